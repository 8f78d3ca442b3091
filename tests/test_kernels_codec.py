"""The 8-bit codec: error bounds, zeros, dither, and equal bits on every path."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazytrain.kernels import native
from lazytrain.kernels.codec import (
    GROUP,
    Codes,
    count_groups,
    dequantize_moments,
    derive_dither,
    empty_codes,
    quantize_moments,
    reference_dequantize_moments,
    reference_quantize_moments,
)

SHAPES = [(0, 5), (3, 0), (1, 1), (3, 63), (2, 123), (1, 128), (5, 300), (4, 129)]
M_SLACK = 1.6e-5  # of the scale: the rounding of codes in fp32
GAUSSIAN_M_ERROR = 6e-5  # mean squared, of the variance; worst seen 4.6e-5
GAUSSIAN_V_ERROR = 3e-5  # mean squared error of r, of the mean square; worst seen 2.1e-5


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where Triton runs: interpreted on the CPU, or compiled."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    return "cpu" if request.param == "interpreter" else "cuda"


def make_moments(rows: int, cols: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, cols, generator=gen) * scale * 10 ** torch.randn(rows, cols, generator=gen)
    return m, (torch.randn(rows, cols, generator=gen) * scale) ** 2


def scales_of(codes: Codes, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return each element's s_m and s_v."""
    spread = [x.view(rows, -1).repeat_interleave(GROUP, 1)[:, :cols] for x in (codes.m_scale, codes.v_scale)]
    return spread[0], spread[1]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 400),
    exponent=st.integers(-12, 12),
    step=st.integers(1, 2**40),
    first_group=st.integers(0, 2**40),
    seed=st.integers(0, 10**6),
)
def test_codec_error_is_bounded(rows: int, cols: int, exponent: int, step: int, first_group: int, seed: int) -> None:
    m, v = make_moments(rows, cols, seed, 10.0**exponent)
    codes = quantize_moments(m, v, step=step, first_group=first_group)
    m_back, v_back = dequantize_moments(*codes)
    s_m, s_v = (x.double() for x in scales_of(codes, rows, cols))
    r, r_back = v.double().sqrt(), v_back.double().sqrt()
    assert ((m_back - m).abs() <= s_m * ((m.abs() / s_m).sqrt() / 127 + M_SLACK)).all()
    assert ((r_back - r).abs() < s_v / 255 * (1 + 1e-4)).all()
    assert (codes.v_q[v > 0] >= 1).all()


def test_gaussian_error_is_small() -> None:
    gen = torch.Generator().manual_seed(0)
    m, g = torch.randn(2, 512, 512, generator=gen)
    codes = quantize_moments(m, g * g, step=3)
    m_back, v_back = dequantize_moments(*codes)
    assert (m_back - m).square().mean() <= GAUSSIAN_M_ERROR
    assert (v_back.sqrt() - g.abs()).square().mean() <= GAUSSIAN_V_ERROR


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_decode_to_zeros(shape: tuple[int, int]) -> None:
    codes = quantize_moments(torch.zeros(shape), torch.zeros(shape), step=7)
    assert not codes.m_q.any()
    assert not codes.v_q.any()
    assert all(not x.any() for x in dequantize_moments(*codes))


def test_tiny_v_keeps_a_code() -> None:
    v = torch.full((1, 256), 1e-38)
    v[0, 0] = 1.0
    v[0, 128] = 1e30
    v[0, 129] = torch.finfo(torch.float32).smallest_normal * 2**-20
    codes = quantize_moments(torch.zeros_like(v), v, step=1)
    assert (codes.v_q >= 1).all()
    assert (dequantize_moments(*codes)[1] > 0).all()


def test_group_does_not_cross_rows() -> None:
    m = torch.ones(2, 130)
    m[0] = 1e6
    codes = quantize_moments(m, m, step=1)
    assert torch.equal(codes.m_scale, torch.tensor([1e6, 1e6, 1.0, 1.0]))


