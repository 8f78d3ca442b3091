"""Sums of gradients over rows of a matrix that were looked up, in fp32 and in an order that never changes."""

from collections.abc import Sequence

import torch
from torch import Tensor

# A dense fp32 sum of a large vocabulary takes 2 to 3 GB in one piece, which a full device rarely has.
PIECE_BYTES = 256 << 20
MIN_COLUMNS = 64


def sum_rows_into(grads_vd: Tensor, rows: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    """Write the gradients of a matrix whose rows were looked up: summed in fp32, some columns at a time, rounded once.

    Args:
        grads_vd: written, whatever it held; its dtype is what is rounded to.
        rows: of each microbatch, which row each position took, in the cotangents' order.
        cotangents: of each microbatch, (..., d).
    Memory: PIECE_BYTES, or 64 columns where they are larger, but at most half of the columns; and as many columns of
        one cotangent in fp32. With 16-bit gradients this is no more than the dense fp32 sum.
    """
    num_rows, width = grads_vd.shape
    columns = max(MIN_COLUMNS, PIECE_BYTES // (4 * max(1, num_rows)) // MIN_COLUMNS * MIN_COLUMNS)
    columns = max(1, min(columns, width // 2))
    for begin in range(0, width, columns):
        part_vc = grads_vd[:, begin : begin + columns]
        sums_vc = torch.zeros(part_vc.shape, dtype=torch.float32, device=grads_vd.device)
        for index, dx in zip(rows, cotangents, strict=True):
            add_rows_into(sums_vc, index.reshape(-1), dx.reshape(-1, width)[:, begin : begin + columns].float())
        part_vc.copy_(sums_vc)


def add_rows_into(sum_vd: Tensor, rows_n: Tensor, dx_nd: Tensor) -> None:
    """Add dx to rows of an fp32 sum, in an order that never changes."""
    if sum_vd.is_cuda:
        # Sorts by row and adds runs of equal ones in order; index_add_ would add by atomics unless told otherwise.
        sum_vd.index_put_((rows_n,), dx_nd, accumulate=True)
    else:
        sum_vd.index_add_(0, rows_n, dx_nd)
