"""The time rows of the MILP: compute, the link in both directions, and the CPU's updates.

    queue a then b     finish[b] >= finish[a] + ms[b]
    data               the same, where b waits for a; a wait that depends on a binary is relaxed by M
    last step's tail   finish[a] - T, for stores of grads that run on after the norm, and for early loads

The rows of an operation of 0 ms only repeat what others say already, because each queue follows the order of compute;
the waits for which that isn't so are the conditional ones.
"""

from collections.abc import Sequence

from lazytrain.solver.draft import Draft, pick_lane
from lazytrain.solver.events import AWAY, Events, Op, follow, follow_if, relax
from lazytrain.solver.linear import Affine, total
from lazytrain.solver.memory import NUM_RING_BUFFERS
from lazytrain.solver.plan import CPU, DEVICE, HOST
from lazytrain.solver.rates import sync_ms
from lazytrain.solver.rings import add_largest, add_ring
from lazytrain.solver.traffic import sweep_ms

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"


class Queues:
    """The order within each queue; on a machine without a device they are one, in the order of issue."""

    def __init__(self, draft: Draft, events: Events) -> None:
        self._draft = draft
        self._is_one = draft.problem.device_is_host
        stores, loads = events.store_grads[0].finish - draft.period, events.early[-1].finish - draft.period
        # What is loaded early for a unit binds its own load; those before it don't wait for it (`_add_forward`).
        self._ends = {COMPUTE: loads} if self._is_one else {D2H: stores}

    def run(self, queue: str, op: Op, waits: Sequence[Affine] = ()) -> None:
        """Add the rows of `op` behind what was run on the queue before."""
        queue = COMPUTE if self._is_one else queue
        follow(self._draft, op, [self._ends.get(queue, Affine()), *waits])
        self._ends[queue] = op.finish


def add_timing(draft: Draft, events: Events) -> None:
    """Add the rows of everything but NVMe (spilling.py)."""
    queues, moves = Queues(draft, events), _add_moves(draft)
    for u, op in enumerate(events.cpu):
        queues.run(CPU, op)
        tail = events.store_grads[u].finish - draft.period
        follow_if(draft, pick_lane(draft, u, update=CPU), op, tail, draft.horizon)
    last_offload, buffers = _add_forward(draft, events, queues, moves)
    _add_backward(draft, events, queues, moves, last_offload)
    for wait in (events.forward[-1].finish, _stored(draft, events, -1)):
        follow_if(draft, draft.edges.early, events.early[0], wait, 2 * draft.horizon)
    for u, (op, users) in enumerate(zip(events.early, draft.early, strict=True)):
        queues.run(H2D, op)
        follow_if(draft, total(users), op, buffers[u] + draft.period, 2 * draft.horizon)
        follow_if(draft, users[1], op, events.store_grads[u].finish, 2 * draft.horizon)


def _add_moves(draft: Draft) -> list[Affine]:
    """Add, per unit, a variable that is at least 1 where a boundary or residuals leave the device."""
    moves = [Affine() for _ in draft.choices]
    for u, choice in enumerate(draft.choices[1:-1], start=1):
        moves[u] = draft.model.add_var(upper=1.0)
        draft.model.add_at_least(moves[u], choice.boundary(lambda place: place in AWAY))
        draft.model.add_at_least(moves[u], choice.keep(lambda keep: keep.place in AWAY))
    return moves


def _finishes(ops: Sequence[Op]) -> list[list[Affine]]:
    return [[op.finish] for op in ops]


def _slot_ends(draft: Draft, events: Events, uses: Sequence[Op]) -> list[list[Affine]]:
    """Return what a slot waits for: its last use, and the copy of its weights home where the device updated them."""
    return [[use.finish, _stored(draft, events, u)] for u, use in enumerate(uses)]


def _stored(draft: Draft, events: Events, u: int) -> Affine:
    """Return when a unit's weights (the head's: -1) have left their slot, where the device updated them."""
    return relax(draft, events.store_weights[u].finish, pick_lane(draft, u, weights=AWAY, update=DEVICE))


