"""Progress: a bar with its note below on a terminal of any width, plain lines elsewhere."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading

import pytest

from lazytrain import progress
from lazytrain.progress import progress_bar

NOTE = "loss 7.0144, norm 13.45, lr 7.20e-04, 4,228 tokens/s (4,831 with padding), 0.0219 TFLOP/s, bound by compute"


def show(columns: int, num_steps: int = 3, count: int = 1) -> str:
    """Return what a bar of some steps writes to a terminal of so many columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(reader, 65536):
                pieces.append(piece)
        except OSError:  # the other side is closed
            return

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        with progress_bar("training", num_steps, unit="steps", stream=stream) as bar:
            for step in range(num_steps):
                bar.write(f"said at {step}")
                bar.advance(count, note=f"step {step}, {NOTE}")
    thread.join()
    os.close(reader)
    return b"".join(pieces).decode()


@pytest.mark.parametrize("columns", [0, 40, 80, 110, 200])
def test_a_terminal_shows_the_whole_last_note_whatever_its_width(columns: int) -> None:
    text = show(columns)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[A-Z]", "", text))
    assert max(len(line) for line in lines) <= (columns or 80)
    shown = " ".join(" ".join(lines).split())
    assert f"step 2, {NOTE}" in shown
    assert "3/3" in shown
    assert "said at 1" in shown


def test_work_inside_of_a_unit_is_shown_without_counting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_INTERVAL_S", 0.0)
    shown = show(120, count=0)
    assert f"step 2, {NOTE}" in " ".join(shown.split())
    assert "1/3" not in shown
    stream = io.StringIO()
    with progress_bar("answers", 3, unit="batches", stream=stream, interval_s=0.0) as bar:
        bar.advance(0, note="token 7 of 256")
    assert stream.getvalue() == "answers 0/3 batches, 0 batches/s, ETA ?, token 7 of 256\n"


def test_elsewhere_lines_are_whole_and_plain() -> None:
    stream = io.StringIO()
    with progress_bar("training", 2, unit="steps", stream=stream, interval_s=0.0) as bar:
        for _ in range(2):
            bar.advance(note=NOTE)
    lines = stream.getvalue().splitlines()
    assert [line.endswith(NOTE) for line in lines] == [True, True]
    assert not set(stream.getvalue()) & {"\r", "\x1b"}
