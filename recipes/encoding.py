"""Encode rows into one flat array of tokens, and report what had to be dropped and how long the samples are."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lazytrain.errors import DataError
from lazytrain.recipes.chats import ChatExample, ChatTemplate, encode_chats, encode_openings
from lazytrain.recipes.messages import Message
from lazytrain.recipes.prompts import Example, Prompt, SpecialTokens, encode_examples, encode_prompts
from lazytrain.recipes.rows import Row

PERCENTILES = (50, 90, 99, 100)
DIGEST_LETTERS = 16
_CHUNK_ROWS = 1024
_NO_TARGET = "with a prompt that fills the whole length"
_TOO_LONG = "too long"
_SEVERAL_TURNS = "of several turns, which need --prompt chat"


class EncodeReport(NamedTuple):
    """What became of the rows; lengths and counts in tokens, EOS included.

    `length_percentiles` are of all rows before any was dropped as too long or cut, to choose `max_tokens` by.
    """

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
        which = "lengths before that" if self.dropped or self.num_truncated else "lengths"
        return "; ".join([*parts, f"{which} up to {lengths}"])


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

    @cached_property
    def digest(self) -> str:
        """Return a digest of the samples and of what of them is trained: two of one digest train alike."""
        digest = hashlib.sha256()
        for values in (self.tokens, self.offsets, self.prompt_lengths, self.trained):
            digest.update(b"none" if values is None else np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()[:DIGEST_LETTERS]

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
    prompt: Prompt | ChatTemplate,
    *,
    max_tokens: int,
    too_long: Literal["drop", "truncate"] = "drop",
    vocab_size: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Encoded:
    """Encode rows, each as prompt, response and EOS, or as the chat template has it.

    Args:
        max_tokens: the length of a sample at most, EOS included.
        too_long: whether a longer response is dropped, or cut (it then has no EOS). A row whose prompt leaves no room
            for one token of the response is dropped either way.
        vocab_size: rows of the model's embedding, to check token ids against; None = no check.
        progress: called with the number of rows done since its last call.

    Raises:
        DataError: no row is left (raise --max-tokens), or a token has no row in the embedding.

    Memory: 4 bytes a token, 5 where chats have several turns of the assistant.
    """
    kept = _Kept(max_tokens, too_long)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        for example in _encode_chunk(chunk, tokenizer, special, prompt):
            kept.add(example)
        if progress is not None:
            progress(len(chunk))
    if not kept.tokens:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in kept.dropped.items())
        remedy = (
            "raise --max-tokens" if {_NO_TARGET, _TOO_LONG} & kept.dropped.keys() or not rows else "give other rows"
        )
        raise DataError(
            f"no row is left of {len(rows):,} ({reasons or 'no rows given'}; the limit is {max_tokens:,} tokens); "
            f"{remedy}"
        )
    tokens_n = np.concatenate(kept.tokens)
    _check_ids(tokens_n, tokenizer, vocab_size)
    lengths = np.array([len(tokens) for tokens in kept.tokens], dtype=np.int64)
    percentiles = np.percentile(kept.all_lengths, PERCENTILES, method="higher").tolist()
    report = EncodeReport(
        num_rows=len(rows),
        num_used=len(lengths),
        num_truncated=kept.num_truncated,
        dropped=dict(kept.dropped),
        max_tokens=max_tokens,
        length_percentiles=dict(zip(PERCENTILES, percentiles)),
        num_tokens=len(tokens_n),
        num_targets=kept.num_targets,
    )
    return Encoded(
        tokens=tokens_n,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array(kept.prompt_lengths, dtype=np.int32),
        pad_id=special.pad_id,
        report=report,
        trained=np.concatenate(kept.trained) if kept.has_gaps else None,
    )


def encode_questions(
    rows: Sequence[Row], tokenizer: Tokenizer, special: SpecialTokens, prompt: Prompt | ChatTemplate
) -> list[list[int]]:
    """Return what a model is given to answer each row (of a chat: its last turn), by the tokens it was trained on."""
    if isinstance(prompt, ChatTemplate):
        return encode_openings(prompt, tokenizer, special, [_messages(row)[:-1] for row in rows])
    return encode_prompts(tokenizer, special, prompt, [row.query for row in rows])


def _encode_chunk(
    rows: Sequence[Row], tokenizer: Tokenizer, special: SpecialTokens, prompt: Prompt | ChatTemplate
) -> Iterable[Example | ChatExample | str]:
    if isinstance(prompt, ChatTemplate):
        return encode_chats(prompt, tokenizer, special, [_messages(row) for row in rows])
    single = [row for row in rows if row.num_answers == 1]
    examples = encode_examples(tokenizer, special, prompt, [r.query for r in single], [r.response for r in single])
    return [*examples, *[_SEVERAL_TURNS] * (len(rows) - len(single))]


def _messages(row: Row) -> tuple[Message, ...]:
    return row.messages or (Message("user", row.query), Message("assistant", row.response))


class _Kept:
    """Collects the samples that can be trained, and counts the others."""

    def __init__(self, max_tokens: int, too_long: str) -> None:
        self.max_tokens, self.cuts = max_tokens, too_long == "truncate"
        self.tokens: list[NDArray[np.int32]] = []
        self.trained: list[NDArray[np.bool_]] = []
        self.prompt_lengths: list[int] = []
        self.all_lengths: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.num_truncated = self.num_targets = 0
        self.has_gaps = False

    def add(self, example: Example | ChatExample | str) -> None:
        """Take one sample, or the reason why there is none."""
        if isinstance(example, str):
            self.dropped[example] += 1
            return
        self.all_lengths.append(len(example.tokens))
        trained = np.ones(min(len(example.tokens), self.max_tokens), dtype=np.bool_)
        if isinstance(example, Example):
            trained[: example.prompt_tokens] = False
        else:
            trained &= np.array(example.trained[: self.max_tokens], dtype=np.bool_)
        num_targets = int(trained[1:].sum())  # the first token of all has nothing before it
        if num_targets == 0:
            self.dropped[_NO_TARGET] += 1
        elif len(example.tokens) > self.max_tokens and not self.cuts:
            self.dropped[_TOO_LONG] += 1
        else:
            length = int(trained.nonzero()[0][-1]) + 1  # behind the last target there is nothing to learn
            first = int(trained.argmax())
            self.num_truncated += len(example.tokens) > self.max_tokens
            self.num_targets += num_targets
            self.tokens.append(np.asarray(example.tokens[:length], dtype=np.int32))
            self.trained.append(trained[:length])
            self.prompt_lengths.append(first)
            self.has_gaps |= not trained[first:length].all()


def _check_ids(tokens_n: NDArray[np.int32], tokenizer: Tokenizer, vocab_size: int | None) -> None:
    largest = int(tokens_n.max())
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"the tokenizer gives token {largest} ({tokenizer.id_to_token(largest)!r}), but the model's embedding has "
            f"{vocab_size:,} rows; use the model's own tokenizer.json"
        )
