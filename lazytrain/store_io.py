"""Read and write whole files by several threads in large requests, through the page cache or past it.

Buffered: every piece's page cache is dropped behind the front, so that streaming a model larger than RAM drives nothing
else out. Direct (O_DIRECT): memory is read and written by the device itself; a buffer that isn't aligned to 4096 bytes
goes through an aligned piece of each thread. Where the file system refuses direct requests, buffered ones take over.

A checksum is taken of every piece as it is written, and compared as it is read.
"""

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lazytrain.durable import drop_cached, read_all, write_all
from lazytrain.errors import LazyTrainError

PIECE_BYTES = 8 * 2**20
BLOCK_BYTES = 4096
# Smaller files stay in the page cache.
DROP_FROM_BYTES = 2**20

_ROW_WORDS, _ROWS = 1024, 128  # a mebibyte at a time: it stays in the cache for the second look
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class Manner(NamedTuple):
    """How files are read and written."""

    direct: bool
    num_threads: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'}, {self.num_threads} thread{'s' * (self.num_threads > 1)}"


class ChangedError(LazyTrainError):
    """A piece of a file that is not what was written: its first byte and the one after its last."""

    def __init__(self, start_bytes: int, end_bytes: int) -> None:
        super().__init__(f"bytes {start_bytes} to {end_bytes} are not what was written")


