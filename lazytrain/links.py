"""Measure a machine's rates: links under the load of a step, memory, NVMe, matrix products."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lazytrain.slabs import allocate_slab, is_slab_pinned
from lazytrain.solver.problem import Hardware
from lazytrain.step_load import LoadedRates, StepLoad
from lazytrain.store_bench import CANDIDATES, make_test_file, measure_rates

MIN_COPY_BYTES, MAX_COPY_BYTES = 4 << 20, 512 << 20
# Of each direction's host memory: a step's copies never come from a processor's cache.
ROTATED_BYTES = 8 << 30
NVME_TEST_BYTES = 256 << 20


class MedianTimer(Protocol):
    """What `lazytrain.timer.Timer` offers."""

    def median_ms(self, work: Callable[[], Any]) -> float:
        """Return the median time of one call."""


class Work(NamedTuple):
    """What a step does beside its copies.

    Attributes:
        launch: some work of a block on the device.
        update: one update of `num_params` parameters on the CPU.
        update_ms: one update on the CPU alone and on the device; on a GPU's host the CPU's is measured under load.
    """

    launch: Callable[[], object]
    update: Callable[[], object]
    num_params: int
    update_ms: tuple[float, float]


def measure_machine(
    device: torch.device,
    block_bytes: int,
    limits: Mapping[str, int],
    *,
    work: Work,
    spill_dir: Path | None,
    timer: MedianTimer,
) -> Hardware:
    """Return the machine's measured rates: on a GPU's host as a step's load leaves them, see `StepLoad`.

    Args:
        block_bytes: the size of the copies that matter.
        limits: bytes a plan may fill per tier: "device", "host", "nvme".
        spill_dir: where to measure NVMe; None = not measured, and none allowed.
    """
    size = min(MAX_COPY_BYTES, max(MIN_COPY_BYTES, block_bytes))
    rotated = max(size, min(ROTATED_BYTES, limits["host"] // 16)) if device.type == "cuda" else size
    host, back = (_allocate_pieces(rotated, size, device, name) for name in ("link test", "link test back"))
    memcpy_gbs = size / timer.median_ms(lambda: back[0].copy_(host[0])) / 1e6
    loaded = LoadedRates(memcpy_gbs, memcpy_gbs, 0.0, work.update_ms[0], 2 * memcpy_gbs)
    if device.type == "cuda":
        load = StepLoad(device=device, host=host, back=back, launch=work.launch, update=work.update)
        loaded = load.measure_loaded()
    tiny = torch.empty(256, dtype=torch.uint8, device=device)
    read_gbs, write_gbs = _measure_nvme(spill_dir) if spill_dir is not None else (1.0, 1.0)
    return Hardware(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        device_memory_bytes=limits["device"],
        host_memory_bytes=limits["host"],
        nvme_bytes=limits.get("nvme", 0),
        h2d_gbs=loaded.h2d_gbs,
        d2h_gbs=loaded.d2h_gbs,
        nvme_read_gbs=read_gbs,
        nvme_write_gbs=write_gbs,
        dram_gbs=loaded.dram_gbs,
        copy_latency_ms=timer.median_ms(lambda: tiny.copy_(host[0][:256], non_blocking=True)),
        matmul_tflops=_matmul_tflops(device, timer),
        device_memory_gbs=2 * memcpy_gbs if device.type == "cpu" else _device_memory_gbs(device, timer),
        cpu_update_gparams_s=_update_rate(work.num_params, loaded.update_ms),
        device_update_gparams_s=_update_rate(work.num_params, work.update_ms[1]),
        is_estimate=False,
        quiet_link_gbs=loaded.quiet_gbs,
    )


def _update_rate(num_params: int, ms: float) -> float:
    return max(1e-6, num_params / ms / 1e6) if ms > 0 else 1e-6


def _allocate_pieces(num_bytes: int, size: int, device: torch.device, name: str) -> Sequence[Tensor]:
    """Return pieces of a slab, pinned for a GPU: one piece, where the system does not let so much be pinned."""
    pin = device.type == "cuda"
    slab = allocate_slab(num_bytes // size * size, pin=pin, name=name)
    if pin and not is_slab_pinned(slab) and num_bytes > size:
        slab = allocate_slab(size, pin=pin, name=name)
    return slab.split(size)


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
