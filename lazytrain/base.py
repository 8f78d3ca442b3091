"""Contracts only: what a unit, a model, a batch and an optimizer are.

Shape letters: b batch, t time, d model width, h heads, k head dim, v vocabulary, f feed-forward.

A model is `embed`, a list of blocks and `head`, each a pure function of a dict of tensors:

    x_btd = embed.fn(params, batch)
    y_btd = block.fn(params, x_btd, ctx)              ctx: what all blocks share (rotary tables, an attention mask)
    loss  = head.fn(params, x_btd, batch)             fp32, **summed** over the batch's targets

A batch of a language model holds `tokens_bt` (int64), `targets_bt` (int64: the token at t + 1, or -100 where nothing
is to be learnt) and, where samples are packed, `positions_bt` and `segments_bt` (0 = padding). The trainer adds
`target_index_n`: the flat positions that have a target, so that the head computes no logits in vain.

Units of one `kind` share code: the same `fn`, the same local names and shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, dtype

from lazytrain.account import Account

Params = dict[str, Tensor]
Context = dict[str, Tensor]
Batch = Mapping[str, Tensor]

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One tensor of a unit: its name in the model's files and its shape."""

    full_name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One streamable part of a model: a pure function and the specification of its parameters.

    Attributes:
        name: unique, for example "model.layers.3"; errors and plans use it.
        kind: units of one kind share `fn`, local names and shapes, and so compiled programs and costs.
        fn: the pure function (see the head of this file).
        params: local name -> specification.
        grads_into: for an embed or head that can do better than a vjp of `fn` (chunks of logits, target positions
            only); it adds its parameters' gradients to `sums`, fp32 by local name. None = torch.func.vjp of `fn`.
            Embed: `(params, batch, dx_btd, sums)`; a streamed embed's weights have left by then, so that `params` are
            shapes only, on the meta device. Head: `(params, x_btd, batch, scale, sums) -> (loss_sum, dx_btd)`, the loss
            fp32 and unscaled, gradients those of `scale * loss_sum`.
        rows: for an embed whose `fn` looks up rows of its only parameter, a matrix: `batch -> index`, in the order of
            its output's rows. Its gradients then need no dense fp32 sum.
    """

    name: str
    kind: str
    fn: Callable[..., Any]
    params: Mapping[str, ParamSpec] = field(default_factory=dict)
    grads_into: Callable[..., Any] | None = None
    rows: Callable[[Batch], Tensor] | None = None


def count_targets(batch: Batch) -> int:
    """Return the number of target tokens of a batch, or of its rows where it has no `targets_bt`."""
    return len(find_targets(batch["targets_bt"])) if "targets_bt" in batch else count_rows(batch)


def find_targets(targets_bt: Tensor) -> Tensor:
    """Return the flat positions that have a target, int64, on the CPU.

    By NumPy, on this thread alone: torch's threads would wait for each other behind updates on the CPU, which keep the
    cores busy at the start of a step (measured: 40 ms for 65,536 positions, where it takes 0.1).
    """
    return torch.from_numpy(np.flatnonzero(targets_bt.cpu().numpy() != IGNORE_INDEX))


def count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(batch.values())))


def no_context(batch: Batch, compute_dtype: dtype) -> Context:
    """Return an empty context, for blocks that share nothing."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Model:
    """Embed, blocks and head, and what they share.

    Attributes:
        context: `(batch on the device, working dtype) -> ctx`, a dict of tensors given to every block.
        tied: the head's local names that are the embed's parameters -> the embed's local names. Such a tensor is
            stored, updated and counted in the norm once, as the embed's; its gradient is the sum of both uses.
        count: the number that the summed loss of a batch is divided by (its targets).
    """

    embed: Unit
    blocks: tuple[Unit, ...]
    head: Unit
    context: Callable[[Batch, dtype], Context] = no_context
    tied: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[Batch], int] = count_targets

    @property
    def units(self) -> tuple[Unit, ...]:
        """Return all units in forward order."""
        return (self.embed, *self.blocks, self.head)

    @property
    def num_params(self) -> int:
        """Return the number of parameters, tied ones counted once."""
        return sum(
            spec.numel for unit in self.units for name, spec in unit.params.items() if not self._is_tied(unit, name)
        )

    @property
    def streams_embed(self) -> bool:
        """Return whether the embed's backward does without its weights, which may have left the device by then."""
        return self.embed.grads_into is not None or not self.embed.params

    @property
    def embed_rows(self) -> Callable[[Batch], Tensor] | None:
        """Return the embed's `rows` where its gradients are summed by them, without a dense fp32 sum, or None."""
        return self.embed.rows if self.embed.params and not self.tied else None

    def _is_tied(self, unit: Unit, name: str) -> bool:
        return unit is self.head and name in self.tied


class StepMetrics(NamedTuple):
    """What one optimizer step measured. All are plain numbers: the one host synchronisation of a step is done.

    loss: mean over the step's target tokens. grad_norm: before clipping. clip_coef: what grads were scaled by.
    skipped: the norm was not finite and the step left weights, states and t untouched.
    last_account: where the time of the step before went, by the spans of all queues; None after a start or a pause.
    """

    step: int
    loss: float
    grad_norm: float
    clip_coef: float
    lr: float
    num_target_tokens: int
    skipped: bool
    bad_unit: str | None
    step_s: float
    last_account: Account | None = None
