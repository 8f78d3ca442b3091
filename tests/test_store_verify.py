"""`python -m lazytrain.store verify`: every class of file, every kind of damage, by file and tensor."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from store_runs import META, export_toy, flip_bit, make_run, make_step
from test_trainer import PLANS

from lazytrain import store_checks
from lazytrain.checkpoint import open_checkpoint
from lazytrain.errors import CheckpointError, ModelFileError
from lazytrain.saving import resume_state
from lazytrain.shards import open_model_dir
from lazytrain.store import main
from lazytrain.store_saving import save_checkpoint
from lazytrain.store_verify import verify_directory
from lazytrain.tensorfile import TensorFile

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("store") / "run")


def data_files(run_dir: Path) -> list[Path]:
    """Return every file of the run that a flipped bit must be found in."""
    found = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in ("run.lock", "metrics.jsonl")]
    names = {path.name for path in found}
    assert {"manifest.json", "lazytrain_checksums.json", "plan.json", "config.json", "generation_config.json"} <= names
    assert {"unit-00001.states", "model-00001-of-00004.safetensors", "model.safetensors.index.json"} <= names
    return sorted(found)


def expected_place(path: Path, position: int) -> str:
    """Return what the report must name for a flipped bit at a position: the tensor, else the file."""
    if path.suffix in (".safetensors", ".states"):
        for info in TensorFile(path).tensors.values():
            if info.start_bytes <= position < info.start_bytes + info.num_bytes:
                return f"{path.name}: tensor {info.name!r} has changed"
        return f"{path.name}: the header has changed"
    return path.name


def run_command(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "lazytrain.store", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_an_intact_run_is_found_intact(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (run_dir, run_dir / "checkpoints/step_00000002", run_dir / "model"):
        assert main(["verify", str(directory)]) == 0
        out, err = capsys.readouterr()
        assert "intact" in out
        assert "damaged" not in out
        assert "verifying" in err
    report = verify_directory(run_dir)
    assert len([note for note in report.notes if note.endswith("intact")]) == 4  # two checkpoints, the model, the plan
    assert not any("not checked" in note for note in report.notes)


def test_one_flipped_bit_is_found_in_every_class_of_file(run_dir: Path) -> None:
    random_ = random.Random(0)
    places = set()
    for path in data_files(run_dir):
        size = path.stat().st_size
        starts = [0, 9, size - 1, *(random_.randrange(size) for _ in range(6))]
        if path.suffix in (".safetensors", ".states"):
            starts += [info.start_bytes + info.num_bytes // 2 for info in TensorFile(path).tensors.values()]
        for position in starts:
            place = expected_place(path, position)
            bit = random_.randrange(8)
            flip_bit(path, position, bit)
            # The whole run once a file; the part alone for the other positions.
            part = run_dir if position in (9, size - 1) or path.parent == run_dir else path.parent
            report = verify_directory(part)
            flip_bit(path, position, bit)
            assert len(report.problems) == 1, (path, position, report)
            assert place in report.problems[0], (path, position, report)
            places.add(place)
    assert len([place for place in places if "tensor" in place]) > 100
    assert not verify_directory(run_dir).problems


def test_a_flipped_bit_stops_a_load_and_is_named(run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "checkpoints/step_00000003/unit-00003.states"
    info = TensorFile(path).tensors["blocks.1.up.v_q"]
    flip_bit(path, info.start_bytes + 5, 3)
    with pytest.warns(RuntimeWarning, match=r"step_00000003.*unit-00003.states: tensor 'blocks.1.up.v_q'"):
        state = resume_state(make_step("streamed", tmp_path), run_dir, meta=META)
    flip_bit(path, info.start_bytes + 5, 3)
    assert state is not None
    assert state.step == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "lazytrain_checksums.json"])
def test_a_changed_text_of_a_model_stops_its_load(name: str, run_dir: Path) -> None:
    flip_bit(run_dir / "model" / name, 3, 0)
    with pytest.raises(ModelFileError, match=rf"{name}.*(changed|damaged).*delete lazytrain_checksums.json"):
        open_model_dir(run_dir / "model")
    flip_bit(run_dir / "model" / name, 3, 0)


def test_a_changed_shard_of_a_model_stops_its_load(run_dir: Path) -> None:
    path = run_dir / "model/model-00002-of-00004.safetensors"
    file = TensorFile(path)
    first, second = list(file.tensors.values())[:2]
    flip_bit(path, second.start_bytes, 0)
    model = open_model_dir(run_dir / "model")
    model.read(first.name)
    for read in (model.read, model.read_raw):
        with pytest.raises(ModelFileError, match=f"model-00002-of-00004.safetensors: tensor '{second.name}'"):
            read(second.name)
    flip_bit(path, second.start_bytes, 0)
    # A blank behind the header's JSON: still JSON, but not what was written.
    padding = path.read_bytes().index(b"}}") + 2
    assert padding < file.header_bytes
    flip_bit(path, padding, 0)
    with pytest.raises(ModelFileError, match="header"):
        open_model_dir(run_dir / "model")
    flip_bit(path, padding, 0)
    assert torch.equal(open_model_dir(run_dir / "model").read(second.name), file.read(second.name))


def test_files_that_are_gone_cut_or_strange_are_named(run_dir: Path) -> None:
    path = run_dir / "checkpoints/step_00000002/unit-00002.states"
    content = path.read_bytes()
    for damage, text in ((content[:-1], f"{len(content) - 1} bytes, {len(content)} were written"), (None, "missing")):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        problems = verify_directory(run_dir).problems
        assert len(problems) == 1
        assert "unit-00002.states" in problems[0]
        assert text in problems[0]
    path.write_bytes(content)
    (path.parent / "notes.txt").write_text("mine")
    assert any("not checked: notes.txt" in note for note in verify_directory(run_dir).notes)
    (path.parent / "notes.txt").unlink()


def test_a_disk_that_cannot_read_is_an_error_that_names_the_tensor(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir / "model/model-00003-of-00004.safetensors"
    info = next(iter(TensorFile(path).tensors.values()))
    real = store_checks.read_all

    def fails(fd: int, out: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and offset == info.start_bytes:
            raise OSError(5, "Input/output error")
        return real(fd, out, offset)

    monkeypatch.setattr(store_checks, "read_all", fails)
    (problem,) = verify_directory(run_dir / "model").problems
    assert f"{path.name}: tensor {info.name!r} can't be read: Input/output error" in problem


def test_a_signal_ends_a_verification_without_reading_the_rest(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(run_dir / "checkpoints/step_00000003")
    read: list[tuple[str, ...]] = []
    real = store_checks.check_part

    def slow(part: store_checks.Part) -> str | None:
        read.append(part.tensors)
        time.sleep(0.01)
        return real(part)

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_checks, "check_part", slow)
    with pytest.raises(KeyboardInterrupt):
        store_checks.find_damage(checkpoint.path, checkpoint.files, advance=interrupt)
    assert 1 <= len(read) < 40 < sum(len(record.tensor_crc32) for record in checkpoint.files.values())


def test_a_plan_made_after_the_checkpoint_is_no_damage(run_dir: Path) -> None:
    path = run_dir / "plan.json"
    content, times = path.read_text(), path.stat()
    changed = content.replace('"prefetch_depth": 2', '"prefetch_depth": 3')
    assert changed != content
    path.write_text(changed)
    assert not verify_directory(run_dir).problems
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "plan.json has changed" in verify_directory(run_dir).problems[0]
    path.write_text(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_metrics_that_are_no_json_are_named_by_line(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    content = path.read_bytes()
    lines = content.split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"{" + lines[1], *lines[2:]]))
    assert "metrics.jsonl: line 2" in verify_directory(run_dir).problems[0]
    path.write_bytes(content + b'{"step": 3, "lo')  # cut by a kill
    assert not verify_directory(run_dir).problems
    path.write_bytes(content)


def test_a_model_of_others_is_checked_by_what_it_has(tmp_path: Path) -> None:
    """A plain directory has headers only; in the hub's cache, links carry the SHA-256 of large files."""
    snapshot, blobs = tmp_path / "snapshots/abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"a": torch.ones(5)}, snapshot / "model.safetensors", {"format": "pt"})
    report = verify_directory(snapshot)
    assert not report.problems
    assert "it has no checksums" in report.notes[0]
    blob = blobs / hashlib.sha256((snapshot / "model.safetensors").read_bytes()).hexdigest()
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    report = verify_directory(snapshot)
    assert not report.problems
    assert "1 of 1 files have the hub's SHA-256" in report.notes[0]
    flip_bit(blob, blob.stat().st_size - 1, 2)
    assert "model.safetensors has changed" in verify_directory(snapshot).problems[0]


