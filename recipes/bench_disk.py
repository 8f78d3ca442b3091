"""What the disk allows a step: its rates, and the bound that they and the other resources give.

A step can't be shorter than any of its resources is busy. NVMe's part is what the step moved, at the rates that the
disk had just before: read alone, written alone and both at once (`store_bench.measure_streams`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lazytrain.account import Work, merge
from lazytrain.lanes import NVME_READ, NVME_WRITE, Span
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import Simulation
from lazytrain.store_bench import StreamRates, measure_streams
from lazytrain.store_io import Manner

TEST_BYTES = 1 << 30
NVME = "NVMe"


class Disk(NamedTuple):
    """A disk as it was measured before the steps."""

    manner: Manner
    rates: StreamRates

    def describe(self) -> str:
        """Return one line with all rates."""
        read, write, both_read, both_write = (rate / 1e9 for rate in self.rates)
        return (
            f"disk ({self.manner}): read {read:.2f} GB/s, written {write:.2f} GB/s; "
            f"both at once {both_read:.2f} and {both_write:.2f} GB/s"
        )


class DiskUse(NamedTuple):
    """What a step did on NVMe, measured beside predicted, and what bounds it.

    Attributes:
        read_bytes, write_bytes: a step, the mean of those measured. read_ms, write_ms: how long of the last step the
            disk was read and written.
        bounds_ms: resource -> the least time of a step; `alone_ms`: NVMe's, if reads and writes didn't slow each other.
        share: the largest bound over the step's time, 1 = no step can be faster.
    """

    read_bytes: float
    write_bytes: float
    predicted_read_bytes: int
    predicted_write_bytes: int
    read_ms: float
    write_ms: float
    bounds_ms: Mapping[str, float]
    alone_ms: float
    share: float

    def describe(self) -> list[str]:
        """Return two lines."""
        gb = [n / 1e9 for n in self[:4]]
        pairs = (self.read_bytes, self.read_ms), (self.write_bytes, self.write_ms)
        busy = " and ".join(f"{ms:.0f} ms ({n / ms / 1e6 if ms else 0:.2f} GB/s)" for n, ms in pairs)
        bounds = sorted(self.bounds_ms.items(), key=lambda item: -item[1])
        return [
            f"  NVMe: {gb[0]:.2f} GB read, {gb[1]:.2f} GB written a step (predicted {gb[2]:.2f}, {gb[3]:.2f}), "
            f"busy for {busy} of the last",
            f"  bounds, ms: {', '.join(f'{name} {ms:.1f}' for name, ms in bounds)} "
            f"(NVMe {self.alone_ms:.1f} by the rates of one way at a time); "
            f"speed {self.share:.2f} of the bound by {bounds[0][0]}",
        ]


def measure_disk(directory: Path, num_bytes: int = TEST_BYTES) -> Disk:
    """Measure a disk in the manner that a run with much on NVMe chooses; takes room for two files for the while."""
    return Disk(*measure_streams(directory, num_bytes))


def with_disk(problem: Problem, disk: Disk, nvme_bytes: int) -> Problem:
    """Return the problem with NVMe allowed, at the rates that the disk has with the other direction busy."""
    hardware = replace(
        problem.hardware,
        nvme_bytes=nvme_bytes,
        nvme_read_gbs=disk.rates.both_read_bytes_s / 1e9,
        nvme_write_gbs=disk.rates.both_write_bytes_s / 1e9,
    )
    return replace(problem, allow_nvme=True, hardware=hardware)


def bound_step(
    disk: Disk, simulation: Simulation, *, step_ms: float, moved: Mapping[str, float], spans: Sequence[Span]
) -> DiskUse:
    """Return what the disk did in a step of `step_ms`, and how near that is to the bound.

    Args:
        simulation: of the plan, which says how long the other resources are busy.
        moved: queue -> bytes a step.
        spans: of the last step, in ms from its begin.
    """
    read_bytes, write_bytes = moved.get(NVME_READ, 0.0), moved.get(NVME_WRITE, 0.0)
    bounds = {name: ms for name, ms in simulation.busy_ms.items() if ms and name not in (NVME_READ, NVME_WRITE)}
    bounds[NVME] = disk.rates.bound_s(read_bytes, write_bytes) * 1e3
    return DiskUse(
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        predicted_read_bytes=simulation.moved_bytes[NVME_READ],
        predicted_write_bytes=simulation.moved_bytes[NVME_WRITE],
        read_ms=_busy_ms(spans, NVME_READ, step_ms),
        write_ms=_busy_ms(spans, NVME_WRITE, step_ms),
        bounds_ms=bounds,
        alone_ms=disk.rates.alone_s(read_bytes, write_bytes) * 1e3,
        share=max(bounds.values()) / step_ms,
    )


def _busy_ms(spans: Sequence[Span], queue: str, step_ms: float) -> float:
    works = merge(Work(max(0.0, s.start_ms), min(step_ms, s.end_ms)) for s in spans if s.queue == queue)
    return sum(max(0.0, work.end_ms - work.start_ms) for work in works)
