"""Host memory in slabs of exact size, pinned where CUDA is there, and how much of it a run may take.

torch's pinned allocator rounds requests up to a power of two (20.4 GiB takes 32). A slab is an anonymous mapping of
whole pages, touched by several threads and registered with CUDA afterwards, which is also the faster way to pin.
"""

import contextlib
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lazytrain.errors import MemoryBudgetError

GIB = 2**30
PAGE_BYTES = mmap.PAGESIZE

_TOUCH_BYTES = 64 * 2**20
# cgroup v1 says "no limit" by a number near 2^63.
_NO_LIMIT_BYTES = 2**60
_REMEDIES = {
    "device": "a smaller batch or sequence, or more GPU memory (--gpu-memory)",
    "host": "a smaller model, NVMe for a part of it, or more RAM (--host-memory)",
    "nvme": "more free room on the disk, or a directory on another disk",
}

_registered: dict[int, weakref.finalize] = {}
_mappings: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()
# Reentrant: the garbage collector may end a slab while this thread holds it.
_lock = threading.RLock()
_has_warned = False


def allocate_slab(num_bytes: int, *, pin: bool, name: str) -> Tensor:
    """Allocate host memory of exactly `num_bytes` (rounded up to whole pages), zeroed and touched.

    Args:
        num_bytes: size; 0 gives an empty tensor.
        pin: register it with CUDA. If that fails, one warning is given and the slab stays pageable.
        name: what it is for, named in errors.
    Returns:
        uint8 (num_bytes,), page-aligned. It is unregistered and unmapped when the last tensor on it is gone.
    Raises:
        MemoryBudgetError: the system refuses the mapping.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryBudgetError(
            f"No {num_bytes / GIB:.2f} GiB of host memory for {name}: {error}. Needed is {_REMEDIES['host']}."
        ) from error
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without huge pages; both are hints
            mapping.madvise(advice)
    array = np.frombuffer(mapping, dtype=np.uint8)
    _touch(array)
    slab = torch.from_numpy(array)
    _mappings[slab.data_ptr()] = mapping
    if pin and torch.cuda.is_available():
        _register(array, mapping, name)
    return slab


def free_slab(slab: Tensor) -> None:
    """Unregister a slab and give its pages back to the system now. Its tensors stay valid and read as zero."""
    if slab.numel() == 0:
        return
    with _lock:
        finalizer = _registered.pop(slab.data_ptr(), None)
    if finalizer is not None:
        finalizer()
    mapping = _mappings.get(slab.data_ptr())
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def is_slab_pinned(slab: Tensor) -> bool:
    """Return whether CUDA knows the slab as pinned."""
    return slab.data_ptr() in _registered


def _touch(array: np.ndarray) -> None:
    """Fault every page in, by several threads (NumPy lets the interpreter lock go)."""
    starts = range(0, len(array), _TOUCH_BYTES)
    num_threads = min(len(starts), len(os.sched_getaffinity(0)), 16)
    if num_threads <= 1:
        array[::PAGE_BYTES] = 0
        return

    def touch_piece(start: int) -> None:
        array[start : start + _TOUCH_BYTES : PAGE_BYTES] = 0

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(touch_piece, starts))


def _register(array: np.ndarray, mapping: mmap.mmap, name: str) -> None:
    runtime = torch.cuda.cudart()
    address, num_bytes = array.ctypes.data, array.nbytes
    result = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(result) != 0:
        _clear_pending_error()
        _warn_once(f"{name}: pinning {num_bytes / GIB:.3f} GiB failed ({runtime.cudaGetErrorString(result)})")
        return
    # The finalizer runs before the mapping goes, which it holds; not at exit, where CUDA may be gone already.
    finalizer = weakref.finalize(array, _unregister, address, mapping, os.getpid())
    finalizer.atexit = False
    with _lock:
        _registered[address] = finalizer


def _unregister(address: int, mapping: mmap.mmap, owner_pid: int) -> None:
    with _lock:
        _registered.pop(address, None)
    if os.getpid() == owner_pid and int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _clear_pending_error()


def _clear_pending_error() -> None:
    """Clear CUDA's sticky-until-read error, or the next kernel launch would report it as its own."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # this launch has read, and so cleared, the error


