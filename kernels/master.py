"""Master weights as a bf16 working weight and a small remainder.

    bits of the fp32 master = (hi << 16) + sext(lo)              hi bf16 (as int16 bits), lo int16: 32 bits, lossless
                            = (hi << 16) + (sext(lo) << 8)       lo int8: 24 bits, 15 bits of fraction

    split to 32   hi = (bits + 0x8000) >> 16                     lo = bits - (hi << 16)
    split to 24   b = (bits + d) >> 8;  hi = (b + 0x80) >> 8     lo = b - (hi << 8)

All on 32-bit integers that wrap, so every pattern (NaN, infinities, -0) goes through. `hi` is the master rounded to
bf16, halves away from zero: the weight that streams to the GPU, so that the master costs only `lo`.

d rounds the 24-bit master: 0x80 (nearest) for `split_master`; in an update the low byte of the group's dither
(codec.py), which walks through all 256 values in 256 steps. Rounding to nearest would lose updates under half of
the master's spacing (up to 2^-16 of the weight) for ever.

Example:
    >>> hi, lo = split_master(torch.tensor([0.1, -3.0]), 32)
    >>> join_master(hi, lo)
    tensor([ 0.1000, -3.0000])
"""

import torch
from torch import Tensor

NEAREST = 0x80


def split_master(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split fp32 master weights in working weights and remainder (formula: head of this file).

    Args:
        w: fp32, any shape. bits: 32 (lossless) or 24 (nearest).

    Returns:
        (hi bf16, lo int16 for 32 or int8 for 24), w's shape, contiguous.

    Memory: 12 bytes an element while it runs.

    Raises:
        ValueError: w is not fp32 (convert it with `.float()`) or bits is another number.

    Example:
        >>> split_master(torch.ones(2), 24)
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([0, 0], dtype=torch.int8))
    """
    if w.dtype != torch.float32:
        raise ValueError(f"split_master takes fp32 weights, got {w.dtype}: convert with .float()")
    if bits not in (32, 24):
        raise ValueError(f"split_master: bits is {bits}, must be 32 or 24")
    pattern = w.contiguous().view(torch.int32)
    return split_bits(pattern, torch.int16 if bits == 32 else torch.int8, NEAREST)


def split_bits(pattern: Tensor, lo_dtype: torch.dtype, dither: Tensor | int) -> tuple[Tensor, Tensor]:
    """Split int32 patterns; `dither` (0..255, broadcast) rounds a 24-bit master and is unused for 32."""
    if lo_dtype == torch.int16:
        hi = (pattern + 0x8000) >> 16
        lo = pattern - (hi << 16)
    else:
        kept = (pattern + dither) >> 8
        hi = (kept + 0x80) >> 8
        lo = kept - (hi << 8)
    return hi.to(torch.int16).view(torch.bfloat16), lo.to(lo_dtype)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """Join working weights and remainder to the fp32 master (formula: head of this file).

    Args:
        hi: bf16. lo: int16 (32-bit master) or int8 (24-bit master), hi's shape.

    Returns:
        fp32, hi's shape. After `split_master(w, 32)`: w's bits; after 24: |difference| <= 2^-16 |w| for normal w.

    Raises:
        ValueError: other dtypes or shapes.

    Example:
        >>> join_master(*split_master(torch.tensor([1e-3]), 32))
        tensor([0.0010])
    """
    if hi.dtype != torch.bfloat16 or lo.dtype not in (torch.int16, torch.int8) or hi.shape != lo.shape:
        raise ValueError(
            f"join_master takes bf16 and int16 or int8 of one shape, got {hi.dtype} {tuple(hi.shape)} and "
            f"{lo.dtype} {tuple(lo.shape)}"
        )
    shift = 0 if lo.dtype == torch.int16 else 8
    high = hi.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + (lo.to(torch.int32) << shift)).view(torch.float32)
