"""Adam8bit: AdamW with 8-bit moments for plain PyTorch parameters, a front of `torch.optim.Optimizer` over the kernels.

Formulas: adamw.py (the step), codec.py (the moments), master.py (bf16 weights and their remainder), clipping.py.

State of a parameter, each tensor contiguous and on the parameter's device:

    step                            int: applied updates
    lo                              bf16 parameters only: int16, or int8 with master_bits=24; the parameter's shape
    m_q, m_scale, v_q, v_scale      8-bit moments: int8, fp32, uint8, fp32; codes have the parameter's shape
    first_group                     int, beside 8-bit moments: where the parameter's groups begin in the dither's count
    m, v                            fp32 moments instead, where they are kept: the parameter's shape

Moments stay fp32 for tensors of one dimension or under 4096 elements, in groups with state_bits=32, and for names that
one of a group's fp32_patterns finds. Bytes a parameter beside bf16 weights: 4.06 (master_bits=24: 3.06); beside fp32
weights, which are their own master: 2.06.

Example:
    >>> model = torch.nn.Linear(128, 64)
    >>> optimizer = Adam8bit(model.parameters(), lr=1e-3)
    >>> model(torch.ones(2, 128)).square().mean().backward()
    >>> optimizer.step(clip_coef=optimizer.measure_clip(1.0).coef)
    >>> optimizer.state[model.weight]["m_q"].dtype
    torch.int8
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lazytrain.kernels.clipping import Clip, clip_coefficient
from lazytrain.kernels.codec import count_groups
from lazytrain.kernels.master import join_master
from lazytrain.kernels.parameter_state import (
    is_quantized,
    load_state,
    make_state,
    read_state,
    rows_and_cols,
    store_master_into,
    store_moments_into,
    update_parameter_into,
)
from lazytrain.kernels.torch_adamw import make_state_dict, read_moments


class Adam8bit(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) with 8-bit moments. Defaults and order are those of torch.optim.AdamW.

    Args:
        params: parameters, (name, parameter) pairs or groups of either; bf16 or fp32, of any strides, on CUDA or CPU.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; a group may have its own.
        state_bits: 8, or 32 for fp32 moments. master_bits: 32 or 24, of 8-bit tensors with bf16 weights.
        fp32_patterns: regular expressions of names that keep fp32 moments (needs `model.named_parameters()`).
            All three may differ by group.

    Memory: head of this file. A step works in place; strided parameters and gradients are copied one at a time.

    Raises:
        ValueError: an option out of range, patterns without names, or a parameter of another dtype or device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 8,
        master_bits: int = 32,
        fp32_patterns: Iterable[str] = (),
    ) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event, list[dict[str, Any]]] | None = None
        self._num_skipped = 0
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_bits": state_bits,
            "master_bits": master_bits,
            "fp32_patterns": tuple(fp32_patterns),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def num_skipped_steps(self) -> int:
        """Return how many steps a coefficient of NaN has skipped."""
        self._settle()
        return self._num_skipped

    def measure_clip(self, max_norm: float) -> Clip:
        """Return the norm of all gradients and their clip coefficient, on the device (clipping.py)."""
        return clip_coefficient((p for group in self.param_groups for p in group["params"]), max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip_coef: float | Tensor = 1.0) -> Any:
        """Apply one update to every parameter that has a gradient; gradients are read as clip_coef * grad.

        Args:
            closure: evaluates the model again and returns the loss.
            clip_coef: a number, or a tensor (fp32, one element, on the parameters' device) as `measure_clip` gives it:
                then the host waits for no more than the step before this one, and NaN skips the step: parameters
                and states stay untouched. A skipped step's number is taken back, and counted, when the next call
                looks.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse: make it dense.
            ValueError: clip_coef is a number that is negative or not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        if isinstance(clip_coef, Tensor) and not clip_coef.is_cuda:
            clip_coef = float(clip_coef)
            if math.isnan(clip_coef):
                self._num_skipped += 1
                return loss
        first_groups: dict[Tensor, int] | None = None
        stepped: list[dict[str, Any]] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError(f"Adam8bit: a gradient is {p.grad.layout}; make it dense (sparse=False)")
                state = self.state[p]
                if not state:
                    first_groups = self._first_groups() if first_groups is None else first_groups
                    state.update(make_state(p, group, first_groups.get(p)))
                state["step"] += 1
                update_parameter_into(p, state, group, clip_coef)
                stepped.append(state)
        if isinstance(clip_coef, Tensor):
            on_host = torch.empty((), dtype=torch.float32, pin_memory=True).copy_(clip_coef, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(clip_coef.device))
            self._pending = (on_host, event, stepped)
        return loss

    def _settle(self) -> None:
        """Take back the number of the last step if its coefficient, on the host by now, was NaN."""
        if self._pending is None:
            return
        coef, event, stepped = self._pending
        self._pending = None
        event.synchronize()
        if math.isnan(coef.item()):
            self._num_skipped += 1
            for state in stepped:
                state["step"] -= 1

    def _first_groups(self) -> dict[Tensor, int]:
        """Return where each 8-bit parameter's groups begin; all parameters count, with or without a gradient."""
        found, position = {}, 0
        for group in self.param_groups:
            for p, name in zip(group["params"], group.get("param_names", [""] * len(group["params"]))):
                if is_quantized(p, name, group):
                    found[p] = position
                    position += count_groups(*rows_and_cols(p))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return states and options as torch's optimizers do (head of this file); tensors are not copied."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, bit by bit (torch's own loader would cast the codes to the parameter's dtype).

        Raises:
            ValueError: other groups or shapes, or states of another optimizer (see `load_torch_adamw`).
        """
        self._pending = None
        indexes = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        saved = state_dict["state"]
        states = {p: load_state(i, p, saved[i]) for i, p in zip(indexes, params) if saved.get(i)}
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(states)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**super().__getstate__(), "_num_skipped": self._num_skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pending = None

    def read_master(self, p: Tensor) -> Tensor:
        """Return the fp32 value that the optimizer updates, a new tensor of p's shape."""
        lo = self.state[p].get("lo") if p in self.state else None
        return p.detach().float().clone() if lo is None else join_master(p.detach(), lo)

    @torch.no_grad()
    def set_master(self, p: Tensor, value: Tensor) -> None:
        """Give a parameter an fp32 value: rounded in p itself and, beside bf16, exact to master_bits with `lo`."""
        if not self.state[p]:
            (group,) = (group for group in self.param_groups if any(p is other for other in group["params"]))
            self.state[p] = make_state(p, group, self._first_groups().get(p))
        store_master_into(p, self.state[p], value)

    @torch.no_grad()
    def load_torch_adamw(self, state_dict: Mapping[str, Any], masters: Iterable[Tensor] | None = None) -> None:
        """Go on from a run of torch.optim.AdamW: encode its fp32 moments, take over lr, betas, eps and weight_decay.

        Args:
            state_dict: of torch.optim.AdamW over the same parameters in the same order and groups.
            masters: fp32 values of the parameters (the weights of that run), split into bf16 weights and `lo`; None
                keeps the parameters as they are.

        Raises:
            ValueError: other parameters or groups, amsgrad or maximize.
        """
        self._pending = None
        params = [p for group in self.param_groups for p in group["params"]]
        entries = read_moments(state_dict, [p.shape for p in params])
        saved_groups, first_groups, position = state_dict["param_groups"], self._first_groups(), 0
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(f"the state dict has {len(saved_groups)} groups, here are {len(self.param_groups)}")
        for group, theirs in zip(self.param_groups, saved_groups):
            group.update({name: theirs[name] for name in ("lr", "betas", "eps", "weight_decay")})
            for p in group["params"]:
                entry, position = entries[position], position + 1
                self.state[p] = make_state(p, group, first_groups.get(p))
                if entry is not None:
                    store_moments_into(self.state[p], entry, p)
        for p, master in [] if masters is None else zip(params, masters, strict=True):
            store_master_into(p, self.state[p], master)

    @torch.no_grad()
    def torch_adamw_state_dict(self) -> dict[str, Any]:
        """Return a state dict for torch.optim.AdamW over fp32 copies (`read_master`) of the same parameters."""
        self._settle()
        params = [p for group in self.param_groups for p in group["params"]]
        return make_state_dict([read_state(self.state.get(p)) for p in params], self.param_groups)


def _check_group(group: Mapping[str, Any]) -> None:
    lr, (beta1, beta2), eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    limits = {
        "lr": lr >= 0,
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": eps > 0,
        "weight_decay": decay >= 0,
        "state_bits": group["state_bits"] in (8, 32),
        "master_bits": group["master_bits"] in (24, 32),
        "fp32_patterns": not group["fp32_patterns"] or "param_names" in group,
    }
    for name, fine in limits.items():
        if not fine:
            raise ValueError(
                f"Adam8bit: {name} = {group[name]!r} is out of range. Use lr >= 0, betas in [0, 1), eps > 0, "
                "weight_decay >= 0, state_bits 8 or 32, master_bits 24 or 32, patterns with named_parameters() only."
            )
    for p in group["params"]:
        if p.dtype not in (torch.bfloat16, torch.float32) or p.device.type not in ("cuda", "cpu"):
            raise ValueError(
                f"Adam8bit: a parameter of shape {tuple(p.shape)} is {p.dtype} on {p.device}; it takes bfloat16 and "
                "float32 on CUDA or CPU: convert with .bfloat16() or .float()"
            )
