"""Moments of the host and of the device on one time line."""

from typing import Any

import pytest
import torch

from lazytrain import lanes
from lazytrain.lanes import COMPUTE, CPU, Lanes


class FakeEvent:
    """An event that the device passes at `ms` of its own clock."""

    def __init__(self, ms: float, *, is_past: bool = True) -> None:
        self.ms, self.is_past = ms, is_past

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.ms - self.ms

    def query(self) -> bool:
        return self.is_past

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        self.is_past = True


def make_lanes() -> Lanes:
    """Return lanes whose step began at 100 ms of the device's clock; the host had gone on 20 ms before, at 4.98 s."""
    made = Lanes(torch.device("cpu"))
    made._begin = lanes._Mark(FakeEvent(100.0), 4.98)
    made._end = lanes._Mark(FakeEvent(150.0), 5.04)
    return made


def test_host_moments_are_placed_by_where_both_clocks_met() -> None:
    made = make_lanes()
    made._meeting = lanes._Mark(FakeEvent(80.0), 4.98)
    assert made._ms(4.98) == pytest.approx(-20.0), "before the step that begins behind what the device still had to do"
    assert made._ms(5.01) == pytest.approx(10.0)
    assert made._ms(FakeEvent(110.0)) == 10.0
    made._earlier = [
        (CPU, "update", "a", 4.99, 5.01),
        (COMPUTE, "forward", "a", FakeEvent(110.0), FakeEvent(130.0)),
        (CPU, "update", "of the step before", 4.9, 4.97),
    ]
    step_ms, spans = made.read_step()
    assert step_ms == 50.0
    assert [(span.queue, span.unit) for span in spans] == [(CPU, "a"), (COMPUTE, "a")]
    assert spans[0].end_ms == pytest.approx(spans[1].start_ms), "the update ended when the forward began"


@pytest.mark.parametrize(("is_past", "meets"), [(False, True), (True, False)])
def test_clocks_meet_where_the_host_waited(is_past: bool, meets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device was first, nobody knows by how much."""
    made, before = make_lanes(), lanes._Mark(FakeEvent(0.0), 4.9)
    made.is_cuda, made._meeting, made._streams = True, before, {COMPUTE: None}
    made_events: list[Any] = []

    def make_event(*, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        made_events.append(FakeEvent(70.0, is_past=is_past))
        return made_events[-1]

    monkeypatch.setattr(torch.cuda, "Event", make_event)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    assert made.start_reading(torch.tensor([1.0, 2.0]))() == [1.0, 2.0]
    assert (made._meeting is not before) == meets
    if meets:
        assert made._meeting.event is made_events[0]
