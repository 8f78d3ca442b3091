"""Sum of squares of gradients, for global clipping: in one pass, without a host synchronisation, in a fixed order.

A flat tensor is cut in tiles of 64 rows of 1024 lanes, filled up with zeros.

    lane j of a tile    a_j = sum of ((q0 + q1) + (q2 + q3)) over its 16 fours of rows, one after the other, in fp32,
                        where q = fl(x^2)
    a tile              fold of its 1024 a_j, in fp64: one value
    total               c_j = sum of every 1024th tile's value from tile j on, one after the other, in fp64; then fold
    fold                adjacent pairs are added until one is left: ((c0 + c1) + (c2 + c3)) + ...

The order is part of the definition, so the same gradients give the same bits on every device and with any number of
threads. A square goes through at most 18 fp32 roundings, so the root's relative error is at most 9 * 2^-24 = 5.4e-7
(about 1e-8 on Gaussian gradients) while squares are normal numbers (|x| over 1.1e-19; smaller ones lose digits). A lane
of a tile whose squares come to over 3.4e38 gives infinity.

`add_into` finishes a sum of gradients over chunks: add in fp32, round once, and take the squares of what
was written, in one pass over memory.

Example:
    >>> square_sum(torch.tensor([3.0, 4.0]))
    tensor(25., dtype=torch.float64)
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lazytrain.kernels import native
from lazytrain.kernels.codec import check_tensor

LANES = 1024
ROWS = 64
TILE = ROWS * LANES
FLOATS = (torch.bfloat16, torch.float32)
MIN_TASK_TILES = 16  # a million elements: fewer are not worth a thread's start


def count_tiles(numel: int) -> int:
    """Return how many tiles a tensor has."""
    return -(-numel // TILE)


def _fold(lanes_l: Tensor) -> Tensor:
    while lanes_l.shape[-1] > 1:
        lanes_l = lanes_l[..., 0::2] + lanes_l[..., 1::2]
    return lanes_l[..., 0]


def reference_square_tiles(x: Tensor) -> Tensor:
    """Return the value of each tile of x, fp64 (tiles,), with plain torch operations. Memory: 8 bytes an element."""
    num_tiles = count_tiles(x.numel())
    x_tl = pad(x.reshape(-1).float(), (0, num_tiles * TILE - x.numel())).view(num_tiles, ROWS, LANES)
    sums_tl = x_tl.new_zeros(num_tiles, LANES)
    for rows in x_tl.square().split(4, dim=1):
        q0, q1, q2, q3 = rows.unbind(1)
        sums_tl += (q0 + q1) + (q2 + q3)
    return _fold(sums_tl.double())


def reference_square_total(squares: Tensor) -> Tensor:
    """Do `square_total` with plain torch operations."""
    lanes_l = squares.new_zeros(LANES)
    for row_l in pad(squares, (0, -squares.numel() % LANES)).view(-1, LANES):
        lanes_l += row_l
    return _fold(lanes_l)


def reference_square_sum(x: Tensor) -> Tensor:
    """Do `square_sum` with plain torch operations: the truth that the kernels must meet bit by bit."""
    pieces = x.reshape(-1).split(MIN_TASK_TILES * TILE)
    return reference_square_total(torch.cat([reference_square_tiles(piece) for piece in pieces]))


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
    if squares.is_cuda:
        from lazytrain.kernels.norm_triton import square_total_triton

        return square_total_triton(squares)
    library = native.load()
    if library is None:
        return reference_square_total(squares)
    return squares.new_tensor(library.lt_square_total(squares.data_ptr(), squares.numel()))


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares (formula: head of this file).

    Args:
        x: bf16 or fp32, any shape, contiguous.

    Returns:
        fp64, 0-d, on x's device; on CUDA the host does not wait.

    Memory: 8 bytes for 65,536 elements.

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
    num_tiles, kind = count_tiles(x.numel()), int(x.dtype == torch.bfloat16)
    values = torch.empty(num_tiles, dtype=torch.float64)
    call = native.make_call(native.SQUARE_TILES, (x.data_ptr(), values.data_ptr()), x.numel(), kinds=(0, kind))
    native.run_ranges(library, call, num_tiles, min_items=MIN_TASK_TILES)
    out.fill_(library.lt_square_total(values.data_ptr(), num_tiles))


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
    for first in range(0, out.numel(), MIN_TASK_TILES * TILE):
        at = slice(first, first + MIN_TASK_TILES * TILE)
        out[at].copy_(x[at] if y is None else x[at].float() + y[at].float())
    if square is not None:
        square_sum_into(out, square)
