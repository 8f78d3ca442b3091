"""Triton kernels of AdamW's fused step, with 8-bit or fp32 moments; formulas and reference: adamw.py.

12 to 14 bytes move for a parameter and about 110 instructions run for it, so memory and arithmetic both bound them on a
large GPU; eight elements a thread (BLOCK_GROUPS * 128 / (32 * num_warps)) make every load 8 or 16 bytes wide and keep
one layout from load to store. See codec_triton.py for how bits are kept.

A coefficient on the device is read by the kernel, so that clipping needs no host synchronisation; where it is NaN (the
norm was not finite), nothing is written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.codec import count_groups
from lazytrain.kernels.codec_triton import (
    BLOCK_GROUPS,
    EXACT,
    UNSPECIALIZED,
    as_int32,
    decode_tile,
    describe_layout,
    dither_of_group,
    encode_tile,
    tile_of_groups,
)
from lazytrain.kernels.hyper import AdamWHyper, derive_scalars


class Tile(NamedTuple):
    """What one program takes: groups of 128 elements, warps, and a cap on registers (None: the compiler's choice).

    Changes the speed only.
    """

    block_groups: int = BLOCK_GROUPS
    num_warps: int = EXACT["num_warps"]
    max_registers: int | None = None


DEFAULT_TILE = Tile()


@triton.jit
def load_floats(pointer, offset, mask, BF16: tl.constexpr):
    """Load fp32, or bf16 given as 16-bit patterns."""
    if BF16:
        x = (tl.load(pointer + offset, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = tl.load(pointer + offset, mask=mask, other=0.0)
    return x


@triton.jit
def load_weights(weights, lo, offset, mask, LO_BITS: tl.constexpr):
    """Load fp32 weights (LO_BITS 0), or join the master from 16-bit patterns and a remainder of 16 or 8 bits."""
    if LO_BITS == 0:
        w = tl.load(weights + offset, mask=mask, other=0.0)
    else:
        hi = tl.load(weights + offset, mask=mask, other=0).to(tl.int32)
        low = tl.load(lo + offset, mask=mask, other=0).to(tl.int32)
        w = ((hi << 16) + (low << (16 - LO_BITS))).to(tl.float32, bitcast=True)
    return w


@triton.jit
def store_weights(w, dither, weights, lo, offset, mask, LO_BITS: tl.constexpr):
    """Undo `load_weights`; the low byte of the dither rounds a 24-bit master."""
    if LO_BITS == 0:
        tl.store(weights + offset, w, mask=mask)
    elif LO_BITS == 16:
        bits = w.to(tl.int32, bitcast=True)
        hi = (bits + 0x8000) >> 16
        tl.store(weights + offset, hi.to(tl.int16), mask=mask)
        tl.store(lo + offset, (bits - (hi << 16)).to(tl.int16), mask=mask)
    else:
        kept = (w.to(tl.int32, bitcast=True) + (dither & 0xFF).to(tl.int32)) >> 8
        hi = (kept + 0x80) >> 8
        tl.store(weights + offset, hi.to(tl.int16), mask=mask)
        tl.store(lo + offset, (kept - (hi << 8)).to(tl.int8), mask=mask)


@triton.jit
def step_tile(
    g, w, m, v, coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size
):  # fmt: skip
    """Return (w, m, v, r) after one step."""
    g = g * coef
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    r = tl.sqrt_rn(v)
    u = tl.div_rn(m, r * inv_sqrt_bias2 + eps)
    return w * decay - u * step_size, m, v, r


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw8bit_kernel(
    weights, lo, m_q, m_scale, v_q, v_scale, grads, coef_in, num_groups, groups_per_row, cols,
    coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size, dither,
    BLOCK_GROUPS: tl.constexpr, RAGGED: tl.constexpr, LO_BITS: tl.constexpr, GRADS_BF16: tl.constexpr,
    COEF_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    if COEF_ON_DEVICE:
        coef = tl.load(coef_in)
        num_groups = tl.where(coef == coef, num_groups, 0)
    group, offset, mask = tile_of_groups(num_groups, groups_per_row, cols, BLOCK_GROUPS, RAGGED)
    s_m = tl.load(m_scale + group, mask=group < num_groups, other=0.0)
    s_v = tl.load(v_scale + group, mask=group < num_groups, other=0.0)
    q, c = tl.load(m_q + offset, mask=mask, other=0), tl.load(v_q + offset, mask=mask, other=0)
    m, r = decode_tile(q, s_m, c, s_v)
    g = load_floats(grads, offset, mask, GRADS_BF16)
    w = load_weights(weights, lo, offset, mask, LO_BITS)
    w, m, _, r = step_tile(
        g, w, m, r * r, coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size
    )
    word = dither_of_group(dither, group)
    store_weights(w, word, weights, lo, offset, mask, LO_BITS)
    new_q, s_m, new_c, s_v = encode_tile(m, r, word)
    tl.store(m_q + offset, new_q.to(tl.int8), mask=mask)
    tl.store(v_q + offset, new_c.to(tl.uint8), mask=mask)
    tl.store(m_scale + group, s_m, mask=group < num_groups)
    tl.store(v_scale + group, s_v, mask=group < num_groups)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_kernel(
    weights, lo, m_io, v_io, grads, coef_in, num_groups, groups_per_row, numel,
    coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size, dither,
    BLOCK_GROUPS: tl.constexpr, RAGGED: tl.constexpr, LO_BITS: tl.constexpr, GRADS_BF16: tl.constexpr,
    COEF_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    if COEF_ON_DEVICE:
        coef = tl.load(coef_in)
        num_groups = tl.where(coef == coef, num_groups, 0)
    group, offset, mask = tile_of_groups(num_groups, groups_per_row, numel, BLOCK_GROUPS, RAGGED)
    m, v = tl.load(m_io + offset, mask=mask, other=0.0), tl.load(v_io + offset, mask=mask, other=0.0)
    g = load_floats(grads, offset, mask, GRADS_BF16)
    w = load_weights(weights, lo, offset, mask, LO_BITS)
    w, m, v, _ = step_tile(
        g, w, m, v, coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size
    )
    store_weights(w, dither_of_group(dither, group), weights, lo, offset, mask, LO_BITS)
    tl.store(m_io + offset, m, mask=mask)
    tl.store(v_io + offset, v, mask=mask)


def _bits(x: Tensor) -> Tensor:
    """Return bf16 as 16-bit patterns, anything else as it is."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _scalars(num_groups: int, cols: int, hyper: AdamWHyper, coef: float | Tensor, first_group: int) -> list[float]:
    """Return the kernels' arguments from num_groups on; a coefficient on the device makes `coef` unread."""
    s = derive_scalars(hyper, 1.0 if isinstance(coef, Tensor) else coef, first_group)
    return [num_groups, *describe_layout(cols)[:2], *s[:-1], as_int32(s.dither)]


def _or(x: Tensor | float | None, unread: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else unread


def _variant(cols: int, lo: Tensor | None, grads: Tensor, coef: float | Tensor, tile: Tile) -> dict[str, object]:
    options: dict[str, object] = {**EXACT, "num_warps": tile.num_warps}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return {
        "BLOCK_GROUPS": tile.block_groups,
        "RAGGED": describe_layout(cols)[2],
        "LO_BITS": 0 if lo is None else lo.element_size() * 8,
        "GRADS_BF16": grads.dtype == torch.bfloat16,
        "COEF_ON_DEVICE": isinstance(coef, Tensor),
        **options,
    }


def adamw8bit_update_triton_into(
    weights: Tensor,
    lo: Tensor | None,
    m_q: Tensor,
    m_scale: Tensor,
    v_q: Tensor,
    v_scale: Tensor,
    grads: Tensor,
    *,
    rows: int,
    cols: int,
    first_group: int,
    coef: float | Tensor,
    hyper: AdamWHyper,
    tile: Tile = DEFAULT_TILE,
) -> None:
    """Do `adamw.adamw8bit_update_into` with the Triton kernel, on CUDA tensors or in the interpreter."""
    num_groups = count_groups(rows, cols)
    if num_groups:
        with torch.cuda.device_of(weights):
            adamw8bit_kernel[(triton.cdiv(num_groups, tile.block_groups),)](
                _bits(weights), _or(lo, m_q), m_q, m_scale, v_q, v_scale, _bits(grads), _or(coef, m_scale),
                *_scalars(num_groups, cols, hyper, coef, first_group), **_variant(cols, lo, grads, coef, tile),
            )  # fmt: skip


def adamw_update_triton_into(
    weights: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grads: Tensor,
    *,
    coef: float | Tensor,
    hyper: AdamWHyper,
    tile: Tile = DEFAULT_TILE,
) -> None:
    """Do `adamw.adamw_update_into` with the Triton kernel, on CUDA tensors or in the interpreter."""
    numel = weights.numel()
    num_groups = count_groups(1, numel)
    if num_groups:
        with torch.cuda.device_of(weights):
            adamw_kernel[(triton.cdiv(num_groups, tile.block_groups),)](
                _bits(weights), _or(lo, m), m, v, _bits(grads), _or(coef, m),
                *_scalars(num_groups, numel, hyper, coef, 0), **_variant(numel, lo, grads, coef, tile),
            )  # fmt: skip
