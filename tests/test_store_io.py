"""Threads, direct and buffered requests, checksums of pieces: the same bytes, whatever the size and the alignment."""

import errno
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lazytrain import durable, spill, store_bench, store_io
from lazytrain.errors import MemoryBudgetError
from lazytrain.slabs import allocate_slab
from lazytrain.spill import SpillError, SpillStore
from lazytrain.store import main
from lazytrain.store_bench import Rates, choose_manner, make_test_file, measure_rates
from lazytrain.store_io import ChangedError, DiskIO, Manner, piece_checksum

PIECE = 64 * 1024
MANNERS = [Manner(False, 1), Manner(False, 3), Manner(True, 1), Manner(True, 3)]
SIZES = [0, 1, 63, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5000, 5 * PIECE]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_io, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(store_io, "DROP_FROM_BYTES", PIECE)


def random_bytes(num_bytes: int, *, shift: int = 0) -> torch.Tensor:
    """Return random bytes that begin `shift` bytes behind the start of a page."""
    slab = allocate_slab(num_bytes + shift + 1, pin=False, name="test")[shift : shift + num_bytes]
    slab.numpy()[:] = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    return slab


def new_file(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.close(durable.create_file(path))
    return path


@pytest.mark.parametrize("manner", MANNERS, ids=str)
@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_back_for_any_size_alignment_and_manner(tmp_path: Path, manner: Manner, num_bytes: int) -> None:
    path, io = new_file(tmp_path / "f"), DiskIO(manner)
    for shift in (0, 1, 256):
        data, out = random_bytes(num_bytes, shift=shift), random_bytes(num_bytes, shift=256 - shift).zero_()
        checksums = io.write(path, data, sync=shift == 0)
        assert io.read_into(path, out, checksums) == num_bytes
        assert torch.equal(out, data)
        assert num_bytes <= path.stat().st_size < num_bytes + store_io.BLOCK_BYTES + PIECE
    io.close()


def test_direct_requests_are_direct_and_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct_works(tmp_path):
        pytest.skip("this file system has no direct requests")
    seen = []
    pwrite, preadv = os.pwrite, os.preadv

    def note(fd: int, buffer: memoryview, offset: int) -> None:
        flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        seen.append((bool(flags & os.O_DIRECT), address % 4096, offset % 4096, len(buffer) % 4096))

    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: note(fd, data, offset) or pwrite(fd, data, offset))
    monkeypatch.setattr(os, "preadv", lambda fd, out, offset: note(fd, out[0], offset) or preadv(fd, out, offset))
    path, io = new_file(tmp_path / "f"), DiskIO(Manner(True, 2))
    for shift in (0, 17):
        data = random_bytes(3 * PIECE + 4097, shift=shift)
        io.read_into(path, data.clone(), io.write(path, data))
    io.close()
    assert len(seen) > 15
    assert set(seen) == {(True, 0, 0, 0)}


