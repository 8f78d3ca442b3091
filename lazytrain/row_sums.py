"""Sums of gradients over rows of a matrix that were looked up, in fp32 and in an order that never changes."""

import math
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
    Memory: PIECE_BYTES, or what 64 columns take, where that is more, of the fp32 sum and the cotangents, as they are
        and in fp32; at most half of the columns, but fewer than 128 columns are one piece.
    """
    num_rows, width = grads_vd.shape
    index_n = torch.cat([index.reshape(-1) for index in rows])
    column_bytes = 4 * num_rows + sum((4 + dx.element_size()) * dx.numel() // width for dx in cotangents)
    num_pieces = max(1, min(width // MIN_COLUMNS, max(2, math.ceil(column_bytes * width / PIECE_BYTES))))
    pieces = [
        x_nd.tensor_split(num_pieces, dim=1) for x_nd in (grads_vd, *(dx.reshape(-1, width) for dx in cotangents))
    ]
    for part_vc, *parts in zip(*pieces, strict=True):
        sums_vc = torch.zeros(part_vc.shape, dtype=torch.float32, device=grads_vd.device)
        add_rows_into(sums_vc, index_n, torch.cat(parts).float())
        part_vc.copy_(sums_vc)


def add_rows_into(sum_vd: Tensor, rows_n: Tensor, dx_nd: Tensor) -> None:
    """Add dx to rows of an fp32 sum, in an order that never changes."""
    if sum_vd.is_cuda:
        # Sorts by row and adds runs of equal ones in order; index_add_ would add by atomics unless told otherwise.
        sum_vd.index_put_((rows_n,), dx_nd, accumulate=True)
    else:
        sum_vd.index_add_(0, rows_n, dx_nd)
