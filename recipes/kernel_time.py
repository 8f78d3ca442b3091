"""The GPU's time in kernels: how busy a step keeps it, kernel by kernel, and the rate of a large matrix product."""

import time
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


def product_tflops(device: torch.device) -> float | None:
    """Return the rate of a large bf16 matrix product, the machine's own measure; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize(device)
    return 30 * 2 * 8192**3 / (time.perf_counter() - start_s) / 1e12