def direct_works(tmp_path: Path) -> bool:
    try:
        os.close(os.open(new_file(tmp_path / "probe"), os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("where", ["open", "request"])
def test_a_file_system_without_direct_requests_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    real = os.open
    if where == "open":
        monkeypatch.setattr(os, "open", lambda p, flags, *a: refuse() if flags & os.O_DIRECT else real(p, flags, *a))
    else:
        monkeypatch.setattr(store_io, "_is_aligned", lambda array, start: False)
        monkeypatch.setattr(store_io, "_read_once", refuse)
    path, io = new_file(tmp_path / "f"), DiskIO(Manner(True, 2))
    data = random_bytes(2 * PIECE + 100)
    out = torch.zeros_like(data)
    assert io.read_into(path, out, io.write(path, data)) == len(data)
    assert torch.equal(out, data)
    io.close()


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_a_flipped_bit_is_found_and_its_place_named(tmp_path: Path, manner: Manner) -> None:
    path, io, rng = new_file(tmp_path / "f"), DiskIO(manner), random.Random(0)
    data = random_bytes(3 * PIECE + 77)
    checksums = io.write(path, data)
    for position in [0, PIECE - 1, 3 * PIECE + 76, *(rng.randrange(len(data)) for _ in range(20))]:
        flip(path, position, rng.randrange(8))
        with pytest.raises(ChangedError, match=f"bytes {position // PIECE * PIECE} to "):
            io.read_into(path, torch.empty_like(data), checksums)
        path.write_bytes(data.numpy().tobytes())
    io.close()


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("num_bytes", [0, 1, 8191, 8192, 8193, 3 * 8192 + 5, 130 * 8192])
def test_checksums_differ_for_every_flip_and_swap(num_bytes: int) -> None:
    data = random_bytes(num_bytes).numpy()
    whole = piece_checksum(data)
    assert piece_checksum(data.copy()) == whole
    rng = random.Random(num_bytes)
    for _ in range(60 if num_bytes else 0):
        changed = data.copy()
        changed[rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
        assert piece_checksum(changed) != whole
    if num_bytes >= 2 * 8192:
        rows = data[: num_bytes // 8192 * 8192].reshape(-1, 8192)
        for first, second in ((0, 1), (0, len(rows) - 1)):
            changed = data.copy()
            view = changed[: len(rows) * 8192].reshape(-1, 8192)
            view[[first, second]] = view[[second, first]]
            assert piece_checksum(changed) != whole


def test_a_cut_file_reads_short(tmp_path: Path) -> None:
    for manner in MANNERS:
        path, io = new_file(tmp_path / "f"), DiskIO(manner)
        data = random_bytes(2 * PIECE)
        checksums = io.write(path, data)
        os.truncate(path, PIECE + 10)
        assert io.read_into(path, torch.empty_like(data), checksums) == PIECE + 10
        io.close()


def test_an_error_of_one_thread_comes_after_all_have_let_go_of_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, io = new_file(tmp_path / "f"), DiskIO(Manner(False, 4))
    data, running, real = random_bytes(8 * PIECE), [], os.pwrite
    first_failed = threading.Event()

    def pwrite(fd: int, piece: memoryview, offset: int) -> int:
        if offset == 0:
            first_failed.set()
            raise OSError(errno.EIO, "failed")
        first_failed.wait(10)
        running.append(offset)
        return real(fd, piece, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="failed"):
        io.write(path, data)
    assert sorted(running) == [i * PIECE for i in range(1, 8)]
    io.close()


def test_after_a_signal_no_thread_uses_buffer_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, io = new_file(tmp_path / "f"), DiskIO(Manner(False, 2))
    started, ended, sent, real = [], [], threading.Event(), os.pwrite

    def pwrite(fd: int, piece: memoryview, offset: int) -> int:
        started.append(offset)
        if len(started) == 2:
            never.wait(0.2)  # by now the main thread waits (elsewhere a destructor could swallow the exception)
            os.kill(os.getpid(), signal.SIGINT)
            sent.set()
        sent.wait(10)
        never.wait(0.2)  # the time to do wrong
        count = real(fd, piece, offset)  # fails if the file is closed by now
        ended.append(offset)
        return count

    never = threading.Event()
    monkeypatch.setattr(os, "pwrite", pwrite)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            io.write(path, random_bytes(40 * PIECE))
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == sorted(started)
    assert 2 <= len(ended) < 40
    io.close()


def test_the_page_cache_is_dropped_behind_large_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []
    monkeypatch.setattr(store_io, "drop_cached", lambda fd, start, count: dropped.append((start, count)))
    path, io = new_file(tmp_path / "f"), DiskIO(Manner(False, 1))
    small, large = random_bytes(PIECE - 1), random_bytes(2 * PIECE + 1)
    for data in (small, large):
        io.read_into(path, torch.empty_like(data), io.write(path, data))
    assert dropped == 2 * [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 1)]
    io.close()


def test_a_store_names_the_blob_whose_bytes_have_changed(tmp_path: Path) -> None:
    store = SpillStore(tmp_path)
    data = random_bytes(2 * PIECE)
    store.write("0003.state", data)
    flip(next(store.path.iterdir()), PIECE + 5, 4)
    with pytest.raises(
        SpillError, match=rf"'0003.state'.*bytes {PIECE} to {2 * PIECE} are not what was written.*resume"
    ):
        store.read_into("0003.state", torch.empty_like(data))
    store.write("0003.state", data)
    store.read_into("0003.state", torch.empty_like(data))
    store.close()


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_a_store_gives_the_same_bits_in_every_manner(tmp_path: Path, manner: Manner) -> None:
    store = SpillStore(tmp_path, manner)
    assert store.manner == manner
    store.reserve([3 * PIECE + 9] * 3)
    for turn in range(4):
        for name, num_bytes in (("a", 3 * PIECE + 9), ("b", 100)):
            data = random_bytes(num_bytes, shift=turn)
            store.write(name, data)
            out = torch.zeros_like(data)
            store.read_into(name, out)
            assert torch.equal(out, data)
            assert torch.equal(store.map(name), data)
    assert store.reserved_bytes == 3 * (3 * PIECE + 9) + 2 * 100
    store.close()


def test_a_large_store_measures_once_and_keeps_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def choose(path: Path, num_bytes: int) -> Manner:
        chosen.append(num_bytes)
        return choose_manner(path, num_bytes)

    monkeypatch.setattr(spill, "MEASURE_FROM_BYTES", 5 * PIECE)
    monkeypatch.setattr(spill, "choose_manner", choose)
    store = SpillStore(tmp_path)
    store.reserve([PIECE])
    assert (chosen, store.manner) == ([], spill.DEFAULT_MANNER)
    names = sorted(path.name for path in store.path.iterdir())
    store.reserve([4 * PIECE, 2 * PIECE])
    store.reserve([9 * PIECE])
    assert chosen == [4 * PIECE]
    assert store.manner in store_bench.CANDIDATES
    assert len(list(store.path.iterdir())) == len(names) + 3
    data = random_bytes(4 * PIECE)
    store.write("a", data)
    out = torch.zeros_like(data)
    store.read_into("a", out)
    assert torch.equal(out, data)
    store.close()


def test_a_disk_that_fails_while_it_is_measured_is_a_clean_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, num_bytes: int) -> Manner:
        raise OSError(errno.EIO, "failed")

    monkeypatch.setattr(spill, "MEASURE_FROM_BYTES", 10)
    monkeypatch.setattr(spill, "choose_manner", fail)
    with pytest.raises(MemoryBudgetError, match="Measuring the disk failed: Input/output error"):
        SpillStore(tmp_path).reserve([100])


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({Manner(False, 1): (1.0, 1.0), Manner(True, 4): (2.0, 2.0)}, Manner(True, 4)),
        ({Manner(False, 1): (1.0, 1.0), Manner(True, 4): (1.04, 1.04)}, Manner(False, 1)),
        ({Manner(False, 1): (1.0, 3.0), Manner(False, 4): (1.0, 4.0), Manner(True, 4): (0.2, 9.0)}, Manner(False, 4)),
    ],
)
def test_the_fastest_round_trip_is_chosen_and_buffered_where_it_is_as_fast(
    monkeypatch: pytest.MonkeyPatch, rates: dict[Manner, tuple[float, float]], expected: Manner
) -> None:
    measured = [Rates(manner, *pair) for manner, pair in rates.items()]
    monkeypatch.setattr(store_bench, "measure_rates", lambda *args: iter(measured))
    assert choose_manner(Path("x"), 1) == expected


def test_the_bench_prints_a_line_a_manner_and_removes_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tmp_path / "new"), "--size", "1", "--rounds", "1", "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[2:10]] == [
        f"{kind}, {count} thread{'s' * (count > 1)}" for kind in ("buffered", "direct") for count in (1, 2, 4, 8)
    ]
    assert all(float(rate) > 0 for line in (*lines[2:10], *lines[11:]) for rate in line.split()[-2:])
    assert "would choose" in lines[10]
    assert [line[:22].strip() for line in lines[11:]] == ["one way at a time", "both at once"]
    assert list((tmp_path / "new").iterdir()) == []


def test_rates_are_refused_where_the_disk_returns_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_test_file(tmp_path, PIECE)
    assert path.stat().st_size == PIECE
    monkeypatch.setattr(DiskIO, "read_into", lambda self, path, out: out.zero_().numel())
    with pytest.raises(OSError, match="not what was written"):
        list(measure_rates(path, PIECE, [Manner(False, 1)]))
