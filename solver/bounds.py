"""What no plan can beat, and about how the best plans are mixed: sums over all blocks, without the order of events.

Blocks of equal costs are counted, not told apart: an integer says how many of them take each option. A step then is at
least as long as each queue is busy, and as its two phases are (A: from the norm to the head; B: head and backward):

    T >= each queue, DRAM, NVMe       T >= A + B
    A >= forward and device updates;  all CPU updates;  forward's loads but the early ones;  its copies out but a few
    B >= head and backward;  reloads and fetches but two;  head and stores of grads but two

Memory is counted at the positions where most is kept or most grads wait. Every row is a relaxation of one that the
simulator, or `memory.account`, obeys, so that the optimum bounds all plans of a prefetch depth; tests hold that.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lazytrain.solver.backends import Limits, solve_model
from lazytrain.solver.budget import AWAY
from lazytrain.solver.choices import RECOMPUTE, Keep, Lane, list_boundaries, list_keeps, list_lanes
from lazytrain.solver.decisions import UnitChoice
from lazytrain.solver.draft import Draft, Scale, add_edges, pick_lane, pick_ring
from lazytrain.solver.events import Durations
from lazytrain.solver.linear import Affine, LinearModel, total
from lazytrain.solver.memory import NUM_RING_BUFFERS, align, boundary_bytes, chunk_sum_bytes, residual_bytes, sum_bytes
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME
from lazytrain.solver.problem import Problem, UnitCost
from lazytrain.solver.rates import copy_ms, sync_ms
from lazytrain.solver.rings import add_largest
from lazytrain.solver.traffic import add_traffic
from lazytrain.solver.windows import find_largest, find_largest_move

LEAST_S = 0.05  # solvers want some
LIMITS = Limits(time_s=5.0, gap=1e-4, num_nodes=300)


class Kind(NamedTuple):
    """Units of equal costs: their positions, and how many of them take each option (0 is left out)."""

    members: tuple[int, ...]
    lanes: tuple[tuple[Lane, int], ...]
    keeps: tuple[tuple[Keep, int], ...]
    boundaries: tuple[tuple[str, int], ...]


class Bound(NamedTuple):
    """A lower bound of the step of every plan with a prefetch depth, and the mix of decisions that attains it.

    bound_ms: infinite where nothing fits. mix: embed, kinds of blocks, head; empty without a solution. The mix need not
    fit in any order, since positions were left out.
    """

    bound_ms: float
    mix: tuple[Kind, ...]


class _Group(NamedTuple):
    unit: UnitCost
    members: tuple[int, ...]  # in units


def bound_step(problem: Problem, prefetch_depth: int, *, solver: str = "scip", time_s: float = LIMITS.time_s) -> Bound:
    """Return the bound for one prefetch depth, with the mix that was best after `time_s` at most.

    Raises:
        SolverUnavailableError: the solver is not installed or broke down.
    """
    kinds = _group_units(problem)
    draft = _start(problem, kinds, prefetch_depth)
    _add_times(draft, kinds)
    add_traffic(draft)
    _add_memory(draft, kinds)
    limits = LIMITS._replace(time_s=max(min(time_s, LIMITS.time_s), LEAST_S))
    outcome = solve_model(draft.model, limits, solver=solver)
    if outcome.status == "infeasible":
        return Bound(float("inf"), ())
    x = outcome.x
    if x is None:
        return Bound(max(0.0, outcome.bound), ())

    def read(options: tuple) -> tuple:  # type: ignore[type-arg]
        counts = [(option, round(count.value(x))) for option, count in options]
        return tuple((option, count) for option, count in counts if count)

    mix = tuple(
        Kind(kind.members, read(choice.lanes), read(choice.keeps), read(choice.boundaries))
        for kind, choice in zip(kinds, draft.choices, strict=True)
    )
    return Bound(max(0.0, outcome.bound), mix)


def _group_units(problem: Problem) -> list[_Group]:
    """Return embed, the kinds of blocks and head."""
    members: dict[Hashable, list[int]] = {}
    last = len(problem.units) - 1
    for u, unit in enumerate(problem.units):
        costs = tuple(getattr(unit, name) for name in unit.__dataclass_fields__ if name != "name")
        members.setdefault(u if u in (0, last) else costs, []).append(u)
    kinds = sorted(members.values(), key=lambda where: (where[0] == last, where[0]))
    return [_Group(problem.units[where[0]], tuple(where)) for where in kinds]


def _start(problem: Problem, kinds: Sequence[_Group], depth: int) -> Draft:
    model, last = LinearModel(), len(kinds) - 1
    period = model.add_var()
    model.objective = next(iter(period.terms))
    choices = []
    for k, kind in enumerate(kinds):
        is_edge, count = k in (0, last), len(kind.members)

        def pick(options: tuple, count: int = count) -> tuple:  # type: ignore[type-arg]
            if len(options) == 1:
                return ((options[0], Affine(constant=float(count))),)
            picks = tuple((option, model.add_var(upper=float(count), integer=True)) for option in options)
            model.add_equal(total(var for _, var in picks), float(count))
            return picks

        lanes = pick(list_lanes(problem, kind.members[0]))
        keeps = pick((RECOMPUTE,) if is_edge else list_keeps(problem, kind.unit))
        choices.append(UnitChoice(lanes, keeps, pick((DEVICE,) if is_edge else list_boundaries(problem))))
    edges = add_edges(model, choices)
    streamed = pick_ring(choices, lambda lane: lane.is_streamed)
    on_device = pick_ring(choices, lambda lane: lane.is_streamed and lane.update == DEVICE)
    nvme = pick_ring(choices, lambda lane: lane.weights == NVME)
    nvme_on_device = pick_ring(choices, lambda lane: lane.weights == NVME and lane.update == DEVICE)

    def beyond(users: Sequence[Affine]) -> tuple[Affine, ...]:
        """Add how many users of each kind are not among the `depth` that slots hold already."""
        counts = tuple(Affine() if user.is_zero else model.add_var() for user in users)
        if any(count.terms for count in counts):
            model.add_at_least(total(counts), total(users) - float(depth))
        return counts

    return Draft(
        problem=replace(problem, blocks=tuple(kind.unit for kind in kinds[1:-1])),
        prefetch_depth=depth,
        scale=Scale(),
        horizon=0.0,
        model=model,
        choices=tuple(choices),
        period=period,
        streamed=streamed,
        visiting=tuple(c.lane(lambda lane: lane.moves_states) for c in choices),
        num_slots=(),
        num_buffers=(),
        edges=edges._replace(early=Affine()),  # all loads count, whenever they are
        first_load=edges.with_loads(beyond(on_device)),
        second_load=beyond(streamed),
        nvme_loads=tuple(zip(beyond(nvme_on_device), beyond(nvme), strict=True)),
        early=((Affine(), Affine()),) * (last + 1),
    )


def _add_times(draft: Draft, kinds: Sequence[_Group]) -> None:
    model, last = draft.model, len(kinds) - 1
    units = [Durations(draft, k) for k in range(last + 1)]
    sync = draft.ms(sync_ms(draft.problem))
    updates = total(unit.update_on_device() for unit in units)
    forward = total(unit.forward(with_backward=False) for unit in units[:-1])
    head, backward = units[last].forward(with_backward=True), total(unit.backward() for unit in units[:-1])
    cpu = total(unit.update_on_cpu() for unit in units)
    loads, reloads = total(unit.load() for unit in units), total(unit.reload() for unit in units[1:-1])
    fetches, offloads = (
        total(unit.move_boundary(to_device=to_device) + unit.move_residuals(to_device=to_device) for unit in units)
        for to_device in (True, False)
    )
    stores = total(unit.store_weights() + unit.store_states() for unit in units)
    grads = [unit.store_grads() for unit in units]
    compute = updates + forward + head + backward
    queues = {"compute": compute + sync, "h2d": loads + reloads + fetches, "cpu": cpu}
    queues["d2h"] = stores + offloads + total(grads)
    if draft.problem.device_is_host:
        model.add_at_least(draft.period, total(queues.values()))
        return
    for busy in queues.values():
        model.add_at_least(draft.period, busy)
    largest = _Largest(draft)
    first, second = model.add_var(), model.add_var()
    model.add_at_least(draft.period, first + second)
    model.add_at_least(first, forward + updates)
    model.add_at_least(first, cpu)
    model.add_at_least(first, loads - draft.edges.load_embed * largest.embed - NUM_RING_BUFFERS * largest.visit)
    model.add_at_least(first, stores + offloads - NUM_RING_BUFFERS * (largest.store + largest.offload))
    model.add_at_least(second, head + backward + sync)
    model.add_at_least(second, reloads + fetches - NUM_RING_BUFFERS * largest.fetch)
    model.add_at_least(second, head + total(grads[1:-1]) - NUM_RING_BUFFERS * largest.grads)


class _Largest:
    """The longest copies of one unit, whatever its decisions; `embed`: of the embed's weights to the device."""

    def __init__(self, draft: Draft) -> None:
        self.embed = draft.ms(copy_ms(draft.problem, draft.problem.embed.weight_bytes, to_device=True))
        self.visit = find_largest(draft, lambda u: u.state_bytes + u.grad_bytes, to_device=True, num_copies=2)
        self.store = find_largest(draft, lambda u: u.weight_bytes + u.state_bytes, to_device=False, num_copies=2)
        self.grads = find_largest(draft, lambda u: u.grad_bytes, to_device=False)
        self.offload = find_largest_move(draft, to_device=False)
        self.fetch = find_largest_move(draft, to_device=True)


