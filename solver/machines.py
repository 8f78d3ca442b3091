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


class Machines:
    """Trainers under many plans, between spans."""

    def __init__(self, problem: Problem, tables: Tables, many: Sequence[Decisions]) -> None:
        self._problem, self._units, self._last = problem, problem.units, len(problem.units) - 1
        self._has = tables.look_up(many)
        self._some: dict[str, np.ndarray] = {name: np.asarray(values.any(axis=1)) for name, values in self._has.items()}
        num = len(many)
        layout = Layout(np.array([depth for depth, _ in many]), self._has)
        keys = layout.slots, layout.buffers, layout.turns, layout.needs, layout.backward_needs
        self._slots, self._buffers, self._turns, self._needs, self._backward_needs = (
            key * num + np.arange(num) for key in keys
        )
        self._early, self._late, rows = layout.early, ~layout.early, len(self._units)
        self._queue = {queue: queue for queue in QUEUES}
        if problem.device_is_host:
            self._queue |= dict.fromkeys((H2D, D2H, CPU), COMPUTE)
        self._free = {queue: np.zeros(num) for queue in QUEUES}
        self._busy = {queue: np.zeros(num) for queue in QUEUES}
        self._sum_ends, self._norm = np.zeros((2, num))  # of a step's spans, each from the norm before
        self._moved, self._early_moved = np.zeros((2, num))  # weights that are loaded, in bytes through DRAM
        self._dram_ms, sums_ms = dram_ms(problem, 1.0), self._has["sweep_ms"].cumsum(axis=0)  # without those loads
        self._sweep_ms, self._slowed_ms = sums_ms[-1], sums_ms - self._has["sweep_ms"] + self._has["cpu_dram_ms"]
        self._main, self._loader, self._last_store, self._start = np.zeros((4, num))  # start: of the sweep
        num_slots = layout.spare_slot + 1
        self._owner = np.full(num_slots * num, -1)
        self._slot_use, self._slot_out, self._slot_copied = np.zeros((3, num_slots * num))
        self._buffer_out, self._buffer_copied, self._fetch_use = np.zeros((3, (NUM_BUFFERS + 1) * num))
        self._launched = np.zeros((rows + 1, num))
        self._cpu_done = np.full((rows, num), NEVER)  # NEVER = the device has what the CPU made
        self._weights_out, self._grads_out, self._weights_write, self._state_write = np.zeros((4, rows, num))
        self._packs_out, self._packs_written = np.zeros((2, rows, 2, num))
        self._staging = np.zeros((3, 2, num))  # weights, states, spills
        self._turn, self._tickets = np.zeros(num, dtype=bool), np.zeros((rows, num))
        self._in_flight = InFlight(num)

    def _span(self, queue: str, mask: np.ndarray | None, ms: np.ndarray | float, *after: np.ndarray) -> np.ndarray:
        """Run `ms` on a queue where `mask` says so (None = everywhere), once all of `after` is due."""
        key = self._queue[queue]
        end = self._free[key]
        for due in after:
            end = np.maximum(end, due)
        end = end + ms
        self._free[key] = end if mask is None else np.where(mask, end, self._free[key])
        self._busy[queue] += ms if mask is None else ms * mask
        self._sum_ends += end - self._norm if mask is None else (end - self._norm) * mask
        return end

    def _read(self, mask: np.ndarray, ms: np.ndarray | float, written: np.ndarray) -> None:
        end = self._span(NVME_READ, mask, ms, written, self._loader)
        self._loader = np.where(mask, end, self._loader)

    def _bring(self, u: int, *, pending: bool, act: np.ndarray | None = None) -> np.ndarray:
        """Copy to the device what unit u lacks there and what its update needs, where `act` says so."""
        unit, has, some = self._units[u], self._has, self._some
        everywhere = act is None
        act = np.ones_like(self._turn) if act is None else act
        done, slot, buffer = self._cpu_done[u], self._slots[u], self._buffers[u]
        load = done > NEVER
        if pending and some["on_cpu"][u]:
            loaded_ms = self._dram_ms * (self._early_moved + self._moved)
            done = np.where(load, np.maximum(done, self._start + self._slowed_ms[u] + loaded_ms), NEVER)
            self._loader = np.maximum(self._loader, done if everywhere else np.where(act, done, NEVER))
        if some["streamed"][u]:
            load = np.where(has["streamed"][u], self._owner[slot] != u, load)
        load &= act
        visit = has["visits"][u] & act & pending
        any_load, any_visit = load.any(), visit.any()
        after = np.zeros_like(self._main)
        if any_load:
            if some["weights_nvme"][u]:
                reads = load & has["weights_nvme"][u]
                self._loader = np.where(reads, np.maximum(self._loader, self._slot_copied[slot]), self._loader)
                self._read(reads, read_ms(self._problem, unit.weight_bytes), self._weights_write[u])
                self._moved += reads * unit.weight_bytes
            due = self._weights_out[u]
            if some["streamed"][u]:
                due = np.maximum(np.maximum(due, self._slot_use[slot]), self._slot_out[slot])
                self._owner[slot] = np.where(load & has["streamed"][u], u, self._owner[slot])
            after = np.where(load, due, 0.0)
            self._cpu_done[u] = np.where(load, NEVER, done)
            self._moved += load * unit.weight_bytes
        if any_visit:
            due = self._buffer_out[buffer]
            if some["states_nvme"][u]:
                reads = visit & has["states_nvme"][u]
                self._loader = np.where(reads, np.maximum(self._loader, self._buffer_copied[buffer]), self._loader)
                self._read(reads, read_ms(self._problem, unit.state_bytes), self._state_write[u])
            due = np.where(has["to_host"][u], np.maximum(due, self._grads_out[u]), due)
            after = np.where(visit, np.maximum(after, due), after)
        ticket = np.zeros_like(self._main)
        if any_load or any_visit:
            ms, copies = np.zeros_like(self._main), load
            if any_load:
                ms = load * copy_ms(self._problem, unit.weight_bytes, to_device=True, in_backward=not pending)
            if any_visit:
                ms, copies = ms + visit * has["visit"][u], load | visit
            ticket = np.where(copies, self._span(H2D, copies, ms, after, self._loader), 0.0)
        if self._problem.allow_nvme:
            self._slot_copied[slot] = np.where(load, ticket, self._slot_copied[slot])
            self._buffer_copied[buffer] = np.where(visit, ticket, self._buffer_copied[buffer])
        return ticket

    def _update_on_cpu(self, u: int) -> None:
        has, mask = self._has, self._has["on_cpu"][u]
        due = np.maximum(self._grads_out[u], self._weights_out[u])
        due = np.maximum(due, np.maximum(self._weights_write[u], self._state_write[u]))
        nvme = has["cpu_reads"][u], has["cpu_writes"][u]
        ms = self._units[u].cpu_update_ms
        end = self._span(CPU, mask, nvme[0] + ms + nvme[1], due, self._main)
        for queue, extra in zip((NVME_READ, NVME_WRITE), nvme, strict=True):
            self._busy[queue] += extra
            self._busy[CPU] -= extra
        for times in (self._cpu_done, self._weights_write, self._state_write):
            times[u] = np.where(mask, end, times[u])
        slot = self._slots[u]
        self._owner[slot] = np.where(mask & (self._owner[slot] == u), -1, self._owner[slot])

    def _update_on_load(self, u: int, ticket: np.ndarray) -> None:
        unit, has, some, mask = self._units[u], self._has, self._some, self._has["on_device"][u]
        done = self._span(COMPUTE, mask, unit.device_update_ms, ticket, self._main)
        if some["streamed"][u]:
            users, slot = mask & has["streamed"][u], self._slots[u]
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
            self._main = np.where(spills, np.maximum(self._main, staging), self._main)
        out = self._span(D2H, users, copy_ms(self._problem, num_bytes, to_device=False), done, self._main)
        if any_spill:
            written = self._span(NVME_WRITE, spills, write_ms(self._problem, num_bytes), out)
            self._staging[what, u % NUM_BUFFERS] = np.where(spills, written, staging)
            times = self._state_write if what else self._weights_write
            times[u] = np.where(spills, written, times[u])
        return out

    def _deliver(self, u: int, done: np.ndarray) -> None:
        mask, some = self._has["to_host"][u], self._some
        if some["to_host"][u]:
            ms = copy_ms(self._problem, self._units[u].grad_bytes, to_device=False)
            out = self._span(D2H, mask, ms, done, self._main)
            self._grads_out[u] = np.where(mask, out, self._grads_out[u])
            self._last_store = np.where(mask, out, self._last_store)
            if 0 < u < self._last:
                self._in_flight.push(mask, out)

    def _offload(self, u: int, done: np.ndarray, offloads: InFlight) -> None:
        last = done
        for i, what in enumerate(("boundary", "residuals")):
            mask, spills = self._has[f"moves_{what}"][u], self._has[f"spills_{what}"][u]
            any_spill = spills.any()
            if any_spill:
                staging = np.where(self._turn, self._staging[2, 1], self._staging[2, 0])
                self._main = np.where(spills, np.maximum(self._main, staging), self._main)
            out = self._span(D2H, mask, self._has[f"offload_{what}"][u], done, self._main)
            self._packs_out[u, i] = np.where(mask, out, 0.0)
            if any_spill:
                written = self._span(NVME_WRITE, spills, self._has[f"spill_{what}"][u], out)
                self._packs_written[u, i] = written
                for turn in (0, 1):
                    mine = spills & (self._turn == turn)
                    self._staging[2, turn] = np.where(mine, written, self._staging[2, turn])
                self._turn = self._turn ^ spills
            last = np.where(mask, out, last)
        offloads.push(self._has["moves"][u], last)

    def _fetch(self, u: int) -> np.ndarray:
        for i, what in enumerate(("boundary", "residuals")):
            if self._some[f"spills_{what}"][u]:
                self._read(self._has[f"spills_{what}"][u], self._has[f"unspill_{what}"][u], self._packs_written[u, i])
        mask, turn, (first, second) = self._has["moves"][u], self._turns[u], self._packs_out[u]
        after = self._fetch_use[turn], first, second, self._loader
        return np.where(mask, self._span(H2D, mask, self._has["fetch"][u], *after), 0.0)
