"""A step's timeline as a trace file for chrome://tracing or Perfetto."""

import json
from collections.abc import Iterable
from pathlib import Path

from lazytrain.account import AnySpan
from lazytrain.lanes import QUEUE_NAMES


def write_trace(path: Path, spans: Iterable[AnySpan]) -> None:
    """Write spans as complete events of the trace event format, one thread a queue; times in microseconds."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": queue}}
        for i, queue in enumerate(QUEUE_NAMES)
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": QUEUE_NAMES.index(span.queue),
            "ts": round(span.start_ms * 1e3, 1),
            "dur": round((span.end_ms - span.start_ms) * 1e3, 1),
            "args": {"unit": span.unit},
        }
        for span in spans
        if span.end_ms < float("inf")
    ]
    path.write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