class _Gate:
    """Lets threads use a buffer and files until it closes, and closes only when all of them are out.

    A signal may raise in the main thread at any line, even between the queueing of a piece and its future's return:
    futures alone can't tell who is still at work.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_open = True

    def wrap(self, do: Callable[..., int]) -> Callable[..., int]:
        def inside(*args: Any) -> int:
            with self._changed:
                if not self._is_open:
                    raise CancelledError
                self._num_inside += 1
            try:
                return do(*args)
            finally:
                with self._changed:
                    self._num_inside -= 1
                    self._changed.notify_all()

        return inside

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            while self._num_inside:
                self._changed.wait()


class DiskIO:
    """Reads and writes files in one manner; its threads end with `close`. Several threads may call it at once."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self._direct = manner.direct and hasattr(os, "O_DIRECT")
        self._local = threading.local()
        # Apart, so that a read that the GPU waits for never queues behind a write that nobody waits for.
        self._pools = {
            kind: ThreadPoolExecutor(manner.num_threads, thread_name_prefix=f"nvme-{kind}")
            for kind in ("read", "write")
        }

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown()

    def write(self, path: Path, data: Tensor, *, offset: int = 0, sync: bool = False) -> tuple[int, ...]:
        """Write an existing file.

        Args:
            data: uint8 (n,), contiguous, on the CPU.
            offset: where it starts in the file, a multiple of 4096 bytes.
            sync: wait until the disk has it.
        Returns:
            A checksum for each piece, for `read_into`. The file may grow to a whole block of 4096 bytes.
        Raises:
            OSError: the first that any thread got; the file's content is then undefined.
        """

        def write_piece(fds: tuple[int, int], start: int, end: int) -> int:
            checksum = piece_checksum(array[start:end])
            if fds[1] < 0 or not self._write_direct(fds[1], array, start, end, offset):
                write_all(fds[0], memoryview(array[start:end]), offset + start)
                self._drop(fds[0], offset + start, end - start, len(array))
            return checksum

        assert offset % BLOCK_BYTES == 0, offset
        array = array_of(data)
        return tuple(self._run("write", path, os.O_RDWR, len(array), write_piece, sync=sync))

    def read_into(self, path: Path, out: Tensor, checksums: tuple[int, ...] | None = None, *, offset: int = 0) -> int:
        """Fill `out` (uint8 (n,), contiguous, on the CPU) from a file.

        Args:
            checksums: what `write` returned for the same number of bytes; None = they are not compared.
            offset: where to start, a multiple of 4096 bytes.
        Returns:
            The number of bytes read; less than asked where the file is shorter.
        Raises:
            OSError: the first that any thread got.
            ChangedError: a piece differs from its checksum.
        """

        def read_piece(fds: tuple[int, int], start: int, end: int) -> int:
            if fds[1] < 0 or not self._read_direct(fds[1], array, start, end, offset):
                count = read_all(fds[0], memoryview(array[start:end]), offset + start)
                self._drop(fds[0], offset + start, end - start, len(array))
                if count < end - start:
                    return count
            if checksums is not None and piece_checksum(array[start:end]) != checksums[start // PIECE_BYTES]:
                raise ChangedError(start, end)
            return end - start

        array = array_of(out)
        return sum(self._run("read", path, os.O_RDONLY, len(array), read_piece))

    def _run(
        self,
        kind: str,
        path: Path,
        flags: int,
        num_bytes: int,
        do: Callable[[tuple[int, int], int, int], int],
        *,
        sync: bool = False,
    ) -> list[int]:
        """Call `do(fds, start, end)` for every piece; return its results in order, or raise the first error."""
        ranges = [(start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES)]
        fd = os.open(path, flags | os.O_CLOEXEC)
        direct = -1
        try:
            if self._direct and num_bytes >= BLOCK_BYTES:
                direct = self._open_direct(path, flags)
            fds = (fd, direct)
            if len(ranges) < 2:
                results = [do(fds, start, end) for start, end in ranges]
            else:
                gate = _Gate()
                try:
                    job = gate.wrap(do)
                    futures = [self._pools[kind].submit(job, fds, start, end) for start, end in ranges]
                    wait(futures)  # all of them, also after an error of one
                finally:
                    gate.close()
                results = [future.result() for future in futures]
            if sync:
                os.fsync(fd)
            return results
        finally:
            os.close(fd)
            if direct >= 0:
                os.close(direct)

    def _open_direct(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._direct = False
            return -1

    def _write_direct(self, fd: int, array: Any, start: int, end: int, offset: int) -> bool:
        """Write a piece past the page cache; return False where the file system refuses it."""
        position = start
        if _is_aligned(array, start):
            position = start + (end - start) // BLOCK_BYTES * BLOCK_BYTES
            if not self._try(lambda: write_all(fd, memoryview(array[start:position]), offset + start)):
                return False
        if position < end:
            buffer, size = self._buffer(), -(-(end - position) // BLOCK_BYTES) * BLOCK_BYTES
            buffer[: end - position] = array[position:end]
            buffer[end - position : size] = 0
            return self._try(lambda: write_all(fd, memoryview(buffer[:size]), offset + position))
        return True

    def _read_direct(self, fd: int, array: Any, start: int, end: int, offset: int) -> bool:
        """Read a piece past the page cache; return False where that isn't possible or the file is shorter."""
        position = start
        if _is_aligned(array, start):
            position = start + (end - start) // BLOCK_BYTES * BLOCK_BYTES
            whole = memoryview(array[start:position])
            if not self._try(lambda: _read_once(fd, whole, offset + start, len(whole))):
                return False
        if position < end:
            buffer, size = self._buffer(), -(-(end - position) // BLOCK_BYTES) * BLOCK_BYTES
            if not self._try(lambda: _read_once(fd, memoryview(buffer[:size]), offset + position, end - position)):
                return False
            array[position:end] = buffer[: end - position]
        return True

    def _try(self, request: Callable[[], object]) -> bool:
        try:
            request()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
        return True

    def _buffer(self) -> Any:
        """Return this thread's aligned piece."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), dtype=np.uint8)
        return self._local.buffer

    def _drop(self, fd: int, offset: int, num_bytes: int, file_bytes: int) -> None:
        if file_bytes >= DROP_FROM_BYTES:
            drop_cached(fd, offset, num_bytes)


def array_of(data: Tensor) -> Any:
    """Return a uint8 CPU tensor as the NumPy array on the same memory."""
    assert (data.dtype, data.device.type, data.is_contiguous()) == (torch.uint8, "cpu", True)
    return data.view(-1).numpy()


def piece_checksum(data: Any) -> int:
    """Return a checksum of a uint8 array that finds every flipped bit, and rows that changed places.

    Formula: the CRC-32 of (exclusive or of all rows of 8 KiB, the sum of each row, the rest). It runs at several times
    the rate of a CRC-32 of everything, since the data is only added up.
    """
    num_rows = len(data) // (8 * _ROW_WORDS)
    words = data[: num_rows * 8 * _ROW_WORDS].view(np.uint64).reshape(num_rows, _ROW_WORDS)
    columns: Any = np.zeros(_ROW_WORDS, np.uint64)
    checksum = zlib.crc32(data[num_rows * 8 * _ROW_WORDS :])
    for first in range(0, num_rows, _ROWS):
        part = words[first : first + _ROWS]
        columns ^= np.bitwise_xor.reduce(part, axis=0)
        checksum = zlib.crc32(part.sum(axis=1), checksum)
    return zlib.crc32(columns, checksum)


def _is_aligned(array: Any, start: int) -> bool:
    return (array.ctypes.data + start) % BLOCK_BYTES == 0


def _read_once(fd: int, out: memoryview, offset: int, wanted: int) -> None:
    """Fill at least `wanted` bytes with one direct request; a short one leaves no aligned way to go on."""
    if wanted and os.preadv(fd, [out], offset) < wanted:
        raise OSError(errno.EINVAL, "a direct read was short")
