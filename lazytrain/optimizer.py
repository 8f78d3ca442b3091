"""AdamW as a pair of pure functions, and the same update over a unit's slabs.

    optimizer = adamw8bit(1e-5)
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params, lr=1e-5, clip_coef=1.0)

Moments are 8-bit (`lazytrain.kernels.codec` has the format), small and one-dimensional tensors keep fp32 moments.
Order and defaults are those of torch.optim.AdamW.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.base import Params, ParamSpec
from lazytrain.errors import ConfigError
from lazytrain.kernels.adamw import AdamWHyper, adamw8bit_update_into, adamw_update_into
from lazytrain.kernels.clipping import Clip, clip_of_squares
from lazytrain.kernels.codec import count_groups, dequantize_moments, quantize_moments
from lazytrain.kernels.master import join_master, split_master
from lazytrain.kernels.torch_adamw import Moments, make_state_dict, read_moments
from lazytrain.layout import TensorPlace, UnitLayout, make_layout, rows_and_cols
from lazytrain.schedules import Schedule, constant


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """What an AdamW run is made of; `lr` is a schedule `step -> lr`."""

    lr: Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    error_if_nonfinite: bool = False
    state_bits: int = 8
    master_bits: int = 32
    fp32_patterns: tuple[str, ...] = ()

    def layout(self, params: Mapping[str, ParamSpec], dtype: torch.dtype) -> UnitLayout:
        """Return how a unit's tensors and states lie in their slabs under these settings."""
        bits, master_bits = self.state_bits, self.master_bits
        return make_layout(params, dtype, state_bits=bits, master_bits=master_bits, fp32_patterns=self.fp32_patterns)

    def hyper(self, lr: float, t: int) -> AdamWHyper:
        """Return the scalars of update number `t` (the first is 1)."""
        beta1, beta2 = self.betas
        return AdamWHyper(lr, beta1, beta2, self.eps, self.weight_decay, step=t)

    def clip(self, squares: Tensor) -> Clip:
        """Return the norm that the units' sums of squares (fp64) make, and its coefficient; same bits on any device."""
        return clip_of_squares(squares, math.inf if self.max_grad_norm is None else self.max_grad_norm)


class OptimizerState(NamedTuple):
    """Number of updates done, the layout of `params` and their state slab (uint8)."""

    t: int
    layout: UnitLayout
    slab: Tensor


class Optimizer(NamedTuple):
    """A pair of pure functions over a dict of tensors, and what they were made from."""

    init: Callable[[Params], OptimizerState]
    update: Callable[..., tuple[Params, OptimizerState]]
    settings: AdamWSettings


def adamw8bit(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    error_if_nonfinite: bool = False,
    master_bits: int = 32,
    fp32_patterns: Sequence[str] = (),
) -> Optimizer:
    """Return AdamW with 8-bit moments.

    Memory beside bf16 working weights: 4.06 bytes a parameter (3.06 with `master_bits=24`).

    Args:
        lr: a number or a schedule `step -> lr`.
        max_grad_norm: clip the global norm of the accumulated gradient to this; None = do not clip.
        error_if_nonfinite: raise NonFiniteError on a norm that is not finite, instead of skipping the step.
        master_bits: 32 or 24, the width of the master weights beside bf16 working weights.
        fp32_patterns: regular expressions of full tensor names that keep fp32 moments.

    Raises:
        ConfigError: a value out of range.
    """
    return _make_optimizer(
        AdamWSettings(
            lr=lr if callable(lr) else constant(lr),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            master_bits=master_bits,
            fp32_patterns=tuple(fp32_patterns),
        )
    )


def adamw(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    error_if_nonfinite: bool = False,
) -> Optimizer:
    """Return AdamW with fp32 moments and master (10 bytes a parameter beside bf16 working weights)."""
    return _make_optimizer(
        AdamWSettings(
            lr=lr if callable(lr) else constant(lr),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            state_bits=32,
        )
    )


