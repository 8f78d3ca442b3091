"""Measure a machine's links: host and device, memory, NVMe; in the mix in which a step uses them."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lazytrain.slabs import allocate_slab
from lazytrain.solver.problem import Hardware
from lazytrain.store_bench import CANDIDATES, make_test_file, measure_rates

MIN_COPY_BYTES, MAX_COPY_BYTES = 4 << 20, 512 << 20
NVME_TEST_BYTES = 256 << 20
MIX_S, MIX_ALONE = 1.0, 5


class MedianTimer(Protocol):
    """What `lazytrain.timer.Timer` offers."""

    def median_ms(self, work: Callable[[], Any]) -> float:
        """Return the median time of one call."""


def measure_machine(
    device: torch.device,
    block_bytes: int,
    limits: Mapping[str, int],
    *,
    update_gparams_s: tuple[float, float],
    cpu_update: Callable[[], None],
    cpu_update_bytes: int,
    spill_dir: Path | None,
    timer: MedianTimer,
) -> Hardware:
    """Return the machine's measured rates.

    Copies are of a block's size with both directions of the link busy, and beside the CPU's update, which shares the
    host's memory with them.

    Args:
        block_bytes: the size of the copies that matter.
        limits: bytes a plan may fill per tier: "device", "host", "nvme".
        update_gparams_s: the update's measured rates on the CPU and on the device, 1e9 parameters per second.
        cpu_update, cpu_update_bytes: one update of a unit on the CPU, and what it reads and writes.
        spill_dir: where to measure NVMe; None = not measured, and none allowed.
    """
    size = min(MAX_COPY_BYTES, max(MIN_COPY_BYTES, block_bytes))
    host = allocate_slab(size, pin=device.type == "cuda", name="link test")
    other = allocate_slab(size, pin=device.type == "cuda", name="link test back")
    memcpy_gbs = size / timer.median_ms(lambda: other.copy_(host)) / 1e6
    quiet_gbs = h2d_gbs = d2h_gbs = memcpy_gbs
    host_memory_gbs, slowdown = 2 * memcpy_gbs, 1.0
    if device.type == "cuda":
        both = _copy_both_ways(device, host, other)
        quiet_gbs = size / timer.median_ms(both) / 1e6
        h2d_gbs, host_memory_gbs, slowdown = _measure_mix(device, both, size, cpu_update, cpu_update_bytes)
        d2h_gbs = h2d_gbs = min(h2d_gbs, quiet_gbs)
    tiny = torch.empty(256, dtype=torch.uint8, device=device)
    read_gbs, write_gbs = _measure_nvme(spill_dir) if spill_dir is not None else (1.0, 1.0)
    return Hardware(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        device_memory_bytes=limits["device"],
        host_memory_bytes=limits["host"],
        nvme_bytes=limits.get("nvme", 0),
        h2d_gbs=h2d_gbs,
        d2h_gbs=d2h_gbs,
        nvme_read_gbs=read_gbs,
        nvme_write_gbs=write_gbs,
        host_memory_gbs=host_memory_gbs,
        copy_latency_ms=timer.median_ms(lambda: tiny.copy_(host[:256], non_blocking=True)),
        matmul_tflops=_matmul_tflops(device, timer),
        device_memory_gbs=2 * memcpy_gbs if device.type == "cpu" else _device_memory_gbs(device, timer),
        cpu_update_gparams_s=update_gparams_s[0] / slowdown,
        device_update_gparams_s=update_gparams_s[1],
        is_estimate=False,
        quiet_link_gbs=quiet_gbs if device.type == "cuda" else 0.0,
    )


def _copy_both_ways(device: torch.device, host: Tensor, back: Tensor) -> Callable[[], None]:
    """Return a function that queues a copy in each direction, side by side."""
    target = torch.empty_like(host, device=device)
    source = torch.empty_like(back, device=device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        with torch.cuda.stream(inward):
            target.copy_(host, non_blocking=True)
        with torch.cuda.stream(outward):
            back.copy_(source, non_blocking=True)

    return both


def _measure_mix(
    device: torch.device, copies: Callable[[], None], copied_bytes: int, update: Callable[[], None], update_bytes: int
) -> tuple[float, float, float]:
    """Measure copies both ways and the CPU's update at once.

    Returns:
        The link's GB/s each way, what the host's memory moves, and how many times longer an update takes than alone.
    """
    update()
    start_s = time.perf_counter()
    for _ in range(MIX_ALONE):
        update()
    alone_s = (time.perf_counter() - start_s) / MIX_ALONE
    stopped, rounds = threading.Event(), 0

    def copy_on() -> None:
        nonlocal rounds
        while not stopped.is_set():
            for _ in range(2):
                copies()
            torch.cuda.synchronize(device)
            rounds += 2

    thread = threading.Thread(target=copy_on, name="link load")
    start_s, updates = time.perf_counter(), 0
    thread.start()
    while time.perf_counter() - start_s < MIX_S:
        update()
        updates += 1
    stopped.set()
    thread.join()
    elapsed_s = time.perf_counter() - start_s
    link_gbs = rounds * copied_bytes / elapsed_s / 1e9
    memory_gbs = 2 * link_gbs + updates * update_bytes / elapsed_s / 1e9
    return link_gbs, memory_gbs, max(1.0, elapsed_s / updates / alone_s)


def _device_memory_gbs(device: torch.device, timer: MedianTimer) -> float:
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer.median_ms(lambda: target.copy_(source)) / 1e6


def _matmul_tflops(device: torch.device, timer: MedianTimer) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timer.median_ms(lambda: a @ b) / 1e9


def _measure_nvme(spill_dir: Path) -> tuple[float, float]:
    """Return read and write GB/s in the fastest manner, which is the one that a run with much on NVMe chooses."""
    spill_dir.mkdir(parents=True, exist_ok=True)
    path = make_test_file(spill_dir, NVME_TEST_BYTES)
    try:
        rates = min(measure_rates(path, NVME_TEST_BYTES, CANDIDATES), key=lambda r: r.round_trip_s)
    finally:
        path.unlink(missing_ok=True)
    return rates.read_bytes_s / 1e9, rates.write_bytes_s / 1e9
