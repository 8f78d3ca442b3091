"""8-bit codec of AdamW's moments: companded codes with one fp32 scale for each group of 128 elements.

A group is 128 consecutive elements within one row; the last of a row may be shorter (ragged), and a group never crosses
rows or tensors. A (rows, cols) tensor has rows * ceil(cols / 128) groups, in row-major order, and as many scales.

    decode  m = (q * |q|) * (s_m * fl(1/16129))          q int8,  -127..127;  16129 = 127^2
            r = c * (s_v * fl(1/255)),  v = r * r        c uint8, 0..255;     r is the root of the second moment
    encode  s_m = max(max|m|, 1e-30)                     q = sign(m) * int(sqrt(|m| * (16129 / s_m)) + 0.5)
            s_v = max(max r, 1e-30)                      c = min(255, int(r * (255 / s_v) + rho)), at least 1 if r > 0
            rho = (((t * 0x9E3779B9 + k * 0xC13FA9A9) mod 2^32) >> 8) * 2^-24

t is the step (1 for the first) and k the group's index. Arithmetic is fp32, one rounding an operation: no contracted
multiply-adds, true division and root; int() cuts. So every path gives the same bits. Inputs must be finite.

Why: code 0 of v beside a moment that is not 0 would divide by eps alone (hence c >= 1); v that rounds to nearest
can't decay at beta2 = 0.999 (hence rho, a golden-ratio dither: it needs no random numbers, and over the steps each
value is rounded up as often as its fraction says); a fp16 scale is too coarse at ordinary gradient sizes.

Errors: |dm| <= s_m * (sqrt(|m| / s_m) / 127 + 1.6e-5), |dr| < s_v / 255. A group of zeros decodes to exact zeros.

Example:
    >>> m_q, m_scale, v_q, v_scale = quantize_moments(torch.tensor([[1.0, -0.25]]), torch.tensor([[4.0, 0.0]]), step=1)
    >>> m_q, v_q
    (tensor([[127, -64]], dtype=torch.int8), tensor([[255,   0]], dtype=torch.uint8))
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lazytrain.kernels import native

GROUP = 128
M_LEVELS = 16129.0  # 127 squared
R_LEVELS = 255.0
SCALE_FLOOR = 1e-30
STEP_WEIGHT = 0x9E3779B9
GROUP_WEIGHT = 0xC13FA9A9
CHUNK = 1 << 20  # elements that a reference handles at once


class Codes(NamedTuple):
    """Encoded moments of a (rows, cols) tensor.

    m_q: int8 (rows, cols). v_q: uint8 (rows, cols). m_scale, v_scale: fp32 (rows * ceil(cols / 128),).
    """

    m_q: Tensor
    m_scale: Tensor
    v_q: Tensor
    v_scale: Tensor


def count_groups(rows: int, cols: int) -> int:
    """Return how many groups, and so scales, a (rows, cols) tensor has.

    Example:
        >>> count_groups(2, 129)
        4
    """
    return rows * -(-cols // GROUP)


def derive_dither(step: int, first_group: int = 0) -> int:
    """Return (t * 0x9E3779B9 + k * 0xC13FA9A9) mod 2^32 for the first group of a call."""
    return (step * STEP_WEIGHT + first_group * GROUP_WEIGHT) % 2**32


def to_groups(x: Tensor, rows: int, cols: int) -> Tensor:
    """Return a flat tensor as (groups, 128), ragged groups filled up with zeros."""
    return pad(x.view(rows, cols), (0, -cols % GROUP)).view(-1, GROUP)


def from_groups(x_gi: Tensor, rows: int, cols: int) -> Tensor:
    """Undo `to_groups`: (groups, 128) -> (rows, cols), without the filling."""
    return x_gi.view(rows, cols + -cols % GROUP)[:, :cols]


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded fp32 root (torch.sqrt on the CPU is off by one ulp in one result of five)."""
    return x.double().sqrt().float()


