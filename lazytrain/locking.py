"""One process at a time in a run directory.

The lock is a flock on a file, not the file itself: the kernel drops it with the process, so that a lock left by
kill -9 is simply taken over.
"""

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Self

from lazytrain.errors import RunLockedError

LOCK_FILE = "run.lock"
_MAX_NOTE_BYTES = 65536


class RunLock:
    """Hold a run directory, as a context manager.

    Raises (on entry):
        RunLockedError: another process holds it; the text names its pid, host, start and command.
    Example:
        >>> with RunLock(Path("runs/first")):
        ...     train()
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._fd = -1

    def __enter__(self) -> Self:
        path = self.run_dir / LOCK_FILE
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise RunLockedError(
                f"{path} can't be made: {os.strerror(error.errno or 0)}. Choose another one."
            ) from error
        try:
            _lock(fd, self.run_dir)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(_describe_self()).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        # A forked child (a data loader's worker) shares the lock and would hold it on after this process is killed.
        os.register_at_fork(after_in_child=self._close)
        return self

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int, run_dir: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunLockedError(
            f"{run_dir} is in use by {_describe_owner(fd)}. Wait for it, or choose another run."
        ) from None
    except OSError as error:
        raise RunLockedError(f"{run_dir} is on a file system without locks ({error}). Choose a local disk.") from error


def _describe_self() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(sys.argv)[:500],
    }


def _describe_owner(fd: int) -> str:
    """Say who holds the lock; its note may be half written at this moment."""
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return f"process {note['pid']} on {note['host']}, started {note['started']} ({note['command']})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
