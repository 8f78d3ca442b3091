"""The memory rows of the bound (see bounds.py): the device where most is kept, or most grads wait; host and NVMe."""

from collections.abc import Sequence
from typing import NamedTuple

from lazytrain.solver.budget import AWAY
from lazytrain.solver.draft import Draft, pick_lane
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.memory import (
    NUM_RING_BUFFERS,
    align,
    boundary_bytes,
    chunk_sum_bytes,
    embed_sum_bytes,
    first_sums_bytes,
    residual_bytes,
    sum_bytes,
)
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, least_chunks_behind
from lazytrain.solver.problem import UnitCost
from lazytrain.solver.rings import add_largest, add_some


class Group(NamedTuple):
    """Units of equal costs, and their positions among all units."""

    unit: UnitCost
    members: tuple[int, ...]  # in units


def add_memory(draft: Draft, kinds: Sequence[Group]) -> None:
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
    away, kept, own = [], [], []  # own: is there such a block; what its forward, its backward needs
    num = problem.num_microbatches  # one chunk is on its way at a time
    for k in blocks:
        choice = draft.choices[k]
        bytes_of = {keep: size(residual_bytes(problem, units[k], keep.point)) for keep, _ in choice.keeps}
        boundary = size(boundary_bytes(problem, units[k]))
        moved = [(count, boundary / num) for place, count in choice.boundaries if place in AWAY]
        moved += [(count, bytes_of[keep] / num) for keep, count in choice.keeps if keep.place in AWAY]
        away += [add_some(model, count, len(kinds[k].members)) * num_bytes for count, num_bytes in moved]
        leaving, most = choice.boundary(lambda place: float(place in AWAY)), len(kinds[k].members)
        for keep, count in choice.keeps:
            if keep.place in AWAY:
                # More users than blocks: some block moves both.
                both = add_some(model, leaving + count - float(most), most)
                away.append(both * ((boundary + bytes_of[keep]) / num))
            needs = size(units[k].points[keep.point].workspace_bytes)
            residuals = bytes_of[keep]
            if keep.place in AWAY:  # one chunk's, and those in flight
                residuals *= (1 + least_chunks_behind(num)) / num
            own.append((add_some(model, count, len(kinds[k].members)), residuals + needs, needs))
        kept.append(choice.boundary(lambda place, b=boundary: b if place == DEVICE else 0.0))  # type: ignore[misc]
        kept.append(choice.keep(lambda keep, b=bytes_of: b[keep] if keep.place == DEVICE else 0.0))  # type: ignore[misc]
    offload = add_largest(model, away)
    own_forward, own_backward = (add_largest(model, [some * sizes[i] for some, *sizes in own]) for i in (0, 1))
    counts = [len(kind.members) for kind in kinds]
    slots = _add_buffers(draft, [(draft.streamed[k], weights[k], counts[k]) for k in blocks], draft.prefetch_depth)
    slots += add_largest(model, [draft.edges.embed * weights[0], draft.edges.head * weights[last]])
    visits = []
    for k in range(last + 1):
        for place, num_bytes in ((DEVICE, states[k]), (HOST, states[k] + grads[k])):
            visits.append((pick_lane(draft, k, states=AWAY, update=DEVICE, grads=place), num_bytes, counts[k]))
    grad_buffer = add_largest(model, [add_some(model, to_host[k], counts[k]) * grads[k] for k in blocks])
    always = (
        size(align(problem.library_bytes))
        + resident
        + slots
        + _add_buffers(draft, visits, NUM_RING_BUFFERS)
        + NUM_RING_BUFFERS * offload
    )
    ring = NUM_RING_BUFFERS * grad_buffer
    everything = total(kept)
    waiting = [pick_lane(draft, k, grads=DEVICE) * grads[k] for k in range(last + 1)]
    later = [waiting[k] - pick_lane(draft, k, weights=DEVICE, states=DEVICE) * grads[k] for k in range(last + 1)]
    sums = [size(sum_bytes(unit) if k in (0, last) else chunk_sum_bytes(problem, unit)) for k, unit in enumerate(units)]
    leaving_sum, staying_sum = map(size, embed_sum_bytes(problem))
    tied = size(sum_bytes(problem.embed)) if problem.tied else 0.0
    work = [size(min(point.workspace_bytes for point in unit.points)) for unit in units]
    flow = min(size((problem.num_microbatches + 1) * align(units[k].boundary_bytes)) for k in blocks)
    inputs = [size(boundary_bytes(problem, unit)) for unit in units]
    least_input, least_work = min(inputs[1:last]), min(work[1:last])
    one_more = size(align(units[last].boundary_bytes))
    positions = [
        total(later) + work[0] + ring + to_host[0] * leaving_sum + least_input,
        total(later[1:]) + 2 * min(inputs[1:]) + least_work,
        everything + inputs[last] + one_more + work[last] + sums[last] + tied,
        everything + inputs[last] + one_more + waiting[last] + sums[last] + tied,
        2 * min(inputs[1:]) + own_forward,
        flow + own_backward,
        total(waiting) + ring + least_input + work[0] + to_host[0] * (leaving_sum - staying_sum) + staying_sum,
    ]
    k, first = _add_first_kept(draft, kinds)
    backward = Affine(constant=flow + least_work + tied)
    for c, num_bytes in enumerate(first_sums_bytes(problem, units[k])):
        positions.append(everything - first * (c / num) + waiting[last] + backward + size(num_bytes))
    if sum(counts[1:-1]) > 1:  # in the others than the first there is all that blocks before them left
        backward = backward + ring + min(sums[1:last])
        positions.append(everything - first + waiting[last] + backward)
    positions.append(total(waiting[1:]) + backward)
    host, nvme = _sum_far(draft, HOST), _sum_far(draft, NVME)
    hardware = problem.hardware
    for need in positions:
        model.add_at_most(always + need, size(hardware.device_memory_bytes))
        if problem.device_is_host:
            model.add_at_most(always + need + host, size(hardware.host_memory_bytes))
    model.add_at_most(host, size(hardware.host_memory_bytes))
    if nvme.terms:
        model.add_at_most(nvme, size(hardware.nvme_bytes))


