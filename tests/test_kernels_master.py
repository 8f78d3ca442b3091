"""The split master: lossless at 32 bits, bounded at 24, for every kind of pattern."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lazytrain.kernels import native
from lazytrain.kernels.master import join_master, split_bits, split_master

ERROR_24 = 2**-16  # relative, of normal numbers: half of the last of 15 bits


def edge_patterns() -> Tensor:
    """Every sign and exponent with fractions at the edges of 8 and 16 bits, and random ones."""
    tops = torch.arange(2**9, dtype=torch.int64) << 23
    fractions = [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x100, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3FFFFF, 0x7FFFFF]
    edges = (tops[:, None] + torch.tensor(fractions)).flatten()
    randoms = torch.randint(0, 2**32, (1 << 16,), generator=torch.Generator().manual_seed(0))
    return torch.cat([edges, randoms, torch.tensor([0x7F7F8000, 0xFF7FFFFF, 0x7FFF8000])]).to(torch.int32)


def test_split_32_is_lossless() -> None:
    bits = edge_patterns()
    hi, lo = split_master(bits.view(torch.float32), 32)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_master(hi, lo).view(torch.int32), bits)


def test_split_32_rounds_the_working_weight_to_nearest() -> None:
    w = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    hi, _ = split_master(w, 32)
    away = (w.bfloat16() != hi).nonzero().flatten()
    # halves go away from zero here and to even in torch
    assert ((w.view(torch.int32)[away] & 0xFFFF) == 0x8000).all()


def test_split_24_error_is_bounded() -> None:
    w = edge_patterns().view(torch.float32)
    w = w[w.isfinite() & (w.abs() >= 2.0**-126) & (w.abs() < 3e38)]
    hi, lo = split_master(w, 24)
    assert lo.dtype == torch.int8
    assert ((join_master(hi, lo).double() - w.double()).abs() <= w.double().abs() * ERROR_24).all()


def test_split_24_of_a_24_bit_value_is_lossless() -> None:
    bits = edge_patterns() & ~0xFF
    hi, lo = split_master(bits.view(torch.float32), 24)
    assert torch.equal(join_master(hi, lo).view(torch.int32), bits)
    for dither in (0, 0xFF):  # no dither may move what needs no rounding
        assert torch.equal(join_master(*split_bits(bits, torch.int8, dither)).view(torch.int32), bits)


def test_split_24_dither_averages_to_the_value() -> None:
    bits = torch.tensor([0x3F800001, 0x3F80007F, 0x3F8000C3], dtype=torch.int32)
    joined = torch.stack([join_master(*split_bits(bits, torch.int8, d)).view(torch.int32) for d in range(256)])
    assert torch.equal(joined.double().mean(0), bits.double())


@pytest.mark.parametrize("shape", [(0,), (), (1,), (63,), (3, 41)])
def test_split_keeps_shapes(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape)
    for bits in (32, 24):
        hi, lo = split_master(w, bits)
        assert hi.shape == lo.shape == join_master(hi, lo).shape == w.shape


def test_split_takes_strided_weights() -> None:
    w = torch.randn(6, 4).T
    assert torch.equal(join_master(*split_master(w, 32)), w)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"takes fp32 weights, got torch\.bfloat16"):
        split_master(torch.zeros(2).bfloat16(), 32)
    with pytest.raises(ValueError, match="bits is 16"):
        split_master(torch.zeros(2), 16)
    with pytest.raises(ValueError, match="of one shape"):
        join_master(torch.zeros(2).bfloat16(), torch.zeros(3, dtype=torch.int8))


@pytest.mark.slow
def test_native_split_is_lossless_for_all_patterns(tmp_path: Path) -> None:
    """All 2^32 patterns through the operator's own loops: 32 bits come back, 24 bits come back rounded."""
    if native.load() is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "split.cpp"
    source.write_text(
        f'#include "{native.SOURCE}"\n'
        """
        extern "C" int64_t count_wrong(uint64_t begin, uint64_t end) {
          int64_t wrong = 0;
          for (uint64_t first = begin; first < end; first += GROUP) {
            float w[GROUP], back[GROUP];
            uint32_t in[GROUP], out[GROUP];
            uint16_t hi[GROUP];
            int16_t lo[GROUP];
            int8_t lo8[GROUP];
            for (int i = 0; i < GROUP; ++i) in[i] = static_cast<uint32_t>(first) + i;
            std::memcpy(w, in, sizeof w);
            store_weights(WEIGHTS_32, hi, lo, 0, GROUP, 0, w);
            load_weights(WEIGHTS_32, hi, lo, 0, GROUP, back);
            std::memcpy(out, back, sizeof out);
            int32_t bad = 0;
            for (int i = 0; i < GROUP; ++i) bad += in[i] != out[i];
            store_weights(WEIGHTS_24, hi, lo8, 0, GROUP, 0x80, w);
            load_weights(WEIGHTS_24, hi, lo8, 0, GROUP, back);
            std::memcpy(out, back, sizeof out);
            for (int i = 0; i < GROUP; ++i) bad += ((in[i] + 0x80u) & ~0xFFu) != out[i];
            wrong += bad;
          }
          return wrong;
        }
        """
    )
    library = ctypes.CDLL(str(native.build(source, ["-march=native"], tmp_path)))
    library.count_wrong.argtypes, library.count_wrong.restype = [ctypes.c_uint64] * 2, ctypes.c_int64
    size = 2**28
    with ThreadPoolExecutor(native.num_threads()) as pool:
        assert sum(pool.map(lambda i: library.count_wrong(i * size, (i + 1) * size), range(2**32 // size))) == 0
