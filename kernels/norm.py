"""Sum of squares of gradients, for global clipping: in one pass, without a host synchronisation, in a fixed order.

A flat tensor is cut in tiles of 64 rows of 1024 lanes, filled up with zeros.

    lane j of a tile    a_j = sum over the 64 rows of fl(x^2), one after the other, in fp32
    tile                fold of the 1024 a_j in fp64
    total               lane j: sum of the tiles j, j + 1024, ... in fp64, one after the other; then fold
    fold                adjacent pairs are added until one is left: ((x0 + x1) + (x2 + x3)) + ...

The order is part of the definition, so the same gradients give the same bits on every device and with any number of
threads. The error of the root is about 1e-8 relative (under 1e-6 for any input); squares over 3.4e38 give infinity.

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


def count_tiles(numel: int) -> int:
    """Return how many tiles a tensor has."""
    return -(-numel // TILE)


def _fold(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def reference_square_tiles(x: Tensor) -> Tensor:
    """Return each tile's sum of squares, fp64 (tiles,), with plain torch operations."""
    x_trl = pad(x.reshape(-1).float(), (0, -x.numel() % TILE)).view(-1, ROWS, LANES)
    sums_tl = x_trl.new_zeros(x_trl.shape[0], LANES)
    for row in range(ROWS):
        sums_tl += x_trl[:, row] * x_trl[:, row]
    return _fold(sums_tl.double())


def reference_square_total(tiles_t: Tensor) -> Tensor:
    """Return the sum over tiles, fp64 0-d."""
    tiles_rl = pad(tiles_t, (0, -tiles_t.numel() % LANES)).view(-1, LANES)
    sums_l = tiles_t.new_zeros(LANES)
    for row_l in tiles_rl:
        sums_l += row_l
    return _fold(sums_l)


def reference_square_sum(x: Tensor) -> Tensor:
    """Do `square_sum` with plain torch operations: the truth that the kernels must meet bit by bit."""
    pieces = x.reshape(-1).split(16 * TILE) if x.numel() else ()  # bounds the working memory
    tiles = [reference_square_tiles(piece) for piece in pieces]
    return reference_square_total(torch.cat(tiles) if tiles else torch.zeros(0, dtype=torch.float64))


def square_total(squares: Tensor) -> Tensor:
    """Return the total of partial sums of squares, such as one a tensor, in the order of the head of this file.

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
    out = squares.new_empty(())
    _total_into(squares, out)
    return out


def _total_into(squares: Tensor, out: Tensor) -> None:
    if squares.is_cuda:
        from lazytrain.kernels.norm_triton import square_total_triton_into

        square_total_triton_into(squares, out)
    elif (library := native.load()) is None:
        out.copy_(reference_square_total(squares).view_as(out))
    else:
        out.fill_(library.lt_square_total(squares.data_ptr(), squares.numel()))


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
    check_tensor("out", out, (torch.float64,), 1, x.device)
    tiles = torch.empty(count_tiles(x.numel()), dtype=torch.float64, device=x.device)
    square_tiles_into(x, tiles)
    _total_into(tiles, out)


def square_tiles_into(x: Tensor, tiles: Tensor) -> None:
    """Write the sum of squares of each tile of x into `tiles`, fp64, `count_tiles(x.numel())` elements.

    Args and Raises as for `square_sum`. Tiles of several tensors may follow each other in one larger tensor, for
    `square_total` to add up.

    Example:
        >>> tiles = torch.zeros(1, dtype=torch.float64)
        >>> square_tiles_into(torch.ones(5), tiles)
        >>> tiles
        tensor([5.], dtype=torch.float64)
    """
    num_tiles = count_tiles(x.numel())
    check_tensor("x", x, (torch.bfloat16, torch.float32), x.numel(), x.device)
    check_tensor("tiles", tiles, (torch.float64,), num_tiles, x.device)
    if x.is_cuda:
        from lazytrain.kernels.norm_triton import square_tiles_triton_into

        square_tiles_triton_into(x, tiles)
        return
    library = native.load()
    if library is None:
        step = 16  # bounds the working memory
        for first in range(0, num_tiles, step):
            tiles[first : first + step] = reference_square_tiles(x.view(-1)[first * TILE : (first + step) * TILE])
        return
    kind, pointers = int(x.dtype == torch.bfloat16), (x.data_ptr(), tiles.data_ptr())

    def run(begin: int, end: int) -> None:
        library.lt_square_tiles(kind, pointers[0], x.numel(), begin, end, pointers[1])

    native.run_ranges(num_tiles, run, min_items=16)
