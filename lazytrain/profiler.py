"""Measure what the planner needs to know of a model on this machine, at the shapes of the run.

Every time is the median of repeats that fill `floor_s`, on random weights of the real shapes. Block programs, head and
embed run as the sweep runs them; the update runs over one unit's slabs; copies are of the size of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazytrain.base import Batch, Context, Model, Params, Unit
from lazytrain.determinism import deterministic
from lazytrain.engine import split_batch
from lazytrain.homes import owned_params
from lazytrain.layout import UnitLayout
from lazytrain.links import measure_machine
from lazytrain.optimizer import AdamWSettings, update_unit_into
from lazytrain.programs import BlockPrograms, ProgramCache
from lazytrain.solver.problem import Hardware, Problem, ResidualPoint, UnitCost
from lazytrain.solver.rates import update_traffic_bytes
from lazytrain.sweep import embed_grads_into, head_grads_into
from lazytrain.timer import Timer


@dataclass(kw_only=True)
class Profiler:
    """Measures one model's costs on this machine, for the planner; the machine itself once.

    Attributes:
        batch: an example of the run's batches (CPU tensors), the largest shape.
        limits: what a plan may fill: "device", "host" and, if `spill_dir` is given, "nvme", in bytes.
        spill_dir: where NVMe would be used; None = NVMe is not part of the plan.
        floor_s: least time spent on each measurement.
        allow_cpu_update, allow_device_update: where the plan may put updates.
    """

    model: Model
    settings: AdamWSettings
    batch: Batch
    device: torch.device
    dtype: torch.dtype
    programs: ProgramCache
    limits: Mapping[str, int]
    name: str = "model"
    spill_dir: Path | None = None
    floor_s: float = 0.2
    allow_cpu_update: bool = True
    allow_device_update: bool = True
    _hardware: Hardware | None = field(default=None, repr=False)
    _quiet_link_gbs: float = 0.0  # where the CPU updates nothing

    def problem(self, num_microbatches: int) -> Problem:
        """Return the planner's problem for a step cut in that many chunks; costs are per chunk."""
        model, dtype = self.model, self.dtype
        timer = Timer(device=self.device, floor_s=self.floor_s)
        part = split_batch(self.batch, num_microbatches)[0]
        chunk = {key: value.to(self.device) for key, value in part.items()}
        with torch.no_grad(), deterministic(self.device):
            ctx = model.context(chunk, dtype)
            embed_params, head_params = _end_params(model, self.device, dtype)
            x_btd = model.embed.fn(embed_params, chunk)
            embed = _profile_embed(model, self.settings, embed_params, chunk, x_btd, dtype, timer)
            costs = {}
            for unit in model.blocks:
                if unit.kind not in costs:
                    costs[unit.kind] = _profile_block(unit, self.settings, x_btd, ctx, dtype, self.programs, timer)
            head = _profile_head(model, self.settings, head_params, chunk, x_btd, dtype, timer)
            if self._hardware is None:
                self._hardware, self._quiet_link_gbs = self._measure_machine((embed, *costs.values(), head), timer)
        embed, head, *blocks = (
            with_update_rate(cost, self._hardware.cpu_update_gparams_s)
            for cost in (embed, head, *(replace(costs[unit.kind], name=unit.name) for unit in model.blocks))
        )
        tokens = self.batch["tokens_bt"].numel() if "tokens_bt" in self.batch else count_rows(self.batch)
        return Problem(
            model=self.name,
            embed=embed,
            blocks=tuple(blocks),
            head=head,
            num_microbatches=num_microbatches,
            hardware=self._hardware,
            allow_nvme=self.spill_dir is not None,
            allow_cpu_update=self.allow_cpu_update,
            allow_device_update=self.allow_device_update,
            allow_streamed_embed=model.streams_embed,
            tokens_per_step=int(tokens),
            device_is_host=self.device.type == "cpu",
            tied=bool(model.tied),
            train_flops=6.0 * model.num_params * int(tokens),
        )

    def without_cpu_updates(self, problem: Problem) -> Problem | None:
        """Return the problem in which the CPU updates nothing and copies are faster; None where that is no choice."""
        if problem.device_is_host or not (problem.allow_cpu_update and problem.allow_device_update):
            return None
        link = max(self._quiet_link_gbs, problem.hardware.h2d_gbs)
        hardware = replace(problem.hardware, h2d_gbs=link, d2h_gbs=link)
        return replace(problem, hardware=hardware, allow_cpu_update=False)

    def _measure_machine(self, costs: Sequence[UnitCost], timer: Timer) -> tuple[Hardware, float]:
        largest = max(costs, key=lambda cost: cost.num_params)
        unit = next((u for u in self.model.units if u.kind == largest.kind), self.model.blocks[0])
        layout = self.settings.layout(owned_params(self.model, unit), self.dtype)
        return measure_machine(
            self.device,
            max((cost.weight_bytes for cost in costs[1:-1]), default=1 << 20),
            self.limits,
            update_gparams_s=_update_rates(largest),
            cpu_update=make_update(layout, self.settings, torch.device("cpu")),
            cpu_update_bytes=update_traffic_bytes(largest),
            spill_dir=self.spill_dir,
            timer=timer,
        )


