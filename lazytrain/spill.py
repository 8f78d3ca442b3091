"""Named byte blobs on NVMe. A new version goes to another file; the old one stays whole until the new one is complete.

Files are slots that are used again once nobody reads or maps them, so that after `reserve` no write takes room from
the disk any more: a full disk is found at the start. The store is scratch: nothing in it outlives the process.

Large blobs move by several threads, past the page cache where a measurement at the start found that faster. What was
written is compared with its checksums as it is read.
"""

import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.durable import (
    create_file,
    explain_os_error,
    make_locked_directory,
    map_private,
    preallocate,
    remove_stale_directories,
)
from lazytrain.errors import LazyTrainError, MemoryBudgetError
from lazytrain.store_bench import choose_manner
from lazytrain.store_io import ChangedError, DiskIO, Manner

_STEM = "spill"
DEFAULT_MANNER = Manner(direct=False, num_threads=4)
# From this much reserved on, the second that measuring takes is worth it.
MEASURE_FROM_BYTES = 2 * 2**30


class SpillError(LazyTrainError):
    """A spilled blob that can't be read back."""


@dataclass(eq=False, kw_only=True)
class _Slot:
    """A file of the store; `num_users` counts running reads and live mappings of its present content."""

    path: Path
    capacity_bytes: int
    num_bytes: int = 0
    checksums: tuple[int, ...] = ()
    num_users: int = 0
    is_current: bool = False


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
        self._slots: dict[str, _Slot] = {}
        self._free: list[_Slot] = []
        self._num_slots = 0
        self._reserved_bytes = 0
        self._is_chosen = manner is not None
        self._io = DiskIO(manner or DEFAULT_MANNER)
        # Reentrant: the garbage collector may end a mapping while this thread holds it.
        self._lock = threading.RLock()
        self.nvme_read_bytes = 0
        self.nvme_write_bytes = 0
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale_directories(parent, _STEM)
            self.path, self._dir_lock = make_locked_directory(parent, _STEM)
        except OSError as error:
            raise MemoryBudgetError(explain_os_error(error, f"Making a spill directory in {parent}", parent)) from error

    @property
    def manner(self) -> Manner:
        """Return how files are read and written."""
        return self._io.manner

    @property
    def reserved_bytes(self) -> int:
        """Return the room that the store's files have on the disk."""
        with self._lock:
            return self._reserved_bytes

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Take room for files of these sizes now.

        A blob that is rewritten needs one file more than its own while the write runs: reserve the sizes of all
        blobs, and once more the largest for each thread that writes. Call it before the first write: it may measure
        the disk, in one of the new files.
        """
        slots = [self._make_slot(size) for size in sizes_bytes]
        if not self._is_chosen and sum(slot.capacity_bytes for slot in slots) >= MEASURE_FROM_BYTES:
            largest = max(slots, key=lambda slot: slot.capacity_bytes)
            try:
                manner = choose_manner(largest.path, largest.capacity_bytes)
            except OSError as error:
                raise MemoryBudgetError(explain_os_error(error, "Measuring the disk", self.path)) from error
            self._io.close()
            self._io, self._is_chosen = DiskIO(manner), True
        with self._lock:
            self._free += slots

    def write(self, name: str, data: Tensor, *, sync: bool = False) -> None:
        """Write a new version of a blob; the old one is dropped after.

        Args:
            data: uint8 (n,), contiguous, on the CPU.
            sync: wait until the disk has it.
        """
        slot = self._take_slot(data.numel())
        try:
            checksums = self._io.write(slot.path, data, sync=sync)
        except OSError as error:
            with self._lock:
                self._free.append(slot)
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
                num_read = self._io.read_into(slot.path, out, slot.checksums)
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
                mapping = map_private(fd, slot.num_bytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            self._unuse(slot)
            raise SpillError(f"{name!r} can't be mapped from {slot.path}: {error}.") from error
        weakref.finalize(mapping, self._unuse, slot).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8)

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
            self._free.clear()
        self._io.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._dir_lock is not None:
            os.close(self._dir_lock)
            self._dir_lock = None

    @contextmanager
    def _use(self, name: str) -> Iterator[_Slot]:
        slot = self._acquire(name)
        try:
            yield slot
        finally:
            self._unuse(slot)

    def _acquire(self, name: str) -> _Slot:
        with self._lock:
            if name not in self._slots:
                raise SpillError(f"Nothing was spilled under the name {name!r}.")
            slot = self._slots[name]
            slot.num_users += 1
            return slot

    def _unuse(self, slot: _Slot) -> None:
        with self._lock:
            slot.num_users -= 1
            if not slot.is_current:
                self._release(slot)

    def _release(self, slot: _Slot) -> None:
        if slot.num_users == 0:
            self._free.append(slot)

    def _take_slot(self, num_bytes: int) -> _Slot:
        """Return the best fitting free file, or a new one where none fits without much waste."""
        with self._lock:
            fitting = [slot for slot in self._free if num_bytes <= slot.capacity_bytes <= num_bytes + num_bytes // 4]
            if fitting:
                best = min(fitting, key=lambda slot: slot.capacity_bytes)
                self._free.remove(best)
                return best
        try:
            return self._make_slot(num_bytes)
        except MemoryBudgetError:
            # Files of other sizes may hold the room that is missing.
            with self._lock:
                unused, self._free = self._free, []
                self._reserved_bytes -= sum(slot.capacity_bytes for slot in unused)
            for slot in unused:
                slot.path.unlink(missing_ok=True)
            return self._make_slot(num_bytes)

    def _make_slot(self, num_bytes: int) -> _Slot:
        with self._lock:
            path = self.path / f"slot_{self._num_slots:06d}"
            self._num_slots += 1
        try:
            fd = create_file(path)
            try:
                preallocate(fd, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            doing = f"Taking {num_bytes} bytes for a spill file"
            raise MemoryBudgetError(explain_os_error(error, doing, self.path)) from error
        with self._lock:
            self._reserved_bytes += num_bytes
        return _Slot(path=path, capacity_bytes=num_bytes)
