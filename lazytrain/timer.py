"""Time a piece of work, and what it takes of the device's memory, under the load of a run."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_ROUNDS, MAX_REPEATS = 3, 100
# A GPU's clocks fall for seconds once it computes without a pause, and rise again within tenths of one that does.
WARM_UP_FLOORS, SETTLE_FLOORS = 10, 1.5


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Times callables on one device.

    Attributes:
        floor_s: repeat until this much time is filled, so that clocks and caches are those of a run.
    """

    device: torch.device
    floor_s: float

    def median_ms(self, work: Callable[[], Any]) -> float:
        """Return the time of one call: the median over rounds of calls one behind the other, as a run makes them.

        A GPU is kept busy with the same work before that, so that its clocks are those of a run.
        """
        return self.medians_ms([work])[0]

    def medians_ms(self, works: Sequence[Callable[[], Any]]) -> list[float]:
        """Return the time of one call of each, as `median_ms` does; they take turns, so that no clock favours one."""
        counts = []
        for work in works:
            work()
            self._wait()
            once_s = max(1e-6, self._round_s(work, 1))
            counts.append(max(1, min(MAX_REPEATS, round(self.floor_s / once_s / NUM_ROUNDS))))
        turns = list(zip(works, counts, strict=True))
        self._keep_busy(turns, SETTLE_FLOORS * self.floor_s)
        rounds = [[self._round_s(work, calls) / calls for work, calls in turns] for _ in range(NUM_ROUNDS)]
        return [statistics.median(times) * 1e3 for times in zip(*rounds, strict=True)]

    def _round_s(self, work: Callable[[], Any], calls: int) -> float:
        start_s = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return time.perf_counter() - start_s

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Keep a GPU busy until its clocks are those of a long run; a CPU's do not depend on it."""
        self._keep_busy([(work, 10)], WARM_UP_FLOORS * self.floor_s)

    def _keep_busy(self, turns: Sequence[tuple[Callable[[], Any], int]], seconds: float) -> None:
        if self.device.type != "cuda":
            return
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            for work, calls in turns:
                self._round_s(work, calls)

    def extra_bytes(self, work: Callable[[], Any]) -> int | None:
        """Return how far one call raises the device's peak above its start; None where nobody counts (CPU)."""
        if self.device.type != "cuda":
            return None
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = work()
        self._wait()
        del kept
        return torch.cuda.max_memory_allocated(self.device) - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
