"""Sums of gradients over rows of a matrix that were looked up, in fp32 and in an order that never changes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_rows(rows: Sequence[Tensor], cotangents: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the gradients of a matrix whose rows were looked up, with the bits of a dense fp32 sum rounded once.

    Args:
        rows: of each microbatch, which row each position took, in the cotangents' order.
        cotangents: of each microbatch, (..., d). shape: (v, d) of the matrix. dtype: of what is returned.
    Memory: an fp32 and two `dtype` copies of all cotangents, beside what is returned.
    """
    rows_n = torch.cat([r.reshape(-1) for r in rows])
    order_n = rows_n.argsort(stable=True)
    sorted_n = rows_n[order_n]
    is_new = torch.ones_like(sorted_n)
    is_new[1:] = sorted_n[1:] != sorted_n[:-1]
    slot_n = (is_new.cumsum(0) - 1)[order_n.argsort()]  # equal rows share a slot
    sums_nd = torch.zeros(len(rows_n), shape[1], dtype=torch.float32, device=rows_n.device)
    for slot, dx in zip(slot_n.split([r.numel() for r in rows]), cotangents, strict=True):
        add_rows_into(sums_nd, slot, dx.reshape(-1, shape[1]).float())
    grads_vd = torch.zeros(*shape, dtype=dtype, device=rows_n.device)
    grads_vd[rows_n] = sums_nd.to(dtype)[slot_n]  # positions of one row write the same
    return grads_vd


def add_rows_into(sum_vd: Tensor, rows_n: Tensor, dx_nd: Tensor) -> None:
    """Add dx to rows of an fp32 sum, in an order that never changes."""
    if sum_vd.is_cuda:
        # Sorts by row and adds runs of equal ones in order; index_add_ would add by atomics unless told otherwise.
        sum_vd.index_put_((rows_n,), dx_nd, accumulate=True)
    else:
        sum_vd.index_add_(0, rows_n, dx_nd)
