"""Blocks of odd shapes for the tests of block programs.

Shape letters: b batch, t time, d model width, h query heads, g key/value heads, k head dim, f feed-forward.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lazytrain.base import Context, Params
from lazytrain.programs import BlockPrograms, make_programs

B, T, D, H, G, K, FF = 3, 7, 20, 6, 2, 8, 33
EPS = 1e-6
FP32, BF16 = torch.float32, torch.bfloat16


class Sample(NamedTuple):
    """A block and real arguments of it."""

    fn: Callable[[Params, Tensor, Context], Tensor]
    params: Params
    x: Tensor
    ctx: Context
    dy: Tensor


def transformer_block(params: Params, x_btd: Tensor, ctx: Context) -> Tensor:
    """RMSNorm, qkv with bias, rotary, grouped causal or masked attention, SwiGLU."""
    num_rows, num_tokens, _ = x_btd.shape
    h_btd = rms_norm(x_btd, params["norm1"])
    q_bhtk = F.linear(h_btd, params["q"], params["q_bias"]).view(num_rows, num_tokens, H, K).transpose(1, 2)
    k_bgtk = F.linear(h_btd, params["k"], params["k_bias"]).view(num_rows, num_tokens, G, K).transpose(1, 2)
    v_bgtk = F.linear(h_btd, params["v"], params["v_bias"]).view(num_rows, num_tokens, G, K).transpose(1, 2)
    q_bhtk, k_bgtk = rotate(q_bhtk, ctx), rotate(k_bgtk, ctx)
    mask = ctx.get("mask_b1tt")
    if "expand" in ctx:
        k_bgtk, v_bgtk = (x[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2) for x in (k_bgtk, v_bgtk))
    o_bhtk = F.scaled_dot_product_attention(
        q_bhtk, k_bgtk, v_bgtk, attn_mask=mask, is_causal=mask is None, enable_gqa="expand" not in ctx
    )
    x_btd = x_btd + F.linear(o_bhtk.transpose(1, 2).reshape(num_rows, num_tokens, H * K), params["o"])
    h_btd = rms_norm(x_btd, params["norm2"])
    return x_btd + F.linear(F.silu(F.linear(h_btd, params["gate"])) * F.linear(h_btd, params["up"]), params["down"])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x_fp32 = x.float()
    return weight * (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotate(x: Tensor, ctx: Context) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * ctx["cos"] + torch.cat((-second, first), -1) * ctx["sin"]


def transformer_sample(
    dtype: torch.dtype = torch.float32, *, masked: bool = False, expand: bool = False, seed: int = 0
) -> Sample:
    """Return a transformer block with its arguments, all random."""
    shapes = {
        "norm1": (D,),
        "q": (H * K, D),
        "q_bias": (H * K,),
        "k": (G * K, D),
        "k_bias": (G * K,),
        "v": (G * K, D),
        "v_bias": (G * K,),
        "o": (D, H * K),
        "norm2": (D,),
        "gate": (FF, D),
        "up": (FF, D),
        "down": (D, FF),
    }
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    angles = torch.rand(1, 1, T, K, generator=generator) * 6
    ctx = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    if masked:
        segments_bt = torch.tensor([[1] * 3 + [2] * 4, [1] * 7, [1] * 2 + [2] * 2 + [0] * 3])
        same = segments_bt[:, :, None] == segments_bt[:, None, :]
        ctx["mask_b1tt"] = (same & torch.ones(T, T, dtype=torch.bool).tril())[:, None]
    if expand:
        ctx["expand"] = torch.zeros(1, dtype=dtype)
    params = {name: draw(*shape, scale=0.3) for name, shape in shapes.items()}
    return Sample(transformer_block, params, draw(B, T, D), ctx, draw(B, T, D))


def tanh_sample(dtype: torch.dtype = torch.float32) -> Sample:
    """Return what a user may write: one hidden layer, another width on the way out."""
    generator = torch.Generator().manual_seed(1)

    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return torch.tanh(torch.tanh(x @ params["up"]) @ params["down"])

    params = {"up": torch.randn(5, 11, generator=generator), "down": torch.randn(11, 3, generator=generator)}
    x, dy = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
    return Sample(fn, {n: p.to(dtype) for n, p in params.items()}, x.to(dtype), {}, dy.to(dtype))


def module_sample(dtype: torch.dtype = torch.float32) -> Sample:
    """Return a block made of an nn.Module template on the meta device; its ReLU works in place."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 13), nn.ReLU(inplace=True), nn.Linear(13, 9)).to(dtype)
        x, dy = torch.randn(5, 9).to(dtype), torch.randn(5, 9).to(dtype)
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    template = module.to("meta")
    return Sample(lambda p, x, ctx: x + functional_call(template, p, (x,)), params, x, {}, dy)


def concatenate(grads: Params) -> Tensor:
    """Flatten gradients in the order of the parameters."""
    return torch.cat([grad.reshape(-1) for grad in grads.values()])


def plain_autograd(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, flat grads and dx by `backward()` on the block itself."""
    own = {name: value.clone().requires_grad_() for name, value in sample.params.items()}
    x = sample.x.clone().requires_grad_()
    y = sample.fn(own, x, sample.ctx)
    y.backward(sample.dy)
    assert x.grad is not None
    grads = {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in own.items()}
    return y.detach(), concatenate(grads), x.grad


def linear_stack(params: Params, x: Tensor, ctx: Context) -> Tensor:
    return F.relu(F.relu(x @ params["first"]) @ params["second"]) @ params["third"]


def stack_sample() -> Sample:
    widths = {"first": (13, 17), "second": (17, 5), "third": (5, 13)}
    params = {name: torch.randn(shape) for name, shape in widths.items()}
    return Sample(linear_stack, params, torch.randn(7, 13), {}, torch.randn(7, 13))


SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "transformer": transformer_sample,
    "masked transformer": lambda dtype: transformer_sample(dtype, masked=True),
    "transformer with expanded heads": lambda dtype: transformer_sample(dtype, expand=True),
    "masked transformer with expanded heads": lambda dtype: transformer_sample(dtype, masked=True, expand=True),
    "tanh": tanh_sample,
    "module": module_sample,
    "stack": lambda dtype: stack_sample(),
}
NAMES = [name for name in SAMPLES if name != "stack"]


def programs_of(sample: Sample, **options: Any) -> BlockPrograms:
    return make_programs(sample.fn, sample.params, sample.x, sample.ctx, flatten=concatenate, **options)


@functools.cache
def known(name: str, dtype: torch.dtype = FP32) -> tuple[Sample, BlockPrograms]:
    sample = SAMPLES[name](dtype)
    return sample, programs_of(sample)


def run(programs: BlockPrograms, point: int, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    y, residuals = programs.forward_keep(point, sample.params, sample.x, sample.ctx)
    return y, *programs.backward(point, sample.params, sample.x, sample.ctx, residuals, sample.dy)
