import json
import math
import shutil
import zlib

import pytest
import torch
from checkpoint_files import assert_whole, latest_without_warning, make_files, save, steps

from lazytrain.checkpoint import OtherVersionError, find_checkpoints, latest_valid, open_checkpoint
from lazytrain.errors import CheckpointError, ConfigError
from lazytrain.store_manifest import canonical
from lazytrain.store_saving import save_checkpoint


def test_checkpoint_comes_back_bit_equal(tmp_path):
    assert latest_without_warning(tmp_path) is None
    meta = {"lr": 0.1, "order": [3, 1], "nested": {"1": None, "b": "ü"}, "step": 12, "inf": math.inf}
    path = save(tmp_path, 12, meta=meta)
    checkpoint = latest_without_warning(tmp_path)
    assert checkpoint.path == path == tmp_path / "checkpoints/step_00000012"
    assert checkpoint.meta == meta
    assert checkpoint.step == 12
    assert list(checkpoint.files) == ["embed.safetensors", "block_0.states"]
    save(tmp_path, 13)
    assert_whole(latest_without_warning(tmp_path))


def test_meta_is_what_json_makes_of_it(tmp_path):
    save(tmp_path, 1, meta={10: (1, 2), 9: "x"})
    assert latest_without_warning(tmp_path).meta == {"10": [1, 2], "9": "x"}
    with pytest.raises(TypeError):
        save(tmp_path, 2, meta={"a": object()})
    assert steps(tmp_path) == ["step_00000001"]


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_00000015", "step_00000020"]
    save(tmp_path, 25, keep=1)
    assert steps(tmp_path) == ["step_00000025"]
    with pytest.raises(ConfigError, match="at least 1"):
        save(tmp_path, 30, keep=0)


def test_a_new_checkpoint_of_a_lower_step_is_kept_and_so_is_a_whole_one_of_a_higher(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    with pytest.warns(RuntimeWarning, match="step_00000020 is kept: its step is higher, and it is whole"):
        save(tmp_path, 15, keep=1)
    assert steps(tmp_path) == ["step_00000015", "step_00000020"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 3, make_files(99), {"step": 99})
    old = latest_without_warning(tmp_path).open_file("embed.safetensors").read("t")
    save(tmp_path, 3)
    assert_whole(latest_without_warning(tmp_path))
    assert old == 99
    assert steps(tmp_path) == ["step_00000003"]


def test_rotation_deletes_only_what_is_provably_its_own(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    parent = tmp_path / "checkpoints"
    (parent / "step_00000001/notes.txt").write_text("mine")
    (parent / "step_00000002/manifest.json").write_text("{}")
    (parent / "step_x").mkdir()
    shutil.copytree(parent / "step_00000003", tmp_path / "elsewhere")
    (parent / "step_00000000").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match=r"notes.txt"):
        save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == ["step_00000000", "step_00000001", "step_00000002", "step_00000005", "step_x"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


@pytest.mark.parametrize("name", ["embed.safetensors", "block_0.states", "manifest.json"])
def test_every_flipped_bit_is_found(tmp_path, name):
    path = save(tmp_path, 1) / name
    content = path.read_bytes()
    for position in range(0, len(content), 1 if name == "manifest.json" else 7):
        path.write_bytes(
            bytes([*content[:position], content[position] ^ (1 << position % 8), *content[position + 1 :]])
        )
        with pytest.raises(CheckpointError):
            open_checkpoint(path.parent).verify()
    path.write_bytes(content)
    open_checkpoint(path.parent).verify()


def test_flipped_bit_names_file_and_tensor(tmp_path):
    path = save(tmp_path, 1)
    file = path / "block_0.states"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"block_0\.states: tensor 'w' has changed"):
        open_checkpoint(path).verify()


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "manifest", "no manifest", "link"])
def test_newest_valid_checkpoint_is_found_and_broken_ones_named(tmp_path, damage):
    for step in (1, 2):
        path = save(tmp_path, step)
    file, manifest = path / "embed.safetensors", path / "manifest.json"
    if damage == "bit":
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-9])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        file.rename(tmp_path / "outside")
        file.symlink_to(tmp_path / "outside")
    with pytest.warns(RuntimeWarning, match="step_00000002"):
        checkpoint = latest_valid(tmp_path)
    assert_whole(checkpoint)
    assert checkpoint.step == 1


def test_step_numbers_sort_by_value(tmp_path):
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [100_000_000, 99_999_999]


def forge(path, change):
    content = json.loads((path / "manifest.json").read_text())
    change(content["body"])
    content["crc32"] = zlib.crc32(canonical(content["body"]))
    (path / "manifest.json").write_text(json.dumps(content))


def test_manifest_with_a_file_that_no_checkpoint_holds_is_refused(tmp_path):
    path = save(tmp_path, 1)
    forge(path, lambda body: body["files"].update({"notes.txt": body["files"]["embed.safetensors"]}))
    with pytest.raises(CheckpointError, match=r"lists 'notes\.txt'"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["../embed.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_manifest_with_paths_is_refused(tmp_path, name):
    path = save(tmp_path, 1)
    forge(path, lambda body: body["files"].update({name: body["files"]["embed.safetensors"]}))
    with pytest.raises(CheckpointError, match="no plain file name"):
        open_checkpoint(path)


def test_manifest_of_another_version_is_refused(tmp_path):
    path = save(tmp_path, 1)
    forge(path, lambda body: body.update(version=1))
    with pytest.raises(CheckpointError, match=r"version 1; this program reads 2.*release that saved it.*export"):
        open_checkpoint(path)
    # Not skipped as if it were broken: the run would start anew.
    with pytest.warns(RuntimeWarning, match="version 1"), pytest.raises(OtherVersionError, match="version 1"):
        latest_valid(tmp_path)
    save(tmp_path, 2)
    with pytest.warns(RuntimeWarning, match="version 1"):
        assert latest_valid(tmp_path).step == 2
    forge(path, lambda body: body.update(version=2) or body.pop("files"))
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path)


def test_texts_lie_beside_the_tensors_and_stop_no_resume(tmp_path):
    texts = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}'}
    path = save_checkpoint(tmp_path, 1, make_files(1), {"step": 1}, texts=texts)
    assert {name: (path / name).read_bytes() for name in texts} == texts
    checkpoint = latest_without_warning(tmp_path)
    assert set(texts) < set(checkpoint.files)
    checkpoint.verify_texts()
    (path / "tokenizer.json").write_text('{"a": 2}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its content has changed"):
        checkpoint.verify_texts()
    assert latest_without_warning(tmp_path).step == 1


def test_one_file_is_made_at_a_time(tmp_path):
    alive = []

    def produce(idx):
        assert sum(ref() is not None for ref in alive) == 0, "an older file's tensors are still held"
        import weakref

        tensor = torch.zeros(10)
        alive.append(weakref.ref(tensor))
        return {"w": tensor}

    files = [(f"f{idx}.safetensors", lambda idx=idx: produce(idx)) for idx in range(4)]
    save_checkpoint(tmp_path, 1, files, {})
    assert len(alive) == 4
