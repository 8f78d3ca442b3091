"""Save a training state as a checkpoint, resume from one, and export the model.

A checkpoint has one file a unit, `unit_00003.safetensors`, whose tensors are named after the model's:

    NAME            the working weight, in the model's shape
    NAME.lo         the master correction (beside bf16 weights)
    NAME.m, .v      fp32 moments, or
    NAME.m_q, .m_scale, .v_q, .v_scale    8-bit moments, in the format of `lazytrain.kernels.codec`

so that it does not depend on where the plan keeps anything: a run resumes under any plan, with the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.base import Model
from lazytrain.checkpoint import Checkpoint, latest_valid, save_checkpoint
from lazytrain.errors import CheckpointError
from lazytrain.export import MAX_SHARD_BYTES, ExportPlan, check_target, export_model, plan_export
from lazytrain.homes import UnitHome, owned_params
from lazytrain.layout import TensorPlace, UnitLayout, groups_in_row, rows_and_cols
from lazytrain.shards import ModelDir
from lazytrain.tensorwriter import TensorSpec
from lazytrain.trainer import TrainState, TrainStep, live_engine, read_params


def save_state(state: TrainState, run_dir: Path, *, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Save a checkpoint of the state (which stays usable).

    Args:
        meta: what must agree on resume.
        keep: checkpoints to keep, this one included.

    Raises:
        CheckpointError: a full disk or a failed write; older checkpoints and the training are intact.
    """
    engine = live_engine(state)
    engine.finish_updates()
    homes = [home for home in engine.homes.units if home.has_params]

    def tensors(home: UnitHome) -> Mapping[str, Tensor]:
        weights, slab = engine.homes.weights_slab(home), engine.homes.state_slab(home)
        return dict(unit_tensors(home.layout, weights, slab))

    files = [(_file_name(home), lambda home=home: tensors(home)) for home in homes]
    record = {"num_updates": state.num_updates, "seed": state.seed, "dtype": str(engine.dtype), "run": dict(meta)}
    record["plan"] = engine.plan.to_dict()  # only for `lazytrain.store verify`: a run resumes under any plan
    return save_checkpoint(run_dir, state.step, files, record, keep=keep)


def resume_state(
    step: TrainStep, run_dir: Path, *, meta: Mapping[str, Any], progress: Callable[[str], None] | None = None
) -> TrainState | None:
    """Return the state of the newest valid checkpoint, placed as the step's plan says; None if there is none.

    Raises:
        CheckpointError: the checkpoint is of another model, dtype or optimizer, or `meta` differs: names the field.
    """
    checkpoint = latest_valid(run_dir)
    if checkpoint is None:
        return None
    saved = _read_meta(checkpoint)
    for name, value in meta.items():
        if saved.run.get(name) != value:
            raise CheckpointError(
                f"{checkpoint.path} was saved with {name} = {saved.run.get(name)!r}, this run has {value!r}. "
                "Run with the same options, or start in another --out directory."
            )
    if saved.dtype != str(step.dtype):
        raise CheckpointError(
            f"{checkpoint.path} holds {saved.dtype} weights, this run works in {step.dtype}. Give the same --dtype."
        )

    def fill(home: UnitHome, weights: Tensor, slab: Tensor) -> None:
        _fill_unit_into(checkpoint, home, weights, slab)

    return step.restore(
        fill,
        step=checkpoint.step,
        num_updates=saved.num_updates,
        seed=saved.seed,
        progress=progress,
    )


class _SavedMeta(NamedTuple):
    num_updates: int
    seed: int
    dtype: str
    run: Mapping[str, Any]


