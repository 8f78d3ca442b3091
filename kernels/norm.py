"""Sum of squares of gradients, for global clipping: in one pass, without a host synchronisation, in a fixed order.

A flat tensor is cut in tiles of 64 rows of 1024 lanes, filled up with zeros; 16 tiles are a slab.

    lane j of a tile    a_j = sum over the 64 rows of fl(x^2), one after the other, in fp32
    lane j of a slab    b_j = sum over the 16 tiles of a_j, one after the other, in fp64
    total               c_j = sum over the slabs of b_j, one after the other, in fp64; then fold
    fold                adjacent pairs are added until one is left: ((c0 + c1) + (c2 + c3)) + ...

The order is part of the definition, so the same gradients give the same bits on every device and with any number of
threads. The error of the root is about 1e-8 relative (under 1e-6 for any input); squares over 3.4e38 give infinity.

`add_into` finishes a sum of gradients over chunks: add in fp32, round once, and take the squares of what
was written, in one pass over memory.

Example:
    >>> square_sum(torch.tensor([3.0, 4.0]))
    tensor(25., dtype=torch.float64)
"""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from lazytrain.kernels import native
from lazytrain.kernels.codec import check_tensor

LANES = 1024
ROWS = 64
TILE = ROWS * LANES
SLAB_TILES = 16
SLAB = SLAB_TILES * TILE
FLOATS = (torch.bfloat16, torch.float32)


def count_slabs(numel: int) -> int:
    """Return how many slabs a tensor has."""
    return -(-numel // SLAB)


def reference_square_slab(x: Tensor) -> Tensor:
    """Return the lanes of one slab, fp64 (1024,), of at most SLAB elements, with plain torch operations."""
    x_trl = pad(x.reshape(-1).float(), (0, SLAB - x.numel())).view(SLAB_TILES, ROWS, LANES)
    sums_tl = x_trl.new_zeros(SLAB_TILES, LANES)
    for row in range(ROWS):
        sums_tl += x_trl[:, row] * x_trl[:, row]
    lanes_l = torch.zeros(LANES, dtype=torch.float64, device=x.device)
    for tile_l in sums_tl.double():
        lanes_l += tile_l
    return lanes_l


def _fold(lanes_l: Tensor) -> Tensor:
    while lanes_l.shape[-1] > 1:
        lanes_l = lanes_l[0::2] + lanes_l[1::2]
    return lanes_l[0]


def reference_square_total(squares: Tensor) -> Tensor:
    """Do `square_total` with plain torch operations."""
    lanes_l = squares.new_zeros(LANES)
    for row_l in pad(squares, (0, -squares.numel() % LANES)).view(-1, LANES):
        lanes_l += row_l
    return _fold(lanes_l)


def reference_square_sum(x: Tensor) -> Tensor:
    """Do `square_sum` with plain torch operations: the truth that the kernels must meet bit by bit."""
    lanes_l = torch.zeros(LANES, dtype=torch.float64, device=x.device)
    for piece in x.reshape(-1).split(SLAB) if x.numel() else ():
        lanes_l += reference_square_slab(piece)
    return _fold(lanes_l)


def square_total(squares: Tensor) -> Tensor:
    """Return the total of sums of squares, such as one a tensor: lane j sums every 1024th from j on, then fold.

    Args:
        squares: fp64, 1-D, contiguous.

    Returns:
        fp64, 0-d, on its device; on CUDA the host does not wait.

    Raises:
        ValueError: another dtype or gaps.

    Example:
        >>> square_total(torch.tensor([9.0, 16.0], dtype=torch.float64))
        tensor(25., dtype=torch.float64)
    """
    check_tensor("squares", squares, (torch.float64,), squares.numel(), squares.device)
    rows = pad(squares, (0, -squares.numel() % LANES))
    if rows.is_cuda:
        from lazytrain.kernels.norm_triton import square_total_triton

        return square_total_triton(rows)
    library = native.load()
    if library is None:
        return reference_square_total(squares)
    return squares.new_tensor(library.lt_square_total(rows.data_ptr(), rows.numel() // LANES))


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares (formula: head of this file).

    Args:
        x: bf16 or fp32, any shape, contiguous.

    Returns:
        fp64, 0-d, on x's device; on CUDA the host does not wait.

    Memory: 4 KiB for 65,536 elements on CUDA, 8 KiB for a million on the CPU.

    Raises:
        ValueError: another dtype, or gaps: pass `.contiguous()`.

    Example:
        >>> square_sum(torch.full((1000,), 2.0, dtype=torch.bfloat16))
        tensor(4000., dtype=torch.float64)
    """
    out = torch.empty((), dtype=torch.float64, device=x.device)
    square_sum_into(x, out)
    return out


def square_sum_into(x: Tensor, out: Tensor) -> None:
    """Write the sum of squares of x into `out`, one fp64 element on x's device (a slot of a larger tensor is fine).

    Args, Memory and Raises as for `square_sum`.

    Example:
        >>> slots = torch.zeros(2, dtype=torch.float64)
        >>> square_sum_into(torch.ones(5), slots[1])
        >>> slots
        tensor([0., 5.], dtype=torch.float64)
    """
    check_tensor("x", x, FLOATS, x.numel(), x.device)
    check_tensor("out", out, (torch.float64,), 1, x.device)
    if x.is_cuda:
        from lazytrain.kernels.norm_triton import sum_triton_into

        sum_triton_into(None, x, None, out)
        return
    library = native.load()
    if library is None:
        out.copy_(reference_square_sum(x).view_as(out))
        return
    num_slabs, kind = count_slabs(x.numel()), int(x.dtype == torch.bfloat16)
    slabs = (ctypes.c_double * (num_slabs * LANES))()

    tensors = (x.data_ptr(), ctypes.addressof(slabs))
    call = native.make_call(native.SQUARE_SLABS, tensors, x.numel(), kinds=(0, kind))
    native.run_ranges(library, call, num_slabs, min_items=1)
    out.fill_(library.lt_square_total(slabs, num_slabs))


def add_into(out: Tensor, x: Tensor, y: Tensor | None = None, *, square: Tensor | None = None) -> None:
    """Write x + y, or x alone, into `out`: added in fp32 and rounded once, to nearest even.

    Args:
        out: flat, bf16 or fp32; it may be x or y itself.
        x, y: flat, bf16 or fp32, as long as `out`.
        square: one fp64 element that gets the sum of squares of what was written; None = not wanted.

    Raises:
        ValueError: another dtype or length, or gaps.

    Example:
        >>> total = torch.tensor([1.0, 2.0])
        >>> add_into(total, total, torch.tensor([3.0, 4.0]).bfloat16())
        >>> total
        tensor([4., 6.])
    """
    for name, tensor in (("out", out), ("x", x), ("y", x if y is None else y)):
        check_tensor(name, tensor, FLOATS, out.numel(), out.device)
    if square is not None:
        check_tensor("square", square, (torch.float64,), 1, out.device)
    if out.is_cuda:
        from lazytrain.kernels.norm_triton import sum_triton_into

        sum_triton_into(out, x, y, square)
        return
    for first in range(0, out.numel(), SLAB):
        at = slice(first, first + SLAB)
        out[at].copy_(x[at] if y is None else x[at].float() + y[at].float())
    if square is not None:
        square_sum_into(out, square)
