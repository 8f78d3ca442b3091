"""Measure how fast a disk is read and written: buffered or direct, by how many threads.

Used thrice: `choose_manner` at the start of a run with much on NVMe, `python -m lazytrain.store bench DIR`, and
`measure_streams` by the bench of whole steps: a disk that is read and written at once is slower at each.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lazytrain.durable import create_file, drop_cached, preallocate
from lazytrain.slabs import allocate_slab
from lazytrain.store_io import DiskIO, Manner

CANDIDATES = (Manner(False, 1), Manner(False, 4), Manner(True, 1), Manner(True, 4), Manner(True, 8))
CHOICE_BYTES = 256 * 2**20
STREAM_S = 2.0
STREAM_PIECE_BYTES = 128 * 2**20
# Buffered files have no demands on alignment: another manner must be faster by this much.
LEAST_GAIN = 1.05


class Rates(NamedTuple):
    """Bytes per second to the disk (synced) and from it (its page cache dropped before)."""

    manner: Manner
    write_bytes_s: float
    read_bytes_s: float

    @property
    def round_trip_s(self) -> float:
        """Return the seconds to write and read one byte."""
        return 1 / self.write_bytes_s + 1 / self.read_bytes_s


class StreamRates(NamedTuple):
    """Bytes per second over a while: each direction alone, and both at once."""

    read_bytes_s: float
    write_bytes_s: float
    both_read_bytes_s: float
    both_write_bytes_s: float

    def bound_s(self, read_bytes: float, write_bytes: float) -> float:
        """Return the least time in which the disk can read and write that much, with both rates and with one.

        Both at once until one is done, then the rest alone; or, where that loses, one after the other.
        """
        both_s = min(read_bytes / self.both_read_bytes_s, write_bytes / self.both_write_bytes_s)
        read_left = max(0.0, read_bytes - both_s * self.both_read_bytes_s)
        write_left = max(0.0, write_bytes - both_s * self.both_write_bytes_s)
        mixed_s = both_s + read_left / self.read_bytes_s + write_left / self.write_bytes_s
        return min(mixed_s, read_bytes / self.read_bytes_s + write_bytes / self.write_bytes_s)

    def alone_s(self, read_bytes: float, write_bytes: float) -> float:
        """Return the same for a disk on which neither direction slowed the other down."""
        return max(read_bytes / self.read_bytes_s, write_bytes / self.write_bytes_s)


def choose_manner(path: Path, num_bytes: int) -> Manner:
    """Return the fastest manner of writing and reading a file, measured on up to 256 MiB of it; its content is lost.

    Raises:
        OSError: the disk can't be written or read.
    """
    rates = list(measure_rates(path, min(num_bytes, CHOICE_BYTES), CANDIDATES))
    best, plain = (
        min(rates, key=lambda r: r.round_trip_s),
        min((r for r in rates if not r.manner.direct), key=lambda r: r.round_trip_s),
    )
    return best.manner if plain.round_trip_s > LEAST_GAIN * best.round_trip_s else plain.manner


def measure_rates(path: Path, num_bytes: int, manners: Sequence[Manner], *, rounds: int = 1) -> Iterator[Rates]:
    """Write and read an existing file in each manner; yield the best of the rounds of each.

    Args:
        path: its first `num_bytes` bytes are overwritten; room for them was taken before.
    """
    data, out = _random_bytes(num_bytes), allocate_slab(num_bytes, pin=False, name="disk test")
    _timed(Manner(False, 1), lambda io: io.write(path, data, sync=True))  # a first write also maps the file's blocks
    for manner in manners:
        write_s, read_s = [], []
        for _ in range(rounds):
            write_s.append(_timed(manner, lambda io: io.write(path, data, sync=True)))
            _forget(path)
            read_s.append(_timed(manner, lambda io: io.read_into(path, out)))
        if not torch.equal(out, data):
            raise OSError(f"{path}: what was read is not what was written ({manner})")
        yield Rates(manner, num_bytes / min(write_s), num_bytes / min(read_s))


def measure_streams(
    directory: Path, num_bytes: int, manner: Manner | None = None, *, seconds: float = STREAM_S
) -> tuple[Manner, StreamRates]:
    """Read one file and write another for a while, each alone and both at once; both are removed.

    Args:
        num_bytes: of each file, at least 128 MiB or the whole of it is one request.
        manner: None = the one that `choose_manner` chooses.
    """
    paths = list[Path]()
    try:
        for index in range(2):
            paths.append(make_test_file(directory, num_bytes, index))
        chosen = manner or choose_manner(paths[0], num_bytes)
        io = DiskIO(chosen)
        try:
            data = _random_bytes(min(num_bytes, STREAM_PIECE_BYTES))
            starts = range(0, num_bytes - len(data) + 1, len(data))
            for path, start in [(path, start) for path in paths for start in starts]:
                io.write(path, data, offset=start, sync=True)
            _forget(paths[0])
            out = allocate_slab(len(data), pin=False, name="disk test")

            def read(start: int) -> None:
                io.read_into(paths[0], out, offset=start)

            def write(start: int) -> None:
                io.write(paths[1], data, offset=start, sync=not chosen.direct)

            alone = [_stream([work], starts, len(data), seconds)[0] for work in (read, write)]
            return chosen, StreamRates(*alone, *_stream([read, write], starts, len(data), seconds))
        finally:
            io.close()
    finally:
        for path in paths:
            path.unlink()


def _stream(
    works: Sequence[Callable[[int], None]], starts: Sequence[int], piece_bytes: int, seconds: float
) -> list[float]:
    """Let each work go over its file again and again; return the bytes per second of each while all were busy."""
    rates, stopped, start_s = [0.0] * len(works), threading.Event(), time.perf_counter()

    def go(index: int) -> None:
        for count, start in enumerate(cycle(starts), start=1):
            works[index](start)
            if stopped.is_set():  # another may be done
                return
            rates[index] = count * piece_bytes / (time.perf_counter() - start_s)

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(go, index) for index in range(len(works))]
        while not (all(rates) and time.perf_counter() - start_s >= seconds) and not any(f.done() for f in futures):
            time.sleep(0.01)
        measured = list(rates)
        stopped.set()
    for future in futures:
        future.result()
    return measured


def make_test_file(directory: Path, num_bytes: int, index: int = 0) -> Path:
    """Make a file of `num_bytes` with its room taken; the caller removes it."""
    path = directory / f"lazytrain-disk-test-{os.getpid()}-{index}"
    fd = create_file(path)
    try:
        preallocate(fd, num_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    return path


def _random_bytes(num_bytes: int) -> Tensor:
    """Return bytes that no disk can squeeze."""
    slab = allocate_slab(num_bytes, pin=False, name="disk test")
    slab.numpy()[:] = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    return slab


def _timed(manner: Manner, action: Callable[[DiskIO], object]) -> float:
    io = DiskIO(manner)
    try:
        start_s = time.perf_counter()
        action(io)
        return time.perf_counter() - start_s
    finally:
        io.close()


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        drop_cached(fd, 0, 0)
    finally:
        os.close(fd)
