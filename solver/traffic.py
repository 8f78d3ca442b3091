"""Lower bounds: a step, and a forward sweep, are as long as the host's DRAM, or NVMe, is busy."""

from lazytrain.solver.choices import Lane
from lazytrain.solver.draft import Draft
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.plan import CPU, HOST, NVME
from lazytrain.solver.problem import UnitCost
from lazytrain.solver.rates import dram_ms, read_ms, update_dram_ms, write_ms


def add_traffic(draft: Draft) -> None:
    """Add the rows, where there is anything to add."""
    problem, model, units = draft.problem, draft.model, range(len(draft.choices))
    reads = total(_read_bytes(draft, u) for u in units)
    writes = total(_written_bytes(draft, u) for u in units)
    for num_bytes, ms in ((reads, read_ms(problem, 1)), (writes, write_ms(problem, 1))):
        if num_bytes.terms:
            model.add_at_least(draft.period, num_bytes * draft.ms(ms))
    if not problem.device_is_host:
        copied = total([reads, writes, *(_link_bytes(draft, u) for u in units)])
        model.add_at_least(draft.period, copied * draft.ms(dram_ms(problem, 1.0)) + _updates_ms(draft))


def sweep_ms(draft: Draft) -> Affine:
    """Return how long the host's DRAM is busy with a forward sweep: updates, loads, and what leaves the device."""
    copied = total(_sweep_bytes(draft, u) for u in range(len(draft.choices)))
    return copied * draft.ms(dram_ms(draft.problem, 1.0)) + _updates_ms(draft)


def slowed_updates(draft: Draft) -> list[Affine]:
    """Return when DRAM has done with each unit's update on the CPU, those before it, and what earlier units copy."""
    if draft.problem.device_is_host:
        return [Affine() for _ in draft.choices]
    ms, units = draft.ms(dram_ms(draft.problem, 1.0)), range(len(draft.choices))
    updates = [_update_ms(draft, u) for u in units]
    before = draft.model.add_running_sums(updates[u] + ms * _sweep_bytes(draft, u) for u in units)
    return [before[u] + updates[u] + 2 * ms * _cpu_nvme_bytes(draft, u) for u in units]


def _updates_ms(draft: Draft) -> Affine:
    """Return how long updates on the CPU keep DRAM busy."""
    return total(_update_ms(draft, u) for u in range(len(draft.choices)))


def _update_ms(draft: Draft, u: int) -> Affine:
    unit = draft.problem.units[u]
    ms = draft.ms(update_dram_ms(draft.problem, unit))
    return draft.choices[u].lane(lambda lane: ms if lane.update == CPU and unit.num_params else 0.0)


def _cpu_nvme_bytes(draft: Draft, u: int) -> Affine:
    """Return what the CPU's update of a unit reads from NVMe, and writes there."""
    unit = draft.problem.units[u]
    return draft.choices[u].lane(lambda lane: _update_bytes(unit, lane) if lane.update == CPU else 0)


def _sweep_bytes(draft: Draft, u: int) -> Affine:
    """Return what a unit's copies move through DRAM in the forward sweep, NVMe's included."""
    link = _sweep_link_bytes(draft, u) + _activation_bytes(draft, u, (HOST, NVME))
    return total((link, _sweep_read_bytes(draft, u), _written_bytes(draft, u)))


def _sweep_link_bytes(draft: Draft, u: int) -> Affine:
    """Return what copies for updates and loads of weights move in the forward sweep, without NVMe."""
    unit = draft.problem.units[u]
    lanes = draft.choices[u].lane(lambda lane: _lane_bytes(unit, lane))
    return lanes + draft.first_load[u] * unit.weight_bytes


def _lane_bytes(unit: UnitCost, lane: Lane) -> int:
    """Return what a lane copies in the forward sweep, without the loads that depend on other blocks."""
    if not unit.num_params:
        return 0
    if lane.update == CPU:
        return unit.weight_bytes
    num_bytes = unit.weight_bytes if lane.is_streamed else 0
    if lane.moves_states:
        num_bytes += 2 * unit.state_bytes + (unit.grad_bytes if lane.grads == HOST else 0)
    return num_bytes


def _link_bytes(draft: Draft, u: int) -> Affine:
    """Return what a unit's copies move through DRAM in a step, without NVMe."""
    unit = draft.problem.units[u]
    grads = draft.choices[u].lane(lambda lane: unit.grad_bytes if lane.grads == HOST and unit.num_params else 0)
    backward = grads + draft.second_load[u] * unit.weight_bytes
    return total((_sweep_link_bytes(draft, u), backward, _activation_bytes(draft, u, (HOST, NVME)) * 2))


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
    again = draft.nvme_loads[u][1] * draft.problem.units[u].weight_bytes
    return total((_sweep_read_bytes(draft, u), _activation_bytes(draft, u, (NVME,)), again))


def _sweep_read_bytes(draft: Draft, u: int) -> Affine:
    """Return what the forward sweep reads from NVMe: for updates, for the loads behind the CPU's, and first loads."""
    if not draft.problem.allow_nvme:
        return Affine()
    unit = draft.problem.units[u]

    def read(lane: Lane) -> int:
        if lane.update == CPU:
            return _update_bytes(unit, lane) + unit.weight_bytes * (lane.weights == NVME)
        return unit.state_bytes * (lane.states == NVME)

    return draft.choices[u].lane(read) + draft.nvme_loads[u][0] * unit.weight_bytes


def _written_bytes(draft: Draft, u: int) -> Affine:
    if not draft.problem.allow_nvme:
        return Affine()
    unit = draft.problem.units[u]
    return draft.choices[u].lane(lambda lane: _update_bytes(unit, lane)) + _activation_bytes(draft, u, (NVME,))
