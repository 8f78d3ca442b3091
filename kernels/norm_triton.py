"""Triton kernels of the sum of squares; definition and reference: norm.py.

Sums over lanes are explicit trees of adjacent pairs (reshape and split), because the order inside `tl.sum` depends on
the layout that the compiler chose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.norm import LANES, ROWS, count_tiles

EXACT = {"enable_fp_fusion": False}
NUM_WARPS = 4  # 8 lanes of a row for each thread: loads of 16 bytes
UNROLL = 8  # rows whose loads are under way together


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


@triton.jit
def square_tiles_kernel(
    x_in, numel, tiles, LANES: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    lane = tl.arange(0, LANES)
    first = tile.to(tl.int64) * (ROWS * LANES)
    sums = tl.zeros((LANES,), tl.float32)
    if first + ROWS * LANES <= numel:  # without masks: loads are wide whatever numel is
        for row in range(0, ROWS, UNROLL):
            for i in tl.static_range(UNROLL):
                x = tl.load(x_in + first + (row + i) * LANES + lane)
                if BF16:
                    x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
                sums += x * x
    else:
        for row in range(ROWS):
            offset = first + row * LANES + lane
            x = tl.load(x_in + offset, mask=offset < numel, other=0)
            if BF16:
                x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            sums += x * x
    tl.store(tiles + tile + tl.arange(0, 1), fold_lanes(sums.to(tl.float64)))


@triton.jit(do_not_specialize=["num_tiles"])
def square_total_kernel(tiles, num_tiles, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float64)
    for first in range(0, num_tiles, LANES):
        sums += tl.load(tiles + first + lane, mask=first + lane < num_tiles, other=0.0)
    tl.store(out + tl.arange(0, 1), fold_lanes(sums))


def square_tiles_triton_into(x: Tensor, tiles: Tensor, *, num_warps: int = NUM_WARPS, unroll: int = UNROLL) -> None:
    """Do `norm.square_tiles_into` with the Triton kernel, on CUDA tensors or in the interpreter.

    num_warps and unroll (a divisor of 64) change the speed only.
    """
    is_bf16 = x.dtype == torch.bfloat16
    if num_tiles := count_tiles(x.numel()):
        with torch.cuda.device_of(x):
            square_tiles_kernel[(num_tiles,)](
                x.view(torch.int16) if is_bf16 else x, x.numel(), tiles,
                LANES=LANES, ROWS=ROWS, BF16=is_bf16, UNROLL=unroll, num_warps=num_warps, **EXACT,
            )  # fmt: skip


def square_total_triton_into(squares: Tensor, out: Tensor) -> None:
    """Do `norm.square_total` with the Triton kernel, on CUDA tensors or in the interpreter."""
    with torch.cuda.device_of(squares):
        square_total_kernel[(1,)](squares, squares.numel(), out, LANES=LANES, num_warps=8, **EXACT)


def square_sum_triton_into(x: Tensor, out: Tensor, *, num_warps: int = NUM_WARPS, unroll: int = UNROLL) -> None:
    """Do `norm.square_sum_into` with the Triton kernels, on CUDA tensors or in the interpreter."""
    tiles = torch.empty(count_tiles(x.numel()), dtype=torch.float64, device=x.device)
    square_tiles_triton_into(x, tiles, num_warps=num_warps, unroll=unroll)
    square_total_triton_into(tiles, out)
