"""Any write, sync, rename or allocation that fails: a clean message, and the last good state of everything."""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_runs import META, export_toy, make_step
from test_checkpoint_crashes import count_calls, run_killed
from toys import make_batch, make_model, make_params

from lazytrain.checkpoint import latest_valid
from lazytrain.durable import STAGED_MARK
from lazytrain.errors import CheckpointError, MemoryBudgetError, ModelFileError
from lazytrain.saving import save_state
from lazytrain.shards import open_model_dir
from lazytrain.spill import SpillStore

CODES = [errno.ENOSPC, errno.EIO]
DONE, NO_MOUNT = 7, 9
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def fail_with(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def message_of(kind: type[Exception], action: Callable[[], object]) -> str:
    """Return the text of the error that `action` ends with, or nothing where it succeeds."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def leftovers(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if STAGED_MARK in path.name]


@pytest.mark.parametrize("code", CODES)
def test_failure_at_every_system_call_keeps_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    old, new = ({f"t{i}": torch.full((5000,), value) for i in range(5)} for value in (1.0, 2.0))
    export_toy(tmp_path / "base/model", old)
    shutil.copytree(tmp_path / "base", tmp_path / "dry")
    num_calls = count_calls(lambda: export_toy(tmp_path / "dry/model", new), monkeypatch)
    assert num_calls > 25
    num_failed = 0
    for at in range(num_calls):
        parent = tmp_path / f"run{at}"
        shutil.copytree(tmp_path / "base", parent)
        text = message_of(
            ModelFileError,
            lambda: count_calls(lambda: export_toy(parent / "model", new), monkeypatch, at, fail_with(code)),  # noqa: B023
        )
        model = open_model_dir(parent / "model")
        value = 2.0
        if text:
            num_failed += 1
            assert os.strerror(code) in text
            assert "Writing the model" in text
            value = float(model.read("t0")[0])  # old or new, but whole
        assert all((model.read(f"t{i}") == value).all() for i in range(5)), at
        export_toy(parent / "model", new)
        assert not leftovers(parent)
        shutil.rmtree(parent)
    assert num_failed > 20


@pytest.mark.parametrize("code", CODES)
def test_failure_at_every_system_call_keeps_spilled_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def blob(value: int) -> torch.Tensor:
        return torch.full((9000,), value, dtype=torch.uint8)

    def work(store: SpillStore, done: dict[str, int]) -> None:
        store.reserve([9000, 9000])
        for value in range(3):
            for name in "abc":
                store.write(name, blob(value), sync=value == 1)
                done[name] = value

    def run_once(at: int | None, directory: Path) -> tuple[int, str]:
        store, done, counts = SpillStore(directory), {}, [0]

        def count() -> None:
            counts[0] = count_calls(lambda: work(store, done), monkeypatch, at, fail_with(code))

        text = message_of(MemoryBudgetError, count)
        out = torch.empty(9000, dtype=torch.uint8)
        for name, value in done.items():
            store.read_into(name, out)
            assert (out >= value).all(), (at, name)
            assert (out == out[0]).all(), (at, name)
        store.close()
        return counts[0], text

    num_calls, _ = run_once(None, tmp_path / "dry")
    assert num_calls > 20
    texts = [text for at in range(num_calls) if (text := run_once(at, tmp_path / "run")[1])]
    assert len(texts) > 10
    assert all(os.strerror(code) in text for text in texts)


@pytest.mark.parametrize(("plan", "shares"), [("mixed", False), ("all on nvme", True)], ids=["copied", "linked"])
@pytest.mark.parametrize("code", CODES)
def test_training_goes_on_unchanged_after_any_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, plan: str, shares: bool
) -> None:
    """Saves fail at a seventh of all calls, spread over a run: losses and the last save are as without them."""

    def run(fails: bool) -> tuple[list[float], int]:
        run_dir = tmp_path / f"run {fails}"
        step = make_step(plan, tmp_path / "nvme", run_dir=run_dir if shares else None)
        state, losses, num_failed = step.init(make_params(make_model())), [], 0
        save_state(state, run_dir, meta=META)
        num_calls = count_calls(lambda: save_state(state, tmp_path / f"dry {fails}", meta=META), monkeypatch)
        for at in range(0, num_calls, 7):
            state.engine.finish_updates()  # its writes to NVMe are no part of the save
            if fails:
                save = lambda: save_state(state, run_dir, meta=META)  # noqa: B023, E731
                failing = lambda: count_calls(save, monkeypatch, at, fail_with(code))  # noqa: B023, E731
                text = message_of(CheckpointError, failing)
                assert not text or os.strerror(code) in text
                num_failed += bool(text)
            assert latest_valid(run_dir) is not None
            state, metrics = step(state, make_batch(state.step))
            losses.append(metrics.loss)
        path = save_state(state, run_dir, meta=META)
        losses += [file.stat().st_size for file in sorted(path.iterdir()) if file.name != "manifest.json"]
        return losses + [hash(file.read_bytes()) for file in sorted(path.glob("*.s*"))], num_failed

    expected, _ = run(False)
    found, num_failed = run(True)
    assert found == expected
    assert num_failed > 5


def mount_small_disk(path: Path) -> bool:
    """Mount 2 MiB of memory at `path`, for this process alone; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return False
    return libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=2m") == 0


def test_a_disk_of_2_mib_refuses_the_save_that_does_not_fit(tmp_path: Path) -> None:
    """Saves on a tmpfs until it is full: the message names the room, the last checkpoint loads, room is found again."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def fill() -> None:
        if not mount_small_disk(disk):
            os._exit(NO_MOUNT)
        # Made here: slabs are not inherited by a forked process.
        state = make_step("streamed", tmp_path / "nvme").init(make_params(make_model()))
        save_state(state, disk, meta=META, keep=9)
        first = latest_valid(disk)
        assert first is not None
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))
        for _ in range(3):
            text = message_of(CheckpointError, lambda: save_state(state, disk / "other", meta=META))
            assert all(part in text for part in ("No space left on device", "GiB free", "Free some room"))
            assert shutil.disk_usage(disk).free > 90_000  # nothing is left of the failed save
            last = latest_valid(disk)
            assert last is not None
            assert last.step == first.step
        text = message_of(MemoryBudgetError, lambda: SpillStore(disk).reserve([200_000]))
        assert "No space left" in text
        (disk / "ballast").unlink()
        save_state(state, disk / "other", meta=META)
        os._exit(DONE)

    code = run_killed(fill)
    if code == NO_MOUNT:
        pytest.skip("this process may not mount; test_full_disk_names_need_and_room limits file sizes instead")
    assert code == DONE
