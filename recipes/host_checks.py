"""The doctor's checks of CPU, memory and disk."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from lazytrain.recipes.findings import FAIL, OK, WARN, Finding

GIB, MIB = 2**30, 2**20
MIN_SHARED_BYTES = 64 * MIB  # docker's default
LEAST_FREE_BYTES = 10 * GIB
SLOW_DISK_BYTES_S = 1e9
IN_MEMORY = {"tmpfs", "ramfs"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph", "glusterfs"}


def check_cpu(*, root: Path = Path("/")) -> Iterator[Finding]:
    """Tell the cores that this process may use, and what keeps it from using them."""
    cores = len(os.sched_getaffinity(0))
    share = cpu_share(root)
    text = f"{cores} of {os.cpu_count()} threads may be used"
    set_threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    if share is not None and share < cores:
        remedy = f"export OMP_NUM_THREADS={max(1, int(share))}: more threads than that are held back by the cgroup"
        yield Finding("CPU", WARN, f"{text}; the cgroup allows {share:g} cores' time", remedy)
    elif set_threads.isdigit() and int(set_threads) < cores:
        remedy = "unset OMP_NUM_THREADS, unless other programs need the cores"
        yield Finding("CPU", WARN, f"{text}; OMP_NUM_THREADS is {set_threads}", remedy)
    else:
        yield Finding("CPU", OK, text)


def check_host_memory(*, root: Path = Path("/")) -> Iterator[Finding]:
    """Tell host memory, and a cgroup limit below it."""
    from lazytrain.slabs import available_host_bytes, host_memory_limits

    total, limit = host_memory_limits(root=root)
    free = available_host_bytes(root=root)
    text = f"{free / GIB:.1f} GiB can be taken, of {total / GIB:.1f} GiB in all"
    if limit is not None and limit < total:
        remedy = "raise it (docker run --memory, or the job's request) if the model needs more; the plan keeps to it"
        yield Finding("host memory", WARN, f"{text}; a cgroup limits it to {limit / GIB:.1f} GiB", remedy)
    elif free < total / 2:
        yield Finding("host memory", WARN, text, "other programs hold most of it: end them, or give --host-memory")
    else:
        yield Finding("host memory", OK, text)


def check_memlock(*, has_gpu: bool | None = None) -> Iterator[Finding]:
    """Tell how much memory may be locked: pinned buffers for copies to the GPU need it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needs = _has_gpu() if has_gpu is None else has_gpu
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "unlimited")
    elif needs:
        text = f"limited to {soft / MIB:.1f} MiB: pinning host memory may fail, and copies be about 8 times slower"
        yield Finding("locked memory", WARN, text, "ulimit -l unlimited, or docker run --ulimit memlock=-1")
    else:
        yield Finding("locked memory", OK, f"limited to {soft / MIB:.1f} MiB; nothing is pinned without a GPU")


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Tell the size of /dev/shm, which libraries' worker processes use."""
    if not path.is_dir():
        yield Finding(
            "/dev/shm", WARN, "missing", "mount -t tmpfs tmpfs /dev/shm: worker processes of libraries use it"
        )
        return
    total = shutil.disk_usage(path).total
    text = f"{total / GIB:.2f} GiB"
    if total <= MIN_SHARED_BYTES:
        yield Finding("/dev/shm", WARN, text, "docker run --shm-size=1g: worker processes of libraries may fail")
    else:
        yield Finding("/dev/shm", OK, text)


def check_disk(directory: Path, test_bytes: int) -> Iterator[Finding]:
    """Tell file system, room and rates of a directory's disk.

    Args:
        test_bytes: written and read to measure the rates, in a file that is removed; 0 = not measured.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        yield Finding("disk", FAIL, f"{directory} is no directory", f"mkdir -p {directory}, or name another one")
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Finding("disk", FAIL, f"{directory} can't be written", "name a directory of yours")
        return
    yield _file_system(directory)
    free = shutil.disk_usage(directory).free
    text = f"{free / GIB:.1f} GiB free in {directory}"
    if free < LEAST_FREE_BYTES:
        yield Finding(
            "disk room",
            WARN,
            text,
            "a checkpoint takes about 6 bytes a parameter, up to three exist at once: make room",
        )
    else:
        yield Finding("disk room", OK, text)
    if test_bytes:
        yield _disk_rates(directory, min(test_bytes, free // 2))


def _file_system(directory: Path) -> Finding:
    kind = file_system(directory)
    text = f"{kind} at {directory}"
    if kind in IN_MEMORY:
        return Finding(
            "file system", WARN, f"{text}: it lies in host memory", "name a directory on a disk for --spill-dir"
        )
    if kind in REMOTE:
        remedy = "name a directory on a local disk for --out and --spill-dir"
        return Finding("file system", WARN, f"{text}: it is on another machine", remedy)
    return Finding("file system", OK, text)


def _disk_rates(directory: Path, num_bytes: int) -> Finding:
    from lazytrain.store_bench import make_test_file, measure_rates
    from lazytrain.store_io import Manner

    try:
        path = make_test_file(directory, num_bytes)
    except OSError as error:
        return Finding("disk speed", FAIL, f"no file of {num_bytes / MIB:.0f} MiB can be made: {error}", "make room")
    try:
        rates = list(measure_rates(path, num_bytes, (Manner(False, 1), Manner(False, 4), Manner(True, 4))))
    except OSError as error:
        return Finding("disk speed", FAIL, f"{error}", "check the disk: dmesg names its errors")
    finally:
        path.unlink(missing_ok=True)
    write, read = max(r.write_bytes_s for r in rates), max(r.read_bytes_s for r in rates)
    text = (
        f"writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s ({num_bytes / MIB:.0f} MiB, synced, cache dropped)"
    )
    if min(write, read) < SLOW_DISK_BYTES_S:
        return Finding("disk speed", WARN, text, "too slow to spill to: leave --spill-dir away, or name an NVMe disk")
    return Finding("disk speed", OK, text)


def file_system(directory: Path, *, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of the file system that a directory is on: that of the longest mount point above it."""
    best, kind = "", "unknown"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if directory.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def cpu_share(root: Path) -> float | None:
    """Return the cores' time that the cgroup allows (v2 or v1), or None where it sets no limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    base = root / "sys/fs/cgroup/cpu"
    try:
        quota_us, period_us = (int((base / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _has_gpu() -> bool:
    try:
        import torch
    except Exception:  # that check has said so
        return False
    return bool(torch.cuda.is_available())
