"""Files that survive a crash: whole writes, room taken in advance, and directories that appear whole or not at all.

A directory is staged beside its target under a hidden name, synced, and renamed. The stager holds a flock on it, so
that a later run can tell a left-over of a killed process (lock free: removed) from one still being written.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

# One write call moves at most 2,147,479,552 bytes; smaller pieces also let a signal in between.
WRITE_PIECE_BYTES = 64 * 2**20
STREAM_PIECE_BYTES = 8 * 2**20
GIB = 2**30

STAGED_MARK = ".lazytrain-tmp-"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def explain_os_error(error: OSError, doing: str, directory: Path) -> str:
    """Return a sentence on a failed write: what was being done, why it failed, the room left and a remedy."""
    text = f"{doing} failed: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in _NO_ROOM:
        text += f" ({_free_text(directory)}). Free some room there, or choose a directory on another disk"
    return text + "."


def _free_text(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / GIB:.2f} GiB free in {directory}"
    except OSError:
        return f"in {directory}"


def write_all(fd: int, data: memoryview, offset: int = 0) -> None:
    """Write all of `data` (bytes) at `offset`, in as many calls as it takes."""
    while len(data):
        num_written = os.pwrite(fd, data[:WRITE_PIECE_BYTES], offset)
        if num_written == 0:
            raise OSError(errno.EIO, "a write moved no bytes")
        data = data[num_written:]
        offset += num_written


def stream_out(fd: int, data: memoryview, offset: int = 0) -> None:
    """Write all of `data` at `offset`, piece by piece; the disk starts on each at once, and its page cache is dropped.

    So the disk works while the next piece is copied (and checksums are taken), a sync at the end finds little left,
    and a large file drives nothing else out of the page cache.
    """
    for start in range(0, len(data), STREAM_PIECE_BYTES):
        piece = data[start : start + STREAM_PIECE_BYTES]
        write_all(fd, piece, offset + start)
        drop_cached(fd, offset + start, len(piece))


def drop_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Start writing a range of a file out and drop what is clean of it from the page cache; only a hint."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def read_all(fd: int, out: memoryview, offset: int = 0) -> int:
    """Fill `out` (bytes) from `offset`; return the number of bytes read, less than asked only at the file's end."""
    num_read = 0
    while num_read < len(out):
        count = os.preadv(fd, [out[num_read : num_read + WRITE_PIECE_BYTES]], offset + num_read)
        if count == 0:
            break
        num_read += count
    return num_read


def preallocate(fd: int, num_bytes: int) -> None:
    """Take the room of a file from the disk now, so that a full disk is found before the first byte.

    Where the file system can't, the file only gets its length.
    """
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise
        os.ftruncate(fd, num_bytes)


def map_private(fd: int, num_bytes: int) -> mmap.mmap:
    """Map the start of a file that was opened for reading; a write to the mapping copies the page, never the file."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # newer than Python 3.11
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def create_file(path: Path) -> int:
    """Open a new file for writing; an existing one is an error, never overwritten."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def write_file(path: Path, data: bytes) -> None:
    """Write a new, synced file."""
    fd = create_file(path)
    try:
        write_all(fd, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)


def try_link(source: Path, target: Path) -> bool:
    """Give a file a second name; return False where that can't be: another file system, or one that has no such names.

    Raises:
        OSError: any other failure, such as a full disk.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def can_link(source_dir: Path, target_dir: Path) -> bool:
    """Try whether a file in one directory may get a second name in the other; both exist."""
    stem = f"{STAGED_MARK}{uuid.uuid4().hex[:12]}"
    source, target = source_dir / stem, target_dir / stem
    os.close(create_file(source))
    try:
        return try_link(source, target)
    finally:
        target.unlink(missing_ok=True)
        source.unlink()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_with_ancestors(path: Path) -> None:
    """Make the names in a directory durable, and the directory's own, and those of all above it.

    Whoever made a run directory made it without a sync: after a power loss a checkpoint in it would be safe and out of
    reach. Directories above it that may not be read are taken to be old.
    """
    sync_directory(path)
    for ancestor in path.absolute().parents:
        with contextlib.suppress(PermissionError):
            sync_directory(ancestor)


def lock_directory(path: Path) -> int | None:
    """Take a directory's lock; return its file descriptor, or None where another process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def temporary_name(parent: Path, stem: str) -> Path:
    """Return a new path that `remove_stale_directories` removes, once nobody holds its lock."""
    return parent / f"{stem}{STAGED_MARK}{uuid.uuid4().hex[:12]}"


def make_locked_directory(parent: Path, stem: str) -> tuple[Path, int | None]:
    """Make a directory of our own in `parent`, marked as temporary; return it and its lock."""
    path = temporary_name(parent, stem)
    path.mkdir()
    return path, lock_directory(path)


def remove_stale_directories(parent: Path, stem: str) -> None:
    """Remove what killed processes left in `parent`: names that begin with `stem`, carry our mark and are unlocked."""
    for path in parent.iterdir():
        if not path.name.startswith(stem) or STAGED_MARK not in path.name or path.is_symlink() or not path.is_dir():
            continue
        lock = lock_directory(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def stage_directory(target: Path, keep_old: Path | None = None) -> Iterator[Path]:
    """Give an empty directory that becomes `target`, durably and at once, when the block ends without an error.

    An older `target` stays whole until then and is removed after. On an error the staged directory is removed.

    Args:
        keep_old: where to move an older `target` instead, beside it; nothing has that name yet. It never has another:
            a kill leaves it there or in its place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{target.name}"
    remove_stale_directories(target.parent, stem)
    staged, lock = make_locked_directory(target.parent, stem)
    try:
        yield staged
        sync_directory(staged)
        publish(staged, target, keep_old)
        sync_with_ancestors(target.parent)
    finally:
        # After an exchange this name holds the old directory, if it isn't kept; after an error, the unfinished one.
        shutil.rmtree(staged, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def publish(staged: Path, target: Path, keep_old: Path | None = None) -> None:
    """Rename `staged` to `target`; an existing target changes places with it in one atomic call.

    Args:
        keep_old: the existing target gets this name instead, and at no moment another one.
    """
    if not os.path.lexists(target):
        os.rename(staged, target)
        return
    if keep_old is not None:
        os.rename(staged, keep_old)  # first, so that the exchange gives the old one this name
    if _exchange(keep_old or staged, target):
        return
    # No such call on this file system: for an instant `target` is absent, and the old one has the name `aside`.
    if keep_old is not None:
        os.rename(keep_old, staged)
    aside = keep_old or temporary_name(target.parent, f".{target.name}")
    os.rename(target, aside)
    try:
        os.rename(staged, target)
    except OSError:
        os.rename(aside, target)
        raise
    if keep_old is None:
        os.rename(aside, staged)


def _exchange(first: Path, second: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    return renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def discard_directory(path: Path) -> None:
    """Delete a directory of our own so that a crash on the way leaves no half of it under its name."""
    trash = temporary_name(path.parent, f".{path.name}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)
