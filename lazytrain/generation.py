"""Greedy generation in batches with a preallocated cache of keys and values.

Prompts of one batch are padded on the left, so that every row writes its next token at the same place of the cache.
Weights come block by block through `get_params`: all rows pass a block before the next one is asked for, which suits
resident and streamed weights alike.

Shape letters: b rows, t new positions, s positions in the cache, h query heads, g key/value heads, k head dim,
v vocabulary, r query heads that share a key head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazytrain.attention import causal_attention, takes_lengths
from lazytrain.base import Context, Model, Params, Unit
from lazytrain.configuration import ModelConfig
from lazytrain.decoder import decoder_block
from lazytrain.errors import DataError
from lazytrain.rope import rotary_tables
from lazytrain.vocabulary import CausalHead, check_token_ids

# How many tokens are made between looks at which rows have finished: a look synchronises with the device.
TOKENS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 4}
# Finished rows leave the batch once they are this share of it: leaving copies the cache once.
DROP_SHARE = 0.125
# Not cuDNN's, which torch would take first on Hopper: it builds a plan for every new length, so at every token.
ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

GetParams = Callable[[Unit], Params]


@torch.no_grad()
def generate(
    model: Model,
    config: ModelConfig,
    get_params: GetParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    batch_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int], object] | None = None,
) -> list[list[int]]:
    """Continue every prompt with the most likely token until a stop token or `max_new_tokens`.

    Args:
        model, config: of `transformer_model(config)`.
        get_params: unit -> parameters on `device` in `dtype`; asked for in forward order, once a unit and token.
        prompts: token ids, at least one each; lengths may differ. Batches are made of prompts of like length.
        stop_ids: tokens that end a text (`load_stop_ids`).
        pad_id: fills short rows; it is never attended to, so any valid id will do.
        batch_size: rows at a time.
        progress: called before each token with its number in the batch, from 1; what it raises ends the generation.
    Returns:
        The new tokens of each prompt, in the prompts' order, the stop token included where one was made.
    Memory: 2 blocks b g (longest prompt + max_new_tokens) k elements for the cache, b v for logits.
    Raises:
        DataError: an empty prompt, or an id without a row.
        ConfigError: prompt and new tokens exceed a sliding window.
    """
    assert max_new_tokens >= 0, max_new_tokens
    assert batch_size >= 1, batch_size
    _check_prompts(prompts, config, max_new_tokens)
    if max_new_tokens == 0:
        return [[] for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(prompts), batch_size):
        indices = by_length[first : first + batch_size]
        tokens_bt, num_padding_b = _pad_left([prompts[index] for index in indices], pad_id)
        rows = _Rows.start(model, config, tokens_bt, num_padding_b, max_new_tokens, torch.device(device), dtype)
        with sdpa_kernel(ATTENTION_KERNELS):
            made_bt = _continue_rows(model, get_params, rows, max_new_tokens, stop_ids, progress)
        for index, made in zip(indices, made_bt.tolist()):
            texts[index] = _cut_after_stop(made, set(stop_ids))
    return texts


@dataclass
class _Rows:
    """The rows still being written: their cache, and what of it each row may see.

    num_written: positions of the cache that are filled; the next token goes there.
    bounds_s: where padding and prompt of each row begin, for the prompts' own pass, where no mask is needed for it.
    """

    config: ModelConfig
    tokens_bt: Tensor
    index_b: Tensor
    cos_bsk: Tensor
    sin_bsk: Tensor
    visible_b11s: Tensor | None
    keys_bgsk: list[Tensor]
    values_bgsk: list[Tensor]
    bounds_s: Tensor | None = None
    num_written: int = 0

    @classmethod
    def start(
        cls,
        model: Model,
        config: ModelConfig,
        tokens_bt: Tensor,
        num_padding_b: Tensor,
        max_new_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "_Rows":
        """Allocate the cache and make the tables for all positions that the batch will ever have."""
        num_rows, num_positions = tokens_bt.shape[0], tokens_bt.shape[1] + max_new_tokens
        places_bs = (torch.arange(num_positions) - num_padding_b[:, None]).to(device)
        cos_bsk, sin_bsk = rotary_tables(config.rope, config.head_dim, places_bs.clamp(min=0), dtype)
        shape = (num_rows, config.num_key_value_heads, num_positions, config.head_dim)
        keys, values = ([torch.empty(shape, device=device, dtype=dtype) for _ in model.blocks] for _ in range(2))
        is_padded = bool(num_padding_b.any())
        bounds_s = None
        if is_padded and takes_lengths(device, dtype, config.head_dim):
            lengths_bs = torch.stack((num_padding_b, tokens_bt.shape[1] - num_padding_b), 1)
            bounds_s = F.pad(lengths_bs.flatten().cumsum(0), (1, 0)).int().to(device)
        return cls(
            config=config,
            tokens_bt=tokens_bt.to(device),
            index_b=torch.arange(num_rows, device=device),
            cos_bsk=cos_bsk,
            sin_bsk=sin_bsk,
            visible_b11s=(places_bs >= 0)[:, None, None] if is_padded else None,
            keys_bgsk=keys,
            values_bgsk=values,
            bounds_s=bounds_s,
        )

    def context(self) -> Context:
        """Return the context of the positions that come next."""
        start, end = self.num_written, self.num_written + self.tokens_bt.shape[1]
        ctx = {"cos_btk": self.cos_bsk[:, start:end], "sin_btk": self.sin_bsk[:, start:end]}
        if self.bounds_s is not None and start == 0:
            ctx["bounds_s"] = self.bounds_s
        elif self.visible_b11s is not None:
            mask = self.visible_b11s[..., :end]
            if end - start > 1:
                # A padding position sees itself: a row without any key would be NaN in some kernels.
                own = torch.eye(end, dtype=torch.bool, device=mask.device)
                mask = (mask & torch.ones_like(own).tril()) | own
            ctx["mask_b1tt"] = mask
        return ctx

    def attend(self, q_bhtk: Tensor, k_bgtk: Tensor, v_bgtk: Tensor, ctx: Context, *, block_idx: int) -> Tensor:
        """Write keys and values behind those of earlier positions and attend to all of them."""
        start, end = self.num_written, self.num_written + k_bgtk.shape[2]
        self.keys_bgsk[block_idx][:, :, start:end] = k_bgtk
        self.values_bgsk[block_idx][:, :, start:end] = v_bgtk
        if start == 0:
            return causal_attention(q_bhtk, k_bgtk, v_bgtk, ctx)
        # One query a row: the query heads that share a key head are queries of one head, and no key is copied.
        q_bgrk = q_bhtk.reshape(q_bhtk.shape[0], k_bgtk.shape[1], -1, q_bhtk.shape[-1])
        keys_bgsk, values_bgsk = self.keys_bgsk[block_idx][:, :, :end], self.values_bgsk[block_idx][:, :, :end]
        o_bgrk = F.scaled_dot_product_attention(q_bgrk, keys_bgsk, values_bgsk, attn_mask=ctx.get("mask_b1tt"))
        return o_bgrk.reshape(q_bhtk.shape)

    def keep(self, kept_n: Tensor) -> None:
        """Drop all rows but these (local indices)."""
        self.tokens_bt, self.index_b = self.tokens_bt[kept_n], self.index_b[kept_n]
        self.cos_bsk, self.sin_bsk = self.cos_bsk[kept_n], self.sin_bsk[kept_n]
        self.visible_b11s = None if self.visible_b11s is None else self.visible_b11s[kept_n]
        for cache in (self.keys_bgsk, self.values_bgsk):
            for block_idx, old_bgsk in enumerate(cache):
                cache[block_idx] = old_bgsk[kept_n]


def _continue_rows(
    model: Model,
    get_params: GetParams,
    rows: _Rows,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    progress: Callable[[int], object] | None,
) -> Tensor:
    """Return the tokens made (b, max_new_tokens), on the CPU; what stands after a stop token is meaningless."""
    device, num_rows = rows.tokens_bt.device, rows.tokens_bt.shape[0]
    made_bt = torch.full((num_rows, max_new_tokens), -1, dtype=torch.int64, device=device)
    stops_n = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
    finished_b = torch.zeros(num_rows, dtype=torch.bool, device=device)
    between_looks = TOKENS_BETWEEN_LOOKS.get(device.type, 1)
    for step in range(max_new_tokens):
        if progress is not None:
            progress(step + 1)
        next_b = _next_tokens(model, get_params, rows)
        rows.tokens_bt = next_b[:, None]
        made_bt[rows.index_b, step] = next_b
        finished_b |= (next_b[:, None] == stops_n).any(1)
        if (step + 1) % between_looks == 0:
            kept_n = (~finished_b).nonzero().squeeze(1)
            if len(kept_n) <= (1 - DROP_SHARE) * len(finished_b):
                rows.keep(kept_n)
                finished_b = finished_b[kept_n]
            if len(kept_n) == 0:
                break
    return made_bt.cpu()


def _next_tokens(model: Model, get_params: GetParams, rows: _Rows) -> Tensor:
    """Run all blocks over the rows' new positions and return the most likely next token of each row."""
    assert isinstance(model.head.fn, CausalHead)
    ctx = rows.context()
    x_btd = model.embed.fn(get_params(model.embed), {"tokens_bt": rows.tokens_bt})
    for block_idx, unit in enumerate(model.blocks):
        attend = partial(rows.attend, block_idx=block_idx)
        x_btd = decoder_block(get_params(unit), x_btd, ctx, config=rows.config, attend=attend)
    rows.num_written += rows.tokens_bt.shape[1]
    return model.head.fn.logits(get_params(model.head), x_btd[:, -1]).argmax(-1)


def _check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, max_new_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"prompt {index} of {len(prompts)} has no token. Give it at least one, such as BOS.")
        check_token_ids(prompt, config)
    if prompts:
        config.check_sequence_length(max(len(prompt) for prompt in prompts) + max_new_tokens)


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return tokens_bt and the number of padding positions of each row."""
    width = max(len(prompt) for prompt in prompts)
    num_padding = [width - len(prompt) for prompt in prompts]
    rows = [[pad_id] * padding + list(prompt) for prompt, padding in zip(prompts, num_padding)]
    return torch.tensor(rows), torch.tensor(num_padding)


def _cut_after_stop(tokens: list[int], stop_ids: set[int]) -> list[int]:
    """Keep what was made up to the first stop token, that token included."""
    for position, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: position + 1]
    return tokens
