"""Building the C++ operator: cache, damage, concurrent builders, no compiler, threads."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lazytrain.kernels import native
from lazytrain.kernels.adamw import AdamWHyper, adamw8bit_update_into, adamw_update_into
from lazytrain.kernels.codec import GROUP, dequantize_moments, quantize_moments, reference_quantize_moments
from lazytrain.kernels.norm import MIN_TASK_TILES, TILE, reference_square_sum, square_sum

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = "/nonexistent/compiler"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forget the loaded operator before and after."""
    native.reset()
    yield monkeypatch
    monkeypatch.undo()
    native.reset()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A C++ file that builds in no time."""
    try:
        native.find_compiler()
    except native.NativeBuildError:
        pytest.skip("no C++ compiler")
    path = tmp_path / "tiny.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def answer_of(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


def test_build_is_cached(source: Path, tmp_path: Path) -> None:
    first = native.build(source, [], tmp_path)
    stamp = first.stat().st_mtime_ns
    assert native.build(source, [], tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert answer_of(first) == 42


def test_source_and_flags_are_part_of_the_key(source: Path, tmp_path: Path) -> None:
    paths = {native.build(source, [], tmp_path), native.build(source, ["-DOTHER"], tmp_path)}
    source.write_text('extern "C" int answer() { return 43; }\n')
    paths.add(native.build(source, [], tmp_path))
    assert len(paths) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_library_is_built_again(source: Path, tmp_path: Path, damage: str) -> None:
    path = native.build(source, [], tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[: len(data) // 3], "flipped": data, "empty": b""}[damage])
    assert answer_of(native.build(source, [], tmp_path)) == 42


def test_concurrent_builders_agree(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, ctypes\n"
        "from lazytrain.kernels import native\n"
        "path = native.build(pathlib.Path(sys.argv[1]), [], pathlib.Path(sys.argv[2]))\n"
        "print(ctypes.CDLL(str(path)).answer())\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path)]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate(timeout=120)[0] for run in runs] == ["42\n", "42\n"]
    assert not list(tmp_path.glob("*.tmp"))


def test_threads_that_build_at_once_agree(source: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(native.build(source, [], tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer_of(path) for path in found] == [42] * 4


def test_failed_build_says_why(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++\n")
    with pytest.raises(native.NativeBuildError, match=r"failed with code 1: .*error"):
        native.build(source, [], tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("unknown", ["-mprefer-*", "-m*"])
def test_compiler_that_knows_fewer_flags_builds_without_them(
    fresh: pytest.MonkeyPatch, source: Path, tmp_path: Path, unknown: str
) -> None:
    wrapper, log = tmp_path / "compiler", tmp_path / "log"
    wrapper.write_text(
        f'#!/bin/sh\nfor a in "$@"; do case $a in {unknown}) echo "error: unknown $a" >&2; exit 1;; esac; done\n'
        f'echo "$@" >> {log}\nexec {native.find_compiler()[0]} "$@" -O1\n'
    )
    wrapper.chmod(0o755)
    fresh.setenv("CXX", str(wrapper))
    fresh.setenv("LAZYTRAIN_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is not None
    assert ("-march=native" in log.read_text()) == (unknown == "-mprefer-*")


def test_foreign_library_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(native.NativeBuildError, match="does not load"):
        native.open_library(native.build(source, [], tmp_path))


def test_missing_compiler_falls_back_with_one_warning(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CXX", NO_COMPILER)
    m, g = torch.randn(3, 200), torch.randn(600)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        codes = quantize_moments(m, m * m, step=1)
        dequantize_moments(*codes)
        total = square_sum(g)
        flat = [x.view(-1) for x in codes]
        w = torch.randn(600)
        hyper = AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1)
        adamw8bit_update_into(w, None, *flat, g, rows=3, cols=200, first_group=0, coef=1.0, hyper=hyper)
    texts = [str(entry.message) for entry in caught]
    assert len(texts) == 1
    assert NO_COMPILER in texts[0]
    assert "Install a C++ compiler" in texts[0]
    assert torch.equal(total, reference_square_sum(g))
    truth = reference_quantize_moments(m, m * m, step=1)
    assert torch.equal(truth.m_scale, quantize_moments(m, m * m, step=1).m_scale)


def test_reset_finds_a_compiler_that_came_later(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CXX", NO_COMPILER)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        assert native.load() is None
    fresh.delenv("CXX")
    native.reset()
    try:
        native.find_compiler()
    except native.NativeBuildError:
        pytest.skip("no C++ compiler")
    assert native.load() is not None


def test_cache_folder_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(blocked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = native.find_cache_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0


def test_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path / "deep" / "er"))
    assert native.find_cache_folder() == tmp_path / "deep" / "er"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LAZYTRAIN_THREADS", value)
    with pytest.raises(ValueError, match=f"LAZYTRAIN_THREADS is '{value}'"):
        native.num_threads()


def test_number_of_threads_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAZYTRAIN_THREADS", raising=False)
    assert native.num_threads() == torch.get_num_threads()


@pytest.mark.parametrize("threads", ["1", "3", "8"])
@pytest.mark.parametrize("num_groups", [0, 1, 1023, 1024, 5000])
def test_ranges_cover_all_groups_once(monkeypatch: pytest.MonkeyPatch, num_groups: int, threads: str) -> None:
    monkeypatch.setenv("LAZYTRAIN_THREADS", threads)
    weights = torch.zeros(num_groups * GROUP)
    m, v, grads = (torch.zeros_like(weights) for _ in range(3))
    grads += 1.0
    # One step of AdamW moves every weight by the learning rate, once.
    adamw_update_into(weights, None, m, v, grads, coef=1.0, hyper=AdamWHyper(0.5, 0.9, 0.999, 1e-8, 0.0, 1))
    assert torch.allclose(weights, torch.full_like(weights, -0.5))


def test_callers_in_several_threads_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_THREADS", "3")
    x = torch.randn(40 * TILE, generator=torch.Generator().manual_seed(0))
    truth = square_sum(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(total, truth) for total in pool.map(lambda _: square_sum(x), range(20)))


SPARED = """
import os
import torch
from lazytrain.kernels import native
from lazytrain.kernels.norm import square_sum
native.spared_cores = lambda: 1
square_sum(torch.ones(1 << 22))
threads = [int(name) for name in os.listdir("/proc/self/task")]
workers = [t for t in threads if os.getpriority(os.PRIO_PROCESS, t) == native.POOL_NICENESS]
print(len(workers), {min(os.sched_getaffinity(t)) for t in workers}, sorted(os.sched_getaffinity(0))[:2])
"""


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores, and Linux")
def test_threads_keep_off_the_cores_that_launch_kernels() -> None:
    environment = {**os.environ, "LAZYTRAIN_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SPARED], env=environment, capture_output=True, text=True, check=True)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert done.stdout.split(maxsplit=1) == ["2", f"{{{second}}} [{first}, {second}]\n"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_THREADS", "2")
    x = torch.ones(20 * MIN_TASK_TILES * TILE)
    truth = square_sum(x).item()
    child = os.fork()
    if child == 0:
        os._exit(0 if square_sum(x).item() == truth else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_call_releases_the_interpreter_lock() -> None:
    library = native.load()
    if library is None:
        pytest.skip("no C++ compiler")
    assert isinstance(library, ctypes.CDLL)
    assert not isinstance(library, ctypes.PyDLL)


def test_scalars_and_calls_have_the_operator_s_layout() -> None:
    assert ctypes.sizeof(native.Scalars) == 40
    assert ctypes.sizeof(native.Call) == 16 + 7 * 8 + 8 + 8
    assert native.Scalars.dither.offset == 36
