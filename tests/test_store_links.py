"""Checkpoints that link what the plan keeps on NVMe: nothing is written twice, and nothing held is written again."""

import errno
import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_runs import META, flip_bit, make_step
from toys import make_batch, make_model, make_params

from lazytrain.checkpoint import latest_valid, open_checkpoint
from lazytrain.errors import CheckpointError, MemoryBudgetError, ModelFileError
from lazytrain.homes import spill_room
from lazytrain.saving import count_shared, resume_state, save_state
from lazytrain.shards import open_model_dir
from lazytrain.store_verify import verify_directory
from lazytrain.tensorfile import PADDING, TensorFile
from lazytrain.trainer import TrainState, TrainStep, read_params

NVME = "all on nvme"
SMALL_BYTES = 60_000  # embed, head, headers, index and manifest of the toy run


def start(tmp_path: Path, plan: str = NVME) -> tuple[TrainStep, TrainState]:
    step = make_step(plan, tmp_path / "nvme", run_dir=tmp_path / "run")
    return step, step.init(make_params(make_model()))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def steps(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())


def count_written(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> int:
    written = [0]
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        written[0] += len(data)
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        action()
    return written[0]


def fail(code: int) -> Callable[..., None]:
    def call(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_a_save_writes_nothing_that_is_on_nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = start(tmp_path)
    state, _ = step(state, make_batch(0))
    state.engine.finish_updates()
    written = count_written(monkeypatch, lambda: save_state(state, tmp_path / "run", meta=META))
    again = count_written(monkeypatch, lambda: save_state(state, tmp_path / "run", meta=META))
    assert written == again + 8 * 4096  # the files have their headers already, and are not written again
    path = tmp_path / "run/checkpoints/step_00000001"
    store = state.engine.spill
    assert store is not None
    inodes = {slot.stat().st_ino for slot in store.path.iterdir()}
    linked = [file.name for file in path.iterdir() if file.stat().st_ino in inodes]
    assert len(linked) == 8  # weights and states of four blocks
    size = sum(file.stat().st_size for file in path.iterdir())
    assert written < SMALL_BYTES + 8 * 4096 < size / 3
    units = open_checkpoint(path).meta["units"]
    assert {units["blocks.0"]["weights"], units["blocks.0"]["states"]} < set(linked)


def test_linked_and_copied_checkpoints_hold_the_same(tmp_path: Path) -> None:
    """Every tensor has the same bits in both, under the same names in the same files."""
    saved = []
    for shares in (True, False):
        step = make_step(NVME, tmp_path / "nvme", run_dir=tmp_path / "run" if shares else None)
        state = step.init(make_params(make_model()))
        for i in range(3):
            state, _ = step(state, make_batch(i))
        saved.append(save_state(state, tmp_path / f"run{'' if shares else ' copied'}", meta=META))
    linked, copied = (open_checkpoint(path) for path in saved)
    assert linked.files.keys() == copied.files.keys()
    assert (saved[0] / "model.safetensors.index.json").read_text() == (
        saved[1] / "model.safetensors.index.json"
    ).read_text()
    num_pieces = 0
    for name in linked.files:
        if name.endswith(".json"):
            continue
        files = linked.open_file(name), copied.open_file(name)
        assert {n for n in files[0].tensors if not n.startswith(PADDING)} == files[1].tensors.keys()
        assert all(torch.equal(files[0].read(key), files[1].read(key)) for key in files[1].tensors)
        num_pieces += len(linked.files[name].piece_checksums)
    assert num_pieces == 8


@pytest.mark.parametrize("plan", [NVME, "all on nvme, updated on cpu", "states on nvme"])
def test_a_held_file_is_never_written_and_the_room_is_that_of_the_start(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, state = start(tmp_path, plan)
    store = state.engine.spill
    assert store is not None
    own_bytes, shared_bytes = spill_room(step.model, step.plan, step.optimizer.settings, step.dtype, 2)
    assert store.reserved_bytes == own_bytes + shared_bytes
    made = Counter(path.stat().st_size for path in store.path.iterdir())
    seen: dict[str, dict[str, str]] = {}
    for i in range(6):
        state, _ = step(state, make_batch(i))
        path = save_state(state, tmp_path / "run", meta=META)
        seen[path.name] = digests(path)
        for name in steps(tmp_path):
            assert digests(path.parent / name) == seen[name], (i, name)
    now = Counter(path.stat().st_size for path in store.path.iterdir())
    linked = {path.stat().st_size for path in store.path.iterdir() if path.stat().st_nlink > 1}
    assert linked
    assert all(now[size] == made[size] for size in linked)  # as many as at the start; activations are never linked
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.ENOSPC))
    for i in range(6, 9):  # no lasting blob takes room from the disk any more
        state, _ = step(state, make_batch(i))


def test_who_reads_a_checkpoint_that_is_deleted_goes_on_reading_what_it_held(tmp_path: Path) -> None:
    step, state = start(tmp_path)
    path = save_state(state, tmp_path / "run", meta=META)
    files = {file.name: file.open("rb") for file in path.iterdir()}
    mapped = {name: mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for name, file in files.items()}
    expected = {name: bytes(mapping) for name, mapping in mapped.items()}
    for i in range(5):
        state, _ = step(state, make_batch(i))
        save_state(state, tmp_path / "run", meta=META)
    assert not path.exists()
    for name, file in files.items():
        assert file.read() == mapped[name][:] == expected[name], name
        mapped[name].close()
        file.close()


def test_a_resumed_run_inherits_the_room_of_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    run_dir, nvme = tmp_path / "run", tmp_path / "nvme"
    assert count_shared(run_dir, nvme) == 2
    step, state = start(tmp_path)
    expected = []
    for i in range(8):
        state, metrics = step(state, make_batch(i))
        expected.append(metrics.loss)
    for num_steps, shared in ((2, 2), (3, 1), (4, 0), (6, 0), (8, 0)):
        assert count_shared(run_dir, nvme) == shared
        step = make_step(NVME, nvme, run_dir=run_dir)
        resumed = resume_state(step, run_dir, meta=META)
        state = resumed or step.init(make_params(make_model()))
        while state.step < num_steps:
            state, metrics = step(state, make_batch(state.step))
            assert metrics.loss == expected[state.step - 1]
        save_state(state, run_dir, meta=META)
        store = state.engine.spill
        assert store is not None
        held = [slot for slot in store.path.iterdir() if slot.stat().st_nlink > 1]
        assert len(held) == 8  # the new checkpoint's; the files of older ones have no name there any more
        store.close()
    assert steps(tmp_path) == ["step_00000006", "step_00000008"]
    assert count_shared(run_dir, nvme, meta=META) == 0
    assert count_shared(run_dir, nvme, meta={"seed": 8}) == 2  # another run's will not be deleted
    assert count_shared(run_dir, nvme, meta=META, resumes=False) == 2  # nor those of a run that starts anew


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_refused_the_files_are_copied(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, state = start(tmp_path)
    state, _ = step(state, make_batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail(code))
        assert count_shared(tmp_path / "run", tmp_path / "nvme") is None
        path = save_state(state, tmp_path / "run", meta=META)
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())
    assert not any(record.piece_checksums for record in open_checkpoint(path).files.values())
    resumed = resume_state(make_step("resident", tmp_path / "nvme"), tmp_path / "run", meta=META)
    assert resumed is not None
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(read_params(state), read_params(resumed), strict=True))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_link_that_fails_is_a_failed_save(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail(code))
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            save_state(state, tmp_path / "run", meta=META)
    assert steps(tmp_path) == []
    save_state(state, tmp_path / "run", meta=META)
    assert latest_valid(tmp_path / "run") is not None