def test_dither_averages_to_the_value() -> None:
    """Over many steps the mean of the decoded root is the root, which nearest rounding misses by up to half a code."""
    r = torch.linspace(0.1, 1.0, 128)[None]
    steps = 512
    total = torch.zeros_like(r, dtype=torch.float64)
    for step in range(1, steps + 1):
        total += dequantize_moments(*quantize_moments(r, r * r, step=step))[1].double().sqrt()
    assert ((total / steps - r).abs() * 255).max() < 0.02


def test_dither_wraps_at_32_bits() -> None:
    step, group = 2**33 + 5, 2**34 + 7
    assert derive_dither(step, group) == (step * 0x9E3779B9 + group * 0xC13FA9A9) % 2**32
    m, v = make_moments(2, 300)
    late = quantize_moments(m, v, step=step, first_group=group)
    early = quantize_moments(m, v, step=5, first_group=7 + 2**32)
    for a, b in zip(late, early):
        assert torch.equal(a, b)


def test_first_group_continues_a_larger_call() -> None:
    m, v = make_moments(3, 300)
    whole = quantize_moments(m, v, step=9)
    part = quantize_moments(m[1:], v[1:], step=9, first_group=count_groups(1, 300))
    assert torch.equal(whole.v_q[1:], part.v_q)
    assert torch.equal(whole.m_q[1:], part.m_q)


def test_native_offsets_and_groups_over_2_to_31_are_right() -> None:
    """The operator's pointers are shifted so that only two groups far behind in a huge row exist."""
    library = native.load()
    if library is None:
        pytest.skip("no C++ compiler")
    m, v = make_moments(1, 256)
    codes, first_group = empty_codes(m), 2**31 + 12345
    at = first_group * GROUP
    shifts = {"m": 4 * at, "v": 4 * at, "m_q": at, "m_scale": 4 * first_group, "v_q": at, "v_scale": 4 * first_group}
    pointers = [x.data_ptr() - shift for x, shift in zip((m, v, *codes), shifts.values())]
    library.lt_quantize(*pointers, at + 256, first_group, first_group + 2, derive_dither(7))
    for a, b in zip(codes, reference_quantize_moments(m, v, step=7, first_group=first_group)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_native_codec_matches_reference(shape: tuple[int, int]) -> None:
    check_codec(shape, quantize_moments, dequantize_moments, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_codec_matches_reference(shape: tuple[int, int], device: str) -> None:
    from lazytrain.kernels.codec_triton import dequantize_moments_triton, quantize_moments_triton

    check_codec(shape, quantize_moments_triton, dequantize_moments_triton, device)


def check_codec(
    shape: tuple[int, int], quantize: Callable[..., Codes], dequantize: Callable[..., tuple[Tensor, ...]], device: str
) -> None:
    m, v = make_moments(*shape)
    truth = reference_quantize_moments(m, v, step=11, first_group=5)
    codes = quantize(m.to(device), v.to(device), step=11, first_group=5)
    for name, a, b in zip(Codes._fields, truth, codes):
        assert torch.equal(a, b.cpu()), name
    for a, b in zip(reference_dequantize_moments(*truth), dequantize(*codes)):
        assert torch.equal(a, b.cpu())


@pytest.mark.gpu
def test_dispatch_on_cuda_matches_reference() -> None:
    check_codec((5, 300), quantize_moments, dequantize_moments, "cuda")


def test_wrong_arguments_are_named() -> None:
    m = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="2-D of one shape"):
        quantize_moments(m, torch.zeros(2, 5), step=1)
    with pytest.raises(ValueError, match=r"v is torch\.bfloat16"):
        quantize_moments(m, m.bfloat16(), step=1)
    with pytest.raises(ValueError, match="m is not contiguous"):
        quantize_moments(torch.zeros(4, 2).T, m, step=1)
    codes = quantize_moments(m, m, step=1)
    with pytest.raises(ValueError, match="m_scale has 3 elements, must have 2"):
        dequantize_moments(codes.m_q, torch.zeros(3), codes.v_q, codes.v_scale)
