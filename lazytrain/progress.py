"""Progress of long work: a tqdm bar on a terminal, plain lines with rate and ETA elsewhere."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

PLAIN_INTERVAL_S = 10.0
REDRAW_INTERVAL_S = 0.5
NARROWEST = 20  # columns: less is no width, but a terminal that tells none


class Progress:
    """One bar, or its plain lines. Use `progress_bar` to make one."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO, initial: int, interval_s: float) -> None:
        self._label, self._total, self._unit, self._stream = label, total, unit, stream
        self._done, self._initial, self._interval_s = initial, initial, interval_s
        self._start_s = self._last_s = time.perf_counter()
        self._bar = None
        self._note = ""
        self._notes: list[tqdm[object]] = []  # a line below the bar each
        if stream.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=label, unit=unit, file=stream, dynamic_ncols=True)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more units of work; `note` stands below the bar, or at the end of the line.

        0 units show that work goes on inside of one.
        """
        self._done += count
        self._note = note
        now_s = time.perf_counter()
        if self._bar is not None:
            drawn = self._bar.update(count)  # now, and not too soon after the last time
            if not drawn and count == 0 and now_s - self._last_s >= REDRAW_INTERVAL_S:
                drawn = self._bar.refresh()
            if drawn:
                self._last_s = now_s
                self._show()
            return
        if now_s - self._last_s >= self._interval_s or self._done == self._total:
            self._last_s = now_s
            self.write(self._line(now_s, note))

    def write(self, line: str) -> None:
        """Print one line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar; it stays on the screen, as its last note does."""
        if self._bar is not None:
            self._show()
            for line in (self._bar, *self._notes):
                line.close()

    def _show(self) -> None:
        """Write the note below the bar, on as many lines as the terminal's width needs."""
        width = _columns(self._stream)
        lines = textwrap.wrap(self._note, width - 1, break_on_hyphens=False)
        while len(self._notes) < len(lines):
            below = len(self._notes) + 1
            self._notes.append(tqdm(bar_format="{desc}", position=below, file=self._stream, ncols=width, leave=True))
        for index, row in enumerate(self._notes):
            row.ncols = width
            row.set_description_str(lines[index] if index < len(lines) else "")

    def _line(self, now_s: float, note: str) -> str:
        elapsed_s = now_s - self._start_s
        rate = (self._done - self._initial) / elapsed_s if elapsed_s > 0 else 0.0
        eta = duration((self._total - self._done) / rate) if rate > 0 else "?"
        head = f"{self._label} {self._done}/{self._total} {self._unit}, {rate:.3g} {self._unit}/s, ETA {eta}"
        return f"{head}, {note}" if note else head


def _columns(stream: TextIO) -> int:
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        width = 0
    return width if width >= NARROWEST else 80


@contextmanager
def progress_bar(
    label: str,
    total: int,
    *,
    unit: str,
    stream: TextIO | None = None,
    initial: int = 0,
    interval_s: float = PLAIN_INTERVAL_S,
) -> Iterator[Progress]:
    """Show the progress of a piece of work.

    Args:
        total: units of work in all; `initial` of them were done before (a resumed run).
        stream: where to show it; None = standard error.
        interval_s: least time between two plain lines.
    """
    progress = Progress(label, total, unit, stream or sys.stderr, initial, interval_s)
    try:
        yield progress
    finally:
        progress.close()


def duration(seconds: float) -> str:
    """Return a time for people: 45s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
