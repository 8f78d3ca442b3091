"""To and from torch's fp32 AdamW: exact with fp32 moments, bounded with 8-bit ones; training goes on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazytrain import Adam8bit, Optimizer, adamw, adamw8bit
from lazytrain.errors import ConfigError
from lazytrain.kernels.codec import GROUP
from lazytrain.optimizer import from_torch_adamw, to_torch_adamw

SHAPES = {"w": (96, 130), "bias": (130,), "square": (64, 128), "one": (1,)}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.1}
M_SLACK = 1.6e-5  # of the scale, as in test_kernels_codec.py
GOING_ON_ERROR = 4e-2  # of the way since, 20 steps after 8-bit moments replaced fp32 ones; worst seen 2.2e-2
EXACT_ERROR = 2e-6  # absolute, fp32 moments against torch over 20 steps; worst seen 2.4e-7


def draw(seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=gen) for name, shape in SHAPES.items()}


def train_torch(steps: int, weights: dict[str, Tensor] | None = None, saved: Any = None, first: int = 0) -> Any:
    """Return (parameters, optimizer) after some steps on gradients that only depend on the step."""
    params = {name: nn.Parameter(value.clone()) for name, value in (weights or draw(0)).items()}
    optimizer = torch.optim.AdamW(params.values(), **OPTIONS)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for step in range(first, first + steps):
        for name, g in draw(step + 1).items():
            params[name].grad = g
        optimizer.step()
    return params, optimizer


def go_on(params: dict[str, Tensor], state: Any, optimizer: Optimizer, first: int, steps: int) -> dict[str, Tensor]:
    for step in range(first, first + steps):
        params, state = optimizer.update(draw(step + 1), state, params)
    return params


def check_moments(ours: Any, truth: Any, exact: bool, quantized: dict[int, bool]) -> None:
    for i, entry in truth["state"].items():
        m, v = ours["state"][i]["exp_avg"], ours["state"][i]["exp_avg_sq"]
        assert ours["state"][i]["step"] == entry["step"]
        if exact or not quantized[i]:
            assert torch.equal(m, entry["exp_avg"])
            assert torch.equal(v, entry["exp_avg_sq"])
            continue
        assert not torch.equal(m, entry["exp_avg"])
        for theirs, mine, bound in (
            (entry["exp_avg"].double(), m, lambda x, s: s * ((x.abs() / s).sqrt() / 127 + M_SLACK)),
            (entry["exp_avg_sq"].double().sqrt(), v.sqrt(), lambda x, s: s / 255 * (1 + 1e-4)),
        ):
            for at in range(0, theirs.shape[1], GROUP):
                x, y = theirs[:, at : at + GROUP], mine[:, at : at + GROUP]
                assert ((y - x).abs() <= bound(x, x.abs().amax(1, keepdim=True))).all()


QUANTIZED = {0: True, 1: False, 2: True, 3: False}


@pytest.mark.parametrize("make", [adamw, adamw8bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_go_from_torch_and_back(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    weights, theirs = train_torch(7)
    optimizer = make(**OPTIONS)
    params, state = from_torch_adamw(theirs.state_dict(), weights, optimizer, dtype=dtype)
    assert state.t == 7
    assert {p.dtype for p in params.values()} == {dtype}
    masters, back = to_torch_adamw(params, state, optimizer)
    for name, p in weights.items():
        assert torch.equal(masters[name], p)
    check_moments(back, theirs.state_dict(), make is adamw, QUANTIZED)
    if make is adamw8bit:  # what is 8-bit already loses nothing more
        again, state_again = from_torch_adamw(back, masters, optimizer, dtype=dtype)
        _, twice = to_torch_adamw(again, state_again, optimizer)
        for i, entry in back["state"].items():
            torch.testing.assert_close(twice["state"][i]["exp_avg"], entry["exp_avg"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [adamw, adamw8bit])
def test_training_goes_on_after_torch(make: Callable[..., Optimizer]) -> None:
    weights, theirs = train_torch(7)
    truth, _ = train_torch(27)
    optimizer = make(**OPTIONS)
    params, state = from_torch_adamw(theirs.state_dict(), weights, optimizer)
    params = go_on(params, state, optimizer, 7, 20)
    for name, p in truth.items():
        if make is adamw:
            assert (params[name] - p).abs().max() <= EXACT_ERROR
        else:
            assert (params[name] - p).norm() <= GOING_ON_ERROR * (p - weights[name]).norm()
    # and with the moments forgotten it would not be so
    fresh = go_on({k: v.detach() for k, v in weights.items()}, optimizer.init(weights), optimizer, 7, 20)
    assert (fresh["w"] - truth["w"]).norm() > 2 * GOING_ON_ERROR * (truth["w"] - weights["w"]).norm()


def test_torch_goes_on_after_fp32_moments() -> None:
    optimizer = adamw(**OPTIONS)
    params, state = draw(0), optimizer.init(draw(0))
    for step in range(7):
        params, state = optimizer.update(draw(step + 1), state, params)
    masters, saved = to_torch_adamw(params, state, optimizer)
    theirs, _ = train_torch(20, masters, saved, first=7)
    for name, p in go_on(params, state, optimizer, 7, 20).items():
        assert (theirs[name] - p).abs().max() <= EXACT_ERROR


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam8bit_goes_from_torch_and_back(state_bits: int, dtype: torch.dtype) -> None:
    weights, theirs = train_torch(7)
    params = [nn.Parameter(p.detach().to(dtype, copy=True)) for p in weights.values()]
    ours = Adam8bit(params, lr=1.0, state_bits=state_bits)
    ours.load_torch_adamw(theirs.state_dict(), weights.values())
    assert {k: ours.param_groups[0][k] for k in OPTIONS} == OPTIONS
    for p, theirs_p in zip(params, weights.values()):
        assert torch.equal(ours.read_master(p), theirs_p)
    check_moments(ours.torch_adamw_state_dict(), theirs.state_dict(), state_bits == 32, QUANTIZED)
    truth, _ = train_torch(27)
    for step in range(7, 27):
        for p, g in zip(params, draw(step + 1).values()):
            p.grad = g.to(dtype)
        ours.step()
    for p, (name, end) in zip(params, truth.items()):
        assert (ours.read_master(p) - end).norm() <= GOING_ON_ERROR * (end - weights[name]).norm()


def test_a_run_that_has_not_begun_goes_over() -> None:
    optimizer = adamw8bit(**OPTIONS)
    weights, theirs = train_torch(0)
    params, state = from_torch_adamw(theirs.state_dict(), weights, optimizer)
    assert state.t == 0
    _, back = to_torch_adamw(params, state, optimizer)
    assert back["state"] == {}


def test_wrong_state_dicts_are_named() -> None:
    weights, theirs = train_torch(2)
    saved = theirs.state_dict()
    optimizer = adamw8bit(**OPTIONS)
    few = {name: weights[name] for name in ("w", "bias")}
    with pytest.raises(ConfigError, match="4 parameters, here are 2"):
        from_torch_adamw(saved, few, optimizer)
    swapped = {name: weights[name] for name in ("square", "bias", "w", "one")}
    with pytest.raises(ConfigError, match="parameter 0 has moments of shape"):
        from_torch_adamw(saved, swapped, optimizer)
    for i in range(4):
        saved["state"][i]["step"] = torch.tensor(float(i + 1))
    with pytest.raises(ConfigError, match=r"\[1, 2, 3, 4\] updates"):
        from_torch_adamw(saved, weights, optimizer)
    params = list(weights.values())
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    for other, words in ((sgd, "torch AdamW's"), (amsgrad, "amsgrad")):
        other.step()
        with pytest.raises(ValueError, match=words):
            Adam8bit(params).load_torch_adamw(other.state_dict())
