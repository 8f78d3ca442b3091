"""Triton kernels of the sum of squares, and of sums of gradients with it; definition and reference: norm.py.

The loop over rows loads eight before it writes or adds any, to have enough reads in flight; only a last tile that is
not full has masks. Sums over lanes are an explicit tree of adjacent pairs, because the order inside a longer `tl.sum`
depends on the layout that the compiler chose. `tl.sum` of a pair has one order, and leaves the lanes where they are:
three levels within a thread, five within a warp. (`tl.split` gave every thread all 1024 lanes.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.norm import LANES, ROWS, count_tiles

EXACT = {"enable_fp_fusion": False}
NUM_WARPS = 2  # loads of 16 bytes, two of a row for each thread
NONE, BF16, FP32 = 0, 1, 2  # what a pointer of the kernel leads to


@triton.jit
def load_fp32(pointer, offset, end, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Load fp32 (KIND 2), or bf16 given as 16-bit patterns (KIND 1); zeros from `end` on, where MASKED."""
    if MASKED:
        x = tl.load(pointer + offset, mask=offset < end, other=0)
    else:
        x = tl.load(pointer + offset)
    if KIND == 1:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def load_sum(x_in, y_in, offset, end, X: tl.constexpr, Y: tl.constexpr, MASKED: tl.constexpr):
    """Return x + y in fp32."""
    x = load_fp32(x_in, offset, end, X, MASKED)
    if Y != 0:
        x += load_fp32(y_in, offset, end, Y, MASKED)
    return x


@triton.jit
def store(pointer, offset, end, x, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offset, x, mask=offset < end)
    else:
        tl.store(pointer + offset, x)


@triton.jit
def write_row(x, out, offset, end, OUT: tl.constexpr, MASKED: tl.constexpr):
    """Write x to out, and return it as it was written, in fp32."""
    if OUT == 1:
        # To nearest even by hand: the interpreter's own conversion truncates.
        bits = x.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x == x, kept, 0x7FC0)
        store(out, offset, end, kept.to(tl.int16), MASKED)
        x = (kept << 16).to(tl.float32, bitcast=True)
    if OUT == 2:
        store(out, offset, end, x, MASKED)
    return x


@triton.jit
def sum_rows(
    x_in, y_in, out, end, LANES: tl.constexpr, ROWS: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write x + y, where wanted, and return the lanes' sums of squares, fp32 (LANES,)."""
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    for row in range(0, ROWS, 8):
        at = row * LANES + lane
        x0 = load_sum(x_in, y_in, at, end, X, Y, MASKED)
        x1 = load_sum(x_in, y_in, at + LANES, end, X, Y, MASKED)
        x2 = load_sum(x_in, y_in, at + 2 * LANES, end, X, Y, MASKED)
        x3 = load_sum(x_in, y_in, at + 3 * LANES, end, X, Y, MASKED)
        x4 = load_sum(x_in, y_in, at + 4 * LANES, end, X, Y, MASKED)
        x5 = load_sum(x_in, y_in, at + 5 * LANES, end, X, Y, MASKED)
        x6 = load_sum(x_in, y_in, at + 6 * LANES, end, X, Y, MASKED)
        x7 = load_sum(x_in, y_in, at + 7 * LANES, end, X, Y, MASKED)
        x0 = write_row(x0, out, at, end, OUT, MASKED)
        x1 = write_row(x1, out, at + LANES, end, OUT, MASKED)
        x2 = write_row(x2, out, at + 2 * LANES, end, OUT, MASKED)
        x3 = write_row(x3, out, at + 3 * LANES, end, OUT, MASKED)
        x4 = write_row(x4, out, at + 4 * LANES, end, OUT, MASKED)
        x5 = write_row(x5, out, at + 5 * LANES, end, OUT, MASKED)
        x6 = write_row(x6, out, at + 6 * LANES, end, OUT, MASKED)
        x7 = write_row(x7, out, at + 7 * LANES, end, OUT, MASKED)
        sums += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)
        sums += (x4 * x4 + x5 * x5) + (x6 * x6 + x7 * x7)
    return sums


