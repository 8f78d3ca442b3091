"""Save a training state as a checkpoint, resume from one, and export the model.

A checkpoint is a model directory that other tools load (weights, index, config, tokenizer), with the states beside it:
`lazytrain.store_units` has the names.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.base import Model
from lazytrain.checkpoint import Checkpoint, count_checkpoints, find_checkpoints, latest_valid
from lazytrain.durable import can_link, explain_os_error
from lazytrain.errors import CheckpointError, MemoryBudgetError
from lazytrain.export import MAX_SHARD_BYTES, ExportPlan, check_target, encode_index, export_model, plan_export
from lazytrain.homes import Homes, UnitHome, owned_params
from lazytrain.shards import INDEX, ModelDir
from lazytrain.store_saving import Linked, Producer, save_checkpoint
from lazytrain.store_units import UnitFiles, name_files, state_tensors, weight_tensors
from lazytrain.tensorwriter import TensorSpec
from lazytrain.trainer import TrainState, TrainStep, live_engine, read_params

NUM_KEPT = 2  # checkpoints, where nobody says otherwise


def save_state(
    state: TrainState,
    run_dir: Path,
    *,
    meta: Mapping[str, Any],
    keep: int = NUM_KEPT,
    texts: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a checkpoint of the state (which stays usable).

    Args:
        meta: what must agree on resume.
        keep: checkpoints to keep, this one included.
        texts: config and tokenizer (`read_texts`), with which other tools load the checkpoint as a model.

    What is on NVMe is linked, not written again, where `shared_checkpoints` said so and the file system can.

    Memory: the weights or the states of one unit, where they aren't in RAM anyway and must be copied.
    Raises:
        CheckpointError: a full disk or a failed write; older checkpoints and the training are intact.
    """
    engine = live_engine(state)
    engine.finish_updates()
    homes = [home for home in engine.homes.units if home.has_params]
    names = name_files(len(homes))
    record = {
        "num_updates": state.num_updates,
        "seed": state.seed,
        "dtype": str(engine.dtype),
        "run": dict(meta),
        "plan": engine.plan.to_dict(),  # only for `lazytrain.store verify`: a run resumes under any plan
        "units": {home.unit.name: files._asdict() for home, files in zip(homes, names)},
    }
    index = {place.full_name: files.weights for home, files in zip(homes, names) for place in home.layout.places}
    num_bytes = sum(place.numel for home in homes for place in home.layout.places) * engine.dtype.itemsize
    path = save_checkpoint(
        run_dir,
        state.step,
        _list_files(engine.homes, homes, names),
        record,
        keep=keep,
        texts={INDEX: encode_index(index, num_bytes, {}), **(texts or {})},
    )
    if engine.homes.spill is not None and engine.homes.shares_files:
        try:
            engine.homes.spill.restock()
        except MemoryBudgetError as error:
            raise CheckpointError(f"{path} is complete, but the next step needs room beside it. {error}") from error
    return path


def count_shared(
    run_dir: Path,
    spill_dir: Path,
    keep: int = NUM_KEPT,
    meta: Mapping[str, Any] | None = None,
    *,
    resumes: bool = True,
) -> int | None:
    """Return for how many checkpoints a trainer must take room on NVMe (`shared_checkpoints` of `make_train_step`).

    Those of this run that are there already have theirs, which the next ones inherit as they are deleted.

    Args:
        meta: what the run will give to `save_state`, which tells its checkpoints from those of others; None = all are.
        resumes: whether the run goes on from the newest; one that starts anew deletes none of those that are there.
    Returns:
        0 to `keep`; None where the file systems of the two directories, which are made, can't share files.
    """
    parent = run_dir / "checkpoints"
    try:
        for directory in (parent, spill_dir):
            directory.mkdir(parents=True, exist_ok=True)
        if not can_link(spill_dir, parent):
            return None
    except OSError as error:
        raise CheckpointError(explain_os_error(error, "Trying the directories of the run", spill_dir)) from error
    return max(0, keep - count_checkpoints(run_dir, meta)) if resumes else keep


