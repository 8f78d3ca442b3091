"""The moments in a state dict of torch.optim.AdamW, read and written.

    {"state": {i: {"step": fp32 0-d, "exp_avg": m, "exp_avg_sq": v}}, "param_groups": [{"params": [i, ...], "lr": ...}]}

m and v have the parameter's shape and, for fp32 parameters, are fp32: what `codec.quantize_moments` takes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


class Moments(NamedTuple):
    """AdamW's state of one parameter: number of applied updates and fp32 moments of its shape."""

    step: int
    m: Tensor
    v: Tensor


def read_moments(state_dict: Mapping[str, Any], shapes: Sequence[torch.Size]) -> list[Moments | None]:
    """Return each parameter's moments in the order of the groups, None where it has had no gradient yet.

    Args:
        state_dict: of torch.optim.AdamW (or Adam with the same keys).
        shapes: of the parameters that they are for, in the order in which torch's optimizer got its own.

    Raises:
        ValueError: it is of another optimizer, uses amsgrad or maximize, or has other parameters.
    """
    groups = state_dict["param_groups"]
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in groups):
            raise ValueError(f"the state dict has {option}=True, which 8-bit AdamW does not have: train without it")
    indexes = [i for group in groups for i in group["params"]]
    if len(indexes) != len(shapes):
        raise ValueError(f"the state dict has {len(indexes)} parameters, here are {len(shapes)}: pass the same ones")
    return [_read_one(i, state_dict["state"].get(i), shape) for i, shape in zip(indexes, shapes)]


def _read_one(index: int, entry: Mapping[str, Any] | None, shape: torch.Size) -> Moments | None:
    if not entry:
        return None
    if missing := {"step", "exp_avg", "exp_avg_sq"} - set(entry):
        raise ValueError(f"parameter {index} has no {sorted(missing)} in the state dict: it is not torch AdamW's")
    m, v = entry["exp_avg"], entry["exp_avg_sq"]
    if m.shape != shape or v.shape != shape:
        raise ValueError(
            f"parameter {index} has moments of shape {tuple(m.shape)}, here it has {tuple(shape)}: pass the parameters "
            "in the order in which torch's optimizer got them"
        )
    return Moments(int(entry["step"]), m.detach().float().contiguous(), v.detach().float().contiguous())


def make_state_dict(moments: Sequence[Moments | None], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state dict that torch.optim.AdamW over fp32 parameters of the same shapes loads.

    Args:
        moments: of each parameter, in the order of the groups. groups: with `params` (for its length) and lr, betas,
            eps and weight_decay; `param_names` is kept where it is there.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.AdamW([w])
        >>> group = {"params": [w], "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        >>> optimizer.load_state_dict(make_state_dict([Moments(3, torch.ones(2), torch.ones(2))], [group]))
        >>> optimizer.state[w]["step"]
        tensor(3.)
    """
    made, position = [], 0
    for group in groups:
        options = {name: group[name] for name in HYPERPARAMETERS}
        (filled,) = torch.optim.AdamW([torch.zeros(1)], **options).state_dict()["param_groups"]
        count = len(group["params"])
        filled["params"] = list(range(position, position + count))
        if "param_names" in group:
            filled["param_names"] = list(group["param_names"])
        position += count
        made.append(filled)
    state = {
        i: {"step": torch.tensor(float(entry.step)), "exp_avg": entry.m, "exp_avg_sq": entry.v}
        for i, entry in enumerate(moments)
        if entry is not None
    }
    return {"state": state, "param_groups": made}
