"""Linear cross entropy in chunks of rows: the head's matrix product and the loss, never all logits at once.

Shape letters: n tokens, d model width, v vocabulary, c rows of one chunk.

    logits_cv = h_cd w_vd^T                                                 in h's dtype, summed in fp32
    loss      = scale * sum over rows with target != ignore_index of (logsumexp(logits) - logits[target])
    dlogits   = scale * (softmax(logits) - onehot(target)), 0 for ignored rows;     dh = dlogits w,  dw = dlogits^T h

Softmax and loss are fp32. dlogits overwrite the logits of their chunk, in h's dtype. On CUDA one Triton kernel does
softmax, loss and dlogits of a chunk; on the CPU plain torch does. Gradients come with the loss, in one pass over the
chunks, so the backward of `linear_cross_entropy` only multiplies them by the cotangent.

Example:
    >>> h, w = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> linear_cross_entropy(h, w, torch.tensor([3, -100]), scale=1.0, chunk=1)
    tensor(2.0794)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100
SLAB_BYTES = 256 << 20  # bound of an fp32 product that waits to be added to dw


def reference_linear_cross_entropy(
    h_nd: Tensor, w_vd: Tensor, targets_n: Tensor, *, scale: float, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Do `linear_cross_entropy` with all logits at once, in fp32; autograd gives its gradients."""
    logits_nv = h_nd.float() @ w_vd.float().T
    return scale * cross_entropy(logits_nv, targets_n, ignore_index=ignore_index, reduction="sum")


def reference_cross_entropy_into(
    logits_cv: Tensor, targets_c: Tensor, losses_c: Tensor, *, scale: float, ignore_index: int = IGNORE_INDEX
) -> None:
    """Write each row's loss into losses_c (fp32) and dlogits over logits_cv, with plain torch operations."""
    kept_c1 = (targets_c != ignore_index)[:, None]
    index_c1 = targets_c[:, None].where(kept_c1, 0)
    log_softmax = logits_cv.float().log_softmax(1)
    losses_c.copy_(-log_softmax.gather(1, index_c1).where(kept_c1, 0.0).squeeze(1))
    dlogits = log_softmax.exp_()
    dlogits.scatter_add_(1, index_c1, torch.full_like(index_c1, -1.0, dtype=torch.float32))
    logits_cv.copy_(dlogits.mul_(scale).where(kept_c1, 0.0))


def _cross_entropy_into(
    logits_cv: Tensor, targets_c: Tensor, losses_c: Tensor, scale: float, ignore_index: int
) -> None:
    if logits_cv.is_cuda:
        from lazytrain.kernels.cross_entropy_triton import cross_entropy_triton_into

        cross_entropy_triton_into(logits_cv, targets_c, losses_c, scale=scale, ignore_index=ignore_index)
    else:
        reference_cross_entropy_into(logits_cv, targets_c, losses_c, scale=scale, ignore_index=ignore_index)


def _add_product_into(out_vd: Tensor, dlogits_cv: Tensor, h_cd: Tensor) -> None:
    """Add dlogits^T h, summed in fp32, to out_vd (fp32 or bf16; rounded once)."""
    if out_vd.dtype == dlogits_cv.dtype:
        out_vd.addmm_(dlogits_cv.T, h_cd)
        return
    if dlogits_cv.is_cuda and out_vd.dtype == torch.float32:
        torch.addmm(out_vd, dlogits_cv.T, h_cd, out_dtype=torch.float32, out=out_vd)
        return
    step = max(1, SLAB_BYTES // (4 * max(1, h_cd.shape[1])))
    for v in range(0, out_vd.shape[0], step):
        out_vd[v : v + step].add_(dlogits_cv[:, v : v + step].T.float() @ h_cd.float())


def _check(h_nd: Tensor, w_vd: Tensor, targets_n: Tensor, chunk: int, ignore_index: int) -> None:
    if h_nd.dim() != 2 or w_vd.dim() != 2 or h_nd.shape[1] != w_vd.shape[1]:
        raise ValueError(f"h must be (n, d) and w (v, d), got {tuple(h_nd.shape)} and {tuple(w_vd.shape)}")
    if targets_n.shape != h_nd.shape[:1] or targets_n.dtype != torch.int64:
        got = f"{targets_n.dtype} {tuple(targets_n.shape)}"
        raise ValueError(f"targets must be int64 ({h_nd.shape[0]},), one for each row of h, got {got}")
    if h_nd.dtype != w_vd.dtype or h_nd.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"h and w must both be fp32 or both be bf16, got {h_nd.dtype} and {w_vd.dtype}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} rows, must be at least 1")
    if not targets_n.is_cuda:
        kept = targets_n[targets_n != ignore_index]
        if kept.numel() and not (kept.min() >= 0 and kept.max() < w_vd.shape[0]):
            reach = f"{int(kept.min())}..{int(kept.max())}"
            raise ValueError(f"targets reach over {reach}, but w has rows 0..{w_vd.shape[0] - 1} only")


