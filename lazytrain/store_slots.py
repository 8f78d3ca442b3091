"""The files of a spill store: made once, used again and again, each by one version of one blob at a time.

    for lasting blobs    the blob's exact size, headroom included, so that a checkpoint may take the file as it is
    for all others       any size that fits without much waste

A lasting blob's file that has a second name is never given out: the file system's count of its names decides, so that
nobody need say when a checkpoint is gone, and a copy that a user made by links is as safe as a checkpoint. What a
checkpoint had is not written after that either, as somebody may still read it: a new file takes its room.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazytrain.durable import create_file, explain_os_error, preallocate
from lazytrain.errors import MemoryBudgetError

# Threads that write lasting blobs, each with a new version under way: the updater's and the writer's.
NUM_WRITERS = 2


@dataclass(eq=False, kw_only=True)
class Slot:
    """A file.

    Attributes:
        is_lasting: for lasting blobs, which fill it exactly.
        head_bytes, head: room before the blob, and what was written there since the blob was.
        num_users: running reads and live mappings of the present content.
        is_current: its content is the newest version of a blob.
        was_linked: a checkpoint has or had the file; it is never written again.
    """

    path: Path
    capacity_bytes: int
    is_lasting: bool
    head_bytes: int = 0
    head: bytes = b""
    num_bytes: int = 0
    checksums: tuple[int, ...] = ()
    num_users: int = 0
    is_current: bool = False
    was_linked: bool = False

    @property
    def is_held(self) -> bool:
        """Return whether the file has another name than its own, or none: then it must not be written."""
        try:
            return os.stat(self.path).st_nlink != 1
        except FileNotFoundError:
            return True


def count_slots(sizes_bytes: Iterable[int], num_checkpoints: int) -> Counter[int]:
    """Return size -> number of files for lasting blobs of these sizes, those of some checkpoints, and new versions."""
    wanted = Counter({size: count * (1 + num_checkpoints) for size, count in Counter(sizes_bytes).items()})
    return wanted + Counter(dict.fromkeys(wanted, NUM_WRITERS))


class SlotPool:
    """The files in `directory`; several threads may use it at once.

    Raises (all that makes files):
        MemoryBudgetError: the disk is full, or can't be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._free: list[Slot] = []
        self._num_made = 0
        self._reserved_bytes = self._lasting_bytes = 0
        # Reentrant: the garbage collector may give a file back while this thread holds it.
        self._lock = threading.RLock()

    @property
    def reserved_bytes(self) -> int:
        """Return the room that the files have on the disk."""
        with self._lock:
            return self._reserved_bytes

    def extra_bytes(self, current: Sequence[Slot]) -> int:
        """Return the room for lasting blobs beyond their present versions and the next: what checkpoints hold or will.

        Args:
            current: the files of the blobs' present versions.
        """
        with self._lock:
            total_bytes = self._lasting_bytes
        wanted = count_slots((slot.capacity_bytes for slot in current if slot.is_lasting), 0)
        return total_bytes - sum(size * count for size, count in wanted.items())

    def add(self, sizes_bytes: Iterable[int], *, is_lasting: bool = False) -> list[Slot]:
        """Make files of these sizes and return them; they are free."""
        slots = []
        for size in sizes_bytes:
            slots.append(self._make(size, is_lasting))
            self.give_back(slots[-1])
        return slots

    def restock(self, current: Sequence[Slot]) -> None:
        """Make what is missing for a new version of every lasting blob: some files are held, and others have gone.

        First the room of those that checkpoints had and nobody holds any more goes to as many new ones.

        Args:
            current: the files of the blobs' present versions.
        """
        self.add(self._drop_released(), is_lasting=True)
        wanted = count_slots((slot.capacity_bytes for slot in current if slot.is_lasting), 0)
        with self._lock:
            free = [slot for slot in self._free if slot.is_lasting and not (slot.was_linked or slot.is_held)]
        self.add((wanted - Counter(slot.capacity_bytes for slot in free)).elements(), is_lasting=True)

    def take(self, num_bytes: int, *, is_lasting: bool) -> Slot:
        """Return the best fitting free file, or a new one where none fits without much waste."""
        limit_bytes = num_bytes if is_lasting else num_bytes + num_bytes // 4
        with self._lock:
            fitting = [
                slot
                for slot in self._free
                if slot.is_lasting == is_lasting and num_bytes <= slot.capacity_bytes <= limit_bytes
            ]
            for slot in sorted(fitting, key=lambda slot: slot.capacity_bytes):
                if not (is_lasting and (slot.was_linked or slot.is_held)):
                    self._free.remove(slot)
                    return slot
        if is_lasting:
            self._drop_released(num_bytes, at_most=1)
        try:
            return self._make(num_bytes, is_lasting)
        except MemoryBudgetError:
            # Files of other sizes may hold the room that is missing; those of lasting blobs will be needed themselves.
            with self._lock:
                self._drop([slot for slot in self._free if not slot.is_lasting])
            return self._make(num_bytes, is_lasting)

    def give_back(self, slot: Slot) -> None:
        """Note that nobody needs the content of a file any more."""
        with self._lock:
            self._free.append(slot)

    def _drop_released(self, num_bytes: int | None = None, at_most: int | None = None) -> list[int]:
        """Delete files, of one size or all, that checkpoints had and nobody holds any more; return their sizes."""
        with self._lock:
            released = [
                slot
                for slot in self._free
                if slot.was_linked and num_bytes in (None, slot.capacity_bytes) and not slot.is_held
            ][:at_most]
            self._drop(released)
        return [slot.capacity_bytes for slot in released]

    def _drop(self, slots: Sequence[Slot]) -> None:
        """Delete free files; the caller holds the lock."""
        for slot in slots:
            slot.path.unlink(missing_ok=True)
            self._free.remove(slot)
            self._reserved_bytes -= slot.capacity_bytes
            self._lasting_bytes -= slot.capacity_bytes * slot.is_lasting

    def _make(self, num_bytes: int, is_lasting: bool) -> Slot:
        with self._lock:
            path = self._directory / f"slot_{self._num_made:06d}"
            self._num_made += 1
        try:
            fd = create_file(path)
            try:
                preallocate(fd, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            doing = f"Taking {num_bytes} bytes for a spill file"
            raise MemoryBudgetError(explain_os_error(error, doing, self._directory)) from error
        with self._lock:
            self._reserved_bytes += num_bytes
            self._lasting_bytes += num_bytes * is_lasting
        return Slot(path=path, capacity_bytes=num_bytes, is_lasting=is_lasting)
