"""Price many plans at once: the simulator's steps, each span for all plans together, in vectors.

`simulator.py` stays the referee; this says the same (tests hold it to rounding) many times faster, since a search asks
for hundreds of plans that differ in a block or two. The sweeps mirror `simulator._Step`, the methods of
`pricing_machine.py` the machine's; what a plan does without is masked. All times are ms; a column is a plan.
"""

from collections.abc import Sequence

import numpy as np

from lazytrain.solver.machine import COMPUTE, D2H, H2D, QUEUES
from lazytrain.solver.plan import CPU
from lazytrain.solver.pricing_machine import PricingMachine
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import sync_ms
from lazytrain.solver.simulator import MAX_STEPS, SETTLED
from lazytrain.solver.vectors import Decisions, InFlight, Tables

MAX_TOGETHER = 256  # plans in one go: vectors of this size stay in the nearest cache


class Pricer:
    """Step times and loads of many plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._tables = problem, Tables(problem)

    def price(self, many: Sequence[Decisions]) -> tuple[np.ndarray, np.ndarray]:
        """Return what `simulator.simulate_load` says of each plan: [plan] steps and [bound, plan] loads, in ms."""
        parts = [many[i : i + MAX_TOGETHER] for i in range(0, len(many), MAX_TOGETHER)]
        played = [_Steps(self._problem, self._tables, part).settle() for part in parts]
        periods, loads = (np.concatenate(arrays, axis=-1) for arrays in zip(*played, strict=True))
        return np.maximum(periods, loads.max(axis=0)), loads


class _Steps(PricingMachine):
    """Trainers that play step after step."""

    def settle(self) -> tuple[np.ndarray, np.ndarray]:
        """Play until every plan's step is steady; return their periods, and how long queues and DRAM are busy."""
        norms, periods = [self.main], np.full(len(self.main), np.nan)
        for count in range(1, MAX_STEPS + 1):
            self.busy, self.moved = {queue: np.zeros_like(self.main) for queue in QUEUES}, np.zeros_like(self.main)
            before, self.sum_ends, self.norm = self.sum_ends, np.zeros_like(self.main), self.main
            norms.append(self._play(pending=count > 1))
            if count > 2:
                period, last = norms[-1] - norms[-2], norms[-2] - norms[-3]
                change = np.maximum(np.abs(period - last), np.abs(self.sum_ends - before))
                periods = np.where(np.isnan(periods) & (change <= SETTLED * period), period, periods)
                if not np.isnan(periods).any():
                    break
        else:
            half = MAX_STEPS // 2
            mean = (norms[-1] - norms[half]) / (MAX_STEPS - half)
            periods = np.where(np.isnan(periods), mean, periods)
        return periods, self._list_bounds()

    def _list_bounds(self) -> np.ndarray:
        busy = dict(self.busy)
        bounds = [self.dram_ms * self.moved + self.has["dram_ms"].sum(axis=0)]
        if self.problem.device_is_host:
            bounds.append(sum(busy.pop(queue) for queue in (COMPUTE, H2D, D2H, CPU)))
        return np.stack([*busy.values(), *bounds])

    def _play(self, *, pending: bool) -> np.ndarray:
        """Play one step; return when its norm is known."""
        self.in_flight, self.start = InFlight(len(self.main)), self.main
        if pending:
            for u in np.flatnonzero(self.some["on_cpu"]).tolist():
                self.update_on_cpu(u)
        offloads = self._forward(pending)
        self._backward(offloads)
        return self.main

    def _forward(self, pending: bool) -> InFlight:
        has, some, offloads = self.has, self.some, InFlight(len(self.main))
        everywhere = np.ones_like(self.turn)
        self.launched[-1] = self.main
        for u in range(self.last + 1):
            self.loader = np.maximum(self.loader, self.launched.take(self.needs[u]))
            if not pending:
                ticket = self.bring(u, pending=False)
            elif self.early[u].all():
                ticket = self.tickets[u]
            else:
                brought = self.bring(u, pending=True, act=self.late[u])
                ticket = np.where(self.early[u], self.tickets[u], brought)
            self.main = np.maximum(self.main, self.loader)
            if pending and some["on_device"][u]:
                self.update_on_load(u, ticket)
            after = [ticket, self.main]
            if u:
                after.append(offloads.pop_if_full(everywhere))
            if u == 1:
                after.append(self.last_store)
            if u == self.last and pending:
                after.append(self.start + self.sweep_ms + self.dram_ms * (self.early_moved + self.moved))
            done = self.span(COMPUTE, None, has["forward"][u], *after)
            if u == self.last:
                self.deliver(u, done)
            if some["moves"][u]:
                self.offload(u, done, offloads)
            if some["streamed"][u]:
                self.slot_use[self.slots[u]] = np.where(has["streamed"][u], done, 0.0)
            self.launched[u] = self.main
        return offloads

    def _backward(self, offloads: InFlight) -> None:
        has, some = self.has, self.some
        self.launched[-1] = self.main
        waits = [offloads.latest()]
        for u in range(self.last - 1, 0, -1):
            self.loader = np.maximum(self.loader, self.launched.take(self.backward_needs[u]))
            after = [self.bring(u, pending=False), *waits]
            waits = []
            if some["moves"][u]:
                after.append(self.fetch(u))
            self.main = np.maximum(self.main, self.loader)
            after.append(self.main)
            if u == self.last - 1:
                after.append(np.where(has["to_host"][self.last], self.grads_out[self.last], 0.0))
            if some["to_host"][u]:
                after.append(self.in_flight.pop_if_full(has["to_host"][u]))
            done = self.span(COMPUTE, None, has["backward"][u], *after)
            self.launched[u] = self.main
            self.deliver(u, done)
            if some["streamed"][u]:
                self.slot_use[self.slots[u]] = np.where(has["streamed"][u], done, 0.0)
            if some["moves"][u]:
                self.fetch_use[self.turns[u]] = done
        done = self.span(COMPUTE, None, has["backward"][0], self.main)
        self.deliver(0, done)
        self.loader, before = self.main, self.moved.copy()
        for u in range(self.last + 1):
            if self.early[u].any():
                self.tickets[u] = self.bring(u, pending=True, act=self.early[u])
        self.early_moved = self.moved - before
        self.main = self.loader = np.maximum(np.maximum(self.main, self.loader), done) + sync_ms(self.problem)
