"""A step, predicted or measured, as a trace for chrome://tracing or ui.perfetto.dev: one thread a queue.

The trace event format: `X` is a complete event, `C` a counter, `M` a name; times in microseconds. 0 is when the norm of
the step before is known. What is still under way then (stores of grads, loads for the next step) runs on past the end.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from lazytrain.solver.machine import COMPUTE, QUEUES
from lazytrain.solver.memory import GIB, account
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import Simulation

PID = 0


class AnySpan(Protocol):
    """An event of the simulator, or a span that a trainer measured."""

    @property
    def name(self) -> str:
        """Return what was done."""

    @property
    def unit(self) -> str:
        """Return for which unit."""

    @property
    def queue(self) -> str:
        """Return where: one of `machine.QUEUES`."""

    @property
    def start_ms(self) -> float:
        """Return when it began."""

    @property
    def end_ms(self) -> float:
        """Return when it ended; infinite where that is not known, and then it is left out."""


def write_trace(path: Path, problem: Problem, plan: Plan, simulation: Simulation) -> None:
    """Write a simulation's steady step as JSON, with what the device's memory holds.

    Raises:
        OSError: the file can't be written.
    """
    title = f"{problem.model} on {problem.hardware.name}, predicted: {simulation.step_ms:.1f} ms a step"
    write_spans(path, simulation.timeline, title=title, counters=_count_memory(problem, plan, simulation))


def write_spans(path: Path, spans: Iterable[AnySpan], *, title: str, counters: Iterable[dict[str, Any]] = ()) -> None:
    """Write spans, predicted or measured, as JSON.

    Args:
        title: of the process in the trace.
        counters: further events.

    Raises:
        OSError: the file can't be written.
    """
    names = [{"ph": "M", "name": "process_name", "pid": PID, "args": {"name": title}}]
    names += [
        {"ph": "M", "name": name, "pid": PID, "tid": tid, "args": {key: value}}  # type: ignore[dict-item]
        for tid, queue in enumerate(QUEUES)
        for name, key, value in (("thread_name", "name", queue), ("thread_sort_index", "sort_index", tid))
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": PID,
            "tid": QUEUES.index(span.queue),
            "ts": _microseconds(span.start_ms),
            "dur": _microseconds(span.end_ms - span.start_ms),
            "args": {"unit": span.unit},
        }
        for span in spans
        if span.start_ms < span.end_ms < math.inf
    ]
    data = {"displayTimeUnit": "ms", "traceEvents": [*names, *events, *counters]}
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def _count_memory(problem: Problem, plan: Plan, simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield what the device holds from the start of each sweep's compute on; the order is that of `memory.account`."""
    sweep = [event for event in simulation.timeline if event.queue == COMPUTE and event.name != "update"]
    positions = account(problem, plan).device
    assert len(sweep) == len(positions), "one position for each compute"
    for event, (_, num_bytes) in zip(sweep, positions, strict=True):
        args = {"GiB": round(num_bytes / GIB, 3)}
        yield {"ph": "C", "name": "device memory", "pid": PID, "ts": _microseconds(event.start_ms), "args": args}


def _microseconds(ms: float) -> float:
    return round(ms * 1e3, 3)