def _add_first_kept(draft: Draft, kinds: Sequence[Group]) -> tuple[int, Affine]:
    """Return the kind of the block whose backward comes first, and what that one may keep on the device."""
    k = max(range(1, len(kinds) - 1), key=lambda k: max(kinds[k].members))
    unit, choice, parts, shares = kinds[k].unit, draft.choices[k], list[Affine](), list[Affine]()

    def add_share(count: Affine) -> Affine:
        share = draft.model.add_var(upper=1.0)
        draft.model.add_at_most(share - count, 0.0)
        return share

    for place, count in choice.boundaries:
        if place == DEVICE:
            parts.append(add_share(count) * draft.size(boundary_bytes(draft.problem, unit)))
    for keep, count in choice.keeps:
        if keep.place == DEVICE:
            shares.append(add_share(count))
            parts.append(shares[-1] * draft.size(residual_bytes(draft.problem, unit, keep.point)))
    draft.model.add_at_most(total(shares), 1.0)
    return k, total(parts)


def _add_buffers(draft: Draft, users: Sequence[tuple[Affine, float, int]], depth: int) -> Affine:
    """Add the size of min(depth, users) buffers, each of which holds the largest of its users (count, size, most)."""
    users = [user for user in users if not user[0].is_zero]
    there = [(add_some(draft.model, count, most), num_bytes) for count, num_bytes, most in users]
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
    last, head_bytes = len(problem.units) - 1, align(problem.file_head_bytes) * (tier == NVME)
    for k, unit in enumerate(problem.units):
        weights, states = (draft.size(align(size) + head_bytes) for size in (unit.weight_bytes, unit.state_bytes))
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
