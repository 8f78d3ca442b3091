"""Price many plans at once: the simulator's steps, each span for all plans together, in vectors.

`simulator.py` stays the referee; this says the same (tests hold it to rounding) many times faster, since a search asks
for hundreds of plans that differ in a block or two. The methods mirror `simulator._Step` one by one, those of
`machines.py` the machine's; what a plan does without is masked. All times are ms; a column is a plan.
"""

from collections.abc import Sequence

import numpy as np

from lazytrain.solver.machine import COMPUTE, D2H, H2D, QUEUES
from lazytrain.solver.machines import Machines
from lazytrain.solver.plan import CPU
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


class _Steps(Machines):
    """Trainers that play step after step."""

    def settle(self) -> tuple[np.ndarray, np.ndarray]:
        """Play until every plan's step is steady; return their periods, and how long queues and DRAM are busy."""
        norms, periods = [self._main], np.full(len(self._main), np.nan)
        for count in range(1, MAX_STEPS + 1):
            self._busy, self._moved = {queue: np.zeros_like(self._main) for queue in QUEUES}, np.zeros_like(self._main)
            before, self._sum_ends, self._norm = self._sum_ends, np.zeros_like(self._main), self._main
            norms.append(self._play(pending=count > 1))
            if count > 2:
                period, last = norms[-1] - norms[-2], norms[-2] - norms[-3]
                change = np.maximum(np.abs(period - last), np.abs(self._sum_ends - before))
                periods = np.where(np.isnan(periods) & (change <= SETTLED * period), period, periods)
                if not np.isnan(periods).any():
                    break
        else:
            half = MAX_STEPS // 2
            mean = (norms[-1] - norms[half]) / (MAX_STEPS - half)
            periods = np.where(np.isnan(periods), mean, periods)
        return periods, self._list_bounds()

    def _list_bounds(self) -> np.ndarray:
        busy = dict(self._busy)
        bounds = [self._dram_ms * self._moved + self._has["dram_ms"].sum(axis=0)]
        if self._problem.device_is_host:
            bounds.append(sum(busy.pop(queue) for queue in (COMPUTE, H2D, D2H, CPU)))
        return np.stack([*busy.values(), *bounds])

    def _play(self, *, pending: bool) -> np.ndarray:
        """Play one step; return when its norm is known."""
        self._in_flight, self._start = InFlight(len(self._main)), self._main
        if pending:
            for u in np.flatnonzero(self._some["on_cpu"]).tolist():
                self._update_on_cpu(u)
        offloads = self._forward(pending)
        self._backward(offloads)
        return self._main

    def _forward(self, pending: bool) -> InFlight:
        has, some, offloads = self._has, self._some, InFlight(len(self._main))
        everywhere = np.ones_like(self._turn)
        self._launched[-1] = self._main
        for u in range(self._last + 1):
            self._loader = np.maximum(self._loader, self._launched.take(self._needs[u]))
            if not pending:
                ticket = self._bring(u, pending=False)
            elif self._early[u].all():
                ticket = self._tickets[u]
            else:
                brought = self._bring(u, pending=True, act=self._late[u])
                ticket = np.where(self._early[u], self._tickets[u], brought)
            self._main = np.maximum(self._main, self._loader)
            if pending and some["on_device"][u]:
                self._update_on_load(u, ticket)
            after = [ticket, self._main]
            if u:
                after.append(offloads.pop_if_full(everywhere))
            if u == 1:
                after.append(self._last_store)
            if u == self._last and pending:
                after.append(self._start + self._sweep_ms + self._dram_ms * (self._early_moved + self._moved))
            done = self._span(COMPUTE, None, has["forward"][u], *after)
            if u == self._last:
                self._deliver(u, done)
            if some["moves"][u]:
                self._offload(u, done, offloads)
            if some["streamed"][u]:
                self._slot_use[self._slots[u]] = np.where(has["streamed"][u], done, 0.0)
            self._launched[u] = self._main
        return offloads

    def _backward(self, offloads: InFlight) -> None:
        has, some = self._has, self._some
        self._launched[-1] = self._main
        waits = [offloads.latest()]
        for u in range(self._last - 1, 0, -1):
            self._loader = np.maximum(self._loader, self._launched.take(self._backward_needs[u]))
            after = [self._bring(u, pending=False), *waits]
            waits = []
            if some["moves"][u]:
                after.append(self._fetch(u))
            self._main = np.maximum(self._main, self._loader)
            after.append(self._main)
            if u == self._last - 1:
                after.append(np.where(has["to_host"][self._last], self._grads_out[self._last], 0.0))
            if some["to_host"][u]:
                after.append(self._in_flight.pop_if_full(has["to_host"][u]))
            done = self._span(COMPUTE, None, has["backward"][u], *after)
            self._launched[u] = self._main
            self._deliver(u, done)
            if some["streamed"][u]:
                self._slot_use[self._slots[u]] = np.where(has["streamed"][u], done, 0.0)
            if some["moves"][u]:
                self._fetch_use[self._turns[u]] = done
        done = self._span(COMPUTE, None, has["backward"][0], self._main)
        self._deliver(0, done)
        self._loader, before = self._main, self._moved.copy()
        for u in range(self._last + 1):
            if self._early[u].any():
                self._tickets[u] = self._bring(u, pending=True, act=self._early[u])
        self._early_moved = self._moved - before
        self._main = self._loader = np.maximum(np.maximum(self._main, self._loader), done) + sync_ms(self._problem)
