"""Clipping by the global norm without a pass over the gradients of its own and without a host synchronisation.

    norm = sqrt(sum of the squares of all gradients)         fp64; norm.py's fixed orders
    coef = min(1, max_norm / (norm + 1e-6)), NaN where norm is not finite       in fp64, rounded once to fp32

`coef` stays on the device and is an argument of the update kernels (adamw.py): gradients are read once for the norm and
once for the update, never rewritten, and NaN there makes the kernels skip the step.

Example:
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_coefficient([w], max_norm=1.0)
    Clip(norm=tensor(5., dtype=torch.float64), coef=tensor(0.2000))
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lazytrain.kernels.norm import square_sum_into, square_total

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Clip(NamedTuple):
    """The norm before clipping (fp64, 0-d) and the factor of the gradients (fp32, 0-d), both on the device."""

    norm: Tensor
    coef: Tensor


def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)) as fp32, NaN where the norm (fp64, any shape) is not finite.

    Example:
        >>> coefficient_of(torch.tensor([0.0, 4.0, float("inf")], dtype=torch.float64), 2.0)
        tensor([1.0000, 0.5000,    nan])
    """
    # tensor / tensor: torch turns number / tensor into a product with a reciprocal
    ratio = torch.full_like(norm, max_norm).div(norm + EPSILON).clamp_max(1.0)
    return torch.where(norm.isfinite(), ratio, math.nan).float()


def clip_coefficient(parameters: Iterable[Tensor], max_norm: float) -> Clip:
    """Measure the global norm of the parameters' gradients and return what to scale them by (head of this file).

    Args:
        parameters: tensors on one device whose `grad` is bf16 or fp32, of any shape; those without one are passed
            over, and one that comes twice (tied weights) counts once.
        max_norm: > 0; math.inf measures the norm and clips nothing.

    Returns:
        Clip, on the parameters' device (norm 0 and coef 1 without any gradient).

    Memory: that of `square_sum` for the largest gradient.

    Raises:
        ValueError: max_norm is not positive; a gradient is sparse, has another dtype or lies on another device.

    Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2013, algorithm 1.

    Example: head of this file.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, must be positive (math.inf to measure only)")
    grads = {id(p): p.grad for p in parameters if p.grad is not None}
    if sparse := [g for g in grads.values() if g.layout != torch.strided]:
        raise ValueError(f"a gradient is {sparse[0].layout}: make it dense (for example nn.Embedding(sparse=False))")
    device = next(iter(grads.values())).device if grads else torch.device("cpu")
    squares = torch.zeros(len(grads), dtype=torch.float64, device=device)
    for i, grad in enumerate(grads.values()):
        square_sum_into(grad.contiguous(), squares[i])
    return clip_of_squares(squares, max_norm)


def clip_of_squares(squares: Tensor, max_norm: float) -> Clip:
    """Return the norm that sums of squares make (fp64, 1-D, one a tensor, say), and its coefficient.

    Example:
        >>> clip_of_squares(torch.tensor([9.0, 16.0], dtype=torch.float64), 1.0)
        Clip(norm=tensor(5., dtype=torch.float64), coef=tensor(0.2000))
    """
    norm = square_total(squares).sqrt()
    return Clip(norm, coefficient_of(norm, max_norm))