def _add_forward(draft: Draft, events: Events, queues: Queues, moves: list[Affine]) -> tuple[Affine, list[Affine]]:
    """Add the rows of the forward sweep; return when the last offload ends, and when units' update buffers are free."""
    model, horizon, last = draft.model, draft.horizon, len(draft.choices) - 1
    slot_ends = _slot_ends(draft, events, events.forward)
    offloads, last_offload = add_ring(model, moves, _finishes(events.offload_residuals), 1, horizon)
    slots, _ = add_ring(model, draft.streamed, slot_ends, draft.prefetch_depth, 2 * horizon)
    stores = _finishes(events.store_states)
    buffers, _ = add_ring(model, draft.visiting, stores, NUM_RING_BUFFERS, 2 * horizon, period=draft.period)
    any_store = add_largest(model, [pick_lane(draft, u, grads=HOST) for u in range(last + 1)])
    # Embed and head overwrite each other: the one of the step before, or of this one, must be through with the slot.
    follow_if(draft, draft.edges.both, events.load[0], _stored(draft, events, -1) - draft.period, 2 * horizon)
    for wait in (events.forward[0].finish, _stored(draft, events, 0)):
        follow_if(draft, draft.edges.both, events.load[last], wait, 2 * horizon)
    for u in range(last + 1):
        load, update, forward = events.load[u], events.update[u], events.forward[u]
        queues.run(H2D, load, [events.cpu[u].finish, events.early[u].finish - draft.period])
        follow_if(draft, pick_lane(draft, u, update=CPU), load, events.slowed[u], 2 * horizon)
        follow_if(draft, draft.streamed[u], load, slots[u], 2 * horizon)
        follow_if(draft, draft.visiting[u], load, buffers[u], 2 * horizon)
        tail = events.store_grads[u].finish - draft.period
        follow_if(draft, pick_lane(draft, u, update=DEVICE, grads=HOST), load, tail, horizon)
        queues.run(COMPUTE, update, [load.finish])
        queues.run(D2H, events.store_weights[u], [update.finish])
        queues.run(D2H, events.store_states[u])
        queues.run(COMPUTE, forward, [sweep_ms(draft)] if u == last else [])
        if u == 1:
            follow_if(draft, any_store, forward, events.store_grads[0].finish - draft.period, 2 * horizon)
        if u > 1:
            # All offloads but the last one must be over: where u - 1 made one, those before it; others were due before.
            follow_if(draft, moves[u - 1], forward, offloads[u - 1], horizon)
        if 0 < u < last:
            if draft.problem.allow_nvme:
                queues.run(D2H, events.offload_boundary[u], [forward.finish])
            queues.run(D2H, events.offload_residuals[u], [forward.finish])
    queues.run(D2H, events.store_grads[last], [events.forward[last].finish])
    return last_offload[0], buffers


def _add_backward(draft: Draft, events: Events, queues: Queues, moves: list[Affine], last_offload: Affine) -> None:
    horizon, last = draft.horizon, len(draft.choices) - 1
    blocks = list(range(last - 1, 0, -1))

    def ring(users: Sequence[Affine], ends: Sequence[Sequence[Affine]], depth: int, bound: float) -> dict[int, Affine]:
        chosen, _ = add_ring(draft.model, [users[u] for u in blocks], [ends[u] for u in blocks], depth, bound)
        return dict(zip(blocks, chosen))

    slot_ends = _slot_ends(draft, events, events.backward)
    slots = ring(draft.streamed, slot_ends, draft.prefetch_depth, 2 * horizon)
    fetches = ring(moves, _finishes(events.backward), NUM_RING_BUFFERS, horizon)
    to_host = [pick_lane(draft, u, grads=HOST) for u in range(last + 1)]
    grads = ring(to_host, _finishes(events.store_grads), NUM_RING_BUFFERS, 2 * horizon)
    for u in blocks:
        reload, fetch, backward = events.reload[u], events.fetch[u], events.backward[u]
        queues.run(H2D, reload)
        for wait in (slots[u], _stored(draft, events, u)):
            follow_if(draft, draft.second_load[u], reload, wait, 2 * horizon)
        queues.run(H2D, fetch)
        for wait in (fetches[u], events.offload_residuals[u].finish):
            follow_if(draft, moves[u], fetch, wait, horizon)
        queues.run(COMPUTE, backward, [fetch.finish, *([last_offload] if u == blocks[0] else [])])
        follow_if(draft, to_host[u], backward, grads[u], 2 * horizon)
        if u == blocks[0]:
            follow_if(draft, to_host[last], backward, events.store_grads[last].finish, horizon)
        queues.run(D2H, events.store_grads[u], [backward.finish])
    done = events.backward[0]
    queues.run(COMPUTE, done)
    queues.run(D2H, events.store_grads[0], [done.finish])
    draft.model.add_at_least(draft.period, done.finish + draft.ms(sync_ms(draft.problem)))
