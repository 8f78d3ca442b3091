"""Rotary position embedding: frequencies of the four kinds, and the cos and sin tables that all blocks of a step share.

Shape letters: b batch, t time, h heads, k head dim; `_j` = pairs of the head dim (k / 2).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from lazytrain.configuration import RopeConfig


@lru_cache(maxsize=16)
def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the angle per position of every pair: theta^(-2j / head_dim), scaled as `rope.kind` says.

    Args:
        rope: kind and numbers.
        head_dim: even.
    Returns:
        fp32 (head_dim / 2). Computed on the CPU, so that all devices turn by the same bits. Cached: don't write to it.
    Source: RoFormer (arXiv 2104.09864); linear: position interpolation (arXiv 2306.15595); yarn: arXiv 2309.00071,
        section 3.2; llama3: the Llama 3.1 reference code. Same order of operations as transformers.
    """
    return _scaled_frequencies(rope, head_dim).to(device)


def rotary_tables(rope: RopeConfig, head_dim: int, positions_bt: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position x frequency, times the attention factor, in the working dtype.

    Args:
        positions_bt: int64 (b, t).
        dtype: of the result; angles are fp32 (bf16 can't tell position 257 from 256).
    Returns:
        cos_btk, sin_btk, the second half of k repeating the first.
    """
    angles_btj = positions_bt[..., None].float() * inverse_frequencies(rope, head_dim, positions_bt.device)
    angles_btk = torch.cat((angles_btj, angles_btj), dim=-1)
    cos_btk, sin_btk = angles_btk.cos() * rope.attention_factor, angles_btk.sin() * rope.attention_factor
    return cos_btk.to(dtype), sin_btk.to(dtype)


def rotate(x_bhtk: Tensor, cos_btk: Tensor, sin_btk: Tensor) -> Tensor:
    """Turn the pairs (x_j, x_(j + k/2)) of every head by its position's angles."""
    first, second = x_bhtk.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_bhtk * cos_btk.unsqueeze(1) + turned * sin_btk.unsqueeze(1)


def _scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    powers_j = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain_j = 1.0 / powers_j
    if rope.kind == "default":
        return plain_j
    if rope.kind == "linear":
        return plain_j / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain_j)
    assert rope.kind == "yarn"
    keep_j = _yarn_keep(rope, head_dim)
    return (1.0 / (rope.factor * powers_j)) * (1 - keep_j) + plain_j * keep_j


def _llama3(rope: RopeConfig, plain_j: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, interpolate between."""
    original = rope.original_max_position_embeddings
    wavelength_j = 2 * math.pi / plain_j
    is_long_j = wavelength_j > original / rope.low_freq_factor
    is_short_j = wavelength_j < original / rope.high_freq_factor
    smooth_j = (original / wavelength_j - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between_j = (1 - smooth_j) * plain_j / rope.factor + smooth_j * plain_j
    return torch.where(is_long_j, plain_j / rope.factor, torch.where(is_short_j, plain_j, between_j))


def _yarn_keep(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return how much of the plain frequency each pair keeps: 1 for fast pairs, 0 for slow ones, a ramp between."""

    def pair_with(num_rotations: float) -> float:
        original = rope.original_max_position_embeddings
        return (head_dim * math.log(original / (num_rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_j = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp_j.clamp(0, 1)
