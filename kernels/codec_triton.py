"""Triton kernels of the 8-bit codec; formulas and reference: codec.py.

The helpers here are shared with the fused update (adamw_triton.py). bf16 is handled as 16-bit patterns: exact, and the
same in the interpreter, whose own bf16 stores cut instead of rounding. `tl.div_rn`, `tl.sqrt_rn` and
`enable_fp_fusion=False` keep one correct rounding an operation, as everywhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.codec import Codes, count_groups, derive_dither, empty_codes

BLOCK_GROUPS = 8  # groups of 128 in one program
# Launched with these: no fused multiply-adds.
EXACT = {"enable_fp_fusion": False, "num_warps": 4}
# Values that change from call to call and gain nothing from a kernel of their own.
UNSPECIALIZED = ["num_groups", "groups_per_row", "dither"]


def as_int32(word: int) -> int:
    """Return a 32-bit word as a signed number: kernels then always see the same argument type."""
    return word - 2**32 if word >= 2**31 else word


def describe_layout(cols: int) -> tuple[int, int, bool]:
    """Return (groups_per_row, cols, RAGGED) for the kernels; without ragged groups rows don't matter."""
    return (count_groups(1, cols), cols, True) if cols % 128 else (1, 128, False)


@triton.jit
def tile_of_groups(num_groups, groups_per_row, cols, BLOCK_GROUPS: tl.constexpr, RAGGED: tl.constexpr):
    """Return (group (g, 1), offset (g, 128) in 64 bits, mask (g, 128)) of a program's groups."""
    group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[:, None]
    lane = tl.arange(0, 128)[None, :]
    inside = group < num_groups
    if RAGGED:
        row = group // groups_per_row
        start = (group - row * groups_per_row).to(tl.int64) * 128
        offset = row.to(tl.int64) * cols + start + lane
        mask = inside & (start + lane < cols)
    else:
        offset = group.to(tl.int64) * 128 + lane
        mask = inside & (lane < 128)
    return group, offset, mask


@triton.jit
def dither_of_group(dither, group):
    """Return each group's 32-bit dither, as uint32."""
    return dither.to(tl.uint32) + group.to(tl.uint32) * 0xC13FA9A9


@triton.jit
def decode_tile(m_q, m_scale, v_q, v_scale):
    """Codes (g, 128) and scales (g, 1) -> m and r = sqrt(v)."""
    q = m_q.to(tl.float32)  # its square is exact
    m = (q * tl.abs(q)) * (m_scale * (1.0 / 16129.0))
    r = v_q.to(tl.int32).to(tl.float32) * (v_scale * (1.0 / 255.0))
    return m, r


@triton.jit
def encode_tile(m, r, dither):
    """m and r = sqrt(v) (g, 128), 0 where masked -> codes (int32) and scales (g, 1)."""
    m_scale = tl.maximum(tl.max(tl.abs(m), axis=1)[:, None], 1e-30)
    v_scale = tl.maximum(tl.max(r, axis=1)[:, None], 1e-30)
    m_factor = tl.div_rn(tl.full(m_scale.shape, 16129.0, tl.float32), m_scale)
    v_factor = tl.div_rn(tl.full(v_scale.shape, 255.0, tl.float32), v_scale)
    rho = (dither >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    size = (tl.sqrt_rn(tl.abs(m) * m_factor) + 0.5).to(tl.int32, bitcast=True)
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    q = (size | sign).to(tl.float32, bitcast=True).to(tl.int32)
    c = (r * v_factor + rho).to(tl.int32)
    least = tl.minimum(r.to(tl.int32, bitcast=True), 1)  # bits of a positive float are positive
    c = tl.minimum(tl.maximum(c, least), 255)
    return q, m_scale, c, v_scale


@triton.jit(do_not_specialize=UNSPECIALIZED)
def quantize_kernel(
    m_in, v_in, m_q, m_scale, v_q, v_scale, num_groups, groups_per_row, cols, dither,
    BLOCK_GROUPS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, offset, mask = tile_of_groups(num_groups, groups_per_row, cols, BLOCK_GROUPS, RAGGED)
    m = tl.load(m_in + offset, mask=mask, other=0.0)
    r = tl.sqrt_rn(tl.load(v_in + offset, mask=mask, other=0.0))
    q, s_m, c, s_v = encode_tile(m, r, dither_of_group(dither, group))
    tl.store(m_q + offset, q.to(tl.int8), mask=mask)
    tl.store(v_q + offset, c.to(tl.uint8), mask=mask)
    tl.store(m_scale + group, s_m, mask=group < num_groups)
    tl.store(v_scale + group, s_v, mask=group < num_groups)


@triton.jit(do_not_specialize=["num_groups", "groups_per_row"])
def dequantize_kernel(
    m_q, m_scale, v_q, v_scale, m_out, v_out, num_groups, groups_per_row, cols,
    BLOCK_GROUPS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, offset, mask = tile_of_groups(num_groups, groups_per_row, cols, BLOCK_GROUPS, RAGGED)
    s_m = tl.load(m_scale + group, mask=group < num_groups, other=0.0)
    s_v = tl.load(v_scale + group, mask=group < num_groups, other=0.0)
    q, c = tl.load(m_q + offset, mask=mask, other=0), tl.load(v_q + offset, mask=mask, other=0)
    m, r = decode_tile(q, s_m, c, s_v)
    tl.store(m_out + offset, m, mask=mask)
    tl.store(v_out + offset, r * r, mask=mask)


def quantize_moments_triton(m: Tensor, v: Tensor, *, step: int, first_group: int = 0) -> Codes:
    """Do `codec.quantize_moments` with the Triton kernel, on CUDA tensors or in the interpreter."""
    codes, num_groups = empty_codes(m), count_groups(*m.shape)
    groups_per_row, cols, ragged = describe_layout(m.shape[1])
    if num_groups:
        with torch.cuda.device_of(m):
            quantize_kernel[(triton.cdiv(num_groups, BLOCK_GROUPS),)](
                m, v, *codes, num_groups, groups_per_row, cols, as_int32(derive_dither(step, first_group)),
                BLOCK_GROUPS=BLOCK_GROUPS, RAGGED=ragged, **EXACT,
            )  # fmt: skip
    return codes


def dequantize_moments_triton(m_q: Tensor, m_scale: Tensor, v_q: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Do `codec.dequantize_moments` with the Triton kernel, on CUDA tensors or in the interpreter."""
    m = torch.empty_like(m_q, dtype=torch.float32)
    v, num_groups = torch.empty_like(m), count_groups(*m_q.shape)
    groups_per_row, cols, ragged = describe_layout(m_q.shape[1])
    if num_groups:
        with torch.cuda.device_of(m):
            dequantize_kernel[(triton.cdiv(num_groups, BLOCK_GROUPS),)](
                m_q, m_scale, v_q, v_scale, m, v, num_groups, groups_per_row, cols,
                BLOCK_GROUPS=BLOCK_GROUPS, RAGGED=ragged, **EXACT,
            )  # fmt: skip
    return m, v