def _add_memory(draft: Draft, kinds: Sequence[_Group]) -> None:
    """Add the device's needs at its fullest positions, and the sums of host and NVMe."""
    problem, model, last, size = draft.problem, draft.model, len(kinds) - 1, draft.size
    blocks = range(1, last)
    units = [kind.unit for kind in kinds]
    weights, states, grads = (
        [size(align(getattr(unit, name))) for unit in units] for name in ("weight_bytes", "state_bytes", "grad_bytes")
    )
    resident = total(
        pick_lane(draft, k, weights=DEVICE) * weights[k] + pick_lane(draft, k, states=DEVICE) * states[k]
        for k in range(last + 1)
    )
    to_host = [pick_lane(draft, k, grads=HOST) for k in range(last + 1)]
    away, kept = [], []
    for k in blocks:
        choice = draft.choices[k]
        bytes_of = {keep: size(residual_bytes(problem, units[k], keep.point)) for keep, _ in choice.keeps}
        boundary = size(boundary_bytes(problem, units[k]))
        num = problem.num_microbatches  # one chunk is on its way at a time
        moved = [(count, boundary / num) for place, count in choice.boundaries if place in AWAY]
        moved += [(count, bytes_of[keep] / num) for keep, count in choice.keeps if keep.place in AWAY]
        away += [_some(draft, count, len(kinds[k].members)) * num_bytes for count, num_bytes in moved]
        kept.append(choice.boundary(lambda place, b=boundary: b if place == DEVICE else 0.0))  # type: ignore[misc]
        kept.append(choice.keep(lambda keep, b=bytes_of: b[keep] if keep.place == DEVICE else 0.0))  # type: ignore[misc]
    offload = add_largest(model, away)
    counts = [len(kind.members) for kind in kinds]
    slots = _add_buffers(draft, [(draft.streamed[k], weights[k], counts[k]) for k in blocks], draft.prefetch_depth)
    slots += add_largest(model, [draft.edges.embed * weights[0], draft.edges.head * weights[last]])
    visits = []
    for k in range(last + 1):
        for place, num_bytes in ((DEVICE, states[k]), (HOST, states[k] + grads[k])):
            visits.append((pick_lane(draft, k, states=AWAY, update=DEVICE, grads=place), num_bytes, counts[k]))
    grad_buffer = add_largest(model, [_some(draft, to_host[k], counts[k]) * grads[k] for k in blocks])
    always = resident + slots + _add_buffers(draft, visits, NUM_RING_BUFFERS) + NUM_RING_BUFFERS * offload
    ring = NUM_RING_BUFFERS * grad_buffer
    everything = total(kept)
    waiting = [pick_lane(draft, k, grads=DEVICE) * grads[k] for k in range(last + 1)]
    later = [waiting[k] - pick_lane(draft, k, weights=DEVICE, states=DEVICE) * grads[k] for k in range(last + 1)]
    sums = [size(sum_bytes(unit) if k in (0, last) else chunk_sum_bytes(problem, unit)) for k, unit in enumerate(units)]
    tied = size(sum_bytes(problem.embed)) if problem.tied else 0.0
    work = [size(min(point.workspace_bytes for point in unit.points)) for unit in units]
    flow = min(size((problem.num_microbatches + 1) * align(units[k].boundary_bytes)) for k in blocks)
    inputs = [size(boundary_bytes(problem, unit)) for unit in units]
    least_input, least_work = min(inputs[1:last]), min(work[1:last])
    one_more = size(align(units[last].boundary_bytes))
    positions = [
        total(later) + work[0] + ring + to_host[0] * sums[0] + least_input,
        total(later[1:]) + offload + 2 * min(inputs[1:]) + least_work,
        everything + waiting[last] + offload + inputs[last] + one_more + work[last] + sums[last] + tied,
        everything + waiting[last] + ring + flow + least_work + min(sums[1:last]) + tied,
        total(waiting[1:]) + ring + flow + least_work + min(sums[1:last]) + tied,
        total(waiting) + ring + least_input + work[0] + sums[0],
    ]
    host, nvme = _sum_far(draft, HOST), _sum_far(draft, NVME)
    hardware = problem.hardware
    for need in positions:
        model.add_at_most(always + need, size(hardware.device_memory_bytes))
        if problem.device_is_host:
            model.add_at_most(always + need + host, size(hardware.host_memory_bytes))
    model.add_at_most(host, size(hardware.host_memory_bytes))
    if nvme.terms:
        model.add_at_most(nvme, size(hardware.nvme_bytes))