def dither_of_groups(dither: int, num_groups: int) -> Tensor:
    """Return each group's 32-bit dither, int64 (groups, 1)."""
    k_g1 = torch.arange(num_groups, dtype=torch.int64)[:, None]
    return (dither + (k_g1 * GROUP_WEIGHT & 0xFFFFFFFF)) & 0xFFFFFFFF


def reference_encode(m_gi: Tensor, r_gi: Tensor, dither_g1: Tensor) -> Codes:
    """Encode groups (groups, 128) of m and r = sqrt(v), as the formulas say it."""
    m_scale_g1 = m_gi.abs().amax(1, keepdim=True).clamp_min(SCALE_FLOOR)
    v_scale_g1 = r_gi.amax(1, keepdim=True).clamp_min(SCALE_FLOOR)
    # tensor / tensor: torch turns number / tensor into a product with a reciprocal
    m_factor_g1 = torch.full_like(m_scale_g1, M_LEVELS).div(m_scale_g1)
    v_factor_g1 = torch.full_like(v_scale_g1, R_LEVELS).div(v_scale_g1)
    rho_g1 = (dither_g1 >> 8).float() * 2**-24
    q_gi = (root(m_gi.abs() * m_factor_g1) + 0.5).to(torch.int32) * m_gi.sign().to(torch.int32)
    c_gi = (r_gi * v_factor_g1 + rho_g1).to(torch.int32).clamp_max(255)
    c_gi = torch.where(r_gi > 0, c_gi.clamp_min(1), c_gi)
    return Codes(q_gi.to(torch.int8), m_scale_g1.flatten(), c_gi.to(torch.uint8), v_scale_g1.flatten())


def reference_decode(m_q_gi: Tensor, m_scale_g: Tensor, v_q_gi: Tensor, v_scale_g: Tensor) -> tuple[Tensor, Tensor]:
    """Decode groups (groups, 128) to m and r = sqrt(v), as the formulas say it."""
    q_gi = m_q_gi.float()
    m_gi = (q_gi * q_gi.abs()) * (m_scale_g * (1 / M_LEVELS))[:, None]
    r_gi = v_q_gi.float() * (v_scale_g * (1 / R_LEVELS))[:, None]
    return m_gi, r_gi


def reference_quantize_moments(m: Tensor, v: Tensor, *, step: int, first_group: int = 0) -> Codes:
    """Encode moments with plain torch operations: the truth that the kernels must meet bit by bit."""
    rows, cols = m.shape
    m_gi, v_gi = to_groups(m, rows, cols), to_groups(v, rows, cols)
    codes = reference_encode(m_gi, root(v_gi), dither_of_groups(derive_dither(step, first_group), len(m_gi)))
    return codes._replace(
        m_q=from_groups(codes.m_q, rows, cols).clone(), v_q=from_groups(codes.v_q, rows, cols).clone()
    )


def reference_dequantize_moments(m_q: Tensor, m_scale: Tensor, v_q: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Decode moments with plain torch operations."""
    rows, cols = m_q.shape
    m_gi, r_gi = reference_decode(to_groups(m_q, rows, cols), m_scale, to_groups(v_q, rows, cols), v_scale)
    return from_groups(m_gi, rows, cols).clone(), from_groups(r_gi * r_gi, rows, cols).clone()


def check_tensor(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], numel: int, device: torch.device) -> None:
    """Raise ValueError unless x has one of the dtypes, `numel` elements, the device and no gaps."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}, must be {' or '.join(map(str, dtypes))}")
    if x.numel() != numel:
        raise ValueError(f"{name} has {x.numel()} elements, must have {numel}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, must be on {device}: move it with .to()")
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {tuple(x.stride())}): pass a contiguous tensor or view")


