"""How a unit comes to the device and leaves it: the ring of weight slots, the update buffers, update on load.

Streamed block number j always uses slot j mod P. A slot's content stays usable until it is overwritten, so the last P
blocks of the forward sweep need no second load in the backward sweep, and the first P blocks of a step that are updated
on the device need none at all.

Embed and head, where they are streamed, share one slot of their own, as large as the larger of the two: each overwrites
the other. A tied head reads the embed's copy there.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lazytrain.homes import Homes, UnitHome, staging_key
from lazytrain.lanes import COMPUTE, D2H, H2D, Lanes, Ticket, Worker
from lazytrain.layout import ALIGN_BYTES, round_up
from lazytrain.optimizer import update_unit_into
from lazytrain.updates import PendingUpdate

NUM_UPDATE_BUFFERS = 2


@dataclass(kw_only=True)
class Arrival:
    """A unit on the device, once `ticket` is due; `state` and `grads` are there where it is to be updated on load."""

    home: UnitHome
    weights: Tensor
    ticket: Ticket
    state: Tensor | None = None
    grads: Tensor | None = None
    slot: int | None = None
    buffer: int | None = None


class Arrivals:
    """The device side of all units (see the head of this file)."""

    def __init__(self, homes: Homes, prefetch_depth: int, lanes: Lanes, writer: Worker) -> None:
        self._homes, self._lanes, self._writer = homes, lanes, writer
        blocks, edges = (
            [h for h in part if h.plan.is_streamed and h.has_params]
            for part in (homes.units[1:-1], (homes.units[0], homes.units[-1]))
        )
        depth = min(prefetch_depth, len(blocks))
        self._slot_index = {home.index: j % depth for j, home in enumerate(blocks)}
        self._slot_index |= {home.index: depth for home in edges}
        self._slots: list[Tensor] = []
        self._slot_use: list[Ticket | None] = []
        for count, users in ((depth, blocks), (min(1, len(edges)), edges)):
            numel = max((h.layout.numel for h in users), default=0)
            slots, made = lanes.make_copy_buffers(count, numel, homes.dtype)
            self._slots += slots
            self._slot_use += [made] * count
        self._slot_owner: list[int | None] = [None] * len(self._slots)
        self._slot_out: list[Ticket | None] = [None] * len(self._slots)
        visiting = [h for h in homes.units if self.needs_buffer(h)]
        size = max((self._buffer_bytes(h) for h in visiting), default=0)
        count = min(NUM_UPDATE_BUFFERS, len(visiting))
        self._buffers, made = lanes.make_copy_buffers(count, size, torch.uint8)
        self._buffer_out: list[Ticket | None] = [made] * count
        self._copied: dict[str, Ticket] = {}
        self._staging_write: dict[str, Future[Any]] = {}
        self._buffer_index = {home.index: i % NUM_UPDATE_BUFFERS for i, home in enumerate(visiting)}

    @staticmethod
    def needs_buffer(home: UnitHome) -> bool:
        """Return whether a unit's states come to the device for its update."""
        return home.has_params and home.plan.moves_states

    def slot_of(self, home: UnitHome) -> int | None:
        """Return the slot of a streamed unit."""
        return self._slot_index.get(home.index)

    def buffer_of(self, home: UnitHome) -> int | None:
        """Return the update buffer of a unit whose states visit the device."""
        return self._buffer_index.get(home.index)

    def forget(self, home: UnitHome) -> None:
        """Mark a slot's copy of `home` as outdated (it is being updated elsewhere)."""
        slot = self.slot_of(home)
        if slot is not None and self._slot_owner[slot] == home.index:
            self._slot_owner[slot] = None

    def bring(self, home: UnitHome, pending: PendingUpdate | None) -> Arrival:
        """Issue the copies that bring a unit to the device, with what its update needs where one is pending.

        Blocks the calling thread while the unit's update runs on the CPU, and while NVMe is read.
        """
        if not home.has_params:
            return Arrival(home=home, weights=torch.empty(0, dtype=self._homes.dtype), ticket=Ticket())
        if home.cpu_update is not None:
            home.cpu_update.result()
        slot = self.slot_of(home)
        weights = self._weights_target(home)
        arrival = Arrival(home=home, weights=weights, ticket=Ticket(), slot=slot)
        copies: list[tuple[Tensor, Tensor, str]] = []
        after: list[Ticket | None] = []
        if self._is_outdated(home, slot):
            if home.plan.weights == "nvme":
                self._wait_for_copies(f"slot {slot}")
            copies.append((weights, self._homes.weights_slab(home, f"in weights {slot}"), "weights"))
            after.append(home.weights_out)
            if slot is not None:
                after += [self._slot_use[slot], self._slot_out[slot]]
                self._slot_owner[slot] = home.index
            home.cpu_update = None
        if pending is not None and pending.is_due(home) and self.needs_buffer(home):
            buffer = self._buffer_index[home.index]
            arrival.buffer = buffer
            after.append(self._buffer_out[buffer])
            if home.plan.states == "nvme":
                self._wait_for_copies(f"buffer {buffer}")
            arrival.state = self._buffers[buffer][: home.layout.state_bytes]
            copies.append((arrival.state, self._homes.state_slab(home, f"in state {buffer}"), "states"))
            if home.grads_host is not None:
                start = round_up(home.layout.state_bytes, ALIGN_BYTES)
                arrival.grads = self._buffers[buffer][start : start + home.layout.weight_bytes].view(self._homes.dtype)
                copies.append((arrival.grads, home.grads_host, "grads"))
                after.append(home.grads_out)
        for target, source, name in copies:
            with self._lanes.span(H2D, f"load {name}", home.unit.name, after) as arrival.ticket:
                self._lanes.copy_into(target, source, H2D)
            after = []
        # Of what was copied alone: NVMe is read into the staging behind a slot once its last copy has ended.
        moved = {name for _, _, name in copies}
        if "weights" in moved:
            self._copied[f"slot {slot}"] = arrival.ticket
        if "states" in moved:
            self._copied[f"buffer {arrival.buffer}"] = arrival.ticket
        return arrival

    def update_in_place(self, pending: PendingUpdate, coef: Tensor) -> None:
        """Queue the updates that need nothing from elsewhere, with a coefficient (fp32, 0-d) that lies on the device.

        A NaN in it leaves everything as it is. The host need not know the norm yet: the device has work while it reads
        the norm and prepares the next step.
        """
        for home in self._homes.units:
            if home.plan.updates_in_place and pending.is_due(home):
                assert home.state_device is not None
                self._update(home, self._weights_target(home), home.state_device, None, coef, pending, [])

    def update_on_load(self, arrival: Arrival, pending: PendingUpdate) -> None:
        """Update an arrived unit on the compute queue and send home what changed."""
        home, state = arrival.home, arrival.state if arrival.state is not None else arrival.home.state_device
        assert state is not None
        done = self._update(home, arrival.weights, state, arrival.grads, pending.coef, pending, [arrival.ticket])
        if home.plan.is_streamed:
            out = self._send(home, "weights", arrival.weights, done)
            assert arrival.slot is not None
            self._slot_out[arrival.slot] = home.weights_out = out
        if arrival.buffer is not None:
            self._buffer_out[arrival.buffer] = self._send(home, "state", state, done)

    def weights_on_device(self, home: UnitHome) -> Tensor:
        """Return the weights of a unit that was brought, or is resident, as a flat tensor."""
        slot = self.slot_of(home)
        assert slot is None or self._slot_owner[slot] == home.index, f"{home.unit.name} is not in its slot"
        return self._weights_target(home)

    def used(self, home: UnitHome, compute: Ticket) -> None:
        """Note the compute that used an arrived unit last: its slot is free after it."""
        slot = self.slot_of(home)
        if slot is not None:
            self._slot_use[slot] = compute

    def used_all(self, compute: Ticket) -> None:
        """Note that any slot may be in use until `compute` is due."""
        self._slot_use = [compute] * len(self._slots)

    def _update(
        self,
        home: UnitHome,
        weights: Tensor,
        state: Tensor,
        grads: Tensor | None,
        coef: float | Tensor,
        pending: PendingUpdate,
        after: list[Ticket],
    ) -> Ticket:
        """Queue a unit's update on the compute queue; grads None = those that wait on the device."""
        grads = grads if grads is not None else home.grads_device
        assert grads is not None
        with self._lanes.span(COMPUTE, "update", home.unit.name, after) as done:
            update_unit_into(home.layout, weights, state, grads, coef=coef, hyper=pending.hyper)
        home.grads_device = None
        pending.finish(home)
        return done

    def _wait_for_copies(self, key: str) -> None:
        """Wait until the last copy out of a staging buffer has ended, so that NVMe may be read into it again."""
        if key in self._copied:
            self._copied[key].synchronize()

    def _weights_target(self, home: UnitHome) -> Tensor:
        slot = self.slot_of(home)
        if slot is not None:
            return self._slots[slot][: home.layout.numel]
        assert home.weights_device is not None
        return home.weights_device

    def _is_outdated(self, home: UnitHome, slot: int | None) -> bool:
        if slot is not None:
            return self._slot_owner[slot] != home.index
        return home.cpu_update is not None

    def _buffer_bytes(self, home: UnitHome) -> int:
        grads_bytes = home.layout.weight_bytes if home.plan.grads == "host" else 0
        return round_up(home.layout.state_bytes, ALIGN_BYTES) + grads_bytes

    def _send(self, home: UnitHome, what: str, source: Tensor, done: Ticket) -> Ticket:
        slab = home.weights_host if what == "weights" else home.state_host
        if slab is not None:
            with self._lanes.span(D2H, f"store {what}", home.unit.name, [done]) as out:
                self._lanes.copy_into(slab, source, D2H)
            return out
        return self._send_to_nvme(home, what, source, done)

    def _send_to_nvme(self, home: UnitHome, what: str, source: Tensor, done: Ticket) -> Ticket:
        key = staging_key(home, what)
        before = self._staging_write.get(key)
        if before is not None:
            before.result()
        num_bytes = source.numel() * source.element_size()
        slab = self._homes.staging(key, what, num_bytes)
        with self._lanes.span(D2H, f"store {what}", home.unit.name, [done]) as out:
            self._lanes.copy_into(slab.view(source.dtype), source, D2H)

        def write() -> None:
            out.synchronize()
            self._homes.write(home, what, slab)

        future = self._writer.submit(write)
        self._staging_write[key] = future
        if what == "weights":
            home.weights_write = future
        else:
            home.state_write = future
        return out
