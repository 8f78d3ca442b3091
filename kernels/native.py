"""The portable C++ operator: built once with the system's compiler, cached, called through ctypes.

    adamw8bit.cpp --(CXX, or g++, clang++, c++)--> <cache>/adamw8bit-<key>-<digest>.so

`key` hashes source, flags, compiler and CPU, so another machine or compiler builds its own; `digest` hashes the file's
bytes, so a damaged file is noticed and built again. Builders write a temporary name and rename it: any number of
processes may build at once. A call runs on the operator's own threads (worker_pool.h), without the interpreter lock.
Ranges are cut at groups of 128 elements, and every group is computed alike, so the number of threads never changes a
bit.

Environment: CXX (compiler), LAZYTRAIN_THREADS (threads of one call; default torch.get_num_threads(), two less where
there is a GPU to launch kernels on and cores to spare), LAZYTRAIN_CACHE (cache folder; default
XDG_CACHE_HOME/lazytrain or ~/.cache/lazytrain).

Without a compiler one warning says so, and callers use the chunked torch reference: same bits, about 30 times slower.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("adamw8bit.cpp")
HEADERS = (Path(__file__).with_name("worker_pool.h"),)
ABI_VERSION = 4
# A thread that launches kernels late idles the device, an update only ends later.
POOL_NICENESS = 10
# Left to such threads where there is a GPU.
LAUNCH_CORES, MIN_SHARED_CORES = 2, 8
# No contraction and no fast-math: bits must equal those of the reference. The others only let loops vectorise.
BASE_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-pthread"),
]
# GCC keeps to vectors of 32 bytes on Intel's servers; here 64 are a quarter faster, measured on Zen 4.
NATIVE_FLAGS = [["-march=native", "-mprefer-vector-width=512"], ["-march=native"]]
BUILD_TIMEOUT_S = 120
TASK_GROUPS = 32768  # 4M elements: some milliseconds, so that the pool's cost vanishes
MIN_TASK_GROUPS = 1024

Pointer, Int, Long, UInt = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
SIGNATURES: dict[str, tuple[Sequence[type], type | None]] = {
    "lt_abi_version": ((), Int),
    "lt_adamw8bit": ((Int, Int, *[Pointer] * 7, Long, Long, Long, Pointer), None),
    "lt_adamw": ((Int, Int, *[Pointer] * 5, Long, Long, Long, Pointer), None),
    "lt_quantize": ((*[Pointer] * 6, Long, Long, Long, UInt), None),
    "lt_dequantize": ((*[Pointer] * 6, Long, Long, Long), None),
    "lt_square_tiles": ((Int, Pointer, Long, Long, Long, Pointer), None),
    "lt_square_total": ((Pointer, Long), ctypes.c_double),
    "lt_run_ranges": ((Pointer, Long, Long, Int, Int, Int), None),
}
ADAMW8BIT, ADAMW, QUANTIZE, DEQUANTIZE, SQUARE_TILES = range(5)


class NativeBuildError(Exception):
    """The operator can't be built or loaded; the text says why."""


