"""A power loss at any operation, in any order on the disk, leaves the last complete checkpoint or export readable."""

import shutil
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_whole, save
from crash_states import Recorder, build_state, crash_states
from test_store_units import layout_of

from lazytrain.checkpoint import latest_valid
from lazytrain.export import export_model, plan_export
from lazytrain.shards import open_model_dir
from lazytrain.spill import SpillStore
from lazytrain.store_saving import Linked, save_checkpoint
from lazytrain.store_units import states_header
from lazytrain.tensorfile import TensorFile
from lazytrain.tensorwriter import FileRecord, TensorSpec


@pytest.mark.parametrize("saved_steps", [(1, 2, 3, 4), (1, 2, 2, 2)], ids=["rotating", "replacing one step"])
def test_every_power_loss_keeps_the_last_complete_checkpoint(tmp_path: Path, saved_steps: tuple[int, ...]) -> None:
    root = tmp_path / "recorded"
    root.mkdir()
    recorder = Recorder(root)
    with recorder.recording():
        for step in saved_steps:
            save(root / "runs/first", step)
            recorder.mark()
    seen: set[tuple[int, int]] = set()
    num_states = 0
    for count, manner, kept in crash_states(recorder.operations, seed=0, num_random=3):
        disk = tmp_path / "disk"
        build_state(disk, recorder.top, kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broken ones are named there
            checkpoint = latest_valid(disk / "runs/first")
        num_complete = sum(operation.is_end for operation in recorder.operations[:count])
        if num_complete:
            assert checkpoint is not None, (count, manner)
            assert checkpoint.step >= saved_steps[num_complete - 1], (count, manner)
        if checkpoint is not None:
            assert_whole(checkpoint)
            seen.add((num_complete, checkpoint.step))
        shutil.rmtree(disk)
        num_states += 1
    assert num_states > 400
    assert {step for _, step in seen} == set(saved_steps)


@pytest.mark.parametrize("saved_steps", [(1, 2, 3, 4), (1, 2, 2)], ids=["rotating", "replacing one step"])
def test_every_power_loss_keeps_the_linked_files_of_the_last_checkpoint(
    tmp_path: Path, saved_steps: tuple[int, ...]
) -> None:
    """Blobs are written, linked, written anew: what a checkpoint holds is on the disk before its manifest."""
    root = tmp_path / "recorded"
    root.mkdir()
    layout = layout_of([(3, 5), (7,)], torch.float32)
    header, names = states_header(layout), ("unit-00001.states", "unit-00002.states")

    def blob(value: int) -> torch.Tensor:
        return torch.full((layout.state_bytes,), value, dtype=torch.uint8)

    def linked(store: SpillStore, name: str) -> Linked:
        def link(target: Path) -> FileRecord | None:
            checksums = store.link(name, target, header)
            assert checksums is not None
            return FileRecord(len(header) + layout.state_bytes, zlib.crc32(header), {}, checksums)

        return Linked(link, dict)

    recorder = Recorder(root)
    with recorder.recording():
        store = SpillStore(root / "nvme")
        store.reserve_lasting([len(header) + layout.state_bytes] * 2, 2)
        for value, step in enumerate(saved_steps, 1):
            for name in names:
                store.write(name, blob(value), head_bytes=len(header))
            files = [(name, linked(store, name)) for name in names]
            save_checkpoint(root / "run", step, files, {"value": value})
            store.restock()
            recorder.mark()
            store.write(names[0], blob(100 + value), head_bytes=len(header))  # the next step, not saved
    seen = set()
    for count, manner, kept in crash_states(recorder.operations, seed=2, num_random=2):
        disk = tmp_path / "disk"
        build_state(disk, recorder.top, kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broken ones are named there
            checkpoint = latest_valid(disk / "run")
        num_complete = sum(operation.is_end for operation in recorder.operations[:count])
        assert checkpoint is not None or not num_complete, (count, manner)
        if checkpoint is not None:
            value = checkpoint.meta["value"]
            assert value >= num_complete, (count, manner)
            assert saved_steps[value - 1] == checkpoint.step
            for name in names:
                tensors = TensorFile(checkpoint.path / name)
                assert all((tensors.raw(key) == value).all() for key in tensors.tensors), (count, manner)
            seen.add(value)
        shutil.rmtree(disk)
    assert seen == set(range(1, len(saved_steps) + 1))


def test_every_power_loss_keeps_a_whole_export(tmp_path: Path) -> None:
    root = tmp_path / "recorded"
    root.mkdir()
    recorder = Recorder(root)
    values = (1.0, 2.0)
    with recorder.recording():
        for value in values:
            tensors = {name: torch.full((9,), value) for name in "abc"}
            specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
            plan = plan_export(specs, max_shard_bytes=80)
            export_model(root / "run/model", plan, tensors.items(), config={"model_type": "qwen2"})
            recorder.mark()
    seen = set()
    for count, manner, kept in crash_states(recorder.operations, seed=1, num_random=3):
        disk = tmp_path / "disk"
        build_state(disk, recorder.top, kept)
        num_complete = sum(operation.is_end for operation in recorder.operations[:count])
        if num_complete or (disk / "run/model").exists():
            model = open_model_dir(disk / "run/model")
            found = {float(model.read(name)[4]) for name in "abc"}
            assert len(found) == 1, (count, manner)
            assert min(found) >= (values[num_complete - 1] if num_complete else 1.0), (count, manner)
            seen |= found
        shutil.rmtree(disk)
    assert seen == set(values)