def init_unit_into(layout: UnitLayout, tensors: Callable[[str], Tensor], weights: Tensor, state: Tensor | None) -> None:
    """Write a unit's initial working weights and states, one tensor at a time.

    Args:
        tensors: full name -> initial value (any float dtype, CPU).
        weights: slab of `layout.numel` elements, overwritten.
        state: slab of `layout.state_bytes` bytes, overwritten: zero moments, and what bf16 loses of a wider value.
    """
    weights.zero_()
    parts: dict[str, Tensor] = {}
    if state is not None:
        state.zero_()
        parts = layout.state_views(state)
    for place in layout.places:
        value = tensors(place.full_name).reshape(-1)
        end = place.offset + place.numel
        if layout.dtype != torch.bfloat16 or value.dtype == torch.bfloat16 or not parts:
            weights[place.offset : end].copy_(value)
            continue
        region, base = ("lo_q", 0) if place.quantized else ("lo_f", layout.quantized_numel)
        lo = parts[region][place.offset - base : end - base]
        hi, lo_value = split_master(value.float(), bits=8 * lo.element_size() + 16)
        weights[place.offset : end].copy_(hi)
        lo.copy_(lo_value)


def update_unit_into(
    layout: UnitLayout, weights: Tensor, state: Tensor, grads: Tensor, *, coef: float | Tensor, hyper: AdamWHyper
) -> None:
    """Apply one AdamW update to a unit's slabs in place; all on one device.

    Args:
        weights: `layout.numel` working weights.
        state: `layout.state_bytes` bytes.
        grads: `layout.numel` gradients, bf16 or fp32; they are read as `coef * grads`.
        coef: a number, or a tensor as clipping.py gives it.
    """
    parts = layout.state_views(state)
    for segment in layout.segments:
        at = slice(segment.offset, segment.offset + segment.numel)
        groups = slice(segment.first_group, segment.first_group + segment.num_groups)
        adamw8bit_update_into(
            weights[at],
            parts["lo_q"][at] if "lo_q" in parts else None,
            parts["m_q"][at],
            parts["m_scale"][groups],
            parts["v_q"][at],
            parts["v_scale"][groups],
            grads[at],
            rows=segment.rows,
            cols=segment.cols,
            first_group=segment.first_group,
            coef=coef,
            hyper=hyper,
        )
    if layout.numel > layout.quantized_numel:
        at = slice(layout.quantized_numel, layout.numel)
        adamw_update_into(weights[at], parts.get("lo_f"), parts["m_f"], parts["v_f"], grads[at], coef=coef, hyper=hyper)


def master_weights(layout: UnitLayout, weights: Tensor, state: Tensor) -> Params:
    """Return local name -> the fp32 master value that the optimizer updates (new tensors)."""
    if layout.dtype == torch.float32:
        return {name: value.clone() for name, value in layout.views(weights).items()}
    parts, masters = layout.state_views(state), {}
    for place in layout.places:
        region, base = ("lo_q", 0) if place.quantized else ("lo_f", layout.quantized_numel)
        lo = parts[region][place.offset - base : place.offset - base + place.numel]
        hi = weights[place.offset : place.offset + place.numel]
        masters[place.name] = join_master(hi, lo).view(place.shape)
    return masters


def from_torch_adamw(
    state_dict: Mapping[str, Any], params: Params, optimizer: Optimizer, *, dtype: torch.dtype = torch.float32
) -> tuple[Params, OptimizerState]:
    """Take over a run of torch.optim.AdamW: return (params, state) for `optimizer.update`.

    Args:
        state_dict: of torch.optim.AdamW over these tensors, in this order; its moments are encoded, its
            hyperparameters are not taken over.
        params: name -> that run's weights, fp32. dtype: of the working weights; bfloat16 splits the masters.

    Raises:
        ConfigError: the state dict is of other tensors or options, or has different numbers of updates in it.
    """
    try:
        moments = dict(zip(params, read_moments(state_dict, [p.shape for p in params.values()])))
    except ValueError as error:
        raise ConfigError(f"from_torch_adamw: {error}.") from error
    steps = {entry.step if entry else 0 for entry in moments.values()}
    if len(steps) > 1:
        raise ConfigError(f"from_torch_adamw: the tensors have had {sorted(steps)} updates, must all have had as many.")
    _, layout, slab = optimizer.init({name: p.to(dtype) for name, p in params.items()})
    weights = torch.empty(layout.numel, dtype=dtype, device=slab.device)
    init_unit_into(layout, lambda name: params[name].detach(), weights, slab)
    for place in layout.places:
        if entry := moments[place.name]:
            parts = _moment_views(layout, place, slab)
            m, v = entry.m.to(slab.device), entry.v.to(slab.device)
            if place.quantized:
                shape = rows_and_cols(place.shape)
                values = quantize_moments(m.view(shape), v.view(shape), step=entry.step, first_group=place.first_group)
            for part, value in zip(parts, values if place.quantized else (m, v)):
                part.copy_(value.view(-1))
    return _in_order(layout.views(weights), params), OptimizerState(steps.pop() if steps else 0, layout, slab)


