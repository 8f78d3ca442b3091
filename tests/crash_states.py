"""Record file operations, and build the directories that a power loss may leave of them.

The model is the weakest that POSIX allows. An operation is done in memory at once; on the disk it is certain only once
a later sync covers it: the sync of a file covers its bytes, the sync of a directory its names (files made, renamed and
removed in it). Whatever is not covered may be there or not, each on its own and in any order: a rename without the
bytes of the file, bytes without the name.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lazytrain import durable

# How the uncertain operations fared: persisted by kind, or by a seeded coin.
NAMES_FIRST, DATA_FIRST, NOTHING, ALL = "names first", "data first", "nothing", "all"


@dataclass(eq=False)
class Node:
    """A file or a directory, known by the number that the file system gave it."""

    is_dir: bool


@dataclass
class Operation:
    """One change. `names`: the entries that it sets together; else `data` at `offset` of `node`, or its new length."""

    names: list[tuple[Node, str, Node | None]] = field(default_factory=list)
    node: Node | None = None
    offset: int = 0
    data: bytes = b""
    num_bytes: int | None = None
    synced_by: int | None = None  # index of the operation that made it certain
    is_end: bool = False  # a marker: a save has returned


class Recorder:
    """All changes below a directory that exists and is empty when the recording starts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Node(True)
        self.operations: list[Operation] = []
        self._nodes: dict[int, Node] = {root.stat().st_ino: self.top}

    def mark(self) -> None:
        """Note that a save has returned: from here on its checkpoint must survive."""
        self.operations.append(Operation(is_end=True))

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in (
                "open",
                "pwrite",
                "ftruncate",
                "posix_fallocate",
                "fsync",
                "rename",
                "mkdir",
                "unlink",
                "rmdir",
                "link",
            ):
                patch.setattr(os, name, self._wrap(getattr(os, name), getattr(self, f"_{name}")))
            patch.setattr(durable, "_exchange", self._wrap(durable._exchange, self._exchange))
            yield

    def _wrap(self, real: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before = note(*args, **options)
            result = real(*args, **options)
            if before is not None:
                before(result)
            return result

        return call

    def _entry(self, path: Any, dir_fd: int | None) -> tuple[Node, str] | None:
        """Return the directory and the name of a path, or None where it lies outside the recorded one."""
        path = Path(os.fsdecode(path))
        parent = os.fstat(dir_fd) if dir_fd is not None else path.parent.stat()
        node = self._nodes.get(parent.st_ino)
        return None if node is None else (node, path.name)

    def _node(self, path: Any, dir_fd: int | None = None) -> Node:
        return self._nodes[os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino]

    def _add(self, **values: Any) -> None:
        self.operations.append(Operation(**values))

    def _make(self, path: Any, dir_fd: int | None, is_dir: bool) -> Callable[[Any], None] | None:
        entry = self._entry(path, dir_fd)
        if entry is None:
            return None

        def after(result: Any) -> None:
            node = Node(is_dir)
            self._nodes[os.stat(path, dir_fd=dir_fd).st_ino] = node
            self._add(names=[(*entry, node)])

        return after

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        return self._make(path, dir_fd, False) if flags & os.O_CREAT and not os.path.exists(path) else None

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        return None if os.path.exists(path) else self._make(path, dir_fd, True)

    def _pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._add(node=self._nodes[os.fstat(fd).st_ino], offset=offset, data=bytes(data))

    def _ftruncate(self, fd: int, num_bytes: int) -> None:
        self._add(node=self._nodes[os.fstat(fd).st_ino], num_bytes=num_bytes)

    def _posix_fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        self._add(node=self._nodes[os.fstat(fd).st_ino], num_bytes=num_bytes)

    def _fsync(self, fd: int) -> None:
        node, now = self._nodes.get(os.fstat(fd).st_ino), len(self.operations)
        if node is None:  # a directory above the recorded one
            return
        for operation in self.operations:
            covers_names = node.is_dir and any(parent is node for parent, _, _ in operation.names)
            if operation.synced_by is None and (operation.node is node or covers_names):
                operation.synced_by = now

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        entry = self._entry(path, dir_fd)
        if entry is not None:
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            if status.st_nlink == 1 or self._nodes[status.st_ino].is_dir:
                del self._nodes[status.st_ino]  # the kernel may give the number to another file
            self._add(names=[(*entry, None)])

    _rmdir = _unlink

    def _rename(self, source: Any, target: Any) -> None:
        old, new = self._entry(source, None), self._entry(target, None)
        assert old is not None
        assert new is not None
        self._add(names=[(*old, None), (*new, self._node(source))])

    def _link(self, source: Any, target: Any) -> None:
        new = self._entry(target, None)
        assert new is not None
        self._add(names=[(*new, self._node(source))])

    def _exchange(self, first: Path, second: Path) -> None:
        a, b = self._entry(first, None), self._entry(second, None)
        assert a is not None
        assert b is not None
        self._add(names=[(*a, self._node(second)), (*b, self._node(first))])


def crash_states(operations: list[Operation], seed: int, num_random: int) -> Iterator[tuple[int, str, list[Operation]]]:
    """Yield (operations done, manner, operations on the disk) for a power loss after every operation."""
    rng = random.Random(seed)
    for count in range(len(operations) + 1):
        done = operations[:count]
        for manner in (NAMES_FIRST, DATA_FIRST, NOTHING, ALL, *(f"coin {i}" for i in range(num_random))):
            kept = []
            for operation in done:
                certain = operation.synced_by is not None and operation.synced_by <= count
                is_name = bool(operation.names)
                lucky = {NAMES_FIRST: is_name, DATA_FIRST: not is_name, NOTHING: False, ALL: True}
                if certain or lucky.get(manner, rng.random() < 0.5):
                    kept.append(operation)
            yield count, manner, kept


def build_state(root: Path, top: Node, operations: list[Operation]) -> None:
    """Make in `root` what the disk holds after `operations`."""
    entries: dict[Node, dict[str, Node]] = {}
    contents: dict[Node, bytearray] = {}
    for operation in operations:
        for parent, name, node in operation.names:
            children = entries.setdefault(parent, {})
            if node is None:
                children.pop(name, None)
            else:
                children[name] = node
        if operation.node is not None:
            content = contents.setdefault(operation.node, bytearray())
            end = operation.num_bytes if operation.num_bytes is not None else operation.offset + len(operation.data)
            content.extend(bytes(max(0, end - len(content))))
            content[operation.offset : operation.offset + len(operation.data)] = operation.data

    def place(path: Path, node: Node) -> None:
        if not node.is_dir:
            path.write_bytes(contents.get(node, b""))
            return
        path.mkdir(exist_ok=True)
        for name, child in entries.get(node, {}).items():
            place(path / name, child)

    place(root, top)
