"""States and gradients for the tests of the optimizer kernels."""

import torch
from torch import Tensor

from lazytrain.kernels import codec
from lazytrain.kernels.hyper import AdamWHyper
from lazytrain.kernels.master import split_master

State = list[Tensor | None]


def make_hyper(step: int, **changes: float) -> AdamWHyper:
    base = AdamWHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step)
    return base._replace(**changes)  # type: ignore[arg-type]


def make_state8(w: Tensor, kind: str, cols: int) -> State:
    """weights, lo, m_q, m_scale, v_q, v_scale, flat, with zero moments."""
    weights, lo = (w.clone(), None) if kind == "fp32" else split_master(w, int(kind))
    num_groups = codec.count_groups(w.numel() // max(cols, 1), cols)
    m_q, v_q = torch.zeros(w.numel(), dtype=torch.int8), torch.zeros(w.numel(), dtype=torch.uint8)
    return [weights, lo, m_q, torch.zeros(num_groups), v_q, torch.zeros(num_groups)]


def make_state32(w: Tensor, kind: str) -> State:
    """weights, lo, m, v, flat, with zero moments."""
    weights, lo = (w.clone(), None) if kind == "fp32" else split_master(w, int(kind))
    return [weights, lo, torch.zeros(w.numel()), torch.zeros(w.numel())]


def shift(x: Tensor, pad: int) -> Tensor:
    """Return x's values as a view into a slab, `pad` elements after its start."""
    slab = torch.empty(x.numel() + pad + 3, dtype=x.dtype, device=x.device)
    view = slab[pad : pad + x.numel()]
    view.copy_(x)
    return view


def make_grads(size: int, step: int, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(step)
    return (torch.randn(size, generator=gen) * 10 ** torch.randn(size, generator=gen)).to(dtype)
