"""The time rows of the bound (see bounds.py): how long queues and phases are busy, whatever the order of blocks.

What a queue may do ahead of a phase, or leave to the next one, is limited by buffers: two update buffers, two grads in
flight, one offload behind the forward sweep.
"""

from collections.abc import Sequence

from lazytrain.solver.bound_memory import Group
from lazytrain.solver.budget import AWAY
from lazytrain.solver.draft import Draft, pick_lane
from lazytrain.solver.events import Durations
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.memory import NUM_RING_BUFFERS
from lazytrain.solver.plan import CPU, DEVICE, HOST
from lazytrain.solver.problem import Problem, UnitCost
from lazytrain.solver.rates import copy_ms, sync_ms
from lazytrain.solver.rings import add_most, add_some
from lazytrain.solver.traffic import sweep_ms


def add_times(draft: Draft, kinds: Sequence[Group]) -> None:
    """Add the rows of time."""
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
    largest = _Largest(draft, kinds)
    first, second = model.add_var(), model.add_var()
    model.add_at_least(draft.period, first + second)
    model.add_at_least(first, forward + updates)
    model.add_at_least(first, cpu)
    model.add_at_least(first, sweep_ms(draft))
    model.add_at_least(first, loads - draft.edges.load_embed * largest.embed - largest.visit * NUM_RING_BUFFERS)
    model.add_at_least(first, stores + offloads - largest.store * NUM_RING_BUFFERS - largest.offload)
    _add_cpu_chains(draft, kinds, first)
    model.add_at_least(second, head + backward + sync)
    model.add_at_least(second, reloads + fetches - largest.fetch * NUM_RING_BUFFERS)
    model.add_at_least(second, head + total(grads[1:-1]) - largest.grads * NUM_RING_BUFFERS)


def _add_cpu_chains(draft: Draft, kinds: Sequence[Group], first: Affine) -> None:
    """Add what the forward sweep waits for before the first update on the CPU is loaded, and after the last one."""
    model, last = draft.model, len(kinds) - 1
    units = [Durations(draft, k) for k in range(last + 1)]

    def load_ms(k: int) -> float:
        return draft.ms(copy_ms(draft.problem, kinds[k].unit.weight_bytes, to_device=True))

    embed = pick_lane(draft, 0, update=CPU) * (load_ms(0) if kinds[0].unit.num_params else 0.0)
    behind = total(unit.update_on_device() for unit in units[1:]) + total(
        unit.forward(with_backward=False) for unit in units[1:-1]
    )
    model.add_at_least(first, units[0].update_on_cpu() + embed + units[0].forward(with_backward=False) + behind)
    owners = [k for k in range(1, last) if kinds[k].unit.num_params]
    on_cpu, most = total(pick_lane(draft, k, update=CPU) for k in owners), sum(len(kinds[k].members) for k in owners)
    if on_cpu.is_zero:
        return
    if len(owners) == last - 1:  # else the block that comes first may have nothing to update
        every = model.add_var(upper=1.0)
        model.add_at_least(every, on_cpu - float(most - 1))
        chain_ms = min(draft.ms(kinds[k].unit.cpu_update_ms) + load_ms(k) for k in owners)
        model.add_at_least(first, units[0].update_on_cpu() + every * chain_ms + behind)
    tail_ms = min(load_ms(k) + draft.ms(_least_forward_ms(draft.problem, kinds[k].unit)) for k in owners)
    before_head = total(unit.update_on_cpu() for unit in units[:-1])
    model.add_at_least(first, before_head + add_some(draft.model, on_cpu, most) * tail_ms)


def _least_forward_ms(problem: Problem, unit: UnitCost) -> float:
    return problem.num_microbatches * min(point.forward_ms for point in unit.points)


class _Largest:
    """The longest copies of one unit that a mix has; `embed`: of the embed's weights to the device."""

    def __init__(self, draft: Draft, kinds: Sequence[Group]) -> None:
        self._draft, self._units = draft, [kind.unit for kind in kinds]
        problem, last = draft.problem, len(kinds) - 1
        self.embed = draft.ms(copy_ms(problem, problem.embed.weight_bytes, to_device=True))
        visits, stores, grads = [], [], []
        for k, unit in enumerate(self._units):
            for place, num_bytes in ((DEVICE, unit.state_bytes), (HOST, unit.state_bytes + unit.grad_bytes)):
                users = pick_lane(draft, k, states=AWAY, update=DEVICE, grads=place)
                visits.append((users, self._copy(num_bytes, to_device=True, num_copies=1 + (place == HOST))))
            for places, num_bytes in (((DEVICE,), unit.state_bytes), (AWAY, unit.state_bytes + unit.weight_bytes)):
                users = pick_lane(draft, k, weights=places, states=AWAY, update=DEVICE)
                stores.append((users, self._copy(num_bytes, to_device=False, num_copies=1 + (places == AWAY))))
            if 0 < k < last:
                grads.append((pick_lane(draft, k, grads=HOST), self._copy(unit.grad_bytes, to_device=False)))
        self.visit, self.store, self.grads = (add_most(draft.model, parts) for parts in (visits, stores, grads))
        self.offload, self.fetch = (self._move(to_device=to_device) for to_device in (False, True))

    def _move(self, *, to_device: bool) -> Affine:
        """Return the longest move of a boundary, and of residuals: no block's pack takes longer than the two."""
        num = self._draft.problem.num_microbatches
        boundaries, residuals = [], []
        for unit, choice in zip(self._units[1:-1], self._draft.choices[1:-1], strict=True):
            ms = self._copy(num * unit.boundary_bytes, to_device=to_device, num_copies=num)
            boundaries.append((choice.boundary(lambda place: place in AWAY), ms))
            for keep, count in choice.keeps:
                num_bytes = num * unit.points[keep.point].residual_bytes
                ms = self._copy(num_bytes, to_device=to_device, num_copies=num)
                residuals += [(count, ms)] if keep.place in AWAY else []
        return add_most(self._draft.model, boundaries) + add_most(self._draft.model, residuals)

    def _copy(self, num_bytes: int, *, to_device: bool, num_copies: int = 1) -> float:
        return self._draft.ms(copy_ms(self._draft.problem, num_bytes, to_device=to_device, num_copies=num_copies))