def to_torch_adamw(params: Params, state: OptimizerState, optimizer: Optimizer) -> tuple[Params, dict[str, Any]]:
    """Return (fp32 masters in params' order, the state dict with which torch.optim.AdamW over them goes on)."""
    settings, (t, layout, slab) = optimizer.settings, state
    moments = {}
    for place in layout.places:
        parts = _moment_views(layout, place, slab)
        if place.quantized:
            m_q, m_scale, v_q, v_scale = parts
            shape = rows_and_cols(place.shape)
            parts = list(dequantize_moments(m_q.view(shape), m_scale, v_q.view(shape), v_scale))
        m, v = (x.reshape(place.shape).clone() for x in parts)
        moments[place.name] = Moments(t, m, v) if t else None
    group = {name: getattr(settings, name) for name in ("betas", "eps", "weight_decay")} | {"lr": settings.lr(t)}
    masters = master_weights(layout, layout.flatten(params), slab)
    state_dict = make_state_dict(
        [moments[name] for name in params], [{**group, "lr": settings.lr(t), "params": list(params)}]
    )
    return _in_order(masters, params), state_dict


def _in_order(tensors: Params, params: Params) -> Params:
    return {name: tensors[name] for name in params}


def _moment_views(layout: UnitLayout, place: TensorPlace, slab: Tensor) -> list[Tensor]:
    """Return views of one tensor's m_q, m_scale, v_q, v_scale, or m and v, flat."""
    parts = layout.state_views(slab)
    if not place.quantized:
        at = place.offset - layout.quantized_numel
        return [parts[name][at : at + place.numel] for name in ("m_f", "v_f")]
    rows, cols = rows_and_cols(place.shape)
    tall = slice(place.offset, place.offset + place.numel)
    groups = slice(place.first_group, place.first_group + count_groups(rows, cols))
    return [parts["m_q"][tall], parts["m_scale"][groups], parts["v_q"][tall], parts["v_scale"][groups]]


def _make_optimizer(settings: AdamWSettings) -> Optimizer:
    _check(settings)

    def init(params: Params) -> OptimizerState:
        dtypes = {p.dtype for p in params.values()}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
            raise ConfigError(f"params must share one dtype, float32 or bfloat16; got {sorted(map(str, dtypes))}.")
        specs = {name: ParamSpec(full_name=name, shape=tuple(p.shape)) for name, p in params.items()}
        layout = settings.layout(specs, dtypes.pop())
        device = next(iter(params.values())).device
        return OptimizerState(0, layout, torch.zeros(layout.state_bytes, dtype=torch.uint8, device=device))

    def update(
        grads: Params, state: OptimizerState, params: Params, lr: float | None = None, clip_coef: float = 1.0
    ) -> tuple[Params, OptimizerState]:
        weights, slab = state.layout.flatten(params), state.slab.clone()
        rate = settings.lr(state.t) if lr is None else lr
        hyper = settings.hyper(rate, state.t + 1)
        update_unit_into(state.layout, weights, slab, state.layout.flatten(grads), coef=clip_coef, hyper=hyper)
        return _in_order(state.layout.views(weights), params), OptimizerState(state.t + 1, state.layout, slab)

    return Optimizer(init, update, settings)


def _check(settings: AdamWSettings) -> None:
    beta1, beta2 = settings.betas
    limits = {
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": settings.eps > 0 and math.isfinite(settings.eps),
        "weight_decay": settings.weight_decay >= 0 and math.isfinite(settings.weight_decay),
        "max_grad_norm": settings.max_grad_norm is None or settings.max_grad_norm > 0,
        "master_bits": settings.master_bits in (24, 32),
    }
    for name, fine in limits.items():
        if not fine:
            raise ConfigError(
                f"AdamW: {name} = {getattr(settings, name)!r} is out of range. Use betas in [0, 1), eps > 0, "
                "weight_decay >= 0, max_grad_norm > 0 or None, master_bits 24 or 32."
            )
