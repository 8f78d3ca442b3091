"""Lower bounds: a step, and a forward sweep, are as long as the host's DRAM, or NVMe, is busy with their bytes."""

from lazytrain.solver.choices import Lane
from lazytrain.solver.draft import Draft
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.plan import CPU, HOST, NVME
from lazytrain.solver.problem import UnitCost
from lazytrain.solver.rates import dram_ms, read_ms, update_traffic_bytes, write_ms


def add_traffic(draft: Draft) -> None:
    """Add the rows; durations are proportional to bytes, so that one expression of bytes serves each."""
    problem, model = draft.problem, draft.model
    reads = total(_read_bytes(draft, u) for u in range(len(draft.choices)))
    writes = total(_written_bytes(draft, u) for u in range(len(draft.choices)))
    dram = total([reads, writes, *(_link_bytes(draft, u) for u in range(len(draft.choices)))])
    for num_bytes, ms in ((dram, dram_ms(problem, 1.0)), (reads, read_ms(problem, 1)), (writes, write_ms(problem, 1))):
        if num_bytes.terms and ms:
            model.add_at_least(draft.period, num_bytes * draft.ms(ms))


def sweep_ms(draft: Draft) -> Affine:
    """Return how long the host's DRAM is busy with a forward sweep: updates, loads, and what leaves the device."""
    problem, units = draft.problem, draft.problem.units
    parts: list[Affine] = []
    for u, (unit, choice) in enumerate(zip(units, draft.choices, strict=True)):
        parts.append(choice.lane(lambda lane, unit=unit: _sweep_lane_bytes(unit, lane)))  # type: ignore[misc]
        parts.append(draft.first_load[u] * unit.weight_bytes + _activation_bytes(draft, u, (HOST, NVME)))
        if problem.allow_nvme:
            parts += [draft.nvme_loads[u][0] * unit.weight_bytes, _written_bytes(draft, u)]
            parts.append(choice.lane(lambda lane, unit=unit: _read_lane_bytes(unit, lane)))  # type: ignore[misc]
    return total(parts) * draft.ms(dram_ms(problem, 1.0))


def _lane_bytes(unit: UnitCost, lane: Lane) -> int:
    """Return what a lane moves through DRAM, without the loads that depend on other blocks, and without NVMe."""
    if not unit.num_params:
        return 0
    return _sweep_lane_bytes(unit, lane) + (unit.grad_bytes if lane.grads == HOST else 0)


def _sweep_lane_bytes(unit: UnitCost, lane: Lane) -> int:
    """Return the part of it that moves in the forward sweep: all but the store of grads."""
    if not unit.num_params:
        return 0
    if lane.update == CPU:
        return unit.weight_bytes + update_traffic_bytes(unit)
    num_bytes = unit.weight_bytes if lane.is_streamed else 0
    if lane.moves_states:
        num_bytes += 2 * unit.state_bytes + (unit.grad_bytes if lane.grads == HOST else 0)
    return num_bytes


def _link_bytes(draft: Draft, u: int) -> Affine:
    unit, choice = draft.problem.units[u], draft.choices[u]
    loads = (draft.first_load[u] + draft.second_load[u]) * unit.weight_bytes
    return total(
        (loads, choice.lane(lambda lane: _lane_bytes(unit, lane)), _activation_bytes(draft, u, (HOST, NVME)) * 2)
    )


def _activation_bytes(draft: Draft, u: int, places: tuple[str, ...]) -> Affine:
    unit, choice, num = draft.problem.units[u], draft.choices[u], draft.problem.num_microbatches
    boundary = choice.boundary(lambda place: num * unit.boundary_bytes if place in places else 0)
    return boundary + choice.keep(lambda k: num * unit.points[k.point].residual_bytes if k.place in places else 0)


def _update_bytes(unit: UnitCost, lane: Lane) -> int:
    """Return what an update writes to NVMe; its states (and, on the CPU, its weights) were read from there too."""
    return unit.weight_bytes * (lane.weights == NVME) + unit.state_bytes * (lane.states == NVME)


def _read_bytes(draft: Draft, u: int) -> Affine:
    if not draft.problem.allow_nvme:
        return Affine()
    unit, choice = draft.problem.units[u], draft.choices[u]
    first, second = draft.nvme_loads[u]
    lanes = choice.lane(lambda lane: _read_lane_bytes(unit, lane))
    return total((lanes, _activation_bytes(draft, u, (NVME,)), (first + second) * unit.weight_bytes))


def _read_lane_bytes(unit: UnitCost, lane: Lane) -> int:
    """Return what an update reads from NVMe, and on the CPU the load after it."""
    if lane.update == CPU:
        return _update_bytes(unit, lane) + unit.weight_bytes * (lane.weights == NVME)
    return unit.state_bytes * (lane.states == NVME)


def _written_bytes(draft: Draft, u: int) -> Affine:
    if not draft.problem.allow_nvme:
        return Affine()
    unit = draft.problem.units[u]
    return draft.choices[u].lane(lambda lane: _update_bytes(unit, lane)) + _activation_bytes(draft, u, (NVME,))
