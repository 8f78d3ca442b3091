"""Gradients are summed in fp32, rounded once, and never rounded over what is still to be read."""

import weakref

import pytest
import torch
from torch import Tensor
from toys import make_model, make_params, make_plan

from lazytrain import adamw8bit, gradients
from lazytrain.gradients import GradientSink, add_microbatch, round_in_place
from lazytrain.homes import Homes, build_homes
from lazytrain.kernels.norm import reference_square_sum
from lazytrain.lanes import Lanes, Worker
from lazytrain.optimizer import init_unit_into


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the sums are."""
    return torch.device(request.param)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 16, 17, 1000, 4096, 5000])
def test_rounding_in_place_gives_torchs_bits(numel: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "FIRST_PIECE", 8)
    total = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    truth, address = total.bfloat16(), total.data_ptr()
    rounded = round_in_place(total)
    assert torch.equal(rounded, truth)
    assert rounded.data_ptr() == address


def make_homes(dtype: torch.dtype, device: torch.device) -> tuple[Homes, Lanes]:
    model, lanes, params = make_model(2), Lanes(device), make_params(make_model(2))
    homes = build_homes(
        model,
        make_plan(2),
        adamw8bit(1e-3).settings,
        fill=lambda home, weights, state: init_unit_into(home.layout, params.__getitem__, weights, state),
        dtype=dtype,
        lanes=lanes,
        spill=None,
        writer=Worker("writer", threaded=False),
    )
    return homes, lanes


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_summed_in_fp32_and_rounded_once(
    num_microbatches: int, dtype: torch.dtype, device: torch.device
) -> None:
    homes, lanes = make_homes(dtype, device)
    sink, home = GradientSink(homes, lanes, tied={}), homes.units[1]
    sink.begin_step(num_microbatches)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(home.layout.numel, generator=generator).to(device, dtype) for _ in range(num_microbatches)]
    truth = parts[0].float()
    for part in parts[1:]:
        truth = truth + part.float()
    truth = truth.to(dtype)
    for part in parts:
        sink.add(home, part.clone())
    with lanes.span("compute", "test", "test") as done:
        pass
    sink.deliver(home, done)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert home.grads_host is not None
    assert torch.equal(home.grads_host, truth.cpu())
    assert sink.squares[home.index].item() == reference_square_sum(truth.cpu()).item()


def test_all_blocks_sums_share_one_buffer_until_it_is_dropped(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []

    def watch(total: Tensor | None, flat: Tensor, square: Tensor | None, buffer: Tensor | None) -> Tensor:
        buffers.append(buffer)
        return add_microbatch(total, flat, square, buffer)

    monkeypatch.setattr(gradients, "add_microbatch", watch)
    homes, lanes = make_homes(torch.bfloat16, device)
    sink = GradientSink(homes, lanes, tied={})
    sink.begin_step(4)
    values = []
    for part, home in enumerate(homes.units[1:3]):
        for count in range(4):
            sink.add(home, torch.full((home.layout.numel,), 1.0 + part + count, device=device, dtype=torch.bfloat16))
        values.append(sink.sums(home)[next(iter(home.layout.shapes()))].float().unique().tolist())
    assert values == [[10.0], [14.0]], "the second block's sum does not begin where the first's ended"
    made = [buffer for buffer in buffers if buffer is not None]
    assert len(made) == 2
    assert made[0].data_ptr() == made[1].data_ptr()
    gone = weakref.ref(made[0])
    del made, buffers[:]
    sink.drop_buffer()
    assert gone() is None


def test_a_sum_of_another_size_is_freed_before_a_blocks_backward(device: torch.device) -> None:
    homes, lanes = make_homes(torch.bfloat16, device)
    sink, (embed, home, *_) = GradientSink(homes, lanes, tied={}), homes.units
    sink.begin_step(3)
    for _ in range(3):
        sink.add(home, torch.ones(home.layout.numel, device=device, dtype=torch.bfloat16))
    assert sink._block_sum is not None
    buffer = weakref.ref(sink._block_sum)
    sink.room_for(homes.units[2])
    assert buffer() is not None
    assert embed.layout.numel != home.layout.numel
    sink.room_for(embed)
    assert buffer() is None, "the account of that block's backward has no room for both"


def test_buffers_in_flight_are_held_until_there_is_something_to_wait_for(device: torch.device) -> None:
    homes, lanes = make_homes(torch.float32, device)
    sink = GradientSink(homes, lanes, tied={})
    sink.begin_step(1)
    with lanes.span("compute", "test", "test") as done:
        pass
    for home in homes.units[1:-1]:
        assert sink.room_for(home) == []
        sink.add(home, torch.ones(home.layout.numel, device=device))
        sink.deliver(home, done)
    assert len(sink.room_for(homes.units[1])) == 1
    assert len(sink.room_for_forward()) == 1
    assert sink.room_for_forward() == []
