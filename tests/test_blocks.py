"""Your own blocks: pure functions and module templates."""

import pytest
import torch
from torch import nn

from lazytrain import adamw, block_from_module, block_model, blocks_from_modules, make_train_step, streaming_plan
from lazytrain.errors import ConfigError
from lazytrain.trainer import read_params


class TiedPair(nn.Module):
    """A block that uses one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(16, 16, bias=False)
        self.outward = nn.Linear(16, 16, bias=False)
        self.outward.weight = self.inward.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(torch.tanh(self.inward(x)))


def squared_error(y: torch.Tensor, batch: dict) -> torch.Tensor:
    return ((y - batch["labels"]) ** 2).sum()


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(9, 16, generator=generator) for name in ("inputs", "labels")}


def test_modules_train_as_plain_pytorch_does_and_tied_names_are_one_parameter() -> None:
    torch.manual_seed(0)
    modules, batch = [TiedPair() for _ in range(3)], make_batch()
    model, params = block_model(blocks_from_modules(modules), loss=squared_error)
    assert sorted(params) == [f"blocks.{i}.inward.weight" for i in range(3)]
    step = make_train_step(model, adamw(1e-2), streaming_plan(3), device="cpu")
    state = step.init({name: value.clone() for name, value in params.items()})
    adam = torch.optim.AdamW([m.inward.weight for m in modules], lr=1e-2, weight_decay=0.01)
    for _ in range(4):
        state, metrics = step(state, batch)
        adam.zero_grad()
        loss = squared_error(nn.Sequential(*modules)(batch["inputs"]), batch) / 9
        loss.backward()
        nn.utils.clip_grad_norm_([m.inward.weight for m in modules], 1.0)
        adam.step()
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    for (_, ours), module in zip(read_params(state), modules, strict=True):
        torch.testing.assert_close(ours, module.inward.weight.detach(), rtol=1e-5, atol=1e-6)


def test_blocks_of_one_function_and_shape_share_their_programs() -> None:
    def fn(params, x, ctx):
        return x @ params["w"]

    model, _ = block_model([(fn, {"w": torch.zeros(4, 4)}), (fn, {"w": torch.ones(4, 4)})], loss=squared_error)
    assert len({unit.kind for unit in model.blocks}) == 1
    model, _ = block_model([(fn, {"w": torch.zeros(4, 4)}), (fn, {"w": torch.ones(4, 5)})], loss=squared_error)
    assert len({unit.kind for unit in model.blocks}) == 2


def test_what_cannot_be_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        block_model([], loss=squared_error)
    with pytest.raises(ConfigError, match="buffers"):
        block_from_module(nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match="module 1"):
        blocks_from_modules([nn.Linear(4, 4), nn.Linear(4, 5)])