class Scalars(ctypes.Structure):
    """The operator's scalar arguments, in the order of the C++ struct."""

    _fields_ = [
        ("coef", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("inv_sqrt_bias2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("dither", ctypes.c_uint32),
    ]


class Call(ctypes.Structure):
    """One operator's arguments but for the range, in the order of the C++ struct; `cols`: numel of flat operators."""

    _fields_ = [
        ("op", ctypes.c_int32),
        ("weights_kind", ctypes.c_int32),
        ("grads_kind", ctypes.c_int32),
        ("dither", ctypes.c_uint32),
        ("tensors", Pointer * 7),
        ("cols", Long),
        ("scalars", ctypes.POINTER(Scalars)),
    ]


def make_call(
    op: int,
    tensors: Sequence[int | None],
    cols: int,
    *,
    kinds: tuple[int, int] = (0, 0),
    dither: int = 0,
    scalars: Scalars | None = None,
) -> Call:
    """Return a call of `op` on tensors at the given addresses (None where there is none)."""
    pointer = ctypes.pointer(scalars) if scalars is not None else None
    return Call(op, *kinds, dither, (Pointer * 7)(*tensors), cols, pointer)


def find_compiler() -> list[str]:
    """Return the compiler's command line: CXX if set, else the first of g++, clang++, c++.

    Raises:
        NativeBuildError: there is none; install one (`apt-get install g++`) or set CXX.
    """
    chosen = os.environ.get("CXX", "").strip()
    for command in [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    where = f"CXX names {chosen!r}, which is not on the path" if chosen else "none of g++, clang++, c++ is on the path"
    raise NativeBuildError(f"no C++ compiler: {where}")


def find_cache_folder() -> Path:
    """Return a folder of this user that can be written: LAZYTRAIN_CACHE, the user's cache, or a temporary one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    candidates = [Path(home) / "lazytrain", Path(tempfile.gettempdir()) / f"lazytrain-{user}"]
    if chosen := os.environ.get("LAZYTRAIN_CACHE"):
        candidates.insert(0, Path(chosen))
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Code is loaded from here: a folder that another user planted is refused.
            if hasattr(os, "getuid") and folder.stat().st_uid != user:
                continue
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise NativeBuildError(f"no folder to build in: tried {', '.join(map(str, candidates))}; set LAZYTRAIN_CACHE")


def describe_cpu() -> str:
    """Return what -march=native depends on: machine, model and instruction sets."""
    lines: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            lines.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    parts = [lines.get(name, "") for name in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *parts])


def build(source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Return the shared library of `source`, from `folder` if it is there undamaged, else compiled into it.

    Args:
        source: a C++ file. flags: added to BASE_FLAGS. folder: where built files are kept.

    Raises:
        NativeBuildError: no compiler, or it failed; the text has the first line of its output.
    """
    compiler = find_compiler()
    stat = os.stat(compiler[0])
    identity = [os.path.realpath(compiler[0]), str(stat.st_size), str(stat.st_mtime_ns), *compiler[1:]]
    parts = [
        source.read_text(),
        *(header.read_text() for header in HEADERS),
        *BASE_FLAGS,
        *flags,
        *identity,
        describe_cpu(),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    for path in sorted(folder.glob(f"{source.stem}-{key}-*.so")):
        if _digest(path) == path.stem.rpartition("-")[2]:
            return path
        path.unlink(missing_ok=True)  # damaged: loading a cut file can kill the process
    handle, name = tempfile.mkstemp(prefix=f"{source.stem}-", suffix=".tmp", dir=folder)
    os.close(handle)
    try:
        _compile([*compiler, *BASE_FLAGS, *flags, str(source), "-o", name])
        path = folder / f"{source.stem}-{key}-{_digest(Path(name))}.so"
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:  # another process removed it as damaged
        return ""


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise NativeBuildError(f"{command[0]} failed with code {done.returncode}: {lines[0]}")


def open_library(path: Path) -> ctypes.CDLL:
    """Load a built operator and declare its functions.

    Raises:
        NativeBuildError: the file does not load or is of another version.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"{path} does not load: {error}") from error
    if library.lt_abi_version() != ABI_VERSION:
        raise NativeBuildError(f"{path} has version {library.lt_abi_version()}, this code needs {ABI_VERSION}")
    return library


_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_failed = False


def load() -> ctypes.CDLL | None:
    """Return the operator, built at the first call, or None (after one warning) where it can't be built."""
    global _library, _failed
    if _library is not None or _failed:
        return _library
    with _lock:
        if _library is None and not _failed:
            try:
                _library = open_library(_build_for_this_cpu())
            except NativeBuildError as error:
                _failed = True
                warnings.warn(
                    f"the C++ optimizer operator is not available ({error}). Updates on the CPU fall back to torch "
                    "operations: same results, about 30 times slower. Install a C++ compiler (for example "
                    "`apt-get install g++`) or set CXX to one.",
                    RuntimeWarning,
                    stacklevel=3,
                )
    return _library


def _build_for_this_cpu() -> Path:
    """Build with the most flags that the compiler knows."""
    folder = find_cache_folder()
    for flags in NATIVE_FLAGS:
        try:
            return build(SOURCE, flags, folder)
        except NativeBuildError:
            continue
    return build(SOURCE, [], folder)


def reset() -> None:
    """Forget the loaded operator and a failed build; the next `load` looks again (after CXX was changed, say)."""
    global _library, _failed
    with _lock:
        _library, _failed = None, False


def num_threads() -> int:
    """Return the threads that one call may use.

    Raises:
        ValueError: LAZYTRAIN_THREADS is no positive integer; unset it or set one.
    """
    chosen = os.environ.get("LAZYTRAIN_THREADS", "").strip()
    if not chosen:
        return max(1, torch.get_num_threads() - spared_cores())
    if not chosen.isdigit() or int(chosen) < 1:
        raise ValueError(f"LAZYTRAIN_THREADS is {chosen!r}: set a positive integer or unset it")
    return int(chosen)


def spared_cores() -> int:
    """Return how many cores the operator's threads keep off, for threads that launch kernels on a GPU."""
    return LAUNCH_CORES if torch.cuda.is_available() and torch.get_num_threads() >= MIN_SHARED_CORES else 0


def run_ranges(library: ctypes.CDLL, call: Call, num_items: int, *, min_items: int = MIN_TASK_GROUPS) -> None:
    """Run a call over [0, num_items) on the operator's threads, and wait; the interpreter lock is free meanwhile.

    Args:
        num_items: groups of 128 elements, or other pieces.
        min_items: a smaller range is not worth a thread's start.
    """
    if not num_items:
        return
    threads = num_threads()
    size = min(TASK_GROUPS, max(min_items, -(-num_items // (4 * threads))))
    library.lt_run_ranges(ctypes.byref(call), num_items, size, threads, POOL_NICENESS, spared_cores())