@triton.jit
def fold_pairs(x, N: tl.constexpr):
    """Add adjacent pairs: (N,) -> (N / 2,)."""
    return tl.sum(tl.reshape(x, (N // 2, 2)), axis=1)


@triton.jit
def fold_lanes(x):
    """Add adjacent pairs until one is left: (1024,) -> (1,)."""
    x = fold_pairs(x, 1024)
    x = fold_pairs(x, 512)
    x = fold_pairs(x, 256)
    x = fold_pairs(x, 128)
    x = fold_pairs(x, 64)
    x = fold_pairs(x, 32)
    x = fold_pairs(x, 16)
    x = fold_pairs(x, 8)
    x = fold_pairs(x, 4)
    return fold_pairs(x, 2)


@triton.jit
def sum_tiles_kernel(
    x_in, y_in, out, numel, values, LANES: tl.constexpr, ROWS: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    begin = tile.to(tl.int64) * (ROWS * LANES)
    left = numel - begin
    if left >= ROWS * LANES:
        sums = sum_rows(x_in + begin, y_in + begin, out + begin, left, LANES, ROWS, X, Y, OUT, False)
    else:
        sums = sum_rows(x_in + begin, y_in + begin, out + begin, left, LANES, ROWS, X, Y, OUT, True)
    if SQUARE:
        tl.store(values + tile + tl.arange(0, 1), fold_lanes(sums.to(tl.float64)))


@triton.jit(do_not_specialize=["num_values"])
def square_total_kernel(values, num_values, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float64)
    for first in range(0, num_values, 4 * LANES):
        at = first + lane
        x0 = tl.load(values + at, mask=at < num_values, other=0.0)
        x1 = tl.load(values + at + LANES, mask=at + LANES < num_values, other=0.0)
        x2 = tl.load(values + at + 2 * LANES, mask=at + 2 * LANES < num_values, other=0.0)
        x3 = tl.load(values + at + 3 * LANES, mask=at + 3 * LANES < num_values, other=0.0)
        sums += x0
        sums += x1
        sums += x2
        sums += x3
    tl.store(out + tl.arange(0, 1), fold_lanes(sums))


def sum_triton_into(
    out: Tensor | None, x: Tensor, y: Tensor | None, square: Tensor | None, *, num_warps: int = NUM_WARPS
) -> None:
    """Write x + y into `out` and its sum of squares into `square`, on CUDA tensors or in the interpreter.

    Args:
        out: as `norm.add_into`; None = only the squares are wanted.
        square: fp64, one element; None = not wanted.
    """
    num_tiles = count_tiles(x.numel())
    values = torch.empty(num_tiles if square is not None else 0, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        if num_tiles:
            sum_tiles_kernel[(num_tiles,)](
                _bits(x), _bits(x if y is None else y), _bits(x if out is None else out), x.numel(), values,
                LANES=LANES, ROWS=ROWS, X=_kind(x), Y=_kind(y), OUT=_kind(out), SQUARE=square is not None,
                num_warps=num_warps, **EXACT,
            )  # fmt: skip
    if square is not None:
        _total_into(values, square)


def square_total_triton(squares: Tensor) -> Tensor:
    """Do `norm.square_total` on a CUDA tensor or in the interpreter."""
    out = squares.new_empty(())
    _total_into(squares, out)
    return out


def _total_into(values: Tensor, out: Tensor) -> None:
    with torch.cuda.device_of(values):
        square_total_kernel[(1,)](values, values.numel(), out, LANES=LANES, num_warps=8, **EXACT)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _kind(x: Tensor | None) -> int:
    return NONE if x is None else BF16 if x.dtype == torch.bfloat16 else FP32
