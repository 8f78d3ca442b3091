"""Measure how fast a disk is read and written: buffered or direct, by how many threads.

Used twice: `choose_manner` at the start of a run with much on NVMe, and `python -m lazytrain.store bench DIR`.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
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


def make_test_file(directory: Path, num_bytes: int) -> Path:
    """Make a file of `num_bytes` with its room taken; the caller removes it."""
    path = directory / f"lazytrain-disk-test-{os.getpid()}"
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
