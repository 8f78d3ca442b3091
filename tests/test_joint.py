"""Tracing odd blocks, and blocks that must be refused or can not be traced."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sample_blocks import Sample, concatenate, plain_autograd, programs_of, run, transformer_sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lazytrain.base import Context, Params
from lazytrain.errors import ConfigError
from lazytrain.programs import make_programs


def test_nothing_is_computed_on_examples() -> None:
    real = transformer_sample()
    with FakeTensorMode():
        fake = [{n: torch.empty(t.shape) for n, t in part.items()} for part in (real.params, real.ctx)]
        x = torch.empty(real.x.shape)
    meta = [{n: t.to("meta") for n, t in part.items()} for part in (real.params, real.ctx)]
    from_fake = make_programs(real.fn, fake[0], x, fake[1], flatten=concatenate, budgets=())
    from_meta = make_programs(
        real.fn, meta[0], real.x.to("meta"), meta[1], flatten=concatenate, budgets=(), device=torch.device("cpu")
    )
    nan = real._replace(x=torch.full_like(real.x, torch.nan))
    for programs in (from_fake, from_meta, programs_of(nan, budgets=())):
        for value, target in zip(run(programs, 1, real), plain_autograd(real)):
            assert torch.equal(value, target)


def odd_block(fn: Callable[[Params, Tensor, Context], Any], x: Tensor | None = None) -> Sample:
    params = {"w": torch.randn(3, 3), "unused": torch.randn(2)}
    x = torch.randn(4, 3) if x is None else x
    return Sample(fn, params, x, {}, torch.randn(4, 3))


def test_identity_block_passes_x_and_dy_through() -> None:
    sample = odd_block(lambda p, x, ctx: x)
    y, flat, dx = run(programs_of(sample), 0, sample)
    assert torch.equal(y, sample.x)
    assert torch.equal(dx, sample.dy)
    assert torch.equal(flat, torch.zeros(11))


def test_unused_parameters_and_x_get_zeros() -> None:
    sample = odd_block(lambda p, x, ctx: p["w"][:1].expand(4, 3) * 2)
    _, flat, dx = run(programs_of(sample), 0, sample)
    assert torch.equal(flat[:3], 2 * sample.dy.sum(0))
    assert torch.equal(flat[3:], torch.zeros(8))
    assert torch.equal(dx, torch.zeros(4, 3))


def test_x_of_integers_has_no_gradient() -> None:
    sample = odd_block(lambda p, x, ctx: p["w"][x], torch.tensor([0, 2, 2, 1]))
    programs = programs_of(sample)
    for point in programs.points:
        _, flat, dx = run(programs, point.index, sample)
        assert dx.numel() == 0
        assert torch.equal(flat[:9].view(3, 3), torch.zeros(3, 3).index_add_(0, sample.x, sample.dy))


def test_block_without_parameters_has_empty_grads() -> None:
    sample = odd_block(lambda p, x, ctx: x.sin())._replace(params={})
    _, flat, dx = run(programs_of(sample), 0, sample)
    assert flat.numel() == 0
    assert torch.equal(dx, sample.dy * sample.x.cos())


def test_tensors_that_a_block_closes_over_are_constants() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0])
    sample = odd_block(lambda p, x, ctx: (x @ p["w"]).tanh() * scale)
    programs = programs_of(sample)
    for point in programs.points:
        for value, target in zip(run(programs, point.index, sample), plain_autograd(sample)):
            assert torch.equal(value, target)


def test_what_x_has_no_part_in_is_no_residual() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return (x @ params["w"].double().exp().float()) * torch.where(ctx["mask"], 0.5, 2.0)

    sample = odd_block(fn)._replace(ctx={"mask": torch.rand(4, 3) > 0.5})
    programs = programs_of(sample)
    assert [point.residual_bytes for point in programs.points] == [0]
    for value, target in zip(run(programs, 0, sample), plain_autograd(sample)):
        assert torch.equal(value, target)


# --- refusals and ways back ---


@pytest.mark.parametrize(
    "write",
    [
        lambda p, x, ctx: x.mul_(2) @ p["w"],
        lambda p, x, ctx: x.flatten(0).mul_(2).view(4, 3) @ p["w"],
        lambda p, x, ctx: x @ p["w"] + p["unused"].fill_(1).sum(),
        lambda p, x, ctx: x @ p["w"] * ctx["count"].add_(1),
    ],
    ids=["x", "view of x", "parameter", "ctx"],
)
def test_block_that_writes_into_its_arguments_is_refused(write: Callable[[Params, Tensor, Context], Tensor]) -> None:
    sample = odd_block(write)._replace(ctx={"count": torch.zeros(1)})
    with pytest.raises(ConfigError, match="writes into"):
        programs_of(sample)
    assert sample.ctx["count"] == 0


def test_block_that_writes_into_what_it_closes_over_is_refused() -> None:
    count = torch.zeros(1)
    with pytest.raises(ConfigError, match="writes into"):
        programs_of(odd_block(lambda p, x, ctx: x @ p["w"] * count.add_(1)))


def test_writing_into_intermediates_is_no_matter() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        y = x @ params["w"]
        y[:, 1:].mul_(2)
        y[0] = x[0]
        return y.add_(1).relu_()

    sample = odd_block(fn)
    programs = programs_of(sample)
    for point in programs.points:
        for value, target in zip(run(programs, point.index, sample), plain_autograd(sample)):
            assert torch.equal(value, target)


def test_block_that_returns_a_tuple_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned a tuple"):
        programs_of(odd_block(lambda p, x, ctx: (x, x)))


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.1), torch.rand_like, lambda x: x.clone().normal_()],
    ids=["dropout", "rand", "in place"],
)
@pytest.mark.parametrize("traceable", [True, False])
def test_random_block_is_refused(draw: Callable[[Tensor], Tensor], traceable: bool) -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        if not traceable and x.sum() > 1e9:
            return x
        return x @ params["w"] + draw(x)

    sample = odd_block(fn)
    with pytest.raises(ConfigError, match=r"draws random numbers.*dropout"):
        programs_of(sample).forward(sample.params, sample.x, sample.ctx)


def test_attention_with_dropout_is_refused() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with pytest.raises(ConfigError, match="draws random numbers"):
        programs_of(odd_block(fn, torch.randn(1, 2, 4, 8)))


def test_control_flow_on_values_recomputes_all_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return torch.tanh(x @ params["w"]) if x.sum() > 0 else F.silu(x @ params["w"])

    sample = odd_block(fn)
    with caplog.at_level(logging.WARNING):
        programs = programs_of(sample)
        for sign in (1, -1):
            there = sample._replace(x=sample.x.abs() * sign)
            for value, target in zip(run(programs, 0, there), plain_autograd(there)):
                assert torch.equal(value, target)
    assert [point.residual_bytes for point in programs.points] == [0]
    assert [record.message for record in caplog.records if "can't be traced" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
