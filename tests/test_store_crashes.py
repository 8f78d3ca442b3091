"""A power loss at any operation, in any order on the disk, leaves the last complete checkpoint or export readable."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_whole, save
from crash_states import Recorder, build_state, crash_states

from lazytrain.checkpoint import latest_valid
from lazytrain.export import export_model, plan_export
from lazytrain.shards import open_model_dir
from lazytrain.tensorwriter import TensorSpec


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
