"""The costs of one unit, measured: residual points, head, embed, updates; on random weights of the real shapes."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lazytrain.base import Batch, Context, Model, Params, Unit
from lazytrain.gradients import add_microbatch
from lazytrain.homes import owned_params
from lazytrain.layout import UnitLayout
from lazytrain.optimizer import AdamWSettings, update_unit_into
from lazytrain.programs import BlockPrograms, ProgramCache
from lazytrain.row_sums import sum_rows_into
from lazytrain.slabs import allocate_slab
from lazytrain.solver.problem import ResidualPoint, UnitCost
from lazytrain.sweep import embed_grads_into, head_grads_into
from lazytrain.timer import Timer

LEAST_SLOWDOWN = 1.05  # less is noise of the clock


def random_unit_params(unit: Unit, device: torch.device, dtype: torch.dtype) -> Params:
    """Return random parameters of a unit's shapes: small matrices, vectors of one."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(spec.shape, device=device, dtype=dtype)
        if len(spec.shape) < 2
        else torch.randn(spec.shape, device=device, dtype=dtype, generator=generator) * 0.02
        for name, spec in unit.params.items()
    }


def end_params(model: Model, device: torch.device, dtype: torch.dtype) -> tuple[Params, Params]:
    """Return random parameters of embed and head, tied ones shared."""
    embed = random_unit_params(model.embed, device, dtype)
    head = random_unit_params(replace(model.head, params=owned_params(model, model.head)), device, dtype)
    return embed, head | {name: embed[source] for name, source in model.tied.items()}


def make_program(
    unit: Unit,
    settings: AdamWSettings,
    x_btd: Tensor,
    ctx: Context,
    dtype: torch.dtype,
    programs: ProgramCache,
    timer: Timer,
    report: Callable[[str], None],
) -> BlockPrograms:
    """Make a block's programs and run each once, which compiles it: before any is timed, as the device cools down."""
    start_s = time.perf_counter()
    params = random_unit_params(unit, timer.device, dtype)
    program = programs.get(unit.kind, unit.fn, params, x_btd, ctx, layout=settings.layout(unit.params, dtype))
    dy_btd = torch.randn_like(x_btd) * 1e-3
    for point in program.points:
        residuals = program.forward_keep(point.index, params, x_btd, ctx)[1]
        program.backward(point.index, params, x_btd, ctx, residuals, dy_btd)
    if programs.compiles:
        seconds = time.perf_counter() - start_s
        report(f"compiled {len(program.points)} residual points of {unit.kind!r} in {seconds:.1f} s")
    return program


def profile_block(
    unit: Unit,
    settings: AdamWSettings,
    x_btd: Tensor,
    ctx: Context,
    dtype: torch.dtype,
    program: BlockPrograms,
    timer: Timer,
    num_microbatches: int,
    num_alike: int,
) -> UnitCost:
    """Measure a block at every point of its residual curve; a microbatch's backward includes the sum of its grads.

    Points take turns, and so do forward alone and forward with backward, whose difference is backward: no clock favours
    one. On a GPU forward is measured beside updates on the CPU too, which make launches late.

    Args:
        num_alike: over so many blocks' memory updates on the CPU go, from one to the next, as a step's do.
    """
    params = random_unit_params(unit, timer.device, dtype)
    layout = settings.layout(unit.params, dtype)
    dy_btd = torch.randn_like(x_btd) * 1e-3
    timer.warm_up(lambda: program.backward(0, params, x_btd, ctx, (), dy_btd))
    sum_ms = _sum_ms(layout, num_microbatches, timer)
    points = tuple(
        replace(point, backward_ms=point.backward_ms + sum_ms)
        for point in _profile_points(program, params, x_btd, ctx, dy_btd, timer)
    )
    if timer.device.type == "cuda" and layout.numel:
        forwards = [partial(program.forward_keep, i, params, x_btd, ctx) for i in range(len(points))]
        with _updates_on_cpu(layout, settings, num_alike):
            timer.warm_up(forwards[0])  # the device cooled down while memory for the updates was made
            points = tuple(map(_slow_down, points, timer.medians_ms(forwards)))
    return _unit_cost(unit, layout, x_btd, points, settings, timer, num_alike)


