"""The state that Adam8bit keeps of one parameter: made, loaded, updated, converted. The fields: adam8bit.py.

`group` is a parameter group of torch.optim.Optimizer with state_bits, master_bits and fp32_patterns; `state` is the
optimizer's dict of one parameter.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lazytrain.kernels.adamw import adamw8bit_update_into, adamw_update_into
from lazytrain.kernels.codec import count_groups, dequantize_moments, quantize_moments
from lazytrain.kernels.hyper import AdamWHyper
from lazytrain.kernels.master import split_master
from lazytrain.kernels.torch_adamw import Moments

MIN_QUANTIZED_NUMEL = 4096
CODES = ("m_q", "m_scale", "v_q", "v_scale")

State = dict[str, Any]


def rows_and_cols(p: Tensor) -> tuple[int, int]:
    """Return a tensor's shape as a matrix: its last dimension is a row."""
    cols = p.shape[-1] if p.dim() else 1
    return (p.numel() // cols if cols else 0), cols


def is_quantized(p: Tensor, name: str, group: Mapping[str, Any]) -> bool:
    """Return whether a parameter gets 8-bit moments."""
    small = p.dim() < 2 or p.numel() < MIN_QUANTIZED_NUMEL
    return group["state_bits"] == 8 and not small and not any(re.search(x, name) for x in group["fp32_patterns"])


def make_state(p: Tensor, group: Mapping[str, Any], first_group: int | None) -> State:
    """Return zero moments and remainder; first_group is None where moments are fp32."""

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=p.device)

    state: State = {"step": 0}
    if p.dtype == torch.bfloat16:
        narrow = first_group is not None and group["master_bits"] == 24
        state["lo"] = zeros(torch.int8 if narrow else torch.int16, *p.shape)
    if first_group is None:
        return {**state, "m": zeros(torch.float32, *p.shape), "v": zeros(torch.float32, *p.shape)}
    num_groups = count_groups(*rows_and_cols(p))
    codes = {"m_q": zeros(torch.int8, *p.shape), "v_q": zeros(torch.uint8, *p.shape)}
    scales = {name: zeros(torch.float32, num_groups) for name in ("m_scale", "v_scale")}
    return {**state, "first_group": first_group, **codes, **scales}


def update_parameter_into(p: Tensor, state: State, group: Mapping[str, Any], coef: float | Tensor) -> None:
    """Do one step on a parameter that has a dense gradient; state["step"] counts it already."""
    beta1, beta2 = group["betas"]
    hyper = AdamWHyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], state["step"])
    weights, grad = p.detach().contiguous(), p.grad.contiguous()  # type: ignore[union-attr]
    if "m_q" in state:
        m_q, m_scale, v_q, v_scale = (state[name] for name in CODES)
        rows, cols = rows_and_cols(p)
        adamw8bit_update_into(
            weights, state.get("lo"), m_q, m_scale, v_q, v_scale, grad,
            rows=rows, cols=cols, first_group=state["first_group"], coef=coef, hyper=hyper,
        )  # fmt: skip
    else:
        adamw_update_into(weights, state.get("lo"), state["m"], state["v"], grad, coef=coef, hyper=hyper)
    if weights.data_ptr() != p.data_ptr():
        p.copy_(weights)
    torch.autograd.graph.increment_version(p)  # kernels write behind autograd's back


def load_state(index: int, p: Tensor, entry: Mapping[str, Any]) -> State:
    """Return a copy on p's device of a saved state, bit by bit.

    Raises:
        ValueError: it is another optimizer's, or of a parameter of another shape or dtype.
    """
    if "exp_avg" in entry:
        raise ValueError(f"parameter {index}: the states are torch AdamW's: load them with load_torch_adamw")
    num_groups = (count_groups(*rows_and_cols(p)),)
    expected: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {}
    if "m_q" in entry:
        expected = dict.fromkeys(("m_scale", "v_scale"), ((torch.float32,), num_groups))
        expected |= {"m_q": ((torch.int8,), tuple(p.shape)), "v_q": ((torch.uint8,), tuple(p.shape))}
    else:
        expected = {name: ((torch.float32,), tuple(p.shape)) for name in ("m", "v")}
    if p.dtype == torch.bfloat16:
        expected["lo"] = ((torch.int16, torch.int8), tuple(p.shape))
    tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor)}
    for name in expected.keys() | tensors.keys():
        value = tensors.get(name)
        dtypes, shape = expected.get(name, ((), ()))
        if value is None or value.dtype not in dtypes or value.shape != shape:
            found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(
                f"parameter {index} ({p.dtype} {tuple(p.shape)}): {name} is {found} in the state dict, which was "
                "saved for another parameter: pass the same parameters, of the same dtype, in the same order"
            )
    copies = {name: value.to(p.device, copy=True).contiguous() for name, value in tensors.items()}
    return {**entry, **copies}


def store_moments_into(state: State, moments: Moments, p: Tensor) -> None:
    """Write fp32 moments into a state of either kind, on p's device, and the number of updates."""
    state["step"] = moments.step
    m, v = moments.m.to(p.device), moments.v.to(p.device)
    if "m" in state:
        state["m"].copy_(m)
        state["v"].copy_(v)
    else:
        shape = rows_and_cols(p)
        codes = quantize_moments(m.view(shape), v.view(shape), step=moments.step, first_group=state["first_group"])
        for name, value in codes._asdict().items():
            state[name].copy_(value.view_as(state[name]))


def read_state(state: State | None) -> Moments | None:
    """Return a state's moments in fp32, new tensors; None without a state."""
    if not state:
        return None
    if "m" in state:
        return Moments(state["step"], state["m"].clone(), state["v"].clone())
    m_q, m_scale, v_q, v_scale = (state[name] for name in CODES)
    shape = rows_and_cols(m_q)
    m, v = dequantize_moments(m_q.view(shape), m_scale, v_q.view(shape), v_scale)
    return Moments(state["step"], m.view_as(m_q), v.view_as(m_q))


def store_master_into(p: Tensor, state: State, master: Tensor) -> None:
    """Write an fp32 value into a parameter and, beside bf16, its remainder."""
    if "lo" not in state:
        p.copy_(master)
        return
    hi, lo = split_master(master.to(p.device), 8 * state["lo"].element_size() + 16)
    p.copy_(hi)
    state["lo"].copy_(lo)
