"""Cases of the store as whole kinds: a copied run, a giant embedding, a full disk, an untouched base model."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_runs import META, export_toy, make_run, make_step
from test_trainer import ON_NVME, STATES_ON_CPU
from toys import RESIDENT, STREAMED, D, make_batch, make_model, make_params, make_plan

from lazytrain import adamw8bit, make_train_step
from lazytrain.base import Model, ParamSpec
from lazytrain.checkpoint import latest_valid, open_checkpoint
from lazytrain.errors import CheckpointError, MemoryBudgetError, ModelFileError
from lazytrain.export import check_target
from lazytrain.saving import resume_state, save_state
from lazytrain.shards import open_model_dir
from lazytrain.store_verify import verify_directory
from lazytrain.trainer import read_params

LARGE_VOCAB = 4000


def test_a_copied_run_directory_resumes_with_the_same_bits(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    copy = tmp_path / "elsewhere/copy"
    shutil.copytree(run_dir, copy)
    seen = []
    for path, plan in ((run_dir, "resident"), (copy, "all on nvme")):
        step = make_step(plan, tmp_path / "nvme")
        state = resume_state(step, path, meta=META)
        assert state is not None
        losses = []
        while state.step < 6:
            state, metrics = step(state, make_batch(state.step))
            losses.append(metrics.loss)
        seen.append((losses, {name: value.clone() for name, value in read_params(state)}))
    shutil.rmtree(run_dir)
    assert verify_directory(copy).problems == []
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())


def test_a_checkpoint_under_another_name_is_still_one(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    shutil.copytree(run_dir / "checkpoints/step_00000002", tmp_path / "best")
    open_checkpoint(tmp_path / "best").verify()
    assert open_checkpoint(tmp_path / "best").step == 2
    assert verify_directory(tmp_path / "best").problems == []


def large_embedding() -> Model:
    """Return the toy model with a table of more than 20 times the size of a block."""
    model = make_model(2)
    spec = ParamSpec(full_name="embed.table", shape=(LARGE_VOCAB, D))
    head = replace(model.head, params=dict(model.head.params) | {"out": spec})
    large = replace(model, embed=replace(model.embed, params={"table": spec}), head=head)
    block = sum(torch.Size(p.shape).numel() for p in large.blocks[0].params.values())
    assert 20 * block < LARGE_VOCAB * D
    return large


def test_an_embedding_20_times_a_block_trains_saves_and_resumes(tmp_path: Path) -> None:
    ends_on_nvme = replace(RESIDENT, states="nvme")
    plans = (
        make_plan(2, default=RESIDENT),
        make_plan(2, default=STREAMED, ends=STATES_ON_CPU),
        make_plan(2, default=ON_NVME, ends=ends_on_nvme),
    )
    seen = []
    for index, plan in enumerate(plans):
        model = large_embedding()
        step = make_train_step(model, adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path / "nvme")
        state = step.init(make_params(model))
        state, _ = step(state, make_batch(0))
        save_state(state, tmp_path / f"run{index}", meta=META)
        other = plans[index - 1]
        step = make_train_step(model, adamw8bit(1e-3), other, device="cpu", spill_dir=tmp_path / "nvme")
        resumed = resume_state(step, tmp_path / f"run{index}", meta=META)
        assert resumed is not None
        state, metrics = step(resumed, make_batch(1))
        seen.append((metrics.loss, {name: value.clone() for name, value in read_params(state)}))
    for loss, params in seen[1:]:
        assert loss == seen[0][0]
        assert all(torch.equal(value, seen[0][1][name]) for name, value in params.items())


def test_a_full_disk_is_found_before_the_first_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    step = make_step("all on nvme", tmp_path / "nvme")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError, match=r"No space left on device.*GiB free.*Free some room"):
        step.init(lambda name: pytest.fail(f"{name} was read"))


def test_a_full_disk_is_found_before_the_first_tensor_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of a checkpoint takes all its room before its first byte."""
    order = []
    allocate, write = os.posix_fallocate, os.pwrite
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, *a: order.append(("take", fd)) or allocate(fd, *a))
    monkeypatch.setattr(os, "pwrite", lambda fd, *a: order.append(("write", fd)) or write(fd, *a))
    step = make_step("resident", tmp_path / "nvme")
    save_state(step.init(make_params(make_model())), tmp_path / "run", meta=META)
    files = [i for i, (what, _) in enumerate(order) if what == "take"]
    assert len(files) == 12  # two a unit
    assert files[0] == 0  # nothing is written before the first file has its room
    assert all(order[i + 1] == ("write", order[i][1]) for i in files)


def test_a_base_model_is_never_opened_for_writing(tmp_path: Path) -> None:
    """Read from a directory without the right to write, and export beside it: not a byte or a time of it changes."""
    base = export_toy(tmp_path / "models/base", {f"t{i}": torch.full((5000,), float(i)) for i in range(6)})
    for path in base.iterdir():
        path.chmod(0o444)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in base.iterdir()}
    model = open_model_dir(base)
    tensors = {name: model.read(name).add_(1) for name in model.tensors}  # a mistake: the views are private
    export_toy(tmp_path / "models/out", tensors)
    with pytest.raises(ModelFileError, match="would change the base model"):
        check_target(base / "x", base)
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in base.iterdir()}
    assert after == before
    assert float(open_model_dir(tmp_path / "models/out").read("t3")[0]) == 4.0


def test_mapped_files_of_a_checkpoint_outlive_its_rotation(tmp_path: Path) -> None:
    """A run is resumed while its files are mapped: later saves delete the names, never the bytes under a mapping."""
    step = make_step("resident", tmp_path / "nvme")
    state = step.init(make_params(make_model()))
    save_state(state, tmp_path, meta=META)
    first = latest_valid(tmp_path)
    assert first is not None
    file = first.open_file("unit-00002.states")
    expected = {name: file.read(name).clone() for name in file.tensors}
    while state.step < 3:
        state, _ = step(state, make_batch(state.step))
        save_state(state, tmp_path, meta=META, keep=1)
    assert not first.path.exists()
    assert all(torch.equal(file.read(name), value) for name, value in expected.items())


def test_nothing_is_deleted_where_the_disk_gives_back_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step("resident", tmp_path / "nvme")
    state = step.init(make_params(make_model()))
    save_state(state, tmp_path, meta=META, keep=1)
    state, _ = step(state, make_batch(0))
    real = os.pwrite

    def flips(fd: int, data: memoryview, offset: int) -> int:
        """Write as a disk with a bad cell does: a bit of one file's last write is another one, and nobody says so."""
        if os.readlink(f"/proc/self/fd/{fd}").endswith("unit-00004.states") and offset > 4096:
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", flips)
    with pytest.raises(CheckpointError, match=r"step_00000001 reads back damaged: unit-00004.states: tensor"):
        save_state(state, tmp_path, meta=META, keep=1)
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="step_00000001"):
        kept = latest_valid(tmp_path)
    assert kept is not None
    assert kept.step == 0
    save_state(state, tmp_path, meta=META, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