def _warn_once(text: str) -> None:
    global _has_warned
    with _lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"{text}. Going on with pageable memory: copies are about 8 times slower. "
        "Raise the limit of locked memory (ulimit -l) if it is one.",
        RuntimeWarning,
        stacklevel=2,
    )


def require_memory(needed: Mapping[str, int], available: Mapping[str, int]) -> None:
    """Refuse a run that does not fit, before anything is allocated.

    Args:
        needed, available: tier ("device", "host", "nvme") -> bytes; a tier that is needed and not available has 0.
    Raises:
        MemoryBudgetError: lists every tier's need and room, and what would make it fit.
    """
    short = [tier for tier, need in needed.items() if need > available.get(tier, 0)]
    if not short:
        return
    lines = [f"The run does not fit: {', '.join(short)} memory is too small."]
    for tier, need in needed.items():
        have = available.get(tier, 0)
        verdict = f"{(need - have) / GIB:.2f} GiB short" if need > have else "fits"
        lines.append(f"  {tier}: needs {need / GIB:.2f} GiB, {have / GIB:.2f} GiB available: {verdict}")
    lines += [f"To fit {tier}: {_REMEDIES.get(tier, 'a larger limit')}." for tier in short]
    raise MemoryBudgetError("\n".join(lines))


def resident_host_bytes() -> int:
    """Return how much host memory this process has in RAM now, but for mapped files, which the system drops at need.

    Libraries are such files: those of a GPU's kernels are read during the first step, 0.7 GiB of them.
    """
    status = _read_fields(Path("/proc/self/status"))
    if "RssAnon" in status:
        return (status["RssAnon"] + status.get("RssShmem", 0)) * 1024
    return int(_read_text(Path("/proc/self/statm")).split()[1]) * PAGE_BYTES


def available_host_bytes(limit_bytes: int | None = None, *, root: Path = Path("/")) -> int:
    """Return how much more host memory this process may take.

    A given limit wins. Else it is the least of the system's MemAvailable and of every cgroup limit (v2 or v1) less
    what that group uses and can't drop. Where MemTotal is below a group's limit, only the limit counts: some virtual
    machines show no more memory than was used so far.

    Args:
        limit_bytes: the user's own limit.
        root: where /proc and /sys are; for tests.
    """
    if limit_bytes is not None:
        return limit_bytes
    system = _read_fields(root / "proc/meminfo")
    total, free = system.get("MemTotal", 0) * 1024, system.get("MemAvailable", 0) * 1024
    limits = [limit for group in _cgroup_dirs(root) if (limit := _cgroup_limit(group)) is not None]
    rooms = [room for _, room in limits]
    if not limits or min(limit for limit, _ in limits) <= total:
        rooms.append(free)
    return max(0, min(rooms))


def host_memory_limits(*, root: Path = Path("/")) -> tuple[int, int | None]:
    """Return the machine's MemTotal and the least cgroup limit on this process (None = none), in bytes."""
    limits = [limit[0] for group in _cgroup_dirs(root) if (limit := _cgroup_limit(group)) is not None]
    return _read_fields(root / "proc/meminfo").get("MemTotal", 0) * 1024, min(limits, default=None)


def _cgroup_dirs(root: Path) -> list[Path]:
    """Return this process's memory cgroups and their ancestors: a limit may be set on any of them."""
    directories = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = base / path.lstrip("/")
        # Within a container the listed path may be the host's, and the container's own group is the base.
        directories += [group, *(parent for parent in group.parents if parent.is_relative_to(base)), base]
    return directories or [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]


def _cgroup_limit(group: Path) -> tuple[int, int] | None:
    """Return a group's limit and what is left of it, in bytes, or None where it sets none."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read_text(group / limit_file).strip()
        if not limit.isdigit() or int(limit) >= _NO_LIMIT_BYTES:
            continue
        usage = _read_text(group / usage_file).strip()
        used = int(usage) if usage.isdigit() else 0
        stat = _read_fields(group / "memory.stat")
        cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        cached += stat.get("total_active_file", stat.get("active_file", 0))
        return int(limit), int(limit) - max(0, used - cached)
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_fields(path: Path) -> dict[str, int]:
    """Parse lines such as `MemAvailable:  123 kB` or `inactive_file 123`."""
    fields = {}
    for line in _read_text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields
