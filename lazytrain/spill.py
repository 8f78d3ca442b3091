"""Named byte blobs on NVMe. A new version goes to another file; the old one stays whole until the new one is complete.

Files are slots that are used again once nobody reads or maps them, so that after `reserve` no write takes room from
the disk any more: a full disk is found at the start. The store is scratch: nothing in it outlives the process.

A lasting blob starts behind room for a header, in a file of its exact size, so that a checkpoint may take the file as
it is: `link` writes the header and gives the file a second name, and from then on it is never written.

Large blobs move by several threads, past the page cache where a measurement at the start found that faster. What was
written is compared with its checksums as it is read.
"""

import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.durable import (
    explain_os_error,
    make_locked_directory,
    map_private,
    remove_stale_directories,
    try_link,
    write_all,
)
from lazytrain.errors import LazyTrainError, MemoryBudgetError
from lazytrain.store_bench import choose_manner
from lazytrain.store_io import ChangedError, DiskIO, Manner
from lazytrain.store_slots import Slot, SlotPool, count_slots

_STEM = "spill"
DEFAULT_MANNER = Manner(direct=False, num_threads=4)
# From this much reserved on, the second that measuring takes is worth it.
MEASURE_FROM_BYTES = 2 * 2**30


class SpillError(LazyTrainError):
    """A spilled blob that can't be read back."""


class SpillStore:
    """Blobs in a directory of their own under `directory`; threads may use different names at once.

    A blob must not be read while its first version is being written. Left-overs of killed processes are removed.

    Args:
        manner: how to read and write; None = measured by `reserve` if it takes 2 GiB or more, else buffered.
    Attributes:
        path: the store's own directory.
        nvme_read_bytes, nvme_write_bytes: moved so far (mapped reads are not counted).
    Raises:
        MemoryBudgetError: the disk is full, or can't be written.
    """

    def __init__(self, directory: Path | str, manner: Manner | None = None) -> None:
        parent = Path(directory).expanduser()
        self._slots: dict[str, Slot] = {}
        self._is_chosen = manner is not None
        self._io = DiskIO(manner or DEFAULT_MANNER)
        # Reentrant: the garbage collector may end a mapping while this thread holds it.
        self._lock = threading.RLock()
        self.nvme_read_bytes = 0
        self.nvme_write_bytes = 0
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale_directories(parent, _STEM)
            self.path, dir_lock = make_locked_directory(parent, _STEM)
            self._pool = SlotPool(self.path)
            # At the latest when the process ends; what a checkpoint holds has a name there.
            self._remove = weakref.finalize(self, _remove_store, self.path, dir_lock, os.getpid())
        except OSError as error:
            raise MemoryBudgetError(explain_os_error(error, f"Making a spill directory in {parent}", parent)) from error

    @property
    def manner(self) -> Manner:
        """Return how files are read and written."""
        return self._io.manner

    @property
    def reserved_bytes(self) -> int:
        """Return the room that the store's files have on the disk."""
        return self._pool.reserved_bytes

    @property
    def shared_bytes(self) -> int:
        """Return the part of the room that checkpoints hold, or will, beside the present versions of lasting blobs."""
        with self._lock:
            current = list(self._slots.values())
        return self._pool.extra_bytes(current)

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Take room for files of these sizes now.

        A blob that is rewritten needs one file more than its own while the write runs: reserve the sizes of all
        blobs, and once more the largest for each thread that writes. Call it before the first write: it may measure
        the disk, in one of the new files.
        """
        self._choose_manner(self._pool.add(sizes_bytes))

    def reserve_lasting(self, sizes_bytes: Sequence[int], num_checkpoints: int = 0) -> None:
        """Take room for lasting blobs of these sizes, and for those of as many checkpoints; see `reserve`.

        Args:
            sizes_bytes: of every blob with the room before it.
            num_checkpoints: that will hold an older version of every blob beside the present one.
        """
        wanted = count_slots(sizes_bytes, num_checkpoints)
        self._choose_manner(self._pool.add(wanted.elements(), is_lasting=True))

    def restock(self) -> None:
        """Take room for a new version of every lasting blob, where checkpoints hold files and others have gone.

        Raises:
            MemoryBudgetError: the disk is full.
        """
        with self._lock:
            current = list(self._slots.values())
        self._pool.restock(current)

    def _choose_manner(self, slots: Sequence[Slot]) -> None:
        if not self._is_chosen and sum(slot.capacity_bytes for slot in slots) >= MEASURE_FROM_BYTES:
            largest = max(slots, key=lambda slot: slot.capacity_bytes)
            try:
                manner = choose_manner(largest.path, largest.capacity_bytes)
            except OSError as error:
                raise MemoryBudgetError(explain_os_error(error, "Measuring the disk", self.path)) from error
            self._io.close()
            self._io, self._is_chosen = DiskIO(manner), True

    def write(self, name: str, data: Tensor, *, head_bytes: int = 0, sync: bool = False) -> None:
        """Write a new version of a blob; the old one is dropped after.

        Args:
            data: uint8 (n,), contiguous, on the CPU.
            head_bytes: of a lasting blob: the room before it, a multiple of 4096 bytes. 0 = none.
            sync: wait until the disk has it.
        """
        slot = self._pool.take(head_bytes + data.numel(), is_lasting=head_bytes > 0)
        slot.head_bytes, slot.head = head_bytes, b""
        try:
            checksums = self._io.write(slot.path, data, offset=head_bytes, sync=sync)
        except OSError as error:
            self._pool.give_back(slot)
            raise MemoryBudgetError(explain_os_error(error, f"Spilling {name!r}", self.path)) from error
        with self._lock:
            slot.num_bytes, slot.checksums, slot.is_current = data.numel(), checksums, True
            old = self._slots.get(name)
            self._slots[name] = slot
            self.nvme_write_bytes += data.numel()
            if old is not None:
                old.is_current = False
                self._release(old)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a blob's current version into `out`, uint8 (n,), contiguous, on the CPU, of the blob's exact size."""
        with self._use(name) as slot:
            if out.numel() != slot.num_bytes:
                raise SpillError(f"{name!r} has {slot.num_bytes} bytes; the buffer has {out.numel()}.")
            try:
                num_read = self._io.read_into(slot.path, out, slot.checksums, offset=slot.head_bytes)
            except OSError as error:
                raise SpillError(f"Reading {name!r} from {slot.path} failed: {error}. Check the disk.") from error
            except ChangedError as error:
                raise SpillError(
                    f"{name!r} in {slot.path}: {error}. Check the disk and the memory, then resume from the checkpoint."
                ) from error
            if num_read != slot.num_bytes:
                raise SpillError(f"{slot.path} was cut to {num_read} of {slot.num_bytes} bytes by another program.")
        with self._lock:
            self.nvme_read_bytes += num_read

    def link(self, name: str, target: Path, head: bytes) -> tuple[int, ...] | None:
        """Give a lasting blob's file a second name, durable but for the name; it is not written any more.

        Args:
            target: a new name. Whoever has the file under it must not write to it.
            head: what stands before the blob, of the size that `write` was told.
        Returns:
            The blob's checksums, `piece_checksum` of every 8 MiB; None where the file system gives no name there.
        Raises:
            OSError: the header can't be written, or the disk doesn't take what was.
        """
        with self._use(name) as slot:
            assert slot.is_lasting
            assert len(head) == slot.head_bytes
            if slot.head != head:
                assert not slot.was_linked
                assert not slot.is_held
                fd = os.open(slot.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    write_all(fd, memoryview(head))
                    os.ftruncate(fd, slot.capacity_bytes)  # direct writes end with a whole block
                    os.fsync(fd)
                finally:
                    os.close(fd)
                slot.head = head
            if not try_link(slot.path, target):
                return None
            slot.was_linked = True
            return slot.checksums

    def map(self, name: str) -> Tensor:
        """Return a blob's current version as a mapped tensor, uint8 (n,); its file is not used again while that lives.

        Writes to the tensor never reach the file.
        """
        slot = self._acquire(name)
        if slot.num_bytes == 0:
            self._unuse(slot)
            return torch.empty(0, dtype=torch.uint8)
        try:
            fd = os.open(slot.path, os.O_RDONLY)
            try:
                mapping = map_private(fd, slot.head_bytes + slot.num_bytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            self._unuse(slot)
            raise SpillError(f"{name!r} can't be mapped from {slot.path}: {error}.") from error
        weakref.finalize(mapping, self._unuse, slot).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8, offset=slot.head_bytes, count=slot.num_bytes)

    def remove(self, name: str) -> None:
        """Forget a blob; its file serves the next one."""
        with self._lock:
            slot = self._slots.pop(name, None)
            if slot is not None:
                slot.is_current = False
                self._release(slot)

    def close(self) -> None:
        """Delete all files."""
        with self._lock:
            self._slots.clear()
        self._io.close()
        self._remove()

    @contextmanager
    def _use(self, name: str) -> Iterator[Slot]:
        slot = self._acquire(name)
        try:
            yield slot
        finally:
            self._unuse(slot)

    def _acquire(self, name: str) -> Slot:
        with self._lock:
            if name not in self._slots:
                raise SpillError(f"Nothing was spilled under the name {name!r}.")
            slot = self._slots[name]
            slot.num_users += 1
            return slot

    def _unuse(self, slot: Slot) -> None:
        with self._lock:
            slot.num_users -= 1
            if not slot.is_current:
                self._release(slot)

    def _release(self, slot: Slot) -> None:
        if slot.num_users == 0:
            self._pool.give_back(slot)


def _remove_store(path: Path, dir_lock: int | None, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    shutil.rmtree(path, ignore_errors=True)
    if dir_lock is not None:
        os.close(dir_lock)
