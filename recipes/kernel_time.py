"""How busy the GPU's compute units are in a step, kernel by kernel, as the profiler sees them."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from lazytrain.account import Work, merge


class KernelTime(NamedTuple):
    """Of the profiled work: the time from the first kernel to the end of the last, in which some kernel ran, in ms;
    and the time of each kernel by name, the longest first. Copies are no kernels."""

    span_ms: float
    busy_ms: float
    by_name: tuple[tuple[str, float], ...]

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which a kernel ran."""
        return self.busy_ms / self.span_ms if self.span_ms else 0.0


def profile_kernels(work: Callable[[], object]) -> KernelTime:
    """Run `work` once under the profiler."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    kernels, times = list[Work](), defaultdict[str, float](float)
    for event in profiler.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(("Mem", "Activity")):
            continue
        work_ms = Work(event.time_range.start / 1e3, event.time_range.end / 1e3)
        kernels.append(work_ms)
        times[event.name] += work_ms.end_ms - work_ms.start_ms
    busy = merge(kernels)
    if not busy:
        return KernelTime(0.0, 0.0, ())
    longest_first = sorted(times.items(), key=lambda item: -item[1])
    return KernelTime(
        busy[-1].end_ms - busy[0].start_ms, sum(w.end_ms - w.start_ms for w in busy), tuple(longest_first)
    )
