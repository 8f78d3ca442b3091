"""Rows that no schedule breaks and that the relaxation needs: how far a queue may run ahead of compute, or behind it.

Rings limit how many loads can be done before the compute that needs them, and how many copies out can be due after it.
The rows of the rings say so with M, which means nothing while binaries are fractions; these say it with sums:

    loads ahead    load[u] >= start of forward[u] - A,     A = P + 1 weights (the edges' slot) and 2 update buffers
                   fetch[u] >= start of backward[u] - A,   A = P weights and 2 fetches
    stores behind  start of forward[u] >= store[u - 1] - A,   A = 2 updates' stores and one offload

and the chain of each queue carries them on. Loads have chains of their own here, from the first to the last of a sweep:
a finish in these may lie after the true one, where that was early, and reads from NVMe wait for the true one alone.
"""

from collections.abc import Callable

from lazytrain.solver.draft import Draft
from lazytrain.solver.events import Events, Op
from lazytrain.solver.linear import Affine
from lazytrain.solver.memory import NUM_RING_BUFFERS
from lazytrain.solver.plan import CPU
from lazytrain.solver.problem import UnitCost
from lazytrain.solver.rates import copy_ms


def add_windows(draft: Draft, events: Events) -> None:
    """Add the rows; one queue on a machine without a device needs none."""
    if draft.problem.device_is_host:
        return
    _add_forward_loads(draft, events)
    _add_fetches(draft, events)
    _add_stores(draft, events)


def find_largest(draft: Draft, size: Callable[[UnitCost], int], *, to_device: bool, num_copies: int = 1) -> float:
    num_bytes = max(size(unit) for unit in draft.problem.units)
    return draft.ms(copy_ms(draft.problem, num_bytes, to_device=to_device, num_copies=num_copies))


def find_largest_move(draft: Draft, *, to_device: bool) -> float:
    """Return the longest offload or fetch of one block: its boundary and its largest residuals."""
    num = draft.problem.num_microbatches

    def size(unit: UnitCost) -> int:
        return num * (unit.boundary_bytes + max(point.residual_bytes for point in unit.points))

    return find_largest(draft, size, to_device=to_device, num_copies=2 * num)


def _start(op: Op) -> Affine:
    return op.finish - op.ms


def _add_load(draft: Draft, earliest: Affine, user: Op, ahead: float) -> Affine:
    """Add a finish to a chain of loads, at most `ahead` before the operation that waits for it; return it."""
    finish = draft.model.add_var()
    draft.model.add_at_least(finish, earliest)
    draft.model.add_at_least(finish, _start(user) - ahead)
    draft.model.add_at_least(_start(user), finish)
    return finish


def _add_forward_loads(draft: Draft, events: Events) -> None:
    """Add the chain, without weights that a CPU update publishes to a resident block: they come at any time before."""
    weights = find_largest(draft, lambda unit: unit.weight_bytes, to_device=True)
    buffers = find_largest(draft, lambda unit: unit.state_bytes + unit.grad_bytes, to_device=True, num_copies=2)
    ahead = (draft.prefetch_depth + 1) * weights + NUM_RING_BUFFERS * buffers
    before = Affine()
    for u, unit in enumerate(draft.problem.units):
        published = draft.ms(copy_ms(draft.problem, unit.weight_bytes, to_device=True)) if unit.num_params else 0.0
        ms = events.load[u].ms - draft.choices[u].lane(
            lambda lane, ms=published: ms if lane.update == CPU and not lane.is_streamed else 0.0  # type: ignore[misc]
        )
        before = _add_load(draft, before + ms, events.update[u], ahead)


def _add_fetches(draft: Draft, events: Events) -> None:
    weights = find_largest(draft, lambda unit: unit.weight_bytes, to_device=True)
    ahead = draft.prefetch_depth * weights + NUM_RING_BUFFERS * find_largest_move(draft, to_device=True)
    before = Affine()
    for u in range(len(draft.choices) - 2, 0, -1):
        before = _add_load(draft, before + events.reload[u].ms + events.fetch[u].ms, events.backward[u], ahead)


def _add_stores(draft: Draft, events: Events) -> None:
    last = len(draft.choices) - 1
    update = find_largest(draft, lambda unit: unit.weight_bytes + unit.state_bytes, to_device=False, num_copies=2)
    grads = find_largest(draft, lambda unit: unit.grad_bytes, to_device=False)
    stores = NUM_RING_BUFFERS * update
    offload = find_largest_move(draft, to_device=False)
    for u in range(2, last + 1):
        behind = events.offload_residuals[u - 1].finish - (stores + offload)
        draft.model.add_at_least(_start(events.update[u]), behind)
    for u in range(last - 1, 0, -1):
        done = events.store_states[last] if u == last - 1 else events.store_grads[u + 1]
        behind = done.finish - (stores + NUM_RING_BUFFERS * grads)
        draft.model.add_at_least(_start(events.backward[u]), behind)
