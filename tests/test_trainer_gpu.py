"""The trainer with real streams: plans give the same bits on a GPU too, for a toy and for a transformer."""

from pathlib import Path

import pytest
import torch
from test_saving import CONFIG
from test_trainer import PLANS
from toys import make_batch, make_model, make_params

from lazytrain import adamw8bit, make_train_step
from lazytrain.base import Model
from lazytrain.configuration import parse_config
from lazytrain.determinism import deterministic
from lazytrain.programs import make_programs
from lazytrain.solver.plan import Plan
from lazytrain.trainer import read_params
from lazytrain.transformer import random_params, transformer_model

pytestmark = pytest.mark.gpu
NUM_STEPS = 6
WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}


def train(model: Model, params: dict, plan: Plan, dtype: torch.dtype, spill_dir: Path, rows: int) -> tuple:
    step = make_train_step(model, adamw8bit(1e-3), plan, device="cuda", dtype=dtype, spill_dir=spill_dir)
    state, seen = step.init(params), []
    for i in range(NUM_STEPS):
        state, metrics = step(state, make_batch(i, rows=rows, time=48))
        seen.append((metrics.loss, metrics.grad_norm))
    return seen, {name: value.clone() for name, value in read_params(state)}


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_same_bits_on_a_gpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model()
    expected = train(model, make_params(model), PLANS["resident"], dtype, tmp_path, rows=8)
    assert_same(train(model, make_params(model), PLANS[name], dtype, tmp_path, rows=8), expected)


@pytest.mark.parametrize("name", ["streamed", "streamed, updated on cpu", "mixed, ring of 3", "all on nvme"])
def test_a_transformer_trains_with_the_same_bits_under_every_plan(name: str, tmp_path: Path) -> None:
    model = transformer_model(parse_config(WIDE))
    params = dict(random_params(model, 0, torch.float32))
    expected = train(model, params, PLANS["resident"], torch.bfloat16, tmp_path, rows=16)
    assert_same(train(model, params, PLANS[name], torch.bfloat16, tmp_path, rows=16), expected)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def test_compiled_points_are_as_near_to_fp32_as_eager_blocks() -> None:
    """Points round differently: none may lose more than eager bf16 does."""
    wide = WIDE | {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 8}
    model = transformer_model(parse_config(wide))
    unit, device = model.blocks[0], torch.device("cuda")
    full = dict(random_params(model, 0, torch.bfloat16))
    params = {name: full[spec.full_name].to(device) for name, spec in unit.params.items()}
    generator = torch.Generator(device).manual_seed(0)
    x, dy = (torch.randn(4, 512, 1024, device=device, generator=generator).bfloat16() for _ in range(2))
    batch = {"tokens_bt": torch.zeros(4, 512, dtype=torch.int64, device=device)}

    def grads(dtype: torch.dtype, *, compile: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = {name: value.to(dtype) for name, value in params.items()}
        layout = adamw8bit(1e-3).settings.layout(unit.params, dtype)
        ctx = model.context(batch, dtype)
        programs = make_programs(unit.fn, own, x.to(dtype), ctx, flatten=layout.flatten, compile=compile)
        found = []
        for point in programs.points:
            _, kept = programs.forward_keep(point.index, own, x.to(dtype), ctx)
            found.append(programs.backward(point.index, own, x.to(dtype), ctx, list(kept), dy.to(dtype)))
        return found

    with torch.no_grad(), deterministic(device):
        truth = grads(torch.float32, compile=False)[0]
        eager = grads(torch.bfloat16, compile=False)[0]
        compiled = grads(torch.bfloat16, compile=True)
    assert len(compiled) > 2
    for point in compiled:
        for value, plain, true in zip(point, eager, truth):
            assert relative_error(value, true) <= 1.02 * relative_error(plain, true)
