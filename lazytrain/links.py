"""Measure a machine's links: host and device, memory, NVMe; in the mix in which a step uses them."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lazytrain.slabs import allocate_slab, is_slab_pinned
from lazytrain.solver.problem import Hardware
from lazytrain.store_bench import CANDIDATES, make_test_file, measure_rates

MIN_COPY_BYTES, MAX_COPY_BYTES = 4 << 20, 512 << 20
# Of each direction's host memory: copies of the same bytes again come from a processor's cache (300 MiB on the H200's
# host), which a step's never do: updates beside them were 19% faster, and copies to the device 10 to 20%.
ROTATED_BYTES = 8 << 30
NVME_TEST_BYTES = 256 << 20
MIX_S, MIX_ALONE = 1.0, 5
# How much of the time each direction of the link is busy beside the CPU's update: in steps on an H200 it was 0.3 to 1.
LINK_SHARE = 0.5
LEAST_LOSS = 0.02  # of updates beside copies; less is noise of the clock


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
    spill_dir: Path | None,
    timer: MedianTimer,
) -> Hardware:
    """Return the machine's measured rates.

    Copies are of a block's size, of ever new bytes, in both directions of the link and beside the CPU's update, which
    shares the host's memory with them: each direction is busy half of the time, as in a step. What they take of that
    memory is measured with both busy all the time: by how much updates are slower then.

    Args:
        block_bytes: the size of the copies that matter.
        limits: bytes a plan may fill per tier: "device", "host", "nvme".
        update_gparams_s: the update's measured rates on the CPU and on the device, 1e9 parameters per second.
        cpu_update: one update of a unit on the CPU.
        spill_dir: where to measure NVMe; None = not measured, and none allowed.
    """
    size = min(MAX_COPY_BYTES, max(MIN_COPY_BYTES, block_bytes))
    rotated = max(size, min(ROTATED_BYTES, limits["host"] // 16)) if device.type == "cuda" else size
    host, back = (_allocate_pieces(rotated, size, device, name) for name in ("link test", "link test back"))
    memcpy_gbs = size / timer.median_ms(lambda: back[0].copy_(host[0])) / 1e6
    quiet_gbs, dram_gbs, mix = 0.0, 2 * memcpy_gbs, Rates(memcpy_gbs, memcpy_gbs, 0.0)
    if device.type == "cuda":
        quiet = _measure_mix(device, host, back, None)
        alone_s = _time_alone_s(cpu_update)
        full = _measure_mix(device, host, back, cpu_update)
        mix = _measure_mix(device, host, back, cpu_update, share=LINK_SHARE)
        quiet_gbs = max(mix.h2d_gbs, min(quiet.h2d_gbs, quiet.d2h_gbs))
        dram_gbs = (full.h2d_gbs + full.d2h_gbs) / max(LEAST_LOSS, 1 - full.updates_s * alone_s)
    tiny = torch.empty(256, dtype=torch.uint8, device=device)
    read_gbs, write_gbs = _measure_nvme(spill_dir) if spill_dir is not None else (1.0, 1.0)
    return Hardware(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        device_memory_bytes=limits["device"],
        host_memory_bytes=limits["host"],
        nvme_bytes=limits.get("nvme", 0),
        h2d_gbs=mix.h2d_gbs,
        d2h_gbs=mix.d2h_gbs,
        nvme_read_gbs=read_gbs,
        nvme_write_gbs=write_gbs,
        dram_gbs=dram_gbs,
        copy_latency_ms=timer.median_ms(lambda: tiny.copy_(host[0][:256], non_blocking=True)),
        matmul_tflops=_matmul_tflops(device, timer),
        device_memory_gbs=2 * memcpy_gbs if device.type == "cpu" else _device_memory_gbs(device, timer),
        cpu_update_gparams_s=update_gparams_s[0],
        device_update_gparams_s=update_gparams_s[1],
        is_estimate=False,
        quiet_link_gbs=quiet_gbs,
    )


def _allocate_pieces(num_bytes: int, size: int, device: torch.device, name: str) -> Sequence[Tensor]:
    """Return pieces of a slab, pinned for a GPU: one piece, where the system does not let so much be pinned."""
    pin = device.type == "cuda"
    slab = allocate_slab(num_bytes // size * size, pin=pin, name=name)
    if pin and not is_slab_pinned(slab) and num_bytes > size:
        slab = allocate_slab(size, pin=pin, name=name)
    return slab.split(size)


class Rates(NamedTuple):
    """GB/s of the link by direction while it copies; updates a second on the CPU."""

    h2d_gbs: float
    d2h_gbs: float
    updates_s: float


def _time_alone_s(update: Callable[[], None]) -> float:
    update()
    start_s = time.perf_counter()
    for _ in range(MIX_ALONE):
        update()
    return (time.perf_counter() - start_s) / MIX_ALONE


def _measure_mix(
    device: torch.device,
    host: Sequence[Tensor],
    back: Sequence[Tensor],
    update: Callable[[], None] | None,
    share: float = 1.0,
) -> Rates:
    """Measure copies in both directions, each on its own, beside the CPU's update (None: without).

    The device's reads of the host's memory lose most to an update, its writes next to nothing.

    Args:
        host, back: pinned pieces of equal size to copy to the device in turn, and to copy into.
        share: of the time in which each direction copies; it rests in between.
    """
    there, away = torch.empty_like(host[0], device=device), torch.empty_like(back[0], device=device)
    pairs = [[(there, piece) for piece in host], [(piece, away) for piece in back]]
    torch.cuda.synchronize(device)
    stopped, counts, busy_s = threading.Event(), [0, 0], [0.0, 0.0]

    def copy_on(direction: int) -> None:
        stream = torch.cuda.Stream(device)
        turns = itertools.cycle(pairs[direction])
        with torch.cuda.stream(stream):
            while not stopped.is_set():
                begin_s = time.perf_counter()
                for target, source in itertools.islice(turns, 2):
                    target.copy_(source, non_blocking=True)
                stream.synchronize()
                took_s = time.perf_counter() - begin_s
                counts[direction] += 2
                busy_s[direction] += took_s
                stopped.wait(took_s * (1 / share - 1))

    if update is not None:
        update()
    with ThreadPoolExecutor(2, thread_name_prefix="link load") as pool:
        start_s, updates = time.perf_counter(), 0
        copying = [pool.submit(copy_on, direction) for direction in range(2)]
        try:
            while time.perf_counter() - start_s < MIX_S:
                if update is None:
                    time.sleep(MIX_S / 20)
                else:
                    update()
                    updates += 1
            elapsed_s = time.perf_counter() - start_s  # before the last copies end, beside which nothing is updated
        finally:
            stopped.set()
        for future in copying:
            future.result()
    size = there.numel() * there.element_size()
    inward, outward = (count * size / max(busy, 1e-9) / 1e9 for count, busy in zip(counts, busy_s, strict=True))
    return Rates(inward, outward, updates / elapsed_s)


def measure_library_bytes(device: torch.device) -> int:
    """Return what matrix products make cuBLAS keep of the device's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    a = torch.zeros(256, 256, dtype=torch.bfloat16, device=device)
    before = torch.cuda.memory_allocated(device)
    for product in (lambda: a @ a, lambda: torch.addmm(a[0], a, a)):
        product()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


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
