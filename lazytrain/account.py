"""Account for every millisecond of a step: what computed, and what the compute queue waited for.

    step = forward + backward + head + update on the device + exposed (h2d, d2h, CPU update, NVMe) + idle

A gap in the compute queue belongs to what ended it, followed back: compute started because another queue's span had
just ended; that span started because of the one that had ended before it, and so on to the start of the gap. Where
nothing had just ended, the queue was idle: the host had not launched anything, though other queues may have been busy.
The parts sum to the step by construction.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazytrain.lanes import COMPUTE, CPU, D2H, H2D, NVME_READ, NVME_WRITE
from lazytrain.solver.traces import AnySpan as AnySpan

WAITED_FOR = {NVME_READ: "nvme_ms", NVME_WRITE: "nvme_ms", CPU: "cpu_update_ms", H2D: "h2d_ms", D2H: "d2h_ms"}
# Longer after its end nothing is a span's consequence.
AT_ONCE_MS = 0.05
COMPUTED = {
    "forward": "forward_ms",
    "forward again": "backward_ms",
    "backward": "backward_ms",
    "head": "head_ms",
    "update": "device_update_ms",
}
COMPUTE_PARTS = ("forward", "backward", "head", "device_update", "other")
COMPUTE_BOUND = 0.9


class Work(NamedTuple):
    """A stretch of time on one queue."""

    start_ms: float
    end_ms: float


class Account(NamedTuple):
    """Where a step's time went, in ms; the fields but the first sum to the first.

    forward, backward, head, device_update, other: the compute queue was busy (other: embed and small work).
    h2d, d2h, cpu_update, nvme: it waited for that. idle: nothing was queued.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    head_ms: float
    device_update_ms: float
    other_ms: float
    h2d_ms: float
    d2h_ms: float
    cpu_update_ms: float
    nvme_ms: float
    idle_ms: float

    @property
    def compute_ms(self) -> float:
        """Return how long the compute queue was busy."""
        return sum(getattr(self, f"{name}_ms") for name in COMPUTE_PARTS)

    @property
    def exposed_ms(self) -> dict[str, float]:
        """Return what the compute queue waited for, by name."""
        names = {"h2d": self.h2d_ms, "d2h": self.d2h_ms, "cpu update": self.cpu_update_ms, "nvme": self.nvme_ms}
        return names | {"idle": self.idle_ms}

    @property
    def bound(self) -> str:
        """Return what bounds the step: compute, where that is most of it, or what it waited for longest."""
        if self.compute_ms >= COMPUTE_BOUND * self.step_ms:
            return "compute"
        return max(self.exposed_ms, key=lambda name: self.exposed_ms[name])

    def describe(self) -> str:
        """Return one line: what bounds this step, and every part above a thousandth of it."""
        computed = {name: getattr(self, f"{name}_ms") for name in COMPUTE_PARTS}
        parts = {name.replace("_", " "): ms for name, ms in computed.items()}
        parts |= {name if name == "idle" else f"exposed {name}": ms for name, ms in self.exposed_ms.items()}
        shares = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms > 1e-3 * self.step_ms)
        return f"bound by {self.bound}: {self.step_ms:.1f} ms = {shares}"


def account_step(step_ms: float, spans: Iterable[AnySpan]) -> Account:
    """Return the account of a step that lasts from 0 to `step_ms`, from the spans of all queues that reach into it."""
    start_ms, end_ms = 0.0, step_ms
    inside = [s for s in spans if s.end_ms > start_ms and s.start_ms < end_ms]
    times = dict.fromkeys(Account._fields, 0.0)
    times["step_ms"] = end_ms - start_ms
    busy, position = list[Work](), start_ms
    for span in sorted((s for s in inside if s.queue == COMPUTE), key=lambda s: s.start_ms):
        begin, end = max(span.start_ms, position), min(span.end_ms, end_ms)
        if end > begin:
            times[COMPUTED.get(span.name, "other_ms")] += end - begin
            busy.append(Work(begin, end))
            position = end
    others = sorted((s for s in inside if s.queue in WAITED_FOR), key=lambda s: s.end_ms)
    for gap in _gaps(busy, start_ms, end_ms):
        _blame(gap, others, times)
    return Account(**times)


def _blame(gap: Work, others: Sequence[AnySpan], times: dict[str, float]) -> None:
    """Follow a gap back from its end and add its parts to `times`.

    Args:
        others: the spans of all queues but compute, by their ends.
    """
    position = gap.end_ms
    while position > gap.start_ms:
        i = bisect_right(others, position, key=lambda span: span.end_ms) - 1
        while i >= 0 and others[i].start_ms >= position:  # of no length
            i -= 1
        if i < 0 or others[i].end_ms < position - AT_ONCE_MS:
            end = max(gap.start_ms, others[i].end_ms if i >= 0 else gap.start_ms)
            times["idle_ms"] += position - end
            position = end
            continue
        begin = max(gap.start_ms, others[i].start_ms)
        times[WAITED_FOR[others[i].queue]] += position - begin
        position = begin


def merge(works: Iterable[Work]) -> list[Work]:
    """Return the union of stretches as disjoint ones, in order."""
    merged: list[Work] = []
    for work in sorted(works):
        if merged and work.start_ms <= merged[-1].end_ms:
            merged[-1] = Work(merged[-1].start_ms, max(merged[-1].end_ms, work.end_ms))
        else:
            merged.append(work)
    return merged


def _gaps(busy: Sequence[Work], start_ms: float, end_ms: float) -> list[Work]:
    gaps, position = [], start_ms
    for work in busy:
        if work.start_ms > position:
            gaps.append(Work(position, work.start_ms))
        position = max(position, work.end_ms)
    if end_ms > position:
        gaps.append(Work(position, end_ms))
    return gaps
