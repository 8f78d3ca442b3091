import errno
import json
import math
import os
import shutil
import warnings

import pytest
import torch

from lazytrain.checkpoint import find_checkpoints, latest_valid, open_checkpoint, save_checkpoint
from lazytrain.errors import CheckpointError, ConfigError


def make_files(value):
    generator = torch.Generator().manual_seed(value)
    return [
        ("embed.safetensors", {"w": torch.randn(7, 3, generator=generator).bfloat16(), "t": torch.tensor(value)}),
        ("block_0.safetensors", lambda: {"w": torch.randn(123, generator=generator), "m": torch.zeros(0)}),
    ]


def save(run_dir, step, keep=2, meta=None):
    return save_checkpoint(run_dir, step, make_files(step), meta or {"step": step}, keep=keep)


def assert_whole(checkpoint):
    """Check that a checkpoint holds what `save` wrote for its step."""
    assert checkpoint.meta == {"step": checkpoint.step}
    for name, tensors in make_files(checkpoint.step):
        file = checkpoint.open_file(name)
        expected = tensors() if callable(tensors) else tensors
        assert file.tensors.keys() == expected.keys()
        assert all(torch.equal(file.read(key), tensor) for key, tensor in expected.items())


def steps(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def latest_without_warning(run_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return latest_valid(run_dir)


def test_checkpoint_comes_back_bit_equal(tmp_path):
    assert latest_without_warning(tmp_path) is None
    meta = {"lr": 0.1, "order": [3, 1], "nested": {"1": None, "b": "ü"}, "step": 12, "inf": math.inf}
    path = save(tmp_path, 12, meta=meta)
    checkpoint = latest_without_warning(tmp_path)
    assert checkpoint.path == path == tmp_path / "checkpoints/step_00000012"
    assert checkpoint.meta == meta
    assert checkpoint.step == 12
    assert list(checkpoint.files) == ["embed.safetensors", "block_0.safetensors"]
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


def test_a_new_checkpoint_of_a_lower_step_is_kept(tmp_path):
    # A run resumed from an older checkpoint saves steps below the newest directory's.
    for step in (10, 20):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)
    assert steps(tmp_path) == ["step_00000015"]


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


@pytest.mark.parametrize("name", ["embed.safetensors", "block_0.safetensors", "manifest.json"])
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
    file = path / "block_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"block_0\.safetensors: tensor 'w' has changed"):
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
    from lazytrain.checkpoint import _canonical, zlib

    content = json.loads((path / "manifest.json").read_text())
    change(content["body"])
    content["crc32"] = zlib.crc32(_canonical(content["body"]))
    (path / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../embed.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_manifest_with_paths_is_refused(tmp_path, name):
    path = save(tmp_path, 1)
    forge(path, lambda body: body["files"].update({name: body["files"]["embed.safetensors"]}))
    with pytest.raises(CheckpointError, match="no plain file name"):
        open_checkpoint(path)


def test_manifest_of_another_version_is_refused(tmp_path):
    path = save(tmp_path, 1)
    forge(path, lambda body: body.update(version=2))
    with pytest.raises(CheckpointError, match="version 2; this program reads 1"):
        open_checkpoint(path)
    forge(path, lambda body: body.update(version=1) or body.pop("files"))
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path)


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


SYSTEM_CALLS = ["pwrite", "fsync", "posix_fallocate", "rename", "mkdir", "unlink", "rmdir", "ftruncate", "close"]


def count_calls(action, monkeypatch, at=None, do=None):
    """Run `action`; count the system calls it makes and `do` something instead of number `at`."""
    count = 0

    def wrap(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count - 1 == at:
                do()
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, wrap(getattr(os, name)))
        action()
    return count


def run_killed(action):
    """Run `action` in a forked process, which kills itself with SIGKILL; return the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_kill_at_every_system_call_leaves_a_valid_checkpoint(tmp_path, monkeypatch):
    base = tmp_path / "base"
    for step in (1, 2):
        save(base, step)
    shutil.copytree(base, tmp_path / "dry")
    num_calls = count_calls(lambda: save(tmp_path / "dry", 3), monkeypatch)
    assert num_calls > 20
    found = []
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        shutil.copytree(base, run_dir)
        kill = lambda: os.kill(os.getpid(), 9)  # noqa: E731
        code = run_killed(lambda: count_calls(lambda: save(run_dir, 3), monkeypatch, at, kill))  # noqa: B023
        assert code == -9
        checkpoint = latest_without_warning(run_dir)
        assert_whole(checkpoint)
        found.append(checkpoint.step)
        # The next save cleans up and rotates.
        save(run_dir, 4)
        assert_whole(latest_without_warning(run_dir))
        kept = ["step_00000003" if checkpoint.step == 3 else "step_00000002", "step_00000004"]
        assert steps(run_dir) == kept
        shutil.rmtree(run_dir)
    assert found == sorted(found)
    assert set(found) == {2, 3}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failure_at_every_system_call_leaves_a_valid_checkpoint(tmp_path, monkeypatch, code):
    base = tmp_path / "base"
    for step in (1, 2):
        save(base, step)
    shutil.copytree(base, tmp_path / "dry")
    num_calls = count_calls(lambda: save(tmp_path / "dry", 3), monkeypatch)

    def fail():
        raise OSError(code, os.strerror(code))

    messages = []
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        shutil.copytree(base, run_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old checkpoint that can't be deleted
            try:
                count_calls(lambda: save(run_dir, 3), monkeypatch, at, fail)  # noqa: B023
            except CheckpointError as error:
                messages.append(str(error))
        assert_whole(latest_without_warning(run_dir))
        shutil.rmtree(run_dir)
    assert len(messages) > 10
    assert all(os.strerror(code) in message for message in messages)


def test_kill_while_replacing_a_step_leaves_it_valid(tmp_path, monkeypatch):
    save(tmp_path / "dry", 2)
    num_calls = count_calls(lambda: save(tmp_path / "dry", 2), monkeypatch)
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        save(run_dir, 2)
        kill = lambda: os.kill(os.getpid(), 9)  # noqa: E731
        assert run_killed(lambda: count_calls(lambda: save(run_dir, 2), monkeypatch, at, kill)) == -9  # noqa: B023
        assert_whole(latest_without_warning(run_dir))


def test_full_disk_names_need_and_room_and_leaves_no_trace(tmp_path):
    import resource

    save(tmp_path, 1)
    before = steps(tmp_path)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            save(tmp_path, 2)
        except CheckpointError as error:
            os._exit(7 if "step 2" in str(error) and "GiB free" in str(error) else 8)

    assert run_killed(limited) == 7
    assert steps(tmp_path) == before
    assert_whole(latest_without_warning(tmp_path))


def test_interrupted_producer_leaves_no_trace(tmp_path):
    save(tmp_path, 1)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, [*make_files(2), ("x.safetensors", interrupted)], {})
    assert steps(tmp_path) == ["step_00000001"]
