"""What a save deletes: only what this run saved and nobody changed, and only once the new one is proven to be there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import assert_whole, latest_without_warning, make_files, save, steps
from store_runs import flip_bit

from lazytrain.checkpoint import Checkpoint, latest_valid, open_checkpoint
from lazytrain.errors import CheckpointError
from lazytrain.store_saving import save_checkpoint

TEXTS = {"config.json": b'{"model_type": "qwen2"}\n'}


def save_with_text(run_dir: Path, step: int, keep: int = 1) -> Path:
    return save_checkpoint(run_dir, step, make_files(step), {"step": step}, keep=keep, texts=TEXTS)


def edit(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "llama"}\n')


def shorten(path: Path) -> None:
    os.truncate(path / "embed.safetensors", 90)


def relink(path: Path) -> None:
    (path / "embed.safetensors").rename(path.parents[1] / "outside")
    (path / "embed.safetensors").symlink_to(path.parents[1] / "outside")


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda path: (path / "notes.txt").write_text("mine"), r"files of others \(notes\.txt\)"),
        (lambda path: (path / "sub").mkdir(), r"files of others \(sub\)"),
        (edit, r"config\.json: its content has changed"),
        (shorten, r"embed\.safetensors is not as it was saved"),
        (lambda path: (path / "embed.safetensors").unlink(), r"embed\.safetensors is not as it was saved"),
        (relink, r"embed\.safetensors is not as it was saved"),
        (lambda path: path.rename(path.with_name("step_00000000")), r"step_00000000 is kept: it holds step 1"),
        (lambda path: flip_bit(path / "manifest.json", 40, 0), r"manifest\.json is damaged"),
    ],
    ids=["file", "folder", "edited text", "cut", "missing", "link", "renamed", "manifest"],
)
def test_what_was_changed_is_kept_and_named(change: Callable[[Path], object], phrase: str, tmp_path: Path) -> None:
    change(save_with_text(tmp_path, 1))
    before = steps(tmp_path)
    for step in (2, 3):
        with pytest.warns(RuntimeWarning, match=phrase):
            save_with_text(tmp_path, step)
    assert steps(tmp_path) == [*before, "step_00000003"]


def test_checkpoints_of_another_run_are_kept_and_do_not_count(tmp_path: Path) -> None:
    """A run without --resume in the directory of another one, whose steps are higher or the same."""

    def save_run(step: int, lr: float) -> Path:
        return save_checkpoint(tmp_path, step, make_files(step), {"step": step, "run": {"lr": lr}})

    for step in (2, 100):
        save_run(step, 0.1)
    for step in (1, 2, 3):
        with pytest.warns(RuntimeWarning, match=r"is kept|kept as step_00000002\.kept-1: it is of a run with other"):
            save_run(step, 0.2)
    assert steps(tmp_path) == ["step_00000002", "step_00000002.kept-1", "step_00000003", "step_00000100"]
    parent = tmp_path / "checkpoints"
    for name, lr in zip(steps(tmp_path), (0.2, 0.1, 0.2, 0.1)):
        assert open_checkpoint(parent / name).meta["run"] == {"lr": lr}
        open_checkpoint(parent / name).verify()


def test_steps_that_the_run_could_not_go_on_from_go_first(tmp_path: Path) -> None:
    """Step 20 is damaged, the run goes on from step 10: at step 15 the good one is kept beside it, not the bad one."""
    for step in (10, 20):
        path = save(tmp_path, step)
    flip_bit(path / "embed.safetensors", (path / "embed.safetensors").stat().st_size - 1, 0)
    with pytest.warns(RuntimeWarning, match="step_00000020"):
        assert latest_valid(tmp_path).step == 10
    save(tmp_path, 15)
    assert steps(tmp_path) == ["step_00000010", "step_00000015"]


@pytest.mark.filterwarnings("ignore:.*its step is higher")
def test_a_run_that_starts_anew_deletes_nothing_of_the_one_before(tmp_path: Path) -> None:
    """The same options and directory without --resume: what was there stays until its steps come again."""
    for step in (800, 900, 1000):
        save(tmp_path, step)
    for step, kept in ((100, [100]), (200, [100, 200]), (300, [200, 300]), (850, [300, 850])):
        save(tmp_path, step)
        assert steps(tmp_path) == [f"step_{number:08d}" for number in (*kept, 900, 1000)]
    for step in (900, 1000):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_00000900", "step_00001000"]
    assert_whole(latest_without_warning(tmp_path))


def test_a_whole_higher_step_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 9)
    read: list[int] = []
    real = Checkpoint.verify
    monkeypatch.setattr(Checkpoint, "verify", lambda self: read.append(self.step) or real(self))
    for step in (1, 2, 3):
        with pytest.warns(RuntimeWarning, match="step_00000009 is kept"):
            save(tmp_path, step, keep=1)
    assert read == [9]


def test_what_others_put_into_a_replaced_checkpoint_is_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        (save(tmp_path, 3) / "notes.txt").write_text(str(number))
        with pytest.warns(RuntimeWarning, match=rf"kept as step_00000003\.kept-{number}: it holds files of others"):
            save(tmp_path, 3)
    parent = tmp_path / "checkpoints"
    assert steps(tmp_path) == ["step_00000003", "step_00000003.kept-1", "step_00000003.kept-2"]
    assert [(parent / f"step_00000003.kept-{i}/notes.txt").read_text() for i in (1, 2)] == ["1", "2"]
    assert_whole(latest_without_warning(tmp_path))


@pytest.mark.parametrize("name", ["embed.safetensors", "manifest.json"])
@pytest.mark.parametrize("same_step", [True, False], ids=["replaced", "older"])
def test_a_new_checkpoint_that_reads_back_damaged_replaces_nothing(
    name: str, same_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    expected = open_checkpoint(tmp_path / "checkpoints/step_00000001").files
    real = os.pwrite

    def flips(fd: int, data: memoryview, offset: int) -> int:
        """Write as a disk with a bad cell does: the last byte of one file is another one, and nobody says so."""
        if os.readlink(f"/proc/self/fd/{fd}").endswith(name) and offset + len(data) > 50:
            data = memoryview(bytes(data[:-2]) + bytes([data[-2] ^ 1, data[-1]]))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", flips)
        with pytest.raises(CheckpointError, match="reads back damaged"):
            save(tmp_path, 1 if same_step else 2, keep=1)
    if not same_step:
        shutil.rmtree(tmp_path / "checkpoints/step_00000002")
    found = latest_without_warning(tmp_path)
    assert_whole(found)
    assert (found.step, found.files) == (1, expected)
    save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == ["step_00000002"]