def _read_meta(checkpoint: Checkpoint) -> _SavedMeta:
    """Return what `save_state` recorded; a stranger's manifest may hold anything there."""
    values: dict[str, Any] = {name: checkpoint.meta.get(name) for name in _SavedMeta._fields}
    kinds = {"num_updates": int, "seed": int, "dtype": str, "run": dict}
    for name, kind in kinds.items():
        if type(values[name]) is not kind or (kind is int and not -(2**63) <= values[name] < 2**63):
            raise CheckpointError(
                f"{checkpoint.path}: its manifest has {name} = {values[name]!r}, not a {kind.__name__}. "
                "It is no training state of LazyTrain: use another checkpoint."
            )
    return _SavedMeta(**values)


def plan_state_export(model: Model, model_dir: ModelDir, directory: Path, dtype: torch.dtype) -> ExportPlan:
    """Return which tensor goes to which shard; call it before training, so that the save at the end can't surprise.

    Raises:
        ModelFileError: `directory` is the base model's, or holds something that is not an export of ours.
    """
    check_target(directory, model_dir.path)
    specs = [
        TensorSpec(spec.full_name, dtype, spec.shape)
        for unit in model.units
        for spec in owned_params(model, unit).values()
    ]
    total_bytes = sum(spec.num_bytes for spec in specs)
    # As many shards as the base model at least, so that a reader that streams them can do so again.
    num_shards = max(1, len(model_dir.files))
    return plan_export(specs, max_shard_bytes=min(MAX_SHARD_BYTES, max(1, -(-total_bytes // num_shards))))


def export_state(state: TrainState, model_dir: ModelDir, directory: Path) -> Path:
    """Write the trained model as an HF directory: shards, regenerated index, config, tokenizer, generation config.

    Tied heads are stored once, as the embedding. The base model's directory is never written to.
    """
    engine = live_engine(state)
    return export_model(
        directory,
        plan_state_export(engine.model, model_dir, directory, engine.dtype),
        read_params(state),
        config=model_dir.config,
        side_files=model_dir.side_files,
        base_dir=model_dir.path,
    )


def unit_tensors(layout: UnitLayout, weights: Tensor, slab: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, view of the slabs) for all tensors of a unit, see the head of this file."""
    parts = layout.state_views(slab)
    for place in layout.places:
        yield place.full_name, weights[place.offset : place.offset + place.numel].view(place.shape)
        for suffix, view in _state_views(layout, place, parts):
            yield f"{place.full_name}.{suffix}", view


def _state_views(layout: UnitLayout, place: TensorPlace, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if place.quantized:
        rows, cols = rows_and_cols(place.shape)
        at = slice(place.offset, place.offset + place.numel)
        groups = slice(place.first_group, place.first_group + rows * groups_in_row(cols))
        for name in ("m", "v"):
            yield f"{name}_q", parts[f"{name}_q"][at].view(place.shape)
            yield f"{name}_scale", parts[f"{name}_scale"][groups].view(rows, -1)
        if "lo_q" in parts:
            yield "lo", parts["lo_q"][at].view(place.shape)
        return
    at = slice(place.offset - layout.quantized_numel, place.offset - layout.quantized_numel + place.numel)
    for name in ("m", "v"):
        yield name, parts[f"{name}_f"][at].view(place.shape)
    if "lo_f" in parts:
        yield "lo", parts["lo_f"][at].view(place.shape)


def _fill_unit_into(checkpoint: Checkpoint, home: UnitHome, weights: Tensor, slab: Tensor) -> None:
    file = checkpoint.open_file(_file_name(home))
    weights.zero_()
    slab.zero_()
    for name, target in unit_tensors(home.layout, weights, slab):
        if name not in file.tensors:
            raise CheckpointError(
                f"{checkpoint.path}: {_file_name(home)} has no {name!r}. It was saved with another model or optimizer."
            )
        source = file.read(name)
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} is {source.dtype} {tuple(source.shape)}, this run needs {target.dtype} "
                f"{tuple(target.shape)}. It was saved with another model or other optimizer settings."
            )
        target.copy_(source)


def _file_name(home: UnitHome) -> str:
    return f"unit_{home.index:05d}.safetensors"
