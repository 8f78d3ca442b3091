"""What leaves the device comes back as it was, and no copy overtakes the compute whose memory it may reuse."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazytrain.activations import Activations
from lazytrain.homes import Homes
from lazytrain.lanes import Lanes, Ticket, Worker
from lazytrain.solver.plan import UnitPlan
from lazytrain.stash import Piece, Stash


class RecordingLanes(Lanes):
    """Notes what every span waits for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.spans: list[tuple[str, Ticket, list[Ticket | None]]] = []

    @contextmanager
    def span(self, queue: str, name: str, unit: str, after: Iterable[Ticket | None] = ()) -> Iterator[Ticket]:
        waits = list(after)
        with super().span(queue, name, unit, waits) as ticket:
            self.spans.append((name, ticket, waits))
            yield ticket


def make_activations() -> tuple[Activations, RecordingLanes]:
    lanes = RecordingLanes()
    homes = Homes(units=[], spill=None, lanes=lanes, dtype=torch.float32)
    return Activations(homes, lanes, Worker("writer", threaded=False)), lanes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_come_back_with_their_values_and_strides(dtype: torch.dtype) -> None:
    activations, _ = make_activations()
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, 2, (3, 41, 63), generator=generator).to(dtype)
    tensors = [
        draw,
        draw.transpose(0, 2),
        draw[:, ::2],
        draw[0, 0, :0],
        torch.tensor(1).to(dtype),
        draw.expand(2, 3, 41, 63),
    ]
    pack = activations.offload("0.residuals", tensors, "host", "block", Ticket())
    activations.reserve(pack.num_bytes)
    (fetched,), _ = activations.fetch([pack], 0, "block", None)
    for before, after in zip(tensors, fetched, strict=True):
        assert torch.equal(before, after)
    assert [kept.stride() for kept in fetched[:2]] == [draw.stride(), draw.transpose(0, 2).stride()]


def test_the_first_fetch_waits_for_compute_queued_before_its_buffer_was_made() -> None:
    activations, lanes = make_activations()
    pack = activations.offload("0.boundary", [torch.ones(1000)], "host", "block", Ticket())
    activations.reserve(pack.num_bytes)
    activations.fetch([pack], 0, "block", None)
    (reserved,) = (ticket for name, ticket, _ in lanes.spans if name == "reserve")
    (waits,) = (waits for name, _, waits in lanes.spans if name == "fetch")
    assert any(wait is reserved for wait in waits)


def test_growing_buffers_are_waited_for_again() -> None:
    activations, lanes = make_activations()
    for size in (1000, 5000, 2000):
        pack: Any = activations.offload(f"{size}.boundary", [torch.ones(size)], "host", "block", Ticket())
        activations.reserve(pack.num_bytes)
        activations.fetch([pack], 0, "block", None)
    made = [ticket for name, ticket, _ in lanes.spans if name == "reserve"]
    waits = [waits for name, _, waits in lanes.spans if name == "fetch"]
    assert len(made) == 2  # the third is smaller
    assert [any(w is ticket for w in wait) for wait, ticket in zip(waits, (made[0], made[1], made[1]))] == [True] * 3


def test_parts_of_any_sizes_come_back() -> None:
    """Also in the next step, whose first part may be smaller."""
    activations, _ = make_activations()
    for sizes in ((5000, 4000, 5000), (3000, 6000, 10)):
        parts = [torch.randn(size) for size in sizes]
        packs = [
            activations.offload("0.residuals", [part], "host", "block", Ticket(), part=i, num_parts=len(parts))
            for i, part in enumerate(parts)
        ]
        activations.reserve(max(pack.num_bytes for pack in packs))
        for turn, (part, pack) in enumerate(zip(parts, packs)):
            ((fetched,),), _ = activations.fetch([pack], turn, "block", None)
            assert torch.equal(fetched, part)


@pytest.mark.parametrize("chunks_behind", [1, 2, 4])
def test_a_chunk_waits_for_the_offload_that_leaves_room_for_its_own(chunks_behind: int) -> None:
    activations, lanes = make_activations()
    stash = Stash(activations, 4, chunks_behind)
    home: Any = SimpleNamespace(plan=UnitPlan(boundary="host"), unit=SimpleNamespace(name="block"))
    waited: list[Ticket | None] = []
    for c in range(4):
        for block in range(2):
            waited.append(stash.take_oldest())
            stash.put(Piece(block, c), home, torch.ones(1000), (), Ticket())
    offloads = [ticket for name, ticket, _ in lanes.spans if name == "offload"]
    assert waited == [None] * (chunks_behind + 1) + offloads[: 7 - chunks_behind]
    assert stash.take_all() == offloads[7 - chunks_behind :]
