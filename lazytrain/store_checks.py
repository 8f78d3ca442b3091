"""Compare files with what was recorded when they were written: size, header, every tensor; by several threads.

Data is read, not mapped: a bad sector gives an error that names file and tensor; under a mapping it kills the process.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lazytrain.durable import drop_cached, read_all
from lazytrain.errors import ModelFileError
from lazytrain.paths import is_plain_name, resolve_inside
from lazytrain.store_io import PIECE_BYTES, piece_checksum
from lazytrain.tensorfile import PADDING, TensorFile, holds_tensors
from lazytrain.tensorwriter import FileRecord

MAX_THREADS = 8
MAX_NAMES = 20


class Part(NamedTuple):
    """A range of a file with its expected checksum.

    Attributes:
        tensors: those that lie in it; none in a header or in a file without tensors.
        is_piece: the checksum is `piece_checksum`, else CRC-32.
    """

    path: Path
    name: str
    tensors: tuple[str, ...]
    start_bytes: int
    num_bytes: int
    checksum: int
    is_piece: bool = False


def find_damage(
    directory: Path,
    files: Mapping[str, FileRecord],
    *,
    advance: Callable[[int], None] = lambda num_bytes: None,
    from_disk: bool = False,
    follow_links: bool = False,
) -> list[str]:
    """Read files and compare them with their records.

    Args:
        advance: called in this thread with the number of bytes checked since the last call.
        from_disk: drop the page cache's copy first, so that the disk is read; else a load that follows finds it there.
        follow_links: accept links as `resolve_inside` does (the hub's cache); else a link counts as missing.
    Returns:
        One text for every file or tensor that differs, in the order of the files and of the tensors in them.
    Memory: 8 MiB a thread.
    """
    problems: list[tuple[tuple[int, int], str]] = []
    parts: list[tuple[int, Part]] = []
    for index, (name, record) in enumerate(files.items()):
        found, problem = _outline(directory, name, record, follow_links)
        parts += [(index, part) for part in found]
        if problem is not None:
            problems.append(((index, -1), problem))
            advance(record.size_bytes)
    if from_disk:
        forget_cached({part.path for _, part in parts})
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        for (index, part), problem in zip(parts, pool.map(check_part, (part for _, part in parts))):
            advance(part.num_bytes)
            if problem is not None:
                problems.append(((index, part.start_bytes), problem))
    finally:
        pool.shutdown(cancel_futures=True)  # after a signal, only what is being read is read to its end
    return [text for _, text in sorted(problems)]


def check_part(part: Part) -> str | None:
    """Return what is wrong with a part of a file, or None."""
    what = "the header" if holds_tensors(part.name) else "its content"
    if part.tensors:
        what = f"tensor {part.tensors[0]!r}"
    if len(part.tensors) > 1:
        names = [repr(name) for name in part.tensors[:MAX_NAMES]] + ["..."] * (len(part.tensors) > MAX_NAMES)
        what = f"the piece that holds {', '.join(names)}"
    try:
        checksum, num_read = checksum_of(part.path, part.start_bytes, part.num_bytes, is_piece=part.is_piece)
    except OSError as error:
        return f"{part.name}: {what} can't be read: {os.strerror(error.errno or 0)}"
    if num_read != part.num_bytes:
        return f"{part.name}: {what} is cut ({num_read} of {part.num_bytes} bytes)"
    return f"{part.name}: {what} has changed" if checksum != part.checksum else None


def checksum_of(path: Path, start_bytes: int, num_bytes: int, *, is_piece: bool = False) -> tuple[int, int]:
    """Return the CRC-32 of a range of a file, or its `piece_checksum`, and how many bytes of it there are.

    Raises:
        OSError: the disk can't read it.
    """
    buffer = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
    checksum, position, end = 0, start_bytes, start_bytes + num_bytes
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while position < end:
            count = read_all(fd, buffer[: end - position], position)
            piece = buffer[:count]
            checksum = piece_checksum(np.frombuffer(piece, np.uint8)) if is_piece else zlib.crc32(piece, checksum)
            position += count
            if count < len(buffer):
                break
    finally:
        os.close(fd)
    return checksum, position - start_bytes


def _outline(directory: Path, name: str, record: FileRecord, follow_links: bool) -> tuple[list[Part], str | None]:
    """Return the parts of a file whose size and names are right, or what is wrong with them."""
    assert is_plain_name(name), name
    path = directory / name
    try:
        if follow_links:
            path = resolve_inside(directory.resolve(), name).resolve()
        if path.is_symlink() or not path.is_file():
            return [], f"{name} is missing"
        size_bytes = path.stat().st_size
    except (OSError, ModelFileError) as error:
        return [], f"{name} can't be read: {error}"
    if size_bytes != record.size_bytes:
        return [], f"{name} has {size_bytes} bytes, {record.size_bytes} were written"
    if not holds_tensors(name):
        return [Part(path, name, (), 0, size_bytes, record.header_crc32)], None
    try:
        file = TensorFile(path)
    except OSError as error:
        return [], f"{name} can't be read: {error}"
    except ModelFileError as error:
        return [], f"{name}: the header has changed: {error}"
    infos = sorted(file.tensors.values(), key=lambda info: (info.start_bytes, info.num_bytes))
    parts = [Part(path, name, (), 0, file.header_bytes, record.header_crc32)]
    if record.piece_checksums:
        starts = range(file.header_bytes, size_bytes, PIECE_BYTES)
        if len(starts) != len(record.piece_checksums):
            return [], f"{name}: the header has changed: its data starts elsewhere"
        for start, checksum in zip(starts, record.piece_checksums):
            end = min(start + PIECE_BYTES, size_bytes)
            inside = [i.name for i in infos if i.start_bytes < end and start < i.start_bytes + i.num_bytes]
            tensors = tuple(tensor for tensor in inside if not tensor.startswith(PADDING)) or tuple(inside)
            parts.append(Part(path, name, tensors, start, end - start, checksum, is_piece=True))
        return parts, None
    if file.tensors.keys() != record.tensor_crc32.keys():
        return [], f"{name}: the header has changed: it names other tensors"
    parts += [
        Part(path, name, (info.name,), info.start_bytes, info.num_bytes, record.tensor_crc32[info.name])
        for info in infos
    ]
    return parts, None


def forget_cached(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget clean pages of files, so that the next read is the disk's."""
    for path in paths:
        with contextlib.suppress(OSError):  # a hint; reading the file will say what is wrong with it
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                drop_cached(fd, 0, 0)
            finally:
                os.close(fd)
