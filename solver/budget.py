"""The memory rows of the MILP: the formula of memory.py, position by position, as expressions of the binaries.

The plan that comes out is checked with `memory.account` itself; a test holds the two together.
"""

from dataclasses import dataclass

from lazytrain.solver.choices import Keep
from lazytrain.solver.draft import Draft, pick_lane
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.memory import (
    NUM_RING_BUFFERS,
    NUM_WRITERS,
    align,
    boundary_bytes,
    chunk_sum_bytes,
    embed_sum_bytes,
    first_sums_bytes,
    residual_bytes,
    sum_bytes,
)
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, least_chunks_behind
from lazytrain.solver.rings import add_buffer, add_largest

AWAY = (HOST, NVME)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the plan needs per tier, in the model's unit of size. `device_peak` is at least every position."""

    device_peak: Affine
    host: Affine
    nvme: Affine


def add_needs(draft: Draft) -> Needs:
    """Add the variables and rows that say what each tier must hold, without limits."""
    peak = draft.model.add_var()
    offload = _add_offload(draft)
    always = _device_always(draft) + offload * NUM_RING_BUFFERS
    for need in _device_positions(draft):
        draft.model.add_at_least(peak, always + need)
    return Needs(device_peak=peak, host=_host(draft) + _nvme_staging(draft), nvme=_nvme(draft))


def add_budgets(draft: Draft, slack: dict[str, Affine] | None = None) -> None:
    """Add the limits of device, host and NVMe.

    Args:
        slack: tier -> what may be added to its limit ("device", "host", "nvme"), for explanations.
    """
    needs, hardware, slack = add_needs(draft), draft.problem.hardware, slack or {}
    host = needs.host + needs.device_peak if draft.problem.device_is_host else needs.host
    limits = (
        ("device", needs.device_peak, hardware.device_memory_bytes),
        ("host", host, hardware.host_memory_bytes),
        ("nvme", needs.nvme, hardware.nvme_bytes if draft.problem.allow_nvme else 0),
    )
    for tier, need, limit in limits:
        if need.terms or need.constant:
            draft.model.add_at_most(need - slack.get(tier, Affine()), draft.size(limit))


def _device_always(draft: Draft) -> Affine:
    model, problem = draft.model, draft.problem
    parts = [Affine(constant=draft.size(align(problem.library_bytes)))]
    for u, unit in enumerate(problem.units):
        weights, states = draft.size(align(unit.weight_bytes)), draft.size(align(unit.state_bytes))
        parts.append(pick_lane(draft, u, weights=DEVICE) * weights + pick_lane(draft, u, states=DEVICE) * states)
    slots = [(draft.streamed[u], draft.size(align(unit.weight_bytes))) for u, unit in enumerate(problem.units)]
    parts.append(add_buffer(model, slots, draft.num_slots))
    edges = zip((draft.edges.embed, draft.edges.head), (problem.embed, problem.head), strict=True)
    parts.append(add_buffer(model, [(user, draft.size(align(unit.weight_bytes))) for user, unit in edges]))
    visits = []
    for u, unit in enumerate(problem.units):
        states, grads = align(unit.state_bytes), align(unit.grad_bytes)
        for place, num_bytes in ((DEVICE, states), (HOST, states + grads)):
            visit = pick_lane(draft, u, states=AWAY, update=DEVICE, grads=place)
            visits.append((visit, draft.size(num_bytes)))
    parts.append(add_buffer(model, visits, draft.num_buffers))
    return total(parts)


def _add_offload(draft: Draft) -> Affine:
    """Add the size of a block's largest offload of one chunk, which is also that of a fetch buffer."""
    problem, moved, users, share = draft.problem, [], [], 1 / draft.problem.num_microbatches
    for u in range(1, len(draft.choices) - 1):
        unit, choice = problem.units[u], draft.choices[u]
        moved.append(_moved(draft, u, AWAY) * share)
        users.append((choice.boundary(lambda place: place in AWAY), draft.size(boundary_bytes(problem, unit)) * share))
        for point in range(1, len(unit.points)):
            user = choice.keep(lambda keep, point=point: keep.point == point and keep.place in AWAY)  # type: ignore[misc]
            users.append((user, draft.size(residual_bytes(problem, unit, point)) * share))
    largest = add_largest(draft.model, moved)
    if largest.terms:
        draft.model.add_at_least(largest, add_buffer(draft.model, users))
    return largest