def _some(draft: Draft, users: Affine, most: int) -> Affine:
    """Add a binary that is 1 where there is at least one user."""
    if users.is_zero:
        return Affine()
    some = draft.model.add_var(binary=True)
    draft.model.add_at_most(users - some * float(most))
    return some


def _add_buffers(draft: Draft, users: Sequence[tuple[Affine, float, int]], depth: int) -> Affine:
    """Add the size of min(depth, users) buffers, each of which holds the largest of its users (count, size, most)."""
    users = [user for user in users if not user[0].is_zero]
    there = [(_some(draft, count, most), num_bytes) for count, num_bytes, most in users]
    most = sum(user[2] for user in users)
    parts = []
    for m in range(min(depth, most)):
        exists = draft.model.add_var(binary=True)
        draft.model.add_at_most(total(user[0] for user in users) - exists * float(most - m), float(m))
        parts.append(add_largest(draft.model, [(some + exists - 1.0) * num_bytes for some, num_bytes in there]))
    return total(parts)


def _sum_far(draft: Draft, tier: str) -> Affine:
    """Return the bytes of weights, states, grads, boundaries and residuals in the host's memory or on NVMe."""
    problem, parts = draft.problem, []
    last = len(problem.units) - 1
    for k, unit in enumerate(problem.units):
        weights, states = draft.size(align(unit.weight_bytes)), draft.size(align(unit.state_bytes))
        parts += [pick_lane(draft, k, weights=tier) * weights, pick_lane(draft, k, states=tier) * states]
        if tier == HOST:
            parts.append(pick_lane(draft, k, weights=DEVICE, update=CPU) * weights)
            parts.append(pick_lane(draft, k, grads=HOST) * draft.size(align(unit.grad_bytes)))
        if 0 < k < last:
            choice, size = draft.choices[k], draft.size(boundary_bytes(problem, unit))
            parts.append(choice.boundary(lambda place, b=size: b if place == tier else 0.0))  # type: ignore[misc]
            bytes_of = [draft.size(residual_bytes(problem, unit, point)) for point in range(len(unit.points))]
            parts.append(choice.keep(lambda keep, b=bytes_of: b[keep.point] if keep.place == tier else 0.0))  # type: ignore[misc]
    return total(parts)
