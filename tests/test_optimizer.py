"""AdamW as a pair of pure functions."""

import pytest
import torch

from lazytrain import adamw, adamw8bit, constant, cosine, linear
from lazytrain.base import ParamSpec
from lazytrain.errors import ConfigError
from lazytrain.optimizer import init_unit_into, master_weights

SHAPES = {"w": (96, 130), "square": (64, 128), "b": (130,), "one": (1,)}


def draw(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


@pytest.mark.parametrize("clip_coef", [1.0, 0.25])
def test_adamw_equals_torch(clip_coef: float) -> None:
    params = draw(0)
    plain = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    theirs = torch.optim.AdamW(plain.values(), lr=1e-2, weight_decay=0.1)
    ours = adamw(1e-2, weight_decay=0.1)
    state = ours.init(params)
    for step in range(20):
        grads = draw(step + 1)
        for name, value in plain.items():
            value.grad = grads[name] * clip_coef
        theirs.step()
        params, state = ours.update(grads, state, params, clip_coef=clip_coef)
    for name, value in params.items():
        torch.testing.assert_close(value, plain[name].detach(), rtol=2e-6, atol=2e-6)


def test_update_is_pure() -> None:
    params, grads = draw(0), draw(1)
    before = {name: value.clone() for name, value in params.items()}
    optimizer = adamw8bit(1e-2)
    state = optimizer.init(params)
    first = optimizer.update(grads, state, params)
    again = optimizer.update(grads, state, params)
    for name in SHAPES:
        assert torch.equal(params[name], before[name])
        assert torch.equal(first[0][name], again[0][name])
        assert not torch.equal(first[0][name], before[name])
    assert (state.t, first[1].t) == (0, 1)


def test_first_8bit_step_is_that_of_torch() -> None:
    params, grads = draw(0), draw(1)
    plain = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    for name, value in plain.items():
        value.grad = grads[name]
    torch.optim.AdamW(plain.values(), lr=1e-2).step()
    updated, _ = (lambda o: o.update(grads, o.init(params), params))(adamw8bit(1e-2))
    for name, value in updated.items():
        assert (value - plain[name]).abs().max() <= 2e-6


@pytest.mark.parametrize("bits", [32, 24])
def test_bf16_weights_carry_a_wider_master(bits: int) -> None:
    optimizer = adamw8bit(1e-2, master_bits=bits)
    values = draw(3)
    specs = {name: ParamSpec(full_name=name, shape=shape) for name, shape in SHAPES.items()}
    layout = optimizer.settings.layout(specs, torch.bfloat16)
    weights = torch.empty(layout.numel, dtype=torch.bfloat16)
    state = torch.empty(layout.state_bytes, dtype=torch.uint8)
    init_unit_into(layout, values.__getitem__, weights, state)
    for name, master in master_weights(layout, weights, state).items():
        if bits == 32:
            assert torch.equal(master, values[name])
        else:
            assert (master - values[name]).abs().max() <= 2**-16 * values[name].abs().max()


def test_a_small_step_is_not_lost_in_bf16() -> None:
    optimizer = adamw8bit(1e-5, weight_decay=0.0, eps=1e-12, max_grad_norm=None)
    params = {"w": torch.ones(64, 128, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    grads = {"w": torch.ones(64, 128, dtype=torch.bfloat16)}
    for _ in range(1000):
        params, state = optimizer.update(grads, state, params)
    master = master_weights(state.layout, state.layout.flatten(params), state.slab)["w"]
    assert (master - 0.99).abs().max() < 1e-4
    assert params["w"].float().max() < 1.0


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="betas"):
        adamw8bit(1e-3, betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="weight_decay"):
        adamw(1e-3, weight_decay=-1.0)
    with pytest.raises(ConfigError, match="master_bits"):
        adamw8bit(1e-3, master_bits=16)
    with pytest.raises(ConfigError, match="float16"):
        adamw8bit(1e-3).init({"w": torch.ones(4, dtype=torch.float16)})


def test_schedules_warm_up_and_fall() -> None:
    assert [constant(2.0, num_warmup_steps=4)(s) for s in (0, 1, 3, 9)] == [0.5, 1.0, 2.0, 2.0]
    falling = linear(1.0, num_steps=10, num_warmup_steps=2)
    assert falling(1) == 1.0
    assert falling(6) == pytest.approx(0.5)
    assert falling(10) == 0.0
    half = cosine(1.0, num_steps=10, final_fraction=0.1)
    assert half(0) == 1.0
    assert half(5) == pytest.approx(0.55)
    assert half(99) == pytest.approx(0.1)
