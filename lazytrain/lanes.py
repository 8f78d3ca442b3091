"""Queues of work: the compute stream, the two copy streams, and worker threads; what they moved and when.

On CUDA a queue is a stream, and a ticket is an event recorded on it. On the CPU the same calls run at once, in the
caller's order, so that one code path serves both. `Lanes.bytes_moved` counts every copy, and every span of a step is
recorded (`begin_step` to `end_step`), for the timeline and the account of where the time went (`read_step`).
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"
CPU, NVME_READ, NVME_WRITE = "cpu", "nvme_read", "nvme_write"
QUEUE_NAMES = (COMPUTE, H2D, D2H, CPU, NVME_READ, NVME_WRITE)


class Span(NamedTuple):
    """A measured piece of work; times in ms from the start of the trace."""

    name: str
    unit: str
    queue: str
    start_ms: float
    end_ms: float


class Ticket:
    """A point in a queue that other queues, or the host, can wait for."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event: Any = None

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point is done."""
        if self.event is not None:
            self.event.synchronize()


class Lanes:
    """The queues of one trainer (see the head of this file)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.bytes_moved: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._streams: dict[str, Any] = {}
        if self.is_cuda:
            self._streams = {
                COMPUTE: torch.cuda.current_stream(device),
                H2D: torch.cuda.Stream(device),
                D2H: torch.cuda.Stream(device),
            }
        self._spans: list[_RawSpan] = []
        self._earlier: list[_RawSpan] = []  # of the last whole step
        self._oldest: list[_RawSpan] = []  # of the step before it, which may reach into it
        self._begin = self._end = self._meeting = self._mark()  # meeting: when the host last saw a moment as it came
        self._is_recording = True

    @contextmanager
    def span(self, queue: str, name: str, unit: str, after: Iterable[Ticket | None] = ()) -> Iterator[Ticket]:
        """Run the body on `queue` once the tickets in `after` are due; the ticket it yields is due when it ends."""
        ticket = Ticket()
        stream = self._streams.get(queue)
        if stream is None:
            start_s = time.perf_counter()
            yield ticket
            self._note(queue, name, unit, start_s, time.perf_counter())
            return
        for other in after:
            if other is not None and other.event is not None:
                stream.wait_event(other.event)
        start = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record(stream)
            yield ticket
            ticket.event = torch.cuda.Event(enable_timing=True)
            ticket.event.record(stream)
        self._note(queue, name, unit, start, ticket.event)

    def make_copy_buffers(self, count: int, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], Ticket]:
        """Return device buffers for a copy queue to write to, and the ticket that the first copies must wait for.

        The allocator hands out memory that queued compute may still use: its own stream is in order, a copy stream is
        not.
        """
        with self.span(COMPUTE, "reserve", "copy buffers") as ticket:
            buffers = [torch.empty(numel, dtype=dtype, device=self.device) for _ in range(count)]
        return buffers, ticket

    def copy_into(self, target: Tensor, source: Tensor, queue: str) -> None:
        """Copy `source` into `target` (same shape and dtype) without waiting; call it inside a span of `queue`."""
        target.copy_(source, non_blocking=True)
        self.count(queue, source.numel() * source.element_size())

    def start_reading(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Queue the copy of a few numbers to the host; the function returned waits for them, not for what follows.

        What it waits for is a moment on both clocks, the host's and the device's; a step's end is none, as the device
        comes to it later.
        """
        if not self.is_cuda:
            return numbers.tolist
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event(enable_timing=True)
        arrived.record(self._streams[COMPUTE])

        def read() -> list[float]:
            is_late = arrived.query()
            arrived.synchronize()
            if not is_late:
                self._meeting = _Mark(arrived, time.perf_counter())
            return on_host.tolist()

        return read

    def count(self, queue: str, num_bytes: int) -> None:
        """Add to what `queue` has moved; threads may count at once."""
        with self._counting:
            self.bytes_moved[queue] += num_bytes

    def begin_step(self) -> None:
        """Forget what was recorded and record again: the step begins now, not where the last one ended."""
        self._is_recording = True
        self._spans, self._earlier, self._oldest = [], [], []
        self._begin = self._end = self._mark()

    def pause(self) -> None:
        """Record nothing until the next step begins: evaluation between steps may take millions of spans."""
        self._is_recording = False

    def end_step(self) -> None:
        """Note that a step ends here, on the compute queue and on the host: the next one begins."""
        self._oldest, self._earlier, self._spans = self._earlier, self._spans, []
        self._begin, self._end = self._end, self._mark()

    def read_step(self) -> tuple[float, tuple[Span, ...]]:
        """Return the last whole step's time in ms, and its spans, in ms from its begin, in order of their start.

        Call it once the device has passed `end_step`. A span that goes on beyond now ends now.
        """
        step_ms = self._ms(self._end)
        spans = [
            Span(name, unit, queue, self._ms(a), self._ms(b))
            for queue, name, unit, a, b in (*self._oldest, *self._earlier)
        ]
        inside = [s for s in spans if s.start_ms < step_ms and s.end_ms > 0]
        return step_ms, tuple(sorted(inside, key=lambda s: s.start_ms))

    def _note(self, queue: str, name: str, unit: str, start: Any, end: Any) -> None:
        if self._is_recording:
            self._spans.append((queue, name, unit, start, end))

    def _mark(self) -> "_Mark":
        event = None
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._streams[COMPUTE])
        return _Mark(event, time.perf_counter())

    def _ms(self, moment: Any) -> float:
        """Return a moment (host time, event or mark) in ms from the begin of the step that ended last."""
        if isinstance(moment, _Mark):
            moment = moment.host_s if moment.event is None else moment.event
        if isinstance(moment, float):
            if self._begin.event is None:
                return (moment - self._begin.host_s) * 1e3
            return self._begin.event.elapsed_time(self._meeting.event) + (moment - self._meeting.host_s) * 1e3
        return self._begin.event.elapsed_time(moment) if moment.query() else math.inf


class _Mark(NamedTuple):
    """One moment on the compute queue (None on the CPU) and on the host."""

    event: Any
    host_s: float


_RawSpan = tuple[str, str, str, Any, Any]


class Worker:
    """One thread that runs jobs in order; or, where a thread would only cost, the caller's own."""

    def __init__(self, name: str, *, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name) if threaded else None

    def submit(self, job: Any, *args: Any) -> "Future[Any]":
        """Queue `job(*args)` and return its future."""
        if self._pool is not None:
            return self._pool.submit(job, *args)
        future: Future[Any] = Future()
        future.set_result(job(*args))
        return future

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
