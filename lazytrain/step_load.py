"""Load a machine as a step does, and measure all beside all: copies both ways, launches, updates on the CPU."""

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_ROUNDS, ROUND_S, MAX_S = 3, 0.6, 15.0
# What a round has at least, however slow a machine is.
MIN_UPDATES, MIN_BURSTS = 3, 4
BURST_BYTES = 64 << 20  # smaller copies are timed together
QUEUED_BURSTS = 2
# How much of the time the link copies to the device, and from it. In steps that updates on the CPU bound it was 0.3
# of both, in those that the link bounds 0.9 to 1 and 0.5 to 0.95; in a backward sweep it may be all of both.
LIGHT, HEAVY, FULL = (0.25, 0.25), (1.0, 0.7), (1.0, 1.0)
LEAST_LOSS = 0.02  # of updates beside heavy traffic; less is noise


class Rates(NamedTuple):
    """What a machine does at once.

    Attributes:
        h2d_gbs, d2h_gbs: of the link by direction, while it copies.
        update_ms: one update on the CPU, on average; 0.0 = none was made.
        update_gb: what both directions copied in that time, in 1e9 bytes.
    """

    h2d_gbs: float
    d2h_gbs: float
    update_ms: float
    update_gb: float


class LoadedRates(NamedTuple):
    """A machine's rates under the load of a step.

    Attributes:
        h2d_gbs, d2h_gbs: of the link beside updates on the CPU, when it has much to copy both ways.
        quiet_gbs: of the slower direction without updates, both directions busy.
        update_ms: one update on the CPU beside launches, without copies: what is left of that beside light traffic.
        dram_gbs: an update is a millisecond longer for each `dram_gbs` / 1e3 GB that is copied meanwhile.
    """

    h2d_gbs: float
    d2h_gbs: float
    quiet_gbs: float
    update_ms: float
    dram_gbs: float


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What runs at the same time.

    Attributes:
        host, back: pinned pieces of equal size to copy to the device in turn, and to copy into: together more than a
            processor's cache holds (300 MiB on the H200's host), from which copies are 10 to 20% faster.
        launch: some work of a block on the device; without any the clocks of a GPU fall, and its copies with them.
        update: one update on the CPU.
    """

    device: torch.device
    host: Sequence[Tensor]
    back: Sequence[Tensor]
    launch: Callable[[], object]
    update: Callable[[], object]

    def measure(self, seconds: float, shares: tuple[float, float], *, updates: bool) -> Rates:
        """Run it so long, and till there is something to measure; the device computes about half of the time.

        Args:
            shares: of the time in which each direction copies; it rests in between.
        """
        there, away = (torch.empty_like(pieces[0], device=self.device) for pieces in (self.host, self.back))
        lanes = [_Lane([(there, piece) for piece in self.host]), _Lane([(piece, away) for piece in self.back])]
        stopped, times_s = threading.Event(), list[float]()
        with ThreadPoolExecutor(len(lanes) + 1, thread_name_prefix="step load") as pool:
            running, start_s = list[Future[None]](), time.perf_counter()
            try:
                for lane, share in zip(lanes, shares, strict=True):
                    running.append(pool.submit(lane.copy_on, self.device, stopped, share))
                if updates:
                    running.append(pool.submit(self._update_on, stopped, times_s))
                while (
                    time.perf_counter() - start_s < seconds
                    or min(lane.num_bursts for lane in lanes) < MIN_BURSTS
                    or (updates and len(times_s) < MIN_UPDATES)
                ) and not any(future.done() for future in running):
                    self._launch_and_rest(stopped)
                beside = times_s[:]  # what ends later runs beside less
            finally:
                stopped.set()
            for future in running:
                future.result()
        update_s = statistics.mean(beside) if updates else 0.0
        return Rates(lanes[0].gbs, lanes[1].gbs, update_s * 1e3, sum(lane.mean_gbs for lane in lanes) * update_s)

    def measure_loaded(self) -> LoadedRates:
        """Measure without updates, and with them beside light and heavy traffic: in turns, as a machine has moods."""
        kinds, rounds, start_s = ((FULL, False), (LIGHT, True), (HEAVY, True)), list[list[Rates]](), time.perf_counter()
        # The first round touches all memory. A slow machine's rounds are long, and fewer of them will do.
        while len(rounds) < 2 or (len(rounds) < 1 + NUM_ROUNDS and time.perf_counter() - start_s < MAX_S):
            rounds.append([self.measure(ROUND_S, shares, updates=updates) for shares, updates in kinds])
        quiet, light, heavy = (_mean(rates) for rates in zip(*rounds[1:], strict=True))
        loss_ms = max(heavy.update_ms - light.update_ms, LEAST_LOSS * light.update_ms)
        more_gb = heavy.update_gb - light.update_gb
        if more_gb < heavy.update_gb / 4:  # a link so slow that updates do not tell one traffic from the other
            loss_ms, more_gb = LEAST_LOSS * light.update_ms, heavy.update_gb
        return LoadedRates(
            h2d_gbs=heavy.h2d_gbs,
            d2h_gbs=heavy.d2h_gbs,
            quiet_gbs=max(heavy.h2d_gbs, min(quiet.h2d_gbs, quiet.d2h_gbs)),
            update_ms=max(light.update_ms / 2, light.update_ms - loss_ms * light.update_gb / more_gb),
            dram_gbs=more_gb / loss_ms * 1e3,
        )

    def _launch_and_rest(self, stopped: threading.Event) -> None:
        begin_s, end = time.perf_counter(), torch.cuda.Event(blocking=True)
        self.launch()
        end.record()
        end.synchronize()
        stopped.wait(max(1e-3, time.perf_counter() - begin_s))

    def _update_on(self, stopped: threading.Event, times_s: list[float]) -> None:
        while not stopped.is_set():
            start_s = time.perf_counter()
            self.update()
            times_s.append(time.perf_counter() - start_s)


def _mean(rates: Sequence[Rates]) -> Rates:
    return Rates(*(statistics.mean(values) for values in zip(*rates, strict=True)))


class _Lane:
    """Copies of one direction.

    Attributes:
        num_bursts: how many have ended.
        gbs: the rate while it copies; mean_gbs: its rests included.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        piece_bytes = pairs[0][0].numel() * pairs[0][0].element_size()
        self._turns, self._num_copies = itertools.cycle(pairs), max(1, BURST_BYTES // piece_bytes)
        self._burst_gb = self._num_copies * piece_bytes / 1e9
        self._queued: deque[tuple[Any, Any]] = deque()
        self._busy_ms, self._seconds, self.num_bursts = 0.0, 0.0, 0

    @property
    def gbs(self) -> float:
        return self.num_bursts * self._burst_gb / self._busy_ms * 1e3

    @property
    def mean_gbs(self) -> float:
        return self.num_bursts * self._burst_gb / self._seconds

    def copy_on(self, device: torch.device, stopped: threading.Event, share: float) -> None:
        """Copy until told to stop, and count what is queued then as well."""
        start_s = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            while not stopped.is_set():
                self._copy()
                if share < 1.0:
                    stopped.wait(self._finish() / 1e3 * (1 / share - 1))
                elif len(self._queued) > QUEUED_BURSTS:
                    self._finish()
            while self._queued:
                self._finish()
        self._seconds = time.perf_counter() - start_s

    def _copy(self) -> None:
        # Whoever waits for it sleeps: a thread that looks again and again would take a core from the updates.
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        start.record()
        for target, source in itertools.islice(self._turns, self._num_copies):
            target.copy_(source, non_blocking=True)
        end.record()
        self._queued.append((start, end))

    def _finish(self) -> float:
        """Wait for the oldest burst; return how long it took, in ms."""
        start, end = self._queued.popleft()
        end.synchronize()
        took_ms: float = start.elapsed_time(end)
        self._busy_ms += took_ms
        self.num_bursts += 1
        return took_ms