def _add_in_flight(draft: Draft) -> list[Affine]:
    """Add, per unit, what the offloads take that are under way in its forward: its own, or those of the last before."""
    problem, model, last = draft.problem, draft.model, Affine()
    behind, found = least_chunks_behind(problem.num_microbatches), [Affine()]
    for u in range(1, len(draft.choices) - 1):
        choice = draft.choices[u]
        moved = _moved(draft, u, AWAY) * (behind / problem.num_microbatches)
        found.append(add_largest(model, [last, moved]))
        if moved.is_zero:
            continue
        is_moving, now = model.add_var(upper=1.0), model.add_var()
        users = choice.boundary(lambda place: float(place in AWAY)) + choice.keep(lambda keep: keep.place in AWAY)
        model.add_at_most(is_moving - users, 0.0)
        model.add_at_least(now, moved)
        model.add_at_least(now, last - is_moving * _most_moved(draft, behind))
        last = now
    return [*found, last]


def _most_moved(draft: Draft, behind: int) -> float:
    units = draft.problem.blocks
    return draft.size(
        max(behind * (align(b.boundary_bytes) + max(align(p.residual_bytes) for p in b.points)) for b in units)
    )


def _device_positions(draft: Draft) -> list[Affine]:
    problem, units, last = draft.problem, draft.problem.units, len(draft.choices) - 1
    num = problem.num_microbatches
    sizes = [draft.size(align(unit.grad_bytes)) for unit in units]
    grads = [pick_lane(draft, u, grads=DEVICE) * size for u, size in enumerate(sizes)]
    at_once = [pick_lane(draft, u, weights=DEVICE, states=DEVICE) * size for u, size in enumerate(sizes)]
    later = [grads[u] - at_once[u] for u in range(last + 1)]
    kept = [_moved(draft, u, (DEVICE,)) for u in range(last + 1)]
    kept_before = draft.model.add_running_sums(kept)
    grads_before = draft.model.add_running_sums(grads)
    later_before = draft.model.add_running_sums(later)
    all_grads, all_later = grads_before[-1], later_before[-1]
    inputs = [draft.size(boundary_bytes(problem, unit)) for unit in units]
    work = [_workspace(draft, u) for u in range(last + 1)]
    head_sum = draft.size(sum_bytes(problem.head))
    leaving_sum, staying_sum = map(draft.size, embed_sum_bytes(problem))
    tied = draft.size(sum_bytes(problem.embed)) if problem.tied else 0.0
    edge = grads[last]
    stores = [(pick_lane(draft, u, grads=HOST), draft.size(align(x.grad_bytes))) for u, x in enumerate(units)]
    ring = add_buffer(draft.model, stores[1:-1]) * NUM_RING_BUFFERS
    in_flight = _add_in_flight(draft)

    positions = [all_later + work[0] + ring + stores[0][0] * leaving_sum + inputs[1]]
    for u in range(1, last):
        own = work[u] + _residuals(draft, u, (DEVICE,)) + _residuals(draft, u, AWAY) * (1 / num)
        positions.append(
            own + (inputs[u] + inputs[u + 1]) + (all_later - later_before[u]) + kept_before[u] + in_flight[u]
        )
    one_more = draft.size(align(problem.head.boundary_bytes))
    fixed = inputs[last] + one_more + head_sum + tied
    positions += [own + kept_before[last] + in_flight[last] + fixed for own in (work[last], edge)]
    for u in range(1, last):
        cotangent = max(align(units[u].boundary_bytes), align(units[u + 1].boundary_bytes))
        flow = draft.size(num * cotangent + align(units[u].boundary_bytes))
        needs = work[u] + (grads_before[last] - grads_before[u]) + kept_before[u + 1] + edge + (flow + tied)
        if u < last - 1:
            positions.append(needs + ring + draft.size(chunk_sum_bytes(problem, units[u])))
            continue
        own_store = stores[u][0] * stores[u][1]
        for c, num_bytes in enumerate(first_sums_bytes(problem, units[u])):
            positions.append(needs + own_store + draft.size(num_bytes) - kept[u] * (c / num))
    embed_sum = stores[0][0] * (leaving_sum - staying_sum) + staying_sum
    positions.append(work[0] + all_grads + ring + embed_sum + inputs[1])
    return positions


