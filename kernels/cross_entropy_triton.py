"""Triton kernel of softmax cross entropy on a chunk of logits, in place; formulas and reference: cross_entropy.py.

One program does one row in two passes: the largest logit and the sum of exponentials, then dlogits over the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def cross_entropy_kernel(logits, row_stride, targets, losses, num_cols, scale, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    target = tl.load(targets + row)
    lane = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        for first in range(0, num_cols, BLOCK):
            zeros = tl.zeros((BLOCK,), logits.dtype.element_ty)
            tl.store(row_logits + first + lane, zeros, mask=first + lane < num_cols)
    else:
        # Before the passes: the second one overwrites it.
        known = (target >= 0) & (target < num_cols)
        at_target = tl.load(row_logits + target, mask=known, other=float("nan")).to(tl.float32)
        top = float("-inf")
        total = 0.0
        for first in range(0, num_cols, BLOCK):
            x = tl.load(row_logits + first + lane, mask=first + lane < num_cols, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
            top = new_top
        tl.store(losses + row, tl.log(total) - (at_target - top))
        tl.debug_barrier()  # a small row may lie in every warp: none may overwrite it before all have read it
        for first in range(0, num_cols, BLOCK):
            mask = first + lane < num_cols
            x = tl.load(row_logits + first + lane, mask=mask, other=float("-inf")).to(tl.float32)
            softmax = tl.exp(x - top) / total
            grad = tl.where(first + lane == target, softmax - 1.0, softmax) * scale
            tl.store(row_logits + first + lane, grad.to(logits.dtype.element_ty), mask=mask)


def cross_entropy_triton_into(
    logits_cv: Tensor, targets_c: Tensor, losses_c: Tensor, *, scale: float, ignore_index: int = -100
) -> None:
    """Do `cross_entropy.reference_cross_entropy_into` with the Triton kernel, on CUDA tensors or in the interpreter.

    Args:
        logits_cv: bf16 or fp32, rows contiguous; overwritten by dlogits. targets_c: int64. losses_c: fp32.
    """
    num_rows, num_cols = logits_cv.shape
    assert logits_cv.stride(1) == 1, "logits must have contiguous rows"
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(num_cols))
        with torch.cuda.device_of(logits_cv):
            cross_entropy_kernel[(num_rows,)](
                logits_cv, logits_cv.stride(0), targets_c.contiguous(), losses_c, num_cols, scale, ignore_index,
                BLOCK=block, num_warps=max(1, min(8, block // 256)),
            )  # fmt: skip
