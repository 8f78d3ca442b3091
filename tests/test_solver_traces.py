"""The predicted step as a trace: every span of the timeline, in microseconds, and the device's memory beside it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lazytrain.solver.__main__ import main
from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.machine import QUEUES, Event
from lazytrain.solver.memory import GIB, account
from lazytrain.solver.simulator import simulate
from lazytrain.solver.toys import make_toy_problem
from lazytrain.solver.traces import write_spans, write_trace

ROUNDING_US = 1e-3
COMMAND = ("--model", "qwen2.5-0.5b", "--hardware", "h200", "--batch", "2", "--seq", "256", "--time-limit", "1")


@pytest.mark.parametrize("seed", range(6))
def test_trace_holds_the_timeline_and_the_peak(seed: int, tmp_path: Path) -> None:
    problem = make_toy_problem(seed, num_blocks=5, allow_nvme=seed % 2 == 1, device_is_host=seed == 4)
    plan = list_baselines(problem, num_random=0)[0].plan
    played = simulate(problem, plan)
    write_trace(tmp_path / "trace.json", problem, plan, played)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(threads.values()) == list(QUEUES)
    busy_us = dict.fromkeys(QUEUES, 0.0)
    spans = [event for event in events if event["ph"] == "X" and event["name"] != "update slowed"]
    for event in spans:
        assert event["ts"] >= 0
        busy_us[threads[event["tid"]]] += event["dur"]
    for queue, expected_ms in played.busy_ms.items():
        assert busy_us[queue] == pytest.approx(expected_ms * 1e3, abs=ROUNDING_US * len(spans))
    peak = max(event["args"]["GiB"] for event in events if event["ph"] == "C")
    assert peak == pytest.approx(account(problem, plan).device_peak_bytes / GIB, abs=1e-3)


def test_spans_of_a_queue_do_not_overlap(tmp_path: Path) -> None:
    problem = make_toy_problem(3, num_blocks=5)
    plan = list_baselines(problem, num_random=0)[0].plan
    write_trace(tmp_path / "trace.json", problem, plan, simulate(problem, plan))
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for tid in {event["tid"] for event in spans}:
        row = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == tid)
        assert all(end <= start + 2 * ROUNDING_US for (_, end), (start, _) in pairwise(row))


def test_measured_spans_are_written_alike_and_those_without_an_end_are_left_out(tmp_path: Path) -> None:
    spans = [Event("forward", "a", "compute", 1.0, 3.0), Event("load", "b", "h2d", 2.0, float("inf"))]
    write_spans(tmp_path / "trace.json", spans, title="measured")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == list(QUEUES)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["measured"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [("forward", 1000.0, 2000.0)]


def test_command_writes_a_trace_or_says_in_a_line_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main([*COMMAND, "--trace", str(path)]) == 0
    assert any(event["name"] == "backward" for event in json.loads(path.read_text())["traceEvents"])
    assert main([*COMMAND, "--trace", str(tmp_path / "missing" / "trace.json")]) == 2
    error = capsys.readouterr().err
    assert "can't be written" in error
    assert "missing" in error
    assert error.count("\n") == 1