@torch.no_grad()
def linear_cross_entropy_grads(
    h_nd: Tensor,
    w_vd: Tensor,
    targets_n: Tensor,
    *,
    scale: float,
    chunk: int,
    grad_w_into: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients of the head in one pass over chunks of rows (formulas: head of this file).

    Args:
        h_nd: bf16 or fp32. w_vd: h's dtype. targets_n: int64, 0 <= target < v or ignore_index.
        scale: factor of the gradients, for example 1 / target tokens of the step. chunk: rows at a time, >= 1.
        grad_w_into: fp32 or bf16 (v, d), contiguous: dw is **added** to it. Take fp32 for more than one chunk: bf16
            is rounded at each chunk.

    Returns:
        (sum of losses, not scaled, fp32 0-d; dh (n, d) in h's dtype; dw (v, d): grad_w_into if given, else new, in
        w's dtype, summed over chunks in fp32 and rounded once).

    Memory in bytes, for bf16: logits 2 c v (the CPU takes about 14 c v); dh 2 n d; dw 2 v d for one chunk and 6 v d
        for more (the fp32 sum and the result), nothing with grad_w_into; on the CPU up to 256 MiB for a product that is
        added to an fp32 sum.

    Raises:
        ValueError: a shape or dtype differs from the above or, on the CPU, a target is outside the vocabulary (on CUDA
            the loss is then NaN, because a check would make the host wait).

    Example:
        >>> loss, dh, dw = linear_cross_entropy_grads(
        ...     torch.zeros(3, 4), torch.zeros(8, 4), torch.tensor([1, 2, 3]), scale=1 / 3, chunk=2)
    """
    _check(h_nd, w_vd, targets_n, chunk, ignore_index)
    if grad_w_into is not None and (grad_w_into.shape != w_vd.shape or not grad_w_into.is_contiguous()):
        raise ValueError(f"grad_w_into must be contiguous {tuple(w_vd.shape)}, got {tuple(grad_w_into.shape)}")
    n = h_nd.shape[0]
    losses_n = torch.empty(n, dtype=torch.float32, device=h_nd.device)
    dh_nd = torch.empty_like(h_nd)
    dw_vd = grad_w_into
    if dw_vd is None and (n == 0 or n > chunk):
        dw_vd = torch.zeros_like(w_vd, dtype=torch.float32)
    for first in range(0, n, chunk):
        rows = slice(first, first + chunk)
        dlogits_cv = h_nd[rows] @ w_vd.T
        _cross_entropy_into(dlogits_cv, targets_n[rows], losses_n[rows], scale, ignore_index)
        torch.mm(dlogits_cv, w_vd, out=dh_nd[rows])
        if dw_vd is None:
            dw_vd = dlogits_cv.T @ h_nd[rows]
        else:
            _add_product_into(dw_vd, dlogits_cv, h_nd[rows])
        del dlogits_cv  # before the next chunk's logits are allocated
    assert dw_vd is not None
    loss = losses_n.sum(dtype=torch.float64).float()
    return loss, dh_nd, dw_vd if dw_vd is grad_w_into else dw_vd.to(w_vd.dtype)


@torch.no_grad()
def _sum_losses(h_nd: Tensor, w_vd: Tensor, targets_n: Tensor, scale: float, chunk: int, ignore_index: int) -> Tensor:
    _check(h_nd, w_vd, targets_n, chunk, ignore_index)
    losses_n = torch.empty(h_nd.shape[0], dtype=torch.float32, device=h_nd.device)
    for first in range(0, h_nd.shape[0], chunk):
        rows = slice(first, first + chunk)
        _cross_entropy_into(h_nd[rows] @ w_vd.T, targets_n[rows], losses_n[rows], scale, ignore_index)
    return losses_n.sum(dtype=torch.float64).float()


class LinearCrossEntropy(torch.autograd.Function):
    """The autograd node of `linear_cross_entropy`. The gradients are outputs, so that torch.func may save them."""

    @staticmethod
    def forward(  # type: ignore[override]
        h_nd: Tensor, w_vd: Tensor, targets_n: Tensor, scale: float, chunk: int, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scaled loss, dh, dw)."""
        loss, dh_nd, dw_vd = linear_cross_entropy_grads(
            h_nd, w_vd, targets_n, scale=scale, chunk=chunk, ignore_index=ignore_index
        )
        return loss * scale, dh_nd, dw_vd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the gradients for backward."""
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_loss: Tensor | None, grad_dh: Tensor | None, grad_dw: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by the cotangent."""
        # dh and dw have a cotangent only in a derivative of a derivative.
        if grad_dh is not None or grad_dw is not None:
            raise RuntimeError(
                "linear_cross_entropy is differentiable once: for second derivatives compute the logits and use "
                "torch.nn.functional.cross_entropy"
            )
        if grad_loss is None:
            return (None,) * 6
        dh_nd, dw_vd = ctx.saved_tensors
        need_h, need_w = ctx.needs_input_grad[:2]
        return dh_nd * grad_loss if need_h else None, dw_vd * grad_loss if need_w else None, None, None, None, None


def linear_cross_entropy(
    h_nd: Tensor, w_vd: Tensor, targets_n: Tensor, *, scale: float, chunk: int, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return scale times the sum of the rows' losses (formulas: head of this file), differentiable once.

    Works under `.backward()`, torch.func.grad and torch.func.vjp alike; without a gradient to compute, the gradients'
    products are left out.

    Args:
        h_nd: bf16 or fp32. w_vd: h's dtype. targets_n: int64, 0 <= target < v or ignore_index. scale: factor of the
            loss. chunk: rows at a time, >= 1.

    Returns:
        fp32, 0-d; exactly 0 if all targets are ignored or n is 0.

    Residuals: dh and dw, in the dtypes of h and w.

    Memory: that of `linear_cross_entropy_grads`; in backward one more copy of dh and dw.

    Raises:
        ValueError: as `linear_cross_entropy_grads`. RuntimeError: asked for a second derivative.

    Example:
        >>> h = torch.zeros(3, 4, requires_grad=True)
        >>> linear_cross_entropy(h, torch.ones(8, 4), torch.tensor([1, 2, 3]), scale=1 / 3, chunk=2).backward()
    """
    if torch.is_grad_enabled() and (h_nd.requires_grad or w_vd.requires_grad):
        return LinearCrossEntropy.apply(h_nd, w_vd, targets_n, scale, chunk, ignore_index)[0]
    return _sum_losses(h_nd, w_vd, targets_n, scale, chunk, ignore_index) * scale
