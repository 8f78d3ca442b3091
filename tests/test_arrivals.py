"""How units come to the device: no copy overtakes compute that may still use the memory it writes to."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_activations import RecordingLanes
from toys import STREAMED, make_batch, make_model, make_params, make_plan

from lazytrain import adamw8bit, make_train_step
from lazytrain.arrivals import Arrivals
from lazytrain.homes import Homes, build_homes
from lazytrain.lanes import Lanes, Ticket, Worker
from lazytrain.optimizer import init_unit_into
from lazytrain.updates import PendingUpdate

SETTINGS = adamw8bit(1e-3).settings


def make_arrivals() -> tuple[Homes, RecordingLanes, Arrivals]:
    model, lanes = make_model(tied=False, streams_embed=True), RecordingLanes()
    params, writer = make_params(model), Worker("writer", threaded=False)
    homes = build_homes(
        model,
        make_plan(ends=STREAMED),
        SETTINGS,
        fill=lambda home, weights, state: init_unit_into(home.layout, params.__getitem__, weights, state),
        dtype=torch.float32,
        lanes=lanes,
        spill=None,
        writer=writer,
    )
    return homes, lanes, Arrivals(homes, 2, lanes, writer)


def waits_of(lanes: RecordingLanes, name: str) -> list[Ticket | None]:
    """Return what the last span of a name waits for."""
    return [waits for other, _, waits in lanes.spans if other == name][-1]


def test_first_loads_wait_for_compute_queued_before_their_buffers_were_made() -> None:
    homes, lanes, arrivals = make_arrivals()
    slots, edge_slot, buffers = (ticket for name, ticket, _ in lanes.spans if name == "reserve")
    for home, made in ((homes.units[1], slots), (homes.units[0], edge_slot)):
        arrivals.bring(home, PendingUpdate(hyper=SETTINGS.hyper(1e-3, 1), due={home.index}))
        waits = waits_of(lanes, "load weights")
        assert any(wait is made for wait in waits)
        assert any(wait is buffers for wait in waits)  # the states follow the weights in the same queue


def test_embed_and_head_wait_for_each_other_in_their_slot() -> None:
    homes, lanes, arrivals = make_arrivals()
    embed, head = homes.units[0], homes.units[-1]
    for first, second in ((embed, head), (head, embed)):
        pending = PendingUpdate(hyper=SETTINGS.hyper(1e-3, 1), coef=1.0, due={first.index})
        first.grads_host = torch.zeros(first.layout.numel)
        arrivals.update_on_load(arrivals.bring(first, pending), pending)
        used, sent = Ticket(), first.weights_out
        arrivals.used(first, used)
        arrivals.bring(second, None)
        waits = waits_of(lanes, "load weights")
        assert any(wait is used for wait in waits)
        assert sent is not None
        assert any(wait is sent for wait in waits)


def test_nvme_is_read_behind_a_slot_only_after_the_slots_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two microbatches a unit is brought twice, the second time without a copy."""
    loads: list[Ticket] = []
    waited: list[Ticket | None] = []
    span, wait = Lanes.span, Arrivals._wait_for_copies

    @contextmanager
    def recorded(
        self: Lanes, queue: str, name: str, unit: str, after: Iterable[Ticket | None] = ()
    ) -> Iterator[Ticket]:
        with span(self, queue, name, unit, after) as ticket:
            if name.startswith("load"):
                loads.append(ticket)
            yield ticket

    def waiting(self: Arrivals, key: str) -> None:
        waited.append(self._copied.get(key))
        wait(self, key)

    monkeypatch.setattr(Lanes, "span", recorded)
    monkeypatch.setattr(Arrivals, "_wait_for_copies", waiting)
    plan = make_plan(default=replace(STREAMED, weights="nvme", states="nvme"), microbatches=2)
    step = make_train_step(make_model(), adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path)
    state = step.init(make_params(make_model()))
    for i in range(3):
        state, _ = step(state, make_batch(i))
    later = waited[8:]  # the first of each slot and buffer has nothing before it
    assert len(later) > 10
    assert all(any(ticket is load for load in loads) for ticket in later)
