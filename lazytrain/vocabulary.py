"""The two units with a row for every token: the embed, and the head (final norm, vocabulary matrix, cross entropy).

Shape letters: b batch, t time, d model width, v vocabulary, n rows (all positions, or those that have a target),
c rows of one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp

from lazytrain.base import Batch, Params
from lazytrain.configuration import ModelConfig
from lazytrain.decoder import rms_norm
from lazytrain.errors import DataError
from lazytrain.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_grads
from lazytrain.row_sums import add_rows_into

# A chunk's logits in the working dtype. On the CPU softmax takes up to three times as much beside them.
LOGITS_BYTES = {"cuda": 640 * 2**20, "cpu": 64 * 2**20}


def embed_tokens(params: Params, batch: Batch) -> Tensor:
    """Look up x_btd, the rows of `tokens_bt`."""
    return F.embedding(batch["tokens_bt"], params["embed_tokens.weight"])


def embed_grads_into(params: Params, batch: Batch, dx_btd: Tensor, sums: Params) -> None:
    """Add the cotangents of every token to its row, in fp32 and in an order that never changes.

    Args:
        dx_btd: cotangent of the embed's output.
        sums: fp32 by local name, added to.
    Memory: that of an fp32 copy of the cotangents.
    """
    # The backward of F.embedding would make the host wait.
    dx_nd = dx_btd.reshape(-1, dx_btd.shape[-1]).float()
    add_rows_into(sums["embed_tokens.weight"], token_rows(batch), dx_nd)


def token_rows(batch: Batch) -> Tensor:
    """Return the row of the vocabulary matrix that each position takes, (b * t,)."""
    return batch["tokens_bt"].reshape(-1)


@dataclass(frozen=True)
class CausalHead:
    """Final norm, vocabulary matrix and cross entropy. A call is the head's `fn`: the loss summed over targets."""

    config: ModelConfig

    def logits(self, params: Params, x_btd: Tensor) -> Tensor:
        """Return logits (..., v) in the working dtype."""
        return F.linear(self.normalize(params["norm.weight"], x_btd), params["lm_head.weight"])

    def normalize(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return the final norm of x."""
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def __call__(self, params: Params, x_btd: Tensor, batch: Batch) -> Tensor:
        """Return the fp32 sum of -log p(target), some rows of logits at a time."""
        x_nd, targets_n = _target_rows(x_btd, batch)
        h_nd, weight_vd = self.normalize(params["norm.weight"], x_nd), params["lm_head.weight"]
        return linear_cross_entropy(h_nd, weight_vd, targets_n, scale=1.0, chunk=logits_chunk(weight_vd))

    def grads_into(
        self, params: Params, x_btd: Tensor, batch: Batch, scale: float, sums: Params
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of scale * loss to `sums`, with never more than one chunk of logits.

        Args:
            scale: 1 / (the step's number of targets), for a mean over the step.
            sums: fp32 by local name, added to.
        Returns:
            loss_sum (fp32, unscaled), dx_btd.
        Memory: LOGITS_BYTES for logits, and a few times that of x_btd.
        """
        x_nd, targets_n = _target_rows(x_btd, batch)
        h_nd, pull_norm = vjp(self.normalize, params["norm.weight"], x_nd)[:2]
        weight_vd = params["lm_head.weight"]
        loss_sum, dh_nd, _ = linear_cross_entropy_grads(
            h_nd,
            weight_vd,
            targets_n,
            scale=scale,
            chunk=logits_chunk(weight_vd),
            grad_w_into=sums["lm_head.weight"],
        )
        dnorm_d, dx_nd = pull_norm(dh_nd)
        sums["norm.weight"] += dnorm_d
        if "target_index_n" in batch:
            dx_rows = torch.zeros_like(x_btd.reshape(-1, x_btd.shape[-1]))
            dx_nd = dx_rows.index_copy_(0, batch["target_index_n"], dx_nd)
        return loss_sum, dx_nd.view(x_btd.shape)


def logits_chunk(weight_vd: Tensor) -> int:
    """Return how many rows of logits fit LOGITS_BYTES: a multiple of 128 where it can be, for the matrix units."""
    rows = LOGITS_BYTES[weight_vd.device.type] // (weight_vd.element_size() * weight_vd.shape[0])
    return rows // 128 * 128 if rows >= 128 else max(1, rows)


def check_token_ids(tokens: Tensor | Sequence[int], config: ModelConfig) -> None:
    """Refuse token ids that have no row in the vocabulary matrix.

    Raises:
        DataError: names the id and the limit; use the tokenizer that belongs to the model.
    """
    ids = torch.as_tensor(tokens)
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise DataError(
            f"token id {low if low < 0 else high} has no row: ids go from 0 to {config.vocab_size - 1} (vocab_size "
            f"{config.vocab_size}). Use the tokenizer that belongs to this model."
        )


def _target_rows(x_btd: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rows that have a target and their targets; without `target_index_n` all rows (the loss skips -100)."""
    x_nd, targets_n = x_btd.reshape(-1, x_btd.shape[-1]), batch["targets_bt"].reshape(-1)
    if "target_index_n" not in batch:
        return x_nd, targets_n
    return x_nd[batch["target_index_n"]], targets_n[batch["target_index_n"]]