def _list_files(
    homes: Homes, units: Sequence[UnitHome], names: Sequence[UnitFiles]
) -> Iterator[tuple[str, Producer | Linked]]:
    """Yield (file name, where its tensors come from) for the two files of every unit."""

    def weights(home: UnitHome) -> Mapping[str, Tensor]:
        return dict(weight_tensors(home.layout, homes.weights_slab(home)))

    def states(home: UnitHome) -> Mapping[str, Tensor]:
        return dict(state_tensors(home.layout, homes.state_slab(home)))

    for home, files in zip(units, names):
        sources: tuple[tuple[str, str, str, Producer], ...] = (
            (files.weights, "weights", home.plan.weights, partial(weights, home)),
            (files.states, "state", home.plan.states, partial(states, home)),
        )
        for name, what, place, make in sources:
            is_shared = homes.shares_files and place == "nvme"
            yield name, Linked(partial(homes.link, home, what), make) if is_shared else make


def resume_state(
    step: TrainStep, run_dir: Path, *, meta: Mapping[str, Any], progress: Callable[[str], None] | None = None
) -> TrainState | None:
    """Return the state of the newest valid checkpoint, placed as the step's plan says; None if there is none.

    Raises:
        CheckpointError: the checkpoint is of another model, dtype or optimizer, or `meta` differs: names the field.
            Or there is none but what another version of LazyTrain saved.
    """
    checkpoint = latest_valid(run_dir)
    if checkpoint is None:
        return None
    saved = _read_agreeing(checkpoint, meta, step.dtype)

    def fill(home: UnitHome, weights: Tensor, slab: Tensor) -> None:
        _fill_unit_into(checkpoint, saved, home, weights, slab)

    return step.restore(
        fill,
        step=checkpoint.step,
        num_updates=saved.num_updates,
        seed=saved.seed,
        progress=progress,
    )


def check_resumable(run_dir: Path, meta: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Refuse early, by the manifests alone, what `resume_state` would refuse after profiling and planning.

    Raises:
        CheckpointError: no checkpoint with an intact manifest agrees; tells of the newest.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `resume_state` will name the broken ones
        found = find_checkpoints(run_dir)
    refusals = []
    for checkpoint in found:
        try:
            _read_agreeing(checkpoint, meta, dtype)
            return
        except CheckpointError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _read_agreeing(checkpoint: Checkpoint, meta: Mapping[str, Any], dtype: torch.dtype) -> "_SavedMeta":
    saved = _read_meta(checkpoint)
    for name, value in meta.items():
        if saved.run.get(name) != value:
            raise CheckpointError(
                f"{checkpoint.path} was saved with {name} = {saved.run.get(name)!r}, this run has {value!r}. "
                "Run with the same options, or start in another --out directory."
            )
    if saved.dtype != str(dtype):
        raise CheckpointError(
            f"{checkpoint.path} holds {saved.dtype} weights, this run works in {dtype}. Give the same --dtype."
        )
    return saved


class _SavedMeta(NamedTuple):
    num_updates: int
    seed: int
    dtype: str
    run: Mapping[str, Any]
    units: Mapping[str, Any]

    def files_of(self, unit_name: str) -> UnitFiles | None:
        """Return a unit's files, or None where the manifest names none."""
        files = self.units.get(unit_name)
        if not isinstance(files, dict) or files.keys() != set(UnitFiles._fields):
            return None
        return UnitFiles(**files) if all(isinstance(name, str) for name in files.values()) else None


def _read_meta(checkpoint: Checkpoint) -> _SavedMeta:
    """Return what `save_state` recorded; a stranger's manifest may hold anything there."""
    values: dict[str, Any] = {name: checkpoint.meta.get(name) for name in _SavedMeta._fields}
    kinds = {"num_updates": int, "seed": int, "dtype": str, "run": dict, "units": dict}
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


def _fill_unit_into(checkpoint: Checkpoint, saved: _SavedMeta, home: UnitHome, weights: Tensor, slab: Tensor) -> None:
    files = saved.files_of(home.unit.name)
    if files is None:
        raise CheckpointError(f"{checkpoint.path} has no {home.unit.name!r}. It was saved with another model.")
    weights.zero_()
    slab.zero_()
    _fill_into(checkpoint, files.weights, weight_tensors(home.layout, weights))
    _fill_into(checkpoint, files.states, state_tensors(home.layout, slab))


def _fill_into(checkpoint: Checkpoint, file_name: str, targets: Iterable[tuple[str, Tensor]]) -> None:
    file = checkpoint.open_file(file_name)
    for name, target in targets:
        if name not in file.tensors:
            raise CheckpointError(
                f"{checkpoint.path}: {file_name} has no {name!r}. It was saved with another model or optimizer."
            )
        source = file.read(name)
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} is {source.dtype} {tuple(source.shape)}, this run needs {target.dtype} "
                f"{tuple(target.shape)}. It was saved with another model or other optimizer settings."
            )
        target.copy_(source)