def test_an_export_that_went_through_the_hub_is_checked_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots/abc", tmp_path / "blobs"
    export_toy(snapshot, {f"t{i}": torch.full((5000,), float(i)) for i in range(6)})
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    assert torch.equal(open_model_dir(snapshot).read("t3"), torch.full((5000,), 3.0))
    assert "intact" in verify_directory(snapshot).notes[0]
    flip_bit(blobs / "config.json", 5, 0)
    assert "config.json" in verify_directory(snapshot).problems[0]


def test_wrong_directories_and_links_are_refused(tmp_path: Path, run_dir: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match="Give"):
            verify_directory(path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_00000009").mkdir()
    assert "never completed" in verify_directory(tmp_path).problems[0]
    (tmp_path / "checkpoints/step_00000009").rmdir()
    (tmp_path / "checkpoints/step_00000002").symlink_to(run_dir / "checkpoints/step_00000002")
    assert verify_directory(tmp_path).notes == []
    (tmp_path / "checkpoints/.step_00000003.lazytrain-tmp-1").mkdir()
    report = verify_directory(tmp_path)
    assert (report.problems, len(report.notes)) == ([], 1)


def test_the_command_says_what_is_wrong_with_code_2(run_dir: Path) -> None:
    path = run_dir / "model/model-00001-of-00004.safetensors"
    flip_bit(path, path.stat().st_size - 1, 0)
    code, out, err = run_command("verify", str(run_dir))
    flip_bit(path, path.stat().st_size - 1, 0)
    assert code == 2
    assert "damaged: " in out
    assert path.name in out
    assert "1 problems" in out
    assert "\r" not in out + err
    code, out, err = run_command("verify", "/nowhere")
    assert (code, out) == (2, "")
    assert err.startswith("error: /nowhere is no directory")


def test_a_run_without_a_recorded_plan_still_verifies(run_dir: Path, tmp_path: Path) -> None:
    """Checkpoints of before the plan was recorded have none in their meta."""
    for path in (run_dir / "checkpoints").iterdir():
        content = json.loads((path / "manifest.json").read_text())
        assert content["body"]["meta"]["plan"]["prefetch_depth"] == 2
    PLANS["streamed"].save(tmp_path / "plan.json")
    save_checkpoint(tmp_path, 1, [("x.safetensors", {"a": torch.ones(1)})], {})
    report = verify_directory(tmp_path)
    assert not report.problems
    assert any("no checkpoint records it" in note for note in report.notes)
