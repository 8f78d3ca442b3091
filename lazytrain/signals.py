"""Stop at the end of a step on SIGTERM or Ctrl-C; a second signal ends the process at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """Turn the first SIGTERM or SIGINT into a flag that the training loop checks between steps.

    The first signal prints one line with the time that saving takes at most; the second ends the process at once, also
    while the main thread is inside compiled code (a watching thread sees it). The exit code is the first signal's, 143
    or 130. Outside the main thread, where Python allows no handlers, this does nothing.

    Args:
        bound_s: returns the longest time until the state is saved, seconds, or None where it is not known yet.
    Example:
        >>> with GracefulStop(lambda: 2 * step_s + save_s) as stop:
        ...     while not stop.requested: step()
        >>> save(); sys.exit(stop.exit_code)
    """

    def __init__(self, bound_s: Callable[[], float | None] = lambda: None) -> None:
        self._bound_s = bound_s
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._old_wakeup_fd = -1
        self._pipe = (-1, -1)
        self._watcher: threading.Thread | None = None
        self._lock = threading.RLock()
        self._num_handled = 0
        self._stops_at_once = False
        self._signal = 0

    @property
    def requested(self) -> bool:
        """Return whether a signal came."""
        return self._signal != 0

    @property
    def exit_code(self) -> int:
        """Return 143 after SIGTERM, 130 after SIGINT, 0 without a signal."""
        return 128 + self._signal if self._signal else 0

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Mark a phase with nothing to save (planning, loading, compiling): a signal raises SystemExit there."""
        self._exit_if_requested()
        self._stops_at_once = True
        try:
            yield
        finally:
            self._stops_at_once = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(self._pipe[0], True)
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="signals")
            self._watcher.start()
            self._old_handlers = {number: signal.signal(number, self._handle) for number in _SIGNALS}
            self._old_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            # A forked worker would write its signals into the same pipe, where they would count as a second one.
            os.register_at_fork(after_in_child=self._restore)
        return self

    def __exit__(self, *error: object) -> None:
        if self._watcher is None:
            return
        self._restore()
        os.close(self._pipe[1])
        self._watcher.join()
        os.close(self._pipe[0])
        self._watcher = None

    def _restore(self) -> None:
        if self._watcher is not None:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        self._num_handled += 1
        if self._num_handled > 1:
            os._exit(self.exit_code)
        if self._stops_at_once:
            self._exit_if_requested()

    def _watch(self) -> None:
        """Count signals as the C handler sees them, which is before the main thread's next line of Python."""
        num_seen = 0
        while numbers := os.read(self._pipe[0], 64):
            for number in numbers:
                if number in _SIGNALS:
                    num_seen += 1
                    self._note(number)
                    if num_seen > 1:
                        os._exit(self.exit_code)

    def _note(self, number: int) -> None:
        """Set the flag and print the line, once."""
        with self._lock:
            if self._signal:
                return
            self._signal = number
        name = signal.Signals(number).name
        if self._stops_at_once:
            text = f"{name}: stopping; nothing to save yet."
        else:
            bound_s = self._bound_s()
            within = f" within about {bound_s:.0f} s" if bound_s is not None else ""
            text = f"{name}: stopping after this step, the state is saved{within}. A second signal exits at once."
        # Not print: a handler may interrupt a print of the main thread.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())

    def _exit_if_requested(self) -> None:
        if self.requested:
            sys.exit(self.exit_code)