def with_update_rate(cost: UnitCost, gparams_s: float) -> UnitCost:
    """Return a unit whose update on the CPU takes at least its time at a rate, that of a run with copies both ways."""
    return replace(cost, cpu_update_ms=max(cost.cpu_update_ms, cost.num_params / gparams_s / 1e6))


def count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(batch.values())))


def random_unit_params(unit: Unit, device: torch.device, dtype: torch.dtype) -> Params:
    """Return random parameters of a unit's shapes: small matrices, vectors of one."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(spec.shape, device=device, dtype=dtype)
        if len(spec.shape) < 2
        else torch.randn(spec.shape, device=device, dtype=dtype, generator=generator) * 0.02
        for name, spec in unit.params.items()
    }


def _end_params(model: Model, device: torch.device, dtype: torch.dtype) -> tuple[Params, Params]:
    embed = random_unit_params(model.embed, device, dtype)
    head = random_unit_params(replace(model.head, params=owned_params(model, model.head)), device, dtype)
    return embed, head | {name: embed[source] for name, source in model.tied.items()}


def _profile_block(
    unit: Unit,
    settings: AdamWSettings,
    x_btd: Tensor,
    ctx: Context,
    dtype: torch.dtype,
    programs: ProgramCache,
    timer: Timer,
) -> UnitCost:
    params = random_unit_params(unit, timer.device, dtype)
    layout = settings.layout(unit.params, dtype)
    program = programs.get(unit.kind, unit.fn, params, x_btd, ctx, layout=layout)
    dy_btd = torch.randn_like(x_btd) * 1e-3
    for point in program.points:  # compile all first: the device cools down meanwhile
        residuals = program.forward_keep(point.index, params, x_btd, ctx)[1]
        program.backward(point.index, params, x_btd, ctx, residuals, dy_btd)
    timer.warm_up(lambda: program.backward(0, params, x_btd, ctx, (), dy_btd))
    points = tuple(_profile_point(program, i, params, x_btd, ctx, dy_btd, timer) for i in range(len(program.points)))
    return _unit_cost(unit, layout, x_btd, points, settings, timer)


def _profile_point(
    program: BlockPrograms, index: int, params: Params, x_btd: Tensor, ctx: Context, dy_btd: Tensor, timer: Timer
) -> ResidualPoint:
    def forward() -> Any:
        return program.forward_keep(index, params, x_btd, ctx)

    residuals = forward()[1]
    forward_ms = timer.median_ms(forward)
    kept_bytes = sum(r.numel() * r.element_size() for r in residuals)

    def backward() -> Any:
        return program.backward(index, params, x_btd, ctx, residuals, dy_btd)

    backward_ms = timer.median_ms(backward)
    peaks = (timer.extra_bytes(forward), timer.extra_bytes(backward))
    if peaks[0] is None or peaks[1] is None:
        # Nobody counts on the CPU: all intermediates of the block, which keep-all bounds, for a recompute.
        workspace = program.points[-1].residual_bytes
    else:
        workspace = max(peaks[0] - kept_bytes, peaks[1])
    return ResidualPoint(
        residual_bytes=kept_bytes, forward_ms=forward_ms, backward_ms=backward_ms, workspace_bytes=max(0, workspace)
    )


def _profile_head(
    model: Model,
    settings: AdamWSettings,
    params: Params,
    chunk: Batch,
    x_btd: Tensor,
    dtype: torch.dtype,
    timer: Timer,
) -> UnitCost:
    sums = _make_sums(params)

    def work() -> Any:
        return head_grads_into(model.head, params, x_btd, chunk, 1e-3, sums)

    point = ResidualPoint(
        residual_bytes=0,
        forward_ms=0.0,
        backward_ms=timer.median_ms(work),
        workspace_bytes=timer.extra_bytes(work) or 0,
    )
    return _unit_cost(
        model.head, settings.layout(owned_params(model, model.head), dtype), x_btd, (point,), settings, timer
    )


def _profile_embed(
    model: Model,
    settings: AdamWSettings,
    params: Params,
    chunk: Batch,
    x_btd: Tensor,
    dtype: torch.dtype,
    timer: Timer,
) -> UnitCost:
    dx_btd, sums = torch.randn_like(x_btd) * 1e-3, _make_sums(params)

    def backward() -> Any:
        return embed_grads_into(model.embed, params, chunk, dx_btd, sums) if params else None

    point = ResidualPoint(
        residual_bytes=0,
        forward_ms=timer.median_ms(lambda: model.embed.fn(params, chunk)),
        backward_ms=timer.median_ms(backward),
        workspace_bytes=timer.extra_bytes(backward) or 0,
    )
    layout = settings.layout(model.embed.params, dtype)
    cost = _unit_cost(model.embed, layout, x_btd, (point,), settings, timer)
    return replace(cost, boundary_bytes=sum(v.numel() * v.element_size() for v in chunk.values()))


def _make_sums(params: Params) -> Params:
    return {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}


def _unit_cost(
    unit: Unit,
    layout: UnitLayout,
    x_btd: Tensor,
    points: tuple[ResidualPoint, ...],
    settings: AdamWSettings,
    timer: Timer,
) -> UnitCost:
    return UnitCost(
        name=unit.name,
        kind=unit.kind,
        num_params=sum(place.numel for place in layout.places),
        weight_bytes=layout.weight_bytes,
        state_bytes=layout.state_bytes,
        grad_bytes=layout.weight_bytes,
        boundary_bytes=x_btd.numel() * x_btd.element_size(),
        points=points,
        cpu_update_ms=_update_ms(layout, settings, replace(timer, device=torch.device("cpu"))),
        device_update_ms=_update_ms(layout, settings, timer),
    )


def _update_rates(cost: UnitCost) -> tuple[float, float]:
    """Return a unit's measured update rates on the CPU and on the device, in 1e9 parameters per second."""
    times_ms = (cost.cpu_update_ms, cost.device_update_ms)
    cpu, device = (max(1e-6, cost.num_params / ms / 1e6) if ms > 0 else 1e-6 for ms in times_ms)
    return cpu, device


def make_update(layout: UnitLayout, settings: AdamWSettings, device: torch.device) -> Callable[[], None]:
    """Return a function that makes one update of a unit of this layout, on tensors of its own."""
    weights = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
    state = torch.zeros(layout.state_bytes, dtype=torch.uint8, device=device)
    grads = torch.full((layout.numel,), 1e-4, dtype=layout.dtype, device=device)
    hyper = settings.hyper(1e-5, 10)
    return lambda: update_unit_into(layout, weights, state, grads, coef=1.0, hyper=hyper)


def _update_ms(layout: UnitLayout, settings: AdamWSettings, timer: Timer) -> float:
    return timer.median_ms(make_update(layout, settings, timer.device)) if layout.numel else 0.0
