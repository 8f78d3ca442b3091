"""AdamW's hyperparameters and the scalars of one step that every kernel takes: computed in double, rounded once.

Example:
    >>> derive_scalars(AdamWHyper(0.5, 0.5, 0.75, 0.0, 0.0, 1), 1.0).step_size
    1.0
"""

import ctypes
import math
from typing import NamedTuple

from lazytrain.kernels.codec import derive_dither


class AdamWHyper(NamedTuple):
    """AdamW's hyperparameters for one step; `step` is t >= 1 and counts applied updates."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class AdamWScalars(NamedTuple):
    """The step's scalars, each rounded to fp32 once, and the dither of the first group."""

    coef: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    decay: float
    step_size: float
    dither: int


def derive_scalars(hyper: AdamWHyper, coef: float, first_group: int = 0) -> AdamWScalars:
    """Compute the step's scalars in double and round each to fp32 once.

    Raises:
        ValueError: step < 1, a beta outside [0, 1), or a negative or non-finite value.

    Example:
        >>> derive_scalars(AdamWHyper(0.5, 0.5, 0.75, 0.0, 0.0, 1), 1.0).step_size
        1.0
    """
    if hyper.step < 1:
        raise ValueError(f"step is {hyper.step}: AdamW counts applied updates from 1")
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(hyper, name) < 1.0:
            raise ValueError(f"{name} is {getattr(hyper, name)}, must be in [0, 1)")
    for name, value in (*hyper._asdict().items(), ("coef", coef)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} is {value}, must be finite and not negative")
    exact = (
        coef,
        hyper.beta1,
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step),
        hyper.eps,
        1.0 - hyper.lr * hyper.weight_decay,
        hyper.lr / (1.0 - hyper.beta1**hyper.step),
    )
    return AdamWScalars._make([*(ctypes.c_float(x).value for x in exact), derive_dither(hyper.step, first_group)])
