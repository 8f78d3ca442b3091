"""Encode rows into one flat array of tokens, and report what had to be dropped and how long the samples are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lazytrain.errors import DataError
from lazytrain.recipes.prompts import Example, Prompt, SpecialTokens, encode_examples
from lazytrain.recipes.rows import Row

PERCENTILES = (50, 90, 99, 100)
_CHUNK_ROWS = 1024
_NO_TARGET = "with a prompt that fills the whole length"
_TOO_LONG = "too long"


class EncodeReport(NamedTuple):
    """What became of the rows; lengths and counts in tokens, EOS included."""

    num_rows: int
    num_used: int
    num_truncated: int
    dropped: dict[str, int]
    max_tokens: int
    length_percentiles: dict[int, int]
    num_tokens: int
    num_targets: int

    def describe(self) -> str:
        """Return one line, for example "dropped 12 of 395,000 rows (12 too long for 512 tokens); ..."."""
        parts = []
        if self.dropped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            parts.append(
                f"dropped {sum(self.dropped.values()):,} of {self.num_rows:,} rows "
                f"({reasons}; the limit is {self.max_tokens:,} tokens)"
            )
        if self.num_truncated:
            parts.append(f"cut {self.num_truncated:,} rows at {self.max_tokens:,} tokens")
        lengths = ", ".join(f"{q}%: {length:,}" for q, length in self.length_percentiles.items())
        parts.append(f"{self.num_used:,} rows, {self.num_tokens:,} tokens, {self.num_targets:,} targets")
        return "; ".join([*parts, f"lengths up to {lengths}"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Samples as one array: sample i is `tokens[offsets[i]:offsets[i + 1]]`, its first `prompt_lengths[i]` untrained.

    Of what follows the prompt everything is trained, or what `trained` says (the later turns of a chat).

    Attributes:
        tokens: int32 (num_tokens).
        offsets: int64 (num_samples + 1).
        prompt_lengths: int32 (num_samples).
        pad_id: what fills the rows of a batch.
        trained: bool (num_tokens), or None = all of them; a prompt's own tokens are not, whatever it says.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]
    pad_id: int
    report: EncodeReport
    trained: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sample, EOS included."""
        return np.diff(self.offsets)

    @cached_property
    def target_counts(self) -> NDArray[np.int64]:
        """Return the trained tokens of each sample; the first token of all has nothing before it to be told from."""
        counts = self.lengths - np.maximum(self.prompt_lengths, 1)
        if self.trained is not None:
            counts = np.array([self.trained_of(i)[1:].sum() for i in range(len(self))], dtype=np.int64)
        return counts

    def trained_of(self, index: int) -> NDArray[np.bool_]:
        """Return which tokens of one sample are trained, bool (its length)."""
        first, last = self.offsets[index : index + 2]
        trained = np.ones(last - first, dtype=np.bool_) if self.trained is None else self.trained[first:last].copy()
        trained[: self.prompt_lengths[index]] = False
        return trained

    def example(self, index: int) -> Example:
        """Return one sample."""
        tokens = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return Example(tokens.tolist(), int(self.prompt_lengths[index]))


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    special: SpecialTokens,
    prompt: Prompt,
    *,
    max_tokens: int,
    too_long: Literal["drop", "truncate"] = "drop",
    vocab_size: int | None = None,
) -> Encoded:
    """Encode rows, each as prompt, response and EOS.

    Args:
        max_tokens: the length of a sample at most, EOS included.
        too_long: whether a longer response is dropped, or cut (it then has no EOS). A row whose prompt leaves no room
            for one token of the response is dropped either way.
        vocab_size: rows of the model's embedding, to check token ids against; None = no check.

    Raises:
        DataError: no row is left (raise --max-tokens), or a token has no row in the embedding.

    Memory: 4 bytes a token.
    """
    kept: list[NDArray[np.int32]] = []
    prompt_lengths: list[int] = []
    dropped: Counter[str] = Counter()
    num_truncated = 0
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        examples = encode_examples(tokenizer, special, prompt, [r.query for r in chunk], [r.response for r in chunk])
        for tokens, prompt_tokens in examples:
            if max(prompt_tokens, 1) >= min(len(tokens), max_tokens):  # the first token of all has nothing before it
                dropped[_NO_TARGET] += 1
            elif len(tokens) > max_tokens and too_long == "drop":
                dropped[_TOO_LONG] += 1
            else:
                num_truncated += len(tokens) > max_tokens
                kept.append(np.asarray(tokens[:max_tokens], dtype=np.int32))
                prompt_lengths.append(prompt_tokens)
    if not kept:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"no row is left of {len(rows):,} ({reasons or 'no rows given'}; the limit is {max_tokens:,} tokens); "
            "raise --max-tokens"
        )
    tokens_n = np.concatenate(kept)
    _check_ids(tokens_n, tokenizer, vocab_size)
    lengths = np.array([len(tokens) for tokens in kept], dtype=np.int64)
    percentiles = np.percentile(lengths, PERCENTILES, method="higher").tolist()
    report = EncodeReport(
        num_rows=len(rows),
        num_used=len(kept),
        num_truncated=num_truncated,
        dropped=dict(dropped),
        max_tokens=max_tokens,
        length_percentiles=dict(zip(PERCENTILES, percentiles)),
        num_tokens=len(tokens_n),
        num_targets=int(lengths.sum() - sum(max(length, 1) for length in prompt_lengths)),
    )
    return Encoded(
        tokens=tokens_n,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
        pad_id=special.pad_id,
        report=report,
    )


def _check_ids(tokens_n: NDArray[np.int32], tokenizer: Tokenizer, vocab_size: int | None) -> None:
    largest = int(tokens_n.max())
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"the tokenizer gives token {largest} ({tokenizer.id_to_token(largest)!r}), but the model's embedding has "
            f"{vocab_size:,} rows; use the model's own tokenizer.json"
        )