def quantize_moments(m: Tensor, v: Tensor, *, step: int, first_group: int = 0) -> Codes:
    """Encode AdamW's moments in 8 bits (formula: head of this file).

    Args:
        m: first moment, fp32 (rows, cols), finite. v: second moment, fp32 (rows, cols), finite and >= 0.
        step: t >= 1, which the dither of v depends on. first_group: index k of the first group.

    Returns:
        Codes, on m's device.

    Memory: 2 bytes an element and 8 a group.

    Raises:
        ValueError: m is not 2-D, or dtype, shape, device or strides differ from the above.

    Source: signed-root companding and dithered root of v, measured in BENCHMARKS.md.

    Example:
        >>> codes = quantize_moments(torch.zeros(1, 3), torch.ones(1, 3), step=1)
        >>> codes.v_q
        tensor([[255, 255, 255]], dtype=torch.uint8)
    """
    if m.dim() != 2 or v.shape != m.shape:
        raise ValueError(f"m and v must be 2-D of one shape, got {tuple(m.shape)} and {tuple(v.shape)}")
    check_tensor("m", m, (torch.float32,), m.numel(), m.device)
    check_tensor("v", v, (torch.float32,), m.numel(), m.device)
    if m.is_cuda:
        from lazytrain.kernels.codec_triton import quantize_moments_triton

        return Codes(*quantize_moments_triton(m, v, step=step, first_group=first_group))
    library = native.load()
    if library is None:
        return reference_quantize_moments(m, v, step=step, first_group=first_group)
    codes = empty_codes(m)
    dither = derive_dither(step, first_group)
    pointers = [x.data_ptr() for x in (m, v, *codes)]

    call = native.make_call(native.QUANTIZE, pointers, m.shape[1], dither=dither)
    native.run_ranges(library, call, codes.m_scale.numel())
    return codes


def empty_codes(m: Tensor) -> Codes:
    """Return uninitialised Codes for a (rows, cols) tensor, on its device."""
    num_groups = count_groups(*m.shape)
    m_q, v_q = torch.empty_like(m, dtype=torch.int8), torch.empty_like(m, dtype=torch.uint8)
    return Codes(m_q, m.new_empty(num_groups), v_q, m.new_empty(num_groups))


def dequantize_moments(m_q: Tensor, m_scale: Tensor, v_q: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Decode 8-bit moments (formula: head of this file).

    Args:
        m_q: int8 (rows, cols). v_q: uint8 (rows, cols). m_scale, v_scale: fp32, rows * ceil(cols / 128) elements.

    Returns:
        (m, v), fp32 (rows, cols).

    Raises:
        ValueError: m_q is not 2-D, or dtype, shape, device or strides differ from the above.

    Example:
        >>> codes = quantize_moments(torch.ones(1, 2), torch.ones(1, 2), step=1)
        >>> dequantize_moments(*codes)
        (tensor([[1., 1.]]), tensor([[1., 1.]]))
    """
    if m_q.dim() != 2 or v_q.shape != m_q.shape:
        raise ValueError(f"m_q and v_q must be 2-D of one shape, got {tuple(m_q.shape)} and {tuple(v_q.shape)}")
    num_groups = count_groups(*m_q.shape)
    check_tensor("m_q", m_q, (torch.int8,), m_q.numel(), m_q.device)
    check_tensor("v_q", v_q, (torch.uint8,), m_q.numel(), m_q.device)
    check_tensor("m_scale", m_scale, (torch.float32,), num_groups, m_q.device)
    check_tensor("v_scale", v_scale, (torch.float32,), num_groups, m_q.device)
    if m_q.is_cuda:
        from lazytrain.kernels.codec_triton import dequantize_moments_triton

        return dequantize_moments_triton(m_q, m_scale, v_q, v_scale)
    library = native.load()
    if library is None:
        return reference_dequantize_moments(m_q, m_scale, v_q, v_scale)
    m = torch.empty_like(m_q, dtype=torch.float32)
    v = torch.empty_like(m)
    pointers = [x.data_ptr() for x in (m_q, m_scale, v_q, v_scale, m, v)]

    native.run_ranges(library, native.make_call(native.DEQUANTIZE, pointers, m.shape[1]), num_groups)
    return m, v
