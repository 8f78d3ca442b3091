"""Triton kernels of the sum of squares, and of sums of gradients with it; definition and reference: norm.py.

The loop over rows loads eight before it writes or adds any, to have enough reads in flight. The one sum over lanes,
at the end, is an explicit tree of adjacent pairs (reshape and split), because the order inside `tl.sum` depends on the
layout that the compiler chose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.norm import LANES, ROWS, SLAB_TILES, TILE, count_slabs

EXACT = {"enable_fp_fusion": False}
NUM_WARPS = 4  # 8 lanes of a row for each thread: loads of 16 bytes
NONE, BF16, FP32 = 0, 1, 2  # what a pointer of the kernel leads to
SLAB_LANES = 128  # lanes that one program sums over the tiles of a slab


@triton.jit
def load_fp32(pointer, offset, mask, KIND: tl.constexpr):
    """Load fp32 (KIND 2), or bf16 given as 16-bit patterns (KIND 1)."""
    if KIND == 1:
        x = (tl.load(pointer + offset, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = tl.load(pointer + offset, mask=mask, other=0.0)
    return x


@triton.jit
def load_sum(x_in, y_in, offset, numel, X: tl.constexpr, Y: tl.constexpr):
    """Return x + y in fp32."""
    x = load_fp32(x_in, offset, offset < numel, X)
    if Y != 0:
        x += load_fp32(y_in, offset, offset < numel, Y)
    return x


@triton.jit
def write_row(x, out, offset, numel, OUT: tl.constexpr):
    """Write x to out, and return it as it was written, in fp32."""
    if OUT == 1:
        # To nearest even by hand: the interpreter's own conversion truncates.
        bits = x.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x == x, kept, 0x7FC0)
        tl.store(out + offset, kept.to(tl.int16), mask=offset < numel)
        x = (kept << 16).to(tl.float32, bitcast=True)
    if OUT == 2:
        tl.store(out + offset, x, mask=offset < numel)
    return x


@triton.jit
def sum_tiles_kernel(
    x_in, y_in, out, numel, tiles, LANES: tl.constexpr, ROWS: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    for row in range(0, ROWS, 8):
        at = (tile * ROWS + row) * LANES + lane
        x0 = load_sum(x_in, y_in, at, numel, X, Y)
        x1 = load_sum(x_in, y_in, at + LANES, numel, X, Y)
        x2 = load_sum(x_in, y_in, at + 2 * LANES, numel, X, Y)
        x3 = load_sum(x_in, y_in, at + 3 * LANES, numel, X, Y)
        x4 = load_sum(x_in, y_in, at + 4 * LANES, numel, X, Y)
        x5 = load_sum(x_in, y_in, at + 5 * LANES, numel, X, Y)
        x6 = load_sum(x_in, y_in, at + 6 * LANES, numel, X, Y)
        x7 = load_sum(x_in, y_in, at + 7 * LANES, numel, X, Y)
        x0 = write_row(x0, out, at, numel, OUT)
        x1 = write_row(x1, out, at + LANES, numel, OUT)
        x2 = write_row(x2, out, at + 2 * LANES, numel, OUT)
        x3 = write_row(x3, out, at + 3 * LANES, numel, OUT)
        x4 = write_row(x4, out, at + 4 * LANES, numel, OUT)
        x5 = write_row(x5, out, at + 5 * LANES, numel, OUT)
        x6 = write_row(x6, out, at + 6 * LANES, numel, OUT)
        x7 = write_row(x7, out, at + 7 * LANES, numel, OUT)
        sums += x0 * x0
        sums += x1 * x1
        sums += x2 * x2
        sums += x3 * x3
        sums += x4 * x4
        sums += x5 * x5
        sums += x6 * x6
        sums += x7 * x7
    if SQUARE:
        tl.store(tiles + tile * LANES + lane, sums)


@triton.jit
def square_slabs_kernel(
    tiles, num_tiles, slabs, LANES: tl.constexpr, SLAB_TILES: tl.constexpr, SLAB_LANES: tl.constexpr
):
    slab = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * SLAB_LANES + tl.arange(0, SLAB_LANES)
    sums = tl.zeros((SLAB_LANES,), tl.float64)
    for i in tl.static_range(SLAB_TILES):
        tile = slab * SLAB_TILES + i
        at = tile * LANES + lane
        sums += tl.load(tiles + at, mask=at < num_tiles * LANES, other=0.0).to(tl.float64)
    tl.store(slabs + slab * LANES + lane, sums)


@triton.jit
def fold_pairs(x, N: tl.constexpr):
    """Add adjacent pairs: (N,) -> (N / 2,)."""
    left, right = tl.split(tl.reshape(x, (N // 2, 2)))
    return left + right


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


@triton.jit(do_not_specialize=["num_slabs"])
def square_total_kernel(slabs, num_slabs, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    end = num_slabs * LANES
    sums = tl.zeros((LANES,), tl.float64)
    for slab in range(0, num_slabs, 4):
        at = slab * LANES + lane
        x0 = tl.load(slabs + at)
        x1 = tl.load(slabs + at + LANES, mask=at + LANES < end, other=0.0)
        x2 = tl.load(slabs + at + 2 * LANES, mask=at + 2 * LANES < end, other=0.0)
        x3 = tl.load(slabs + at + 3 * LANES, mask=at + 3 * LANES < end, other=0.0)
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
    num_tiles, num_slabs = -(-x.numel() // TILE), count_slabs(x.numel())
    tiles = torch.empty(num_tiles * LANES if square is not None else 0, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if num_tiles:
            sum_tiles_kernel[(num_tiles,)](
                _bits(x), _bits(x if y is None else y), _bits(x if out is None else out), x.numel(), tiles,
                LANES=LANES, ROWS=ROWS, X=_kind(x), Y=_kind(y), OUT=_kind(out), SQUARE=square is not None,
                num_warps=num_warps, **EXACT,
            )  # fmt: skip
        if square is None:
            return
        slabs = torch.empty(num_slabs * LANES, dtype=torch.float64, device=x.device)
        if num_slabs:
            square_slabs_kernel[(num_slabs, LANES // SLAB_LANES)](
                tiles, num_tiles, slabs, LANES=LANES, SLAB_TILES=SLAB_TILES, SLAB_LANES=SLAB_LANES, num_warps=4, **EXACT
            )
        square_total_kernel[(1,)](slabs, num_slabs, square, LANES=LANES, num_warps=8, **EXACT)


def square_total_triton(rows: Tensor) -> Tensor:
    """Do `norm.square_total` on whole rows of 1024, on a CUDA tensor or in the interpreter."""
    out = rows.new_empty(())
    with torch.cuda.device_of(rows):
        square_total_kernel[(1,)](rows, rows.numel() // LANES, out, LANES=LANES, num_warps=8, **EXACT)
    return out


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _kind(x: Tensor | None) -> int:
    return NONE if x is None else BF16 if x.dtype == torch.bfloat16 else FP32
