"""The functional trainer.

    train_step = make_train_step(model, optimizer, plan)
    state = train_step.init(params)
    state, metrics = train_step(state, batch)

A state is a small frozen record; the weights and optimizer states that it stands for live in the trainer's memory and
on NVMe, so a step consumes the state that it is given, as with donated buffers: using it again is an error.

`train_step` may return while the update that it decided is still to come: each unit is updated before its next use.
Whatever reads the state (`read_params`, a checkpoint, `unit_params`) finishes the updates first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.base import Batch, Model, Params, StepMetrics, Unit
from lazytrain.engine import INTERRUPTED, Engine
from lazytrain.errors import ConfigError, PlanError, StateConsumedError
from lazytrain.homes import FillUnit, TensorSource, UnitHome
from lazytrain.optimizer import Optimizer, init_unit_into
from lazytrain.programs import ProgramCache
from lazytrain.solver.plan import Plan
from lazytrain.standard_plans import resident_plan, streaming_plan


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a step consumes and returns.

    Attributes:
        step: steps taken, skipped ones included; the data cursor (batch number `step` is the next).
        num_updates: updates applied, AdamW's t.
        seed: of the run's random choices.
        engine: the handle to weights, states and queues.
    """

    step: int
    num_updates: int
    seed: int
    engine: Engine = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A step function for one model, optimizer and plan, made by `make_train_step`."""

    model: Model
    optimizer: Optimizer
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    spill_dir: Path | None = None
    shared_checkpoints: int | None = None
    programs: ProgramCache = field(repr=False)

    def init(
        self,
        params: Mapping[str, Tensor] | TensorSource,
        *,
        seed: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> TrainState:
        """Place the initial weights as the plan says and return the first state.

        Args:
            params: full name -> tensor, a mapping or a function that reads one tensor at a time.
            progress: called with each unit's name once it is placed.
        """
        source = params.__getitem__ if isinstance(params, Mapping) else params

        def fill(home: UnitHome, weights: Tensor, state: Tensor) -> None:
            init_unit_into(home.layout, source, weights, state)

        return self.restore(fill, step=0, num_updates=0, seed=seed, progress=progress)

    def restore(
        self,
        fill: FillUnit,
        *,
        step: int,
        num_updates: int,
        seed: int,
        progress: Callable[[str], None] | None = None,
    ) -> TrainState:
        """Return the state of a given step, whose slabs `fill(home, weights, state)` writes unit by unit."""
        engine = Engine(
            self.model,
            self.optimizer.settings,
            self.plan,
            fill=fill,
            device=self.device,
            dtype=self.dtype,
            spill_dir=self.spill_dir,
            shared_checkpoints=self.shared_checkpoints,
            programs=self.programs,
            progress=progress,
        )
        return TrainState(step=step, num_updates=num_updates, seed=seed, engine=claim(engine, step))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take one optimizer step (see `train_step`)."""
        return train_step(state, batch)


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    plan: Plan | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    spill_dir: Path | None = None,
    shared_checkpoints: int | None = None,
    compile: bool = False,
    programs: ProgramCache | None = None,
) -> TrainStep:
    """Return the step function of a model under a plan.

    Args:
        plan: None = everything on the device on a CPU, every block streamed through it on a GPU.
        device: None = the GPU if there is one.
        dtype: of the working weights: float32, or bfloat16 (the optimizer then keeps the rest of an fp32 master).
        spill_dir: a directory on NVMe, needed if the plan puts anything there.
        shared_checkpoints: take room there for so many checkpoints (`count_shared`), which then link what is on NVMe in
            place of writing it again; None = they are copies.
        compile: compile block programs (equal bits between residual points then need more than this release has).
        programs: share compiled programs with another trainer of the same model.

    Raises:
        PlanError: the plan is for another number of blocks, or needs `spill_dir`.
    """
    chosen = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"dtype is {dtype}; working weights are torch.float32 or torch.bfloat16.")
    if plan is None:
        make = streaming_plan if chosen.type == "cuda" else resident_plan
        plan = make(len(model.blocks))
    check_plan(model, plan, spill_dir)
    return TrainStep(
        model=model,
        optimizer=optimizer,
        plan=plan,
        device=chosen,
        dtype=dtype,
        spill_dir=spill_dir,
        shared_checkpoints=shared_checkpoints,
        programs=programs or ProgramCache(compile=compile),
    )


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """Take one optimizer step: loss and gradients of the whole batch, exact clipping, AdamW.

    The loss is the sum over the batch's targets divided by their number, however the batch is cut in microbatches.
    A gradient norm that is not finite skips the update (`metrics.skipped`), names the unit and changes nothing else.

    Args:
        state: consumed.
        batch: dict of CPU tensors, see `lazytrain.base`.

    Returns:
        The next state and the step's numbers.

    Raises:
        StateConsumedError: `state` was given to a step before; use the state which that step returned.
        DataError: the batch has no target.
    """
    engine = live_engine(state)
    lr = engine.settings.lr(state.num_updates)
    engine.num_updates = state.num_updates
    metrics = engine.step(batch, step=state.step, lr=lr)
    following = replace(state, step=state.step + 1, num_updates=engine.num_updates)
    claim(engine, following.step)
    return following, metrics