def _workspace(draft: Draft, u: int) -> Affine:
    points = draft.problem.units[u].points
    return draft.choices[u].keep(lambda keep: draft.size(points[keep.point].workspace_bytes))


def _residuals(draft: Draft, u: int, places: tuple[str, ...]) -> Affine:
    problem, unit = draft.problem, draft.problem.units[u]

    def size(keep: Keep) -> float:
        return draft.size(residual_bytes(problem, unit, keep.point)) if keep.place in places else 0.0

    return draft.choices[u].keep(size)


def _boundary(draft: Draft, u: int, places: tuple[str, ...]) -> Affine:
    size = draft.size(boundary_bytes(draft.problem, draft.problem.units[u]))
    return draft.choices[u].boundary(lambda place: size if place in places else 0.0)


def _moved(draft: Draft, u: int, places: tuple[str, ...]) -> Affine:
    if u in (0, len(draft.choices) - 1):
        return Affine()
    return _boundary(draft, u, places) + _residuals(draft, u, places)


def _host(draft: Draft) -> Affine:
    parts = []
    for u, unit in enumerate(draft.problem.units):
        weights, states = draft.size(align(unit.weight_bytes)), draft.size(align(unit.state_bytes))
        parts.append((pick_lane(draft, u, weights=HOST) + pick_lane(draft, u, weights=DEVICE, update=CPU)) * weights)
        parts.append(pick_lane(draft, u, states=HOST) * states)
        parts.append(pick_lane(draft, u, grads=HOST) * draft.size(align(unit.grad_bytes)))
        parts.append(_moved(draft, u, (HOST,)))
    return total(parts)


def _nvme_staging(draft: Draft) -> Affine:
    if not draft.problem.allow_nvme:
        return Affine()
    units, model = draft.problem.units, draft.model

    def largest(name: str, **wanted: str) -> Affine:
        return add_largest(
            model,
            [pick_lane(draft, u, **wanted) * draft.size(align(getattr(unit, name))) for u, unit in enumerate(units)],
        )

    blocks = range(1, len(units) - 1)
    spilled = [_spill_files(draft, u) for u in blocks]
    return total(
        (
            largest("weight_bytes", weights=NVME) * draft.prefetch_depth,
            largest("weight_bytes", weights=NVME, update=CPU),
            largest("state_bytes", states=NVME, update=CPU),
            largest("weight_bytes", weights=NVME, update=DEVICE) * NUM_RING_BUFFERS,
            largest("state_bytes", states=NVME, update=DEVICE) * (2 * NUM_RING_BUFFERS),
            add_largest(model, [part for parts in spilled for part in parts]) * NUM_RING_BUFFERS,
            add_largest(model, [total(parts) for parts in spilled]) * NUM_RING_BUFFERS,
        )
    )


def _nvme(draft: Draft) -> Affine:
    if not draft.problem.allow_nvme:
        return Affine()
    head_bytes, blocks = align(draft.problem.file_head_bytes), range(1, len(draft.choices) - 1)
    lasting: dict[tuple[str, str, int], list[Affine]] = {}  # those that share spare files
    for u, unit in enumerate(draft.problem.units):
        for what, num_bytes in (("weights", unit.weight_bytes), ("states", unit.state_bytes)):
            file_bytes = (head_bytes + align(num_bytes)) * (num_bytes > 0)
            lives = pick_lane(draft, u, **{what: NVME}) * draft.size(file_bytes)
            lasting.setdefault((unit.kind, what, file_bytes), []).append(lives)
    spilled = [file for u in blocks for file in _spill_files(draft, u)]
    spares = [add_largest(draft.model, files) for files in (*lasting.values(), spilled)]
    files = [file for files in lasting.values() for file in files]
    return total(files) + total(spilled) * draft.problem.num_microbatches + total(spares) * NUM_WRITERS


def _spill_files(draft: Draft, u: int) -> tuple[Affine, Affine]:
    """Return the sizes of a block's files of boundary and residuals on NVMe: one chunk's."""
    part = 1 / draft.problem.num_microbatches
    return _boundary(draft, u, (NVME,)) * part, _residuals(draft, u, (NVME,)) * part
