"""The MILP's rows for NVMe: reads by the loader's thread, writes by the writer's, and the staging buffers between.

The loader reads in the order in which units come; the writer writes in the order in which they leave. A staging buffer
that is still being written holds the main thread, and so the next compute.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from lazytrain.solver.choices import Keep
from lazytrain.solver.draft import Draft, pick_lane
from lazytrain.solver.events import AWAY, Events, Op, follow, follow_if, relax
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.memory import NUM_RING_BUFFERS
from lazytrain.solver.plan import CPU, DEVICE, NVME
from lazytrain.solver.rates import read_ms, write_ms
from lazytrain.solver.rings import add_ring


@dataclass(frozen=True, kw_only=True)
class Writes:
    """The writer's work per unit, in its order."""

    weights: list[Op] = field(default_factory=list)
    states: list[Op] = field(default_factory=list)
    boundary: list[Op] = field(default_factory=list)
    residuals: list[Op] = field(default_factory=list)


def add_spilling(draft: Draft, events: Events) -> None:
    """Add the rows; nothing where NVMe is not allowed."""
    if not draft.problem.allow_nvme:
        return
    writes = _add_writes(draft, events)
    launches = _add_staging(draft, events, writes)
    last_read = _add_forward_reads(draft, events, writes, launches)
    follow(draft, events.reload[-2], [launches[-1]])
    issued = _add_backward_reads(draft, events, writes, [last_read, launches[-1]])
    follow(draft, events.early[0], issued)


def _add_op(draft: Draft, ms: Affine, waits: Sequence[Affine]) -> Op:
    op = Op(draft.model.add_var(), ms)
    follow(draft, op, waits)
    return op


def _write_ms(draft: Draft, num_bytes: float) -> float:
    return draft.ms(write_ms(draft.problem, 1)) * num_bytes


def _read_ms(draft: Draft, num_bytes: float) -> float:
    return draft.ms(read_ms(draft.problem, 1)) * num_bytes


def _spilled(draft: Draft, u: int) -> tuple[Affine, Affine]:
    """Return whether the boundary, and the residuals, of a unit go to NVMe."""
    choice = draft.choices[u]
    return choice.boundary(lambda place: place == NVME), choice.keep(lambda keep: keep.place == NVME)


def _spilled_bytes(draft: Draft, u: int) -> tuple[Affine, Affine]:
    choice, unit, num = draft.choices[u], draft.problem.units[u], draft.problem.num_microbatches

    def residuals(keep: Keep) -> float:
        return num * unit.points[keep.point].residual_bytes if keep.place == NVME else 0.0

    return choice.boundary(lambda place: num * unit.boundary_bytes if place == NVME else 0.0), choice.keep(residuals)


def _add_writes(draft: Draft, events: Events) -> Writes:
    writes = Writes()
    tail = draft.model.add_var()  # the last write of the step before
    before = tail - draft.period
    for u, unit in enumerate(draft.problem.units):
        ms = pick_lane(draft, u, weights=NVME, update=DEVICE) * _write_ms(draft, unit.weight_bytes)
        writes.weights.append(_add_op(draft, ms, [before, events.store_weights[u].finish]))
        ms = pick_lane(draft, u, states=NVME, update=DEVICE) * _write_ms(draft, unit.state_bytes)
        waits = [writes.weights[u].finish, events.store_states[u].finish]
        writes.states.append(_add_op(draft, ms, waits))
        boundary, residuals = (num_bytes * _write_ms(draft, 1.0) for num_bytes in _spilled_bytes(draft, u))
        waits = [writes.states[u].finish, events.offload_boundary[u].finish]
        writes.boundary.append(_add_op(draft, boundary, waits))
        waits = [writes.boundary[u].finish, events.offload_residuals[u].finish]
        writes.residuals.append(_add_op(draft, residuals, waits))
        before = writes.residuals[u].finish
    draft.model.add_at_least(tail, before)
    return writes


def _add_staging(draft: Draft, events: Events, writes: Writes) -> list[Affine]:
    """Add that a staging buffer is written before it is filled again, and that the main thread waits for it.

    Returns:
        Per unit, when the main thread has launched its forward and what follows from it.
    """
    last, horizon = len(draft.choices) - 1, 2 * draft.horizon
    launches = [draft.model.add_var() for _ in draft.choices]
    for before, after in itertools.pairwise(launches):
        draft.model.add_at_least(after, before)
    for what, ends, stores in (
        ("weights", writes.weights, events.store_weights),
        ("states", writes.states, events.store_states),
    ):
        users = [pick_lane(draft, u, update=DEVICE, **{what: NVME}) for u in range(last + 1)]
        for parity in range(NUM_RING_BUFFERS):
            turn = list(range(parity, last + 1, NUM_RING_BUFFERS))
            finishes = [[ends[u].finish] for u in turn]
            free, _ = add_ring(draft.model, [users[u] for u in turn], finishes, 1, horizon, period=draft.period)
            for u, wait in zip(turn, free):
                draft.model.add_at_least(launches[u], relax(draft, wait, users[u]))
                for op in (stores[u], events.forward[u]):
                    follow_if(draft, users[u], op, wait, horizon)
    packs: list[Affine] = []
    pack_ends: list[list[Affine]] = []
    for u in range(1, last):
        packs += _spilled(draft, u)
        pack_ends += [[writes.boundary[u].finish], [writes.residuals[u].finish]]
    free, _ = add_ring(draft.model, packs, pack_ends, NUM_RING_BUFFERS, horizon)
    for k, wait in enumerate(free):
        u = 1 + k // 2
        draft.model.add_at_least(launches[u], relax(draft, wait, packs[k]))
        for op in ((events.offload_boundary[u], events.offload_residuals[u])[k % 2], events.update[u + 1]):
            follow_if(draft, packs[k], op, wait, horizon)
    return launches