def _profile_points(
    program: BlockPrograms, params: Params, x_btd: Tensor, ctx: Context, dy_btd: Tensor, timer: Timer
) -> list[ResidualPoint]:
    def forward(index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return program.forward_keep(index, params, x_btd, ctx)

    def backward(index: int, residuals: tuple[Tensor, ...]) -> Any:
        return program.backward(index, params, x_btd, ctx, residuals, dy_btd)

    def both(index: int) -> Any:
        return backward(index, forward(index)[1])

    indices, points = range(len(program.points)), list[ResidualPoint]()
    times_ms = iter(timer.medians_ms([partial(work, i) for i in indices for work in (forward, both)]))
    for i, forward_ms, both_ms in zip(indices, times_ms, times_ms):
        forward_bytes = timer.extra_bytes(partial(forward, i))
        residuals = forward(i)[1]
        kept_bytes = sum(r.numel() * r.element_size() for r in residuals)
        backward_bytes = timer.extra_bytes(partial(backward, i, residuals))
        del residuals  # before the next point's are made
        if forward_bytes is None or backward_bytes is None:
            # Nobody counts on the CPU: all intermediates of the block, which keep-all bounds, for a recompute.
            workspace = program.points[-1].residual_bytes
        else:
            workspace = max(forward_bytes - kept_bytes, backward_bytes)
        points.append(
            ResidualPoint(
                residual_bytes=kept_bytes,
                forward_ms=forward_ms,
                backward_ms=max(0.0, both_ms - forward_ms),
                workspace_bytes=max(0, workspace),
            )
        )
    return points


def profile_head(
    model: Model,
    settings: AdamWSettings,
    params: Params,
    chunk: Batch,
    x_btd: Tensor,
    dtype: torch.dtype,
    timer: Timer,
) -> UnitCost:
    """Measure the head: loss and gradients of one chunk."""
    sums = _make_sums(params)

    def work() -> Any:
        return head_grads_into(model.head, params, x_btd, chunk, 1e-3, sums)

    timer.warm_up(work)
    point = _end_point(0.0, work, timer)
    sums.clear()  # a small device has no room for these and for what an update takes
    return _unit_cost(
        model.head, settings.layout(owned_params(model, model.head), dtype), x_btd, (point,), settings, timer
    )


def profile_embed(
    model: Model,
    settings: AdamWSettings,
    params: Params,
    chunk: Batch,
    x_btd: Tensor,
    dtype: torch.dtype,
    timer: Timer,
    num_microbatches: int,
) -> UnitCost:
    """Measure the embed: rows forward, their sum backward, as `GradientSink` makes it."""
    dx_btd, forward_ms = torch.randn_like(x_btd) * 1e-3, timer.median_ms(lambda: model.embed.fn(params, chunk))
    if model.embed_rows is not None:
        point = _rows_point(forward_ms, params, [model.embed_rows(chunk)] * num_microbatches, dx_btd, timer)
    else:
        sums = _make_sums(params)

        def backward() -> Any:
            return embed_grads_into(model.embed, params, chunk, dx_btd, sums) if params else None

        point = _end_point(forward_ms, backward, timer)
        sums.clear()
    layout = settings.layout(model.embed.params, dtype)
    cost = _unit_cost(model.embed, layout, x_btd, (point,), settings, timer)
    return replace(cost, boundary_bytes=sum(v.numel() * v.element_size() for v in chunk.values()))


def _rows_point(forward_ms: float, params: Params, rows: list[Tensor], dx_btd: Tensor, timer: Timer) -> ResidualPoint:
    """Return the one point of an embed that looks rows up; a microbatch's share of the sum of all."""
    (value,) = params.values()
    grads_vd, dxs = torch.empty_like(value), [dx_btd] * len(rows)
    point = _end_point(forward_ms, lambda: sum_rows_into(grads_vd, rows, dxs), timer)
    return replace(point, backward_ms=point.backward_ms / len(rows))


def _end_point(forward_ms: float, backward: Callable[[], Any], timer: Timer) -> ResidualPoint:
    """Return embed's or head's one point, which keeps nothing."""
    return ResidualPoint(
        residual_bytes=0,
        forward_ms=forward_ms,
        backward_ms=timer.median_ms(backward),
        workspace_bytes=timer.extra_bytes(backward) or 0,
    )


def _slow_down(point: ResidualPoint, forward_ms: float) -> ResidualPoint:
    if forward_ms < LEAST_SLOWDOWN * point.forward_ms:
        return point
    return replace(point, forward_ms=forward_ms, quiet_forward_ms=point.forward_ms)


@contextmanager
def _updates_on_cpu(layout: UnitLayout, settings: AdamWSettings, num_alike: int) -> Iterator[None]:
    """Have the CPU update one unit after the other meanwhile."""
    update, stopped = make_update(layout, settings, torch.device("cpu"), num_alike), threading.Event()

    def run() -> None:
        while not stopped.is_set():
            update()

    update()
    with ThreadPoolExecutor(1, thread_name_prefix="update load") as pool:
        updating = pool.submit(run)
        try:
            yield
        finally:
            stopped.set()
        updating.result()


def _sum_ms(layout: UnitLayout, num_microbatches: int, timer: Timer) -> float:
    """Return the mean time per microbatch of a block's sum of grads, squares included."""
    if not layout.numel:
        return 0.0
    flats = [torch.zeros(layout.numel, dtype=layout.dtype, device=timer.device) for _ in range(2)]
    square = torch.zeros((), dtype=torch.float64, device=timer.device)

    def work() -> None:
        total = None
        for c in range(num_microbatches):
            total = add_microbatch(total, flats[c % 2], square if c == num_microbatches - 1 else None)

    return timer.median_ms(work) / num_microbatches


def _make_sums(params: Params) -> Params:
    return {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}


def _unit_cost(
    unit: Unit,
    layout: UnitLayout,
    x_btd: Tensor,
    points: tuple[ResidualPoint, ...],
    settings: AdamWSettings,
    timer: Timer,
    num_alike: int = 1,
) -> UnitCost:
    """Return a unit's costs; where the device is a GPU without the CPU's update, which is measured under load."""
    on_cpu = timer.device.type == "cpu"
    return UnitCost(
        name=unit.name,
        kind=unit.kind,
        num_params=sum(place.numel for place in layout.places),
        weight_bytes=layout.weight_bytes,
        state_bytes=layout.state_bytes,
        grad_bytes=layout.weight_bytes,
        boundary_bytes=x_btd.numel() * x_btd.element_size(),
        points=points,
        cpu_update_ms=_update_ms(layout, settings, timer, num_alike) if on_cpu else 0.0,
        device_update_ms=_update_ms(layout, settings, timer, num_alike if on_cpu else 1),
    )


def make_update(
    layout: UnitLayout, settings: AdamWSettings, device: torch.device, num_alike: int = 1
) -> Callable[[], None]:
    """Return a function that makes one update of a unit of this layout, on tensors of its own.

    Args:
        num_alike: so many units take turns.
    """
    hyper = settings.hyper(1e-5, 10)
    turns = itertools.cycle([_make_tensors(layout, device) for _ in range(num_alike)])

    def update() -> None:
        weights, state, grads = next(turns)
        update_unit_into(layout, weights, state, grads, coef=1.0, hyper=hyper)

    return update


def _make_tensors(layout: UnitLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, state and grads; the host's lie in slabs, as a store's do."""

    def make(num_bytes: int) -> Tensor:
        if device.type == "cpu":
            return allocate_slab(num_bytes, pin=False, name="update test")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    weights, grads = (make(layout.weight_bytes).view(layout.dtype) for _ in range(2))
    return weights, make(layout.state_bytes), grads.fill_(1e-4)


def _update_ms(layout: UnitLayout, settings: AdamWSettings, timer: Timer, num_alike: int) -> float:
    return timer.median_ms(make_update(layout, settings, timer.device, num_alike)) if layout.numel else 0.0
