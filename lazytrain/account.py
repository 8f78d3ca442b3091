"""Account for every millisecond of a step: what computed, and what the compute queue waited for.

    step = forward + backward + head + update on the device + exposed (h2d, d2h, CPU update, NVMe) + idle

A gap in the compute queue belongs, moment by moment, to the first of these that was busy then: NVMe reads, the CPU's
update, copies to the device, NVMe writes, copies from it. Where none was, the queue was idle: the host had not launched
anything. The parts sum to the step by construction.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazytrain.lanes import COMPUTE, CPU, D2H, H2D, NVME_READ, NVME_WRITE
from lazytrain.solver.traces import AnySpan as AnySpan

# Who is to blame for a gap, in this order.
BLAMED = ((NVME_READ, "nvme_ms"), (CPU, "cpu_update_ms"), (H2D, "h2d_ms"), (NVME_WRITE, "nvme_ms"), (D2H, "d2h_ms"))
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
    gaps = _gaps(busy, start_ms, end_ms)
    for queue, field in BLAMED:
        blamed = merge(Work(s.start_ms, s.end_ms) for s in inside if s.queue == queue)
        rest: list[Work] = []
        for gap in gaps:
            position = gap.start_ms
            for work in blamed:
                begin, end = max(work.start_ms, position), min(work.end_ms, gap.end_ms)
                if end > begin:
                    times[field] += end - begin
                    if begin > position:
                        rest.append(Work(position, begin))
                    position = end
            if gap.end_ms > position:
                rest.append(Work(position, gap.end_ms))
        gaps = rest
    times["idle_ms"] = sum(gap.end_ms - gap.start_ms for gap in gaps)
    return Account(**times)


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
