"""One decoder block of the llama, mistral, qwen2 and qwen3 families as a pure function, and the context it needs.

Shape letters: b batch, t time, d model width, h query heads, g key/value heads, k head dim, f feed-forward. Numbers
follow transformers operation by operation.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lazytrain.attention import causal_attention, takes_lengths
from lazytrain.base import Batch, Context, Params
from lazytrain.configuration import ModelConfig
from lazytrain.rope import rotary_tables, rotate

Attention = Callable[[Tensor, Tensor, Tensor, Context], Tensor]


def decoder_block(
    params: Params, x_btd: Tensor, ctx: Context, *, config: ModelConfig, attend: Attention = causal_attention
) -> Tensor:
    """Return y = z + MLP(norm(z)) with z = x + attention(norm(x)).

    Args:
        params: local names as in `model.layers.N.` of HF's files.
        x_btd: in the working dtype.
        ctx: see `make_context`.
        attend: (q_bhtk, k_bgtk, v_bgtk, ctx) -> o_bhtk; generation gives one with a cache.
    """
    h_btd = rms_norm(x_btd, params["input_layernorm.weight"], config.rms_norm_eps)
    q_bhtk = _heads(params, "q", h_btd, config)
    k_bgtk = _heads(params, "k", h_btd, config)
    v_bgtk = _heads(params, "v", h_btd, config)
    q_bhtk, k_bgtk = (rotate(x, ctx["cos_btk"], ctx["sin_btk"]) for x in (q_bhtk, k_bgtk))
    o_btd = attend(q_bhtk, k_bgtk, v_bgtk, ctx).transpose(1, 2).flatten(2)
    z_btd = x_btd + _linear(params, "self_attn.o_proj", o_btd)
    h_btd = rms_norm(z_btd, params["post_attention_layernorm.weight"], config.rms_norm_eps)
    h_btf = F.silu(_linear(params, "mlp.gate_proj", h_btd)) * _linear(params, "mlp.up_proj", h_btd)
    return z_btd + _linear(params, "mlp.down_proj", h_btf)


def make_context(batch: Batch, compute_dtype: torch.dtype, *, config: ModelConfig) -> Context:
    """Make what all blocks share: rotary tables, and a mask where samples are packed.

    Right padding needs no mask: a causal position never sees the padding after it. With `segments_bt` a position
    sees the earlier ones of its own segment only; padding (segment 0) sees padding, so that no row is empty.

    Returns:
        cos_btk, sin_btk (b is 1 where the batch has no `positions_bt`); and if packed either bounds_s (int32, where
        each segment begins) for a batch with `segment_lengths_bs` on a GPU in 16 bits, or mask_b1tt (bool, True =
        seen; b t t bytes).
    """
    num_tokens = batch["tokens_bt"].shape[1]
    device = batch["tokens_bt"].device
    positions_bt = batch["positions_bt"] if "positions_bt" in batch else torch.arange(num_tokens, device=device)[None]
    cos_btk, sin_btk = rotary_tables(config.rope, config.head_dim, positions_bt, compute_dtype)
    ctx = {"cos_btk": cos_btk, "sin_btk": sin_btk}
    if "segment_lengths_bs" in batch and takes_lengths(device, compute_dtype, config.head_dim):
        ends_s = batch["segment_lengths_bs"].flatten().cumsum(0)
        ctx["bounds_s"] = F.pad(ends_s, (1, 0)).int()
    elif "segments_bt" in batch:
        segments_bt = batch["segments_bt"]
        causal_tt = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        ctx["mask_b1tt"] = ((segments_bt[:, :, None] == segments_bt[:, None, :]) & causal_tt)[:, None]
    return ctx


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps): the quotient in fp32, cast back, times the weight in its own dtype."""
    x_fp32 = x.float()
    return weight * (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def _heads(params: Params, name: str, h_btd: Tensor, config: ModelConfig) -> Tensor:
    """Project to heads (b, heads, t, k), normalized over k where the family does."""
    x_bthk = _linear(params, f"self_attn.{name}_proj", h_btd).unflatten(-1, (-1, config.head_dim))
    if config.qk_norm and name != "v":
        x_bthk = rms_norm(x_bthk, params[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
    return x_bthk.transpose(1, 2)
