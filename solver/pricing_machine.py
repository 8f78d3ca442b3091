"""The moving parts of the pricer: queues, rings and threads of one trainer under many plans, span by span.

The methods mirror `machine.Machine`; what a plan does without is masked. All times are ms; a column is a plan.
"""

from collections.abc import Sequence

import numpy as np

from lazytrain.solver.machine import COMPUTE, D2H, H2D, NUM_BUFFERS, NVME_READ, NVME_WRITE, QUEUES
from lazytrain.solver.plan import CPU
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import copy_ms, dram_ms, read_ms, write_ms
from lazytrain.solver.vectors import Decisions, InFlight, Layout, Tables

NEVER = -np.inf


class PricingMachine:
    """Trainers under many plans, between spans."""

    def __init__(self, problem: Problem, tables: Tables, many: Sequence[Decisions]) -> None:
        self.problem, self._units, self.last = problem, problem.units, len(problem.units) - 1
        self.has = tables.look_up(many)
        self.some: dict[str, np.ndarray] = {name: np.asarray(values.any(axis=1)) for name, values in self.has.items()}
        num = len(many)
        layout = Layout(np.array([depth for depth, _ in many]), self.has)
        keys = layout.slots, layout.buffers, layout.turns, layout.needs, layout.backward_needs
        self.slots, self._buffers, self.turns, self.needs, self.backward_needs = (
            key * num + np.arange(num) for key in keys
        )
        self.early, self.late, rows = layout.early, ~layout.early, len(self._units)
        self._queue = {queue: queue for queue in QUEUES}
        if problem.device_is_host:
            self._queue |= dict.fromkeys((H2D, D2H, CPU), COMPUTE)
        self._free = {queue: np.zeros(num) for queue in QUEUES}
        self.busy = {queue: np.zeros(num) for queue in QUEUES}
        self.sum_ends, self.norm = np.zeros((2, num))  # of a step's spans, each from the norm before
        self.moved, self.early_moved = np.zeros((2, num))  # weights that are loaded, in bytes through DRAM
        self.dram_ms, sums_ms = dram_ms(problem, 1.0), self.has["sweep_ms"].cumsum(axis=0)  # without those loads
        self.sweep_ms, self._slowed_ms = sums_ms[-1], sums_ms - self.has["sweep_ms"] + self.has["cpu_dram_ms"]
        self.main, self.loader, self.last_store, self.start = np.zeros((4, num))  # start: of the sweep
        num_slots = layout.spare_slot + 1
        self._owner = np.full(num_slots * num, -1)
        self.slot_use, self._slot_out, self._slot_copied = np.zeros((3, num_slots * num))
        self._buffer_out, self._buffer_copied, self.fetch_use = np.zeros((3, (NUM_BUFFERS + 1) * num))
        self.launched = np.zeros((rows + 1, num))
        self._cpu_done = np.full((rows, num), NEVER)  # NEVER = the device has what the CPU made
        self._weights_out, self.grads_out, self._weights_write, self._state_write = np.zeros((4, rows, num))
        self._packs_out, self._packs_written = np.zeros((2, rows, 2, num))
        self._staging = np.zeros((3, 2, num))  # weights, states, spills
        self.turn, self.tickets = np.zeros(num, dtype=bool), np.zeros((rows, num))
        self.in_flight = InFlight(num)

    def span(self, queue: str, mask: np.ndarray | None, ms: np.ndarray | float, *after: np.ndarray) -> np.ndarray:
        """Run `ms` on a queue where `mask` says so (None = everywhere), once all of `after` is due."""
        key = self._queue[queue]
        end = self._free[key]
        for due in after:
            end = np.maximum(end, due)
        end = end + ms
        self._free[key] = end if mask is None else np.where(mask, end, self._free[key])
        self.busy[queue] += ms if mask is None else ms * mask
        self.sum_ends += end - self.norm if mask is None else (end - self.norm) * mask
        return end

    def _read(self, mask: np.ndarray, ms: np.ndarray | float, written: np.ndarray) -> None:
        end = self.span(NVME_READ, mask, ms, written, self.loader)
        self.loader = np.where(mask, end, self.loader)

    def bring(self, u: int, *, pending: bool, act: np.ndarray | None = None) -> np.ndarray:
        """Copy to the device what unit u lacks there and what its update needs, where `act` says so."""
        unit, has, some = self._units[u], self.has, self.some
        everywhere = act is None
        act = np.ones_like(self.turn) if act is None else act
        done, slot, buffer = self._cpu_done[u], self.slots[u], self._buffers[u]
        load = done > NEVER
        if pending and some["on_cpu"][u]:
            loaded_ms = self.dram_ms * (self.early_moved + self.moved)
            done = np.where(load, np.maximum(done, self.start + self._slowed_ms[u] + loaded_ms), NEVER)
            self.loader = np.maximum(self.loader, done if everywhere else np.where(act, done, NEVER))
        if some["streamed"][u]:
            load = np.where(has["streamed"][u], self._owner[slot] != u, load)
        load &= act
        visit = has["visits"][u] & act & pending
        any_load, any_visit = load.any(), visit.any()
        after = np.zeros_like(self.main)
        if any_load:
            if some["weights_nvme"][u]:
                reads = load & has["weights_nvme"][u]
                self.loader = np.where(reads, np.maximum(self.loader, self._slot_copied[slot]), self.loader)
                self._read(reads, read_ms(self.problem, unit.weight_bytes), self._weights_write[u])
                self.moved += reads * unit.weight_bytes
            due = self._weights_out[u]
            if some["streamed"][u]:
                due = np.maximum(np.maximum(due, self.slot_use[slot]), self._slot_out[slot])
                self._owner[slot] = np.where(load & has["streamed"][u], u, self._owner[slot])
            after = np.where(load, due, 0.0)
            self._cpu_done[u] = np.where(load, NEVER, done)
            self.moved += load * unit.weight_bytes
        if any_visit:
            due = self._buffer_out[buffer]
            if some["states_nvme"][u]:
                reads = visit & has["states_nvme"][u]
                self.loader = np.where(reads, np.maximum(self.loader, self._buffer_copied[buffer]), self.loader)
                self._read(reads, read_ms(self.problem, unit.state_bytes), self._state_write[u])
            due = np.where(has["to_host"][u], np.maximum(due, self.grads_out[u]), due)
            after = np.where(visit, np.maximum(after, due), after)
        ticket = np.zeros_like(self.main)
        if any_load or any_visit:
            ms, copies = np.zeros_like(self.main), load
            if any_load:
                ms = load * copy_ms(self.problem, unit.weight_bytes, to_device=True, in_backward=not pending)
            if any_visit:
                ms, copies = ms + visit * has["visit"][u], load | visit
            ticket = np.where(copies, self.span(H2D, copies, ms, after, self.loader), 0.0)
        if self.problem.allow_nvme:
            self._slot_copied[slot] = np.where(load, ticket, self._slot_copied[slot])
            self._buffer_copied[buffer] = np.where(visit, ticket, self._buffer_copied[buffer])
        return ticket

    def update_on_cpu(self, u: int) -> None:
        has, mask = self.has, self.has["on_cpu"][u]
        due = np.maximum(self.grads_out[u], self._weights_out[u])
        due = np.maximum(due, np.maximum(self._weights_write[u], self._state_write[u]))
        nvme = has["cpu_reads"][u], has["cpu_writes"][u]
        ms = self._units[u].cpu_update_ms
        end = self.span(CPU, mask, nvme[0] + ms + nvme[1], due, self.main)
        for queue, extra in zip((NVME_READ, NVME_WRITE), nvme, strict=True):
            self.busy[queue] += extra
            self.busy[CPU] -= extra
        for times in (self._cpu_done, self._weights_write, self._state_write):
            times[u] = np.where(mask, end, times[u])
        slot = self.slots[u]
        self._owner[slot] = np.where(mask & (self._owner[slot] == u), -1, self._owner[slot])

    def update_on_load(self, u: int, ticket: np.ndarray) -> None:
        unit, has, some, mask = self._units[u], self.has, self.some, self.has["on_device"][u]
        done = self.span(COMPUTE, mask, unit.device_update_ms, ticket, self.main)
        if some["streamed"][u]:
            users, slot = mask & has["streamed"][u], self.slots[u]
            out = self._send(0, u, unit.weight_bytes, users, has["weights_nvme"][u], done)
            self._weights_out[u] = np.where(users, out, self._weights_out[u])
            self._slot_out[slot] = np.where(users, out, self._slot_out[slot])
        if some["visits"][u]:
            users, buffer = mask & has["visits"][u], self._buffers[u]
            out = self._send(1, u, unit.state_bytes, users, has["states_nvme"][u], done)
            self._buffer_out[buffer] = np.where(users, out, self._buffer_out[buffer])

    def _send(
        self, what: int, u: int, num_bytes: int, users: np.ndarray, on_nvme: np.ndarray, done: np.ndarray
    ) -> np.ndarray:
        staging, spills = self._staging[what, u % NUM_BUFFERS], users & on_nvme
        any_spill = spills.any()
        if any_spill:
            self.main = np.where(spills, np.maximum(self.main, staging), self.main)
        out = self.span(D2H, users, copy_ms(self.problem, num_bytes, to_device=False), done, self.main)
        if any_spill:
            written = self.span(NVME_WRITE, spills, write_ms(self.problem, num_bytes), out)
            self._staging[what, u % NUM_BUFFERS] = np.where(spills, written, staging)
            times = self._state_write if what else self._weights_write
            times[u] = np.where(spills, written, times[u])
        return out

    def deliver(self, u: int, done: np.ndarray) -> None:
        mask, some = self.has["to_host"][u], self.some
        if some["to_host"][u]:
            ms = copy_ms(self.problem, self._units[u].grad_bytes, to_device=False)
            out = self.span(D2H, mask, ms, done, self.main)
            self.grads_out[u] = np.where(mask, out, self.grads_out[u])
            self.last_store = np.where(mask, out, self.last_store)
            if 0 < u < self.last:
                self.in_flight.push(mask, out)

    def offload(self, u: int, done: np.ndarray, offloads: InFlight) -> None:
        last = done
        for i, what in enumerate(("boundary", "residuals")):
            mask, spills = self.has[f"moves_{what}"][u], self.has[f"spills_{what}"][u]
            any_spill = spills.any()
            if any_spill:
                staging = np.where(self.turn, self._staging[2, 1], self._staging[2, 0])
                self.main = np.where(spills, np.maximum(self.main, staging), self.main)
            out = self.span(D2H, mask, self.has[f"offload_{what}"][u], done, self.main)
            self._packs_out[u, i] = np.where(mask, out, 0.0)
            if any_spill:
                written = self.span(NVME_WRITE, spills, self.has[f"spill_{what}"][u], out)
                self._packs_written[u, i] = written
                for turn in (0, 1):
                    mine = spills & (self.turn == turn)
                    self._staging[2, turn] = np.where(mine, written, self._staging[2, turn])
                self.turn = self.turn ^ spills
            last = np.where(mask, out, last)
        offloads.push(self.has["moves"][u], last)

    def fetch(self, u: int) -> np.ndarray:
        for i, what in enumerate(("boundary", "residuals")):
            if self.some[f"spills_{what}"][u]:
                self._read(self.has[f"spills_{what}"][u], self.has[f"unspill_{what}"][u], self._packs_written[u, i])
        mask, turn, (first, second) = self.has["moves"][u], self.turns[u], self._packs_out[u]
        after = self.fetch_use[turn], first, second, self.loader
        return np.where(mask, self.span(H2D, mask, self.has["fetch"][u], *after), 0.0)
