"""The moving parts of the simulator: queues, rings and threads of one trainer, span by span.

The methods mirror the trainer's engine (bring, update on load, stash away, bring back, deliver), and so do the states
that they keep between steps. A float is the time at which something is due.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazytrain.solver.plan import CPU, HOST, NVME, Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import copy_ms, dram_ms, read_ms, update_dram_ms, write_ms

COMPUTE, H2D, D2H, NVME_READ, NVME_WRITE = "compute", "h2d", "d2h", "nvme_read", "nvme_write"
QUEUES = (COMPUTE, H2D, D2H, CPU, NVME_READ, NVME_WRITE)
NUM_BUFFERS = 2  # update buffers, fetch buffers, grads and offloads in flight, staging


class Event(NamedTuple):
    """One span of the timeline; times in ms from the moment when the norm of the step before was known."""

    name: str
    unit: str
    queue: str
    start_ms: float
    end_ms: float


class Pack(NamedTuple):
    """A boundary or a block's residuals that left the device: when it was out, and when it was on NVMe."""

    num_bytes: int
    place: str
    out: float
    written: float


class Machine:
    """A trainer under one plan, between spans (see the head of this file)."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.units, self.plans = problem, problem.units, plan.units
        self.num = problem.num_microbatches
        self._shared = {COMPUTE, H2D, D2H, CPU} if problem.device_is_host else set()
        self.free = dict.fromkeys(QUEUES, 0.0)
        self.main = self.loader = 0.0
        streamed = [u for u in range(len(self.units)) if self.plans[u].is_streamed and self.units[u].num_params]
        edges = (0, len(self.units) - 1)
        ring = [u for u in streamed if u not in edges]
        num_slots = min(plan.prefetch_depth, len(ring))
        self.slots = {u: j % num_slots for j, u in enumerate(ring)}
        self.slots |= {u: num_slots for u in edges if u in streamed}  # behind the ring: the one that the edges share
        self._slot_owner: dict[int, int | None] = dict.fromkeys(range(num_slots + 1))
        self._slot_use = dict.fromkeys(range(num_slots + 1), 0.0)
        self._slot_out = dict(self._slot_use)
        visiting = [u for u in range(len(self.units)) if self.plans[u].moves_states and self.units[u].num_params]
        self.buffers = {u: i % NUM_BUFFERS for i, u in enumerate(visiting)}
        self._buffer_out = [0.0] * NUM_BUFFERS
        self._copied: dict[tuple[str, int | None], float] = {}
        self._staging: dict[tuple[str, int], float] = {}
        self._turn = 0
        zeros = [0.0] * len(self.units)
        self._cpu_done: list[float | None] = [None] * len(self.units)
        self._weights_out, self._grads_out = list(zeros), list(zeros)
        self._weights_write, self._state_write = list(zeros), list(zeros)
        self._grads_in_flight: list[float] = []
        self.last_store = 0.0
        self._fetch_use = [0.0] * NUM_BUFFERS
        self.events: list[Event] = []
        self.bytes = dict.fromkeys(QUEUES, 0)
        # How long the host's DRAM is busy: in a step, since the forward sweep's first load was issued, of that with
        # updates on the CPU, and with each unit's and those before it.
        self.dram_ms = self.sweep_ms = self._updates_ms = 0.0
        self._updated_ms = list(zeros)
        self._sweep_start = 0.0
        self._dram_ms_per_byte = dram_ms(problem, 1.0)
        self.busy = dict.fromkeys(QUEUES, 0.0)
        self.sum_ends = self._norm = 0.0  # of a step's spans: the sum of their ends, each from the norm before
        self._keeps_events = False
        self._copy_ms: dict[tuple[str, int, int, bool], float] = {}

    def span(self, queue: str, name: str, u: int, ms: float, after: Iterable[float], at: float) -> float:
        """Run `ms` on a queue once `after` is due and a thread issued it at `at`; return when it ends."""
        key = COMPUTE if queue in self._shared else queue
        start = self.free[key]
        if at > start:
            start = at
        for due in after:  # a loop is much faster than max() of so few, and this is the planner's innermost one
            if due > start:
                start = due
        end = self.free[key] = start + ms
        self.busy[queue] += ms
        self.sum_ends += end - self._norm
        if self._keeps_events:
            self.events.append(Event(name, self.units[u].name, queue, start, end))
        return end

    def copy(
        self,
        queue: str,
        name: str,
        u: int,
        num_bytes: int,
        after: Iterable[float],
        at: float,
        num: int = 1,
        *,
        in_backward: bool = False,
    ) -> float:
        """Copy over the link; see `span`."""
        self.bytes[queue] += num_bytes
        self._count_dram(num_bytes * self._dram_ms_per_byte)
        key = queue, num_bytes, num, in_backward
        ms = self._copy_ms.get(key)
        if ms is None:
            ms = self._copy_ms[key] = copy_ms(
                self.problem, num_bytes, to_device=queue == H2D, num_copies=num, in_backward=in_backward
            )
        return self.span(queue, name, u, ms, after, at)

    def read(self, name: str, u: int, num_bytes: int, written: float) -> None:
        """Read from NVMe on the loader's thread, which waits for it."""
        self._count_nvme(NVME_READ, num_bytes)
        self.loader = self.span(NVME_READ, name, u, read_ms(self.problem, num_bytes), [written], self.loader)

    def update_on_cpu(self, u: int) -> None:
        """Update a unit on the CPU threads; NVMe is read before and written after by the same thread."""
        unit, decisions = self.units[u], self.plans[u]
        due = max(self._grads_out[u], self._weights_out[u], self._weights_write[u], self._state_write[u])
        on_nvme = unit.weight_bytes * (decisions.weights == NVME) + unit.state_bytes * (decisions.states == NVME)
        key = COMPUTE if CPU in self._shared else CPU
        start = max(self.free[key], due, self.main)
        before_ms = self.sweep_ms
        if on_nvme:
            start = self._nvme_on_updater(NVME_READ, u, on_nvme, start)
        self.free[key] = start
        end = self.span(CPU, "update", u, unit.cpu_update_ms, [start], 0.0)
        if on_nvme:
            end = self._nvme_on_updater(NVME_WRITE, u, on_nvme, end)
        self.free[key] = end
        self._count_dram(update_dram_ms(self.problem, unit))
        self._updates_ms += self.sweep_ms - before_ms
        self._updated_ms[u] = self._updates_ms
        self._cpu_done[u] = self._weights_write[u] = self._state_write[u] = end
        slot = self.slots.get(u)
        if slot is not None and self._slot_owner[slot] == u:
            self._slot_owner[slot] = None

    def bring(self, u: int, *, pending: bool) -> float:
        """Copy to the device what unit `u` lacks there, and what its update needs; return when all is there."""
        unit, decisions = self.units[u], self.plans[u]
        cpu_done = self._cpu_done[u]
        if cpu_done is not None:
            self.loader = max(self.loader, cpu_done, self._slowed(u))
        slot, copies, after = self.slots.get(u), [], [0.0]
        is_missing = cpu_done is not None if slot is None else self._slot_owner[slot] != u
        if is_missing:
            if decisions.weights == NVME:
                self.loader = max(self.loader, self._copied.get(("slot", slot), 0.0))
                self.read("read weights", u, unit.weight_bytes, self._weights_write[u])
            copies.append(("load weights", unit.weight_bytes))
            after.append(self._weights_out[u])
            if slot is not None:
                after += [self._slot_use[slot], self._slot_out[slot]]
                self._slot_owner[slot] = u
            self._cpu_done[u] = None
        buffer = self.buffers.get(u) if pending else None
        if buffer is not None:
            after.append(self._buffer_out[buffer])
            if decisions.states == NVME:
                self.loader = max(self.loader, self._copied.get(("buffer", buffer), 0.0))
                self.read("read states", u, unit.state_bytes, self._state_write[u])
            copies.append(("load states", unit.state_bytes))
            if decisions.grads == HOST:
                copies.append(("load grads", unit.grad_bytes))
                after.append(self._grads_out[u])
        ticket = 0.0
        for name, num_bytes in copies:
            ticket = self.copy(H2D, name, u, num_bytes, after, self.loader, in_backward=not pending)
        # NVMe is read into a staging buffer once its last copy has ended.
        if is_missing:
            self._copied["slot", slot] = ticket
        if buffer is not None:
            self._copied["buffer", buffer] = ticket
        return ticket

    def update_on_load(self, u: int, ticket: float) -> None:
        """Update an arrived unit on the compute queue and send home what changed."""
        unit, decisions = self.units[u], self.plans[u]
        done = self.span(COMPUTE, "update", u, unit.device_update_ms, [ticket], self.main)
        if decisions.is_streamed:
            out = self._send(u, "weights", unit.weight_bytes, decisions.weights, done)
            self._slot_out[self.slots[u]] = self._weights_out[u] = out
        if u in self.buffers:
            self._buffer_out[self.buffers[u]] = self._send(u, "state", unit.state_bytes, decisions.states, done)

    def used(self, u: int, done: float, turn: int | None = None) -> None:
        """Note the compute that used a unit's slot (and a fetch buffer) last."""
        if u in self.slots:
            self._slot_use[self.slots[u]] = done
        if turn is not None:
            self._fetch_use[turn % NUM_BUFFERS] = done

    def offload(self, u: int, name: str, num_bytes: int, place: str, done: float) -> Pack:
        """Copy a pack out, and on to NVMe; a staging buffer that is still being written holds the main thread."""
        key = ("spill", self._turn)
        if place == NVME:
            self.main = max(self.main, self._staging.get(key, 0.0))
        out = self.copy(D2H, name, u, num_bytes, [done], self.main, self.num)
        written = 0.0
        if place == NVME:
            written = self._staging[key] = self._write("spill", u, num_bytes, out)
            self._turn ^= 1
        return Pack(num_bytes, place, out, written)

    def fetch(self, u: int, packs: Sequence[Pack], turn: int) -> float:
        """Bring packs back into a fetch buffer; return when they are there."""
        for pack in packs:
            if pack.place == NVME:
                self.read("unspill", u, pack.num_bytes, pack.written)
        after = [self._fetch_use[turn % NUM_BUFFERS], *(pack.out for pack in packs)]
        num_bytes = sum(pack.num_bytes for pack in packs)
        return self.copy(H2D, "fetch", u, num_bytes, after, self.loader, self.num * len(packs), in_backward=True)

    def room_for_grads(self, u: int) -> float:
        """Return what a block's backward waits for: room for grads that go to the host; the first, the head's store."""
        last = len(self.units) - 1
        head = self._grads_out[last] if u == last - 1 and self.plans[last].grads == HOST else 0.0
        if self.plans[u].grads == HOST and len(self._grads_in_flight) >= NUM_BUFFERS:
            return max(head, self._grads_in_flight.pop(0))
        return head

    def deliver(self, u: int, done: float) -> None:
        """Send a unit's finished grads to the host, if that is where they wait."""
        unit = self.units[u]
        if unit.num_params and self.plans[u].grads == HOST:
            self._grads_out[u] = self.copy(D2H, "store grads", u, unit.grad_bytes, [done], self.main)
            self.last_store = self._grads_out[u]
            if 0 < u < len(self.units) - 1:
                self._grads_in_flight.append(self._grads_out[u])

    def start_sweep(self) -> None:
        """Begin with the updates on the CPU and the forward sweep, whose early loads have been issued."""
        self._sweep_start, self._updates_ms = self.main, 0.0

    def _slowed(self, u: int) -> float:
        """Return when DRAM is done with the updates up to unit u's, and with what has been copied in the sweep."""
        return self._sweep_start + self._updated_ms[u] + self.sweep_ms - self._updates_ms

    def dram_due(self) -> float:
        """Return when the host's DRAM is done with the sweep; till then updates go on."""
        start, due = self._sweep_start, self._sweep_start + self.sweep_ms
        if self._keeps_events and start < self.free[CPU] < due:
            self.events.append(Event("update slowed", "DRAM", CPU, self.free[CPU], due))
        return due

    def start_step(self, *, keep_events: bool = False) -> None:
        """Forget the last step's events and counts, and its grads in flight."""
        self._keeps_events = keep_events
        self.events, self.bytes, self.busy = [], dict.fromkeys(QUEUES, 0), dict.fromkeys(QUEUES, 0.0)
        self.dram_ms = 0.0
        self._grads_in_flight = []
        self.sum_ends, self._norm = 0.0, self.main

    def _send(self, u: int, what: str, num_bytes: int, place: str, done: float) -> float:
        key = (what, u % NUM_BUFFERS)
        if place == NVME:
            self.main = max(self.main, self._staging.get(key, 0.0))
        out = self.copy(D2H, f"store {what}", u, num_bytes, [done], self.main)
        if place == NVME:
            written = self._staging[key] = self._write(f"write {what}", u, num_bytes, out)
            (self._weights_write if what == "weights" else self._state_write)[u] = written
        return out

    def _write(self, name: str, u: int, num_bytes: int, out: float) -> float:
        self._count_nvme(NVME_WRITE, num_bytes)
        return self.span(NVME_WRITE, name, u, write_ms(self.problem, num_bytes), [out], 0.0)

    def _nvme_on_updater(self, queue: str, u: int, num_bytes: int, start: float) -> float:
        self._count_nvme(queue, num_bytes)
        ms = read_ms(self.problem, num_bytes) if queue == NVME_READ else write_ms(self.problem, num_bytes)
        self.busy[queue] += ms
        if self._keeps_events:
            self.events.append(Event(f"{queue[5:]} for update", self.units[u].name, queue, start, start + ms))
        return start + ms

    def _count_nvme(self, queue: str, num_bytes: int) -> None:
        self.bytes[queue] += num_bytes
        self._count_dram(num_bytes * self._dram_ms_per_byte)

    def _count_dram(self, ms: float) -> None:
        self.dram_ms += ms
        self.sweep_ms += ms