def _weights_copied(draft: Draft, events: Events, u: int) -> Affine:
    """Return when the forward sweep's load has emptied the staging behind a slot; weights still there don't come."""
    moves = draft.first_load[u] + pick_lane(draft, u, weights=AWAY, update=CPU)
    return relax(draft, events.load[u].finish, moves)


def _states_copied(draft: Draft, events: Events, u: int) -> list[Affine]:
    """Return when the staging behind an update buffer is empty: where states are loaded early, before the norm.

    Their load is empty then, but on a machine without a device it stands behind all updates on the CPU.
    """
    early = total(draft.early[u])
    loads = (events.load[u].finish, 1.0 - early), (events.early[u].finish - draft.period, early)
    return [relax(draft, finish, user) for finish, user in loads]


def _add_forward_reads(draft: Draft, events: Events, writes: Writes, launches: list[Affine]) -> Affine:
    """Add the reads before loads, issued once the unit that used slot and buffer before is launched.

    Returns:
        When the loader is through.
    """
    model, horizon = draft.model, 2 * draft.horizon
    everywhere = range(len(launches))
    weights = [[_weights_copied(draft, events, u)] for u in everywhere]
    weights_free, _ = add_ring(model, draft.streamed, weights, draft.prefetch_depth, horizon, in_order=False)
    states = [_states_copied(draft, events, u) for u in everywhere]
    states_free, _ = add_ring(model, draft.visiting, states, NUM_RING_BUFFERS, horizon)
    issued, _ = add_ring(model, draft.streamed, [[launch] for launch in launches], draft.prefetch_depth, horizon)
    visits, _ = add_ring(model, draft.visiting, [[launch] for launch in launches], NUM_RING_BUFFERS, horizon)
    before = Affine()
    for u, unit in enumerate(draft.problem.units):
        first, on_cpu = draft.nvme_loads[u][0], pick_lane(draft, u, update=CPU)
        user = pick_lane(draft, u, weights=NVME, update=CPU) + first
        op = _add_op(draft, user * _read_ms(draft, unit.weight_bytes), [before])
        for wait in (events.cpu[u].finish, events.slowed[u]):
            follow_if(draft, on_cpu, op, wait, horizon)
        follow_if(draft, draft.streamed[u], op, issued[u], horizon)
        follow_if(draft, draft.visiting[u], op, visits[u], horizon)
        if u == len(launches) - 1:
            follow_if(draft, draft.edges.both, op, launches[0], horizon)
        follow_if(draft, user, op, weights_free[u], horizon)
        follow_if(draft, first, op, writes.weights[u].finish - draft.period, horizon)
        user = pick_lane(draft, u, states=NVME, update=DEVICE)
        op = _add_op(draft, user * _read_ms(draft, unit.state_bytes), [op.finish])
        follow_if(draft, user, op, states_free[u], horizon)
        follow_if(draft, user, op, writes.states[u].finish - draft.period, horizon)
        before = op.finish
        follow(draft, events.load[u], [before])
        model.add_at_least(launches[u], before)
    return before


def _add_backward_reads(draft: Draft, events: Events, writes: Writes, before: list[Affine]) -> list[Affine]:
    """Add the reads before reloads and fetches; return when the loader is through."""
    horizon = 2 * draft.horizon
    blocks = list(range(len(draft.choices) - 2, 0, -1))
    reloads = {u: relax(draft, events.reload[u].finish, draft.second_load[u]) for u in blocks}
    loads = [[_weights_copied(draft, events, u), reloads[u]] for u in blocks]
    users = [draft.streamed[u] for u in blocks]
    free = dict(zip(blocks, add_ring(draft.model, users, loads, draft.prefetch_depth, horizon, in_order=False)[0]))
    for u in blocks:
        second = draft.nvme_loads[u][1]
        op = _add_op(draft, second * _read_ms(draft, draft.problem.units[u].weight_bytes), before)
        written = relax(draft, writes.weights[u].finish, pick_lane(draft, u, weights=NVME, update=DEVICE))
        for wait in (free[u], written):
            follow_if(draft, second, op, wait, horizon)
        follow(draft, events.reload[u], [op.finish])
        for user, num_bytes, write in zip(
            _spilled(draft, u), _spilled_bytes(draft, u), (writes.boundary[u], writes.residuals[u])
        ):
            op = _add_op(draft, num_bytes * _read_ms(draft, 1.0), [op.finish])
            follow_if(draft, user, op, write.finish, horizon)
        follow(draft, events.fetch[u], [op.finish])
        before = [op.finish]
    return before
