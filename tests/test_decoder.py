"""The decoder block: traceable, repeatable, on fused attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx

from lazytrain.base import Context, Params, Unit
from lazytrain.configuration import parse_config
from lazytrain.transformer import random_params, transformer_model

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3"},
}


class BlockCase:
    """One block with random weights, inputs and context, and its vjp."""

    def __init__(
        self,
        variant: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        length: int = 10,
        packed: bool = False,
        head_dim: int = 8,
    ) -> None:
        sizes = {
            "vocab_size": 67,
            "hidden_size": 24,
            "intermediate_size": 36,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
        }
        model = transformer_model(parse_config({**sizes, **VARIANTS[variant]}))
        self.unit: Unit = model.blocks[0]
        drawn = dict(random_params(model, 0, dtype, std=0.3))
        self.params: Params = {name: drawn[spec.full_name].to(device) for name, spec in self.unit.params.items()}
        batch = {"tokens_bt": torch.zeros(2, length, dtype=torch.int64, device=device)}
        if packed:
            batch["segments_bt"] = torch.arange(length, device=device).expand(2, length) // 4
        self.ctx: Context = model.context(batch, dtype)
        generator = torch.Generator().manual_seed(1)
        self.x_btd = torch.randn(2, length, 24, generator=generator).to(device, dtype)

    def grads(self, params: Params, x_btd: Tensor, dy_btd: Tensor) -> tuple[Tensor, Params, Tensor]:
        y_btd, pull = vjp(lambda params, x: self.unit.fn(params, x, self.ctx), params, x_btd)
        return y_btd, *pull(dy_btd)

    def trace(self) -> Any:
        return make_fx(lambda params, x, dy: self.grads(params, x, dy))(self.params, self.x_btd, self.x_btd)

    def run(self, fn: Any = None) -> tuple[Tensor, Params, Tensor]:
        return (fn or self.grads)(self.params, self.x_btd, self.x_btd)


def assert_same_bits(left: tuple[Tensor, Params, Tensor], right: tuple[Tensor, Params, Tensor]) -> None:
    assert torch.equal(left[0], right[0])
    assert torch.equal(left[2], right[2])
    for name, grad in left[1].items():
        assert torch.equal(grad, right[1][name]), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_block_vjp_can_be_traced(variant: str, packed: bool) -> None:
    case = BlockCase(variant, packed=packed)
    assert_same_bits(case.run(case.trace()), case.run())


@pytest.mark.slow
def test_block_vjp_can_be_compiled() -> None:
    case = BlockCase("qwen3")
    compiled = torch.compile(case.grads, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(case.run(compiled), case.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_block_gradients_repeat_bit_for_bit(dtype: torch.dtype, packed: bool) -> None:
    case = BlockCase("llama", dtype=dtype, packed=packed, length=70)
    first = case.run()
    assert first[0].dtype == dtype
    for _ in range(3):
        assert_same_bits(case.run(), first)


def attention_ops(case: BlockCase) -> set[str]:
    """Return the attention operators of forward and backward, and the products and softmax of one that is not fused."""
    names = {str(node.target) for node in case.trace().graph.nodes}
    return {name for name in names if "scaled_dot_product" in name or "bmm" in name or "softmax" in name}


@pytest.mark.parametrize("packed", [False, True])
def test_cpu_attention_is_fused(packed: bool) -> None:
    ops = attention_ops(BlockCase("llama", packed=packed))
    assert len(ops) == 2, ops
    assert all("flash_attention_for_cpu" in name for name in ops), ops


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_attention_is_fused(dtype: torch.dtype, packed: bool, head_dim: int) -> None:
    case = BlockCase("llama", device="cuda", dtype=dtype, packed=packed, head_dim=head_dim, length=130)
    ops = attention_ops(case)
    assert len(ops) == 2, ops
    assert all("flash" in name or "efficient" in name or "cudnn" in name for name in ops), ops
    if dtype == torch.bfloat16 and not packed:
        assert not any("efficient" in name for name in ops), ops