def read_params(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield (full name, working weight on the CPU), one unit in memory at a time; tied tensors once.

    The tensors are views of the trainer's own memory: copy what must outlive the next step.
    """
    engine = live_engine(state)
    engine.finish_updates()
    for home in engine.homes.units:
        if home.has_params:
            weights = engine.homes.weights_slab(home)
            for place in home.layout.places:
                yield place.full_name, weights[place.offset : place.offset + place.numel].view(place.shape)


def unit_params(state: TrainState, unit: Unit) -> Params:
    """Return one unit's current parameters on the device, for evaluation (see `param_getter`)."""
    return param_getter(state)(unit)


def param_getter(state: TrainState) -> Callable[[Unit], Params]:
    """Return a function unit -> current parameters on the device, for many calls between two steps.

    Resident units are looked up once. A streamed block's parameters are valid until P others were asked for, a streamed
    embed's until the head was, and the other way round.
    """
    engine = live_engine(state)
    engine.finish_updates()
    resident: dict[str, Params] = {}

    def get(unit: Unit) -> Params:
        if unit.name in resident:
            return resident[unit.name]
        params, is_streamed = engine.unit_params(unit)
        if not is_streamed:
            resident[unit.name] = params
        return params

    return get


def check_plan(model: Model, plan: Plan, spill_dir: Path | None) -> None:
    """Refuse a plan that does not fit the model.

    Raises:
        PlanError: number of blocks, an embed or head that can't be streamed, or NVMe without `spill_dir`.
    """
    if len(plan.blocks) != len(model.blocks):
        raise PlanError(
            f"the plan is for {len(plan.blocks)} blocks, the model has {len(model.blocks)}. Plan again for this model."
        )
    lost = plan.find_lost_boundary()
    if lost is not None:
        raise PlanError(f"plan: the boundary of block {lost[0]} is 'none'; it {lost[1]}. Edit it, or plan anew.")
    for name, unit in (("embed", plan.embed), ("head", plan.head)):
        if unit.weights == "nvme":
            raise PlanError(f"plan: {name}.weights is 'nvme'; embed and head live on the device or the host.")
    if plan.head.is_streamed and model.tied:
        raise PlanError("plan: head.weights is 'host'; a tied head uses the embed's matrix: stream the embed instead.")
    if plan.embed.is_streamed and not model.streams_embed:
        raise PlanError(
            "plan: embed.weights is 'host', but its backward by vjp would need them again. Give the embed a "
            "`grads_into`, or keep it on the device."
        )
    if spill_dir is None and any(unit.uses_nvme for unit in plan.units):
        raise PlanError("the plan puts data on NVMe, but no spill_dir is given. Name a directory on a local NVMe disk.")


def claim(engine: Engine, step: int) -> Engine:
    """Make `step` the only step number whose state may use the engine."""
    engine.live_step = step
    return engine


def live_engine(state: TrainState) -> Engine:
    """Return the machinery behind a state; raises StateConsumedError for one that a step has consumed."""
    if state.engine.live_step == INTERRUPTED:
        raise StateConsumedError(
            f"an exception interrupted step {state.step}, so that its update may be half done. "
            "Go on from a checkpoint, or init anew."
        )
    if state.engine.live_step != state.step:
        raise StateConsumedError(
            f"the state of step {state.step} was consumed by a step (the live one is {state.engine.live_step}). "
            "Use the state that train_step returned."
        )
    return state.engine