def test_a_file_that_anybody_links_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user keeps a checkpoint by `cp -al`: rotation frees its files for nobody; the room for others is made anew."""
    step, state = start(tmp_path)
    path = save_state(state, tmp_path / "run", meta=META)
    kept = tmp_path / "kept"
    kept.mkdir()
    for file in path.iterdir():
        os.link(file, kept / file.name)
    expected = digests(kept)
    store = state.engine.spill
    assert store is not None
    before = Counter(slot.stat().st_size for slot in store.path.iterdir())
    for i in range(5):
        state, _ = step(state, make_batch(i))
        save_state(state, tmp_path / "run", meta=META)
    assert not path.exists()
    assert digests(kept) == expected
    open_checkpoint(kept).verify()
    sizes = [kept.joinpath(name).stat().st_size for name in ("model-00002-of-00006.safetensors", "unit-00002.states")]
    more = Counter(slot.stat().st_size for slot in store.path.iterdir()) - before
    assert [more[size] for size in sizes] == [4, 4]


def test_missing_room_for_the_next_step_is_said_after_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = start(tmp_path)
    for i in range(3):
        path = save_state(state, tmp_path / "run", meta=META)
        (path / "notes.txt").write_text("mine")
        state, _ = step(state, make_batch(i))
    store = state.engine.spill
    assert store is not None
    monkeypatch.setattr(store, "restock", lambda: fail_room())
    with (
        pytest.warns(RuntimeWarning, match=r"notes\.txt"),
        pytest.raises(CheckpointError, match="is complete, but the"),
    ):
        save_state(state, tmp_path / "run", meta=META)
    last = latest_valid(tmp_path / "run")
    assert last is not None
    assert last.step == 3


def fail_room() -> None:
    raise MemoryBudgetError("Taking 5 bytes failed.")


def test_a_flipped_bit_of_a_linked_file_is_named(tmp_path: Path) -> None:
    step, state = start(tmp_path)
    for i in range(2):
        state, _ = step(state, make_batch(i))
        path = save_state(state, tmp_path / "run", meta=META)
    for name in ("model-00003-of-00006.safetensors", "unit-00003.states"):
        file = TensorFile(path / name)
        assert file.header_bytes == 4096
        places = [info.start_bytes for info in file.tensors.values()]
        for position in (9, 4000, *places, path.joinpath(name).stat().st_size - 1):
            inside = [i.name for i in file.tensors.values() if 0 <= position - i.start_bytes < i.num_bytes]
            flip_bit(path / name, position, 3)
            (problem,) = verify_directory(path).problems
            with pytest.warns(RuntimeWarning, match="step_00000002"):
                older = latest_valid(tmp_path / "run")
            flip_bit(path / name, position, 3)
            assert older is not None
            assert older.step == 1
            assert f"{name}: {'the piece that holds' if inside else 'the header has changed'}" in problem
            assert all(repr(tensor) in problem or tensor.startswith(PADDING) for tensor in inside)
    assert not verify_directory(path).problems


def test_a_checkpoint_that_is_read_as_a_model_is_checked(tmp_path: Path) -> None:
    """Linked files, those that were written, and the config; each names what changed and what to do."""
    step, state = start(tmp_path)
    state, _ = step(state, make_batch(0))
    path = save_state(state, tmp_path / "run", meta=META, texts={"config.json": b'{"model_type": "qwen2"}'})
    expected = dict(read_params(state))
    model = open_model_dir(path)
    assert model.tensors.keys() == expected.keys()
    assert all(torch.equal(model.read(name), value) for name, value in expected.items())
    for tensor in ("embed.table", "blocks.2.up"):
        info = model.tensors[tensor]
        flip_bit(path / info.shard, info.start_bytes + 7, 2)
        with pytest.raises(ModelFileError, match=rf"{info.shard}: .*'{tensor}'.* has changed.*another checkpoint"):
            open_model_dir(path).read(tensor)
        flip_bit(path / info.shard, info.start_bytes + 7, 2)
    for name in ("config.json", "manifest.json", "model.safetensors.index.json"):
        flip_bit(path / name, 9, 0)
        with pytest.raises(ModelFileError, match=rf"{name}.*(damaged|changed).*another checkpoint"):
            open_model_dir(path)
        flip_bit(path / name, 9, 0)


def test_a_record_with_wrong_pieces_is_refused(tmp_path: Path) -> None:
    _, state = start(tmp_path)
    path = save_state(state, tmp_path / "run", meta=META)
    checkpoint = open_checkpoint(path)
    record = checkpoint.files["unit-00002.states"]
    for pieces in ((), (1, 2), (record.piece_checksums[0] ^ 1,)):
        files = {"unit-00002.states": record._replace(piece_checksums=pieces)}
        forged = type(checkpoint)(path=path, step=0, meta=json.loads("{}"), files=files)
        with pytest.raises(CheckpointError, match=r"unit-00002\.states: .*has changed"):
            forged.verify()
