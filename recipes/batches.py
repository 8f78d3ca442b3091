"""Batches as a pure function of (samples, sizes, seed, step): nothing to save, nothing to skip on resume.

A batch has `batch_size` lines of one of at most `MAX_SHAPES` lengths, because the executor makes one program for each
shape. A line holds one sample or, packed, several; padding is on the right.

    tokens      p p p r r   .      p prompt, r response, e EOS, . padding
    targets     - - r r e   -      the token at t + 1, -100 (written -) for the prompt's own tokens and for padding

The last token of a sample is a target only, so a sample of n tokens fills n - 1 places.
Shape letters: b line, t place.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazytrain.base import IGNORE_INDEX
from lazytrain.errors import DataError
from lazytrain.recipes.encoding import Encoded

MAX_SHAPES = 3
MIN_SAVING = 0.05  # a further shape must save this fraction of all places: it costs a compilation
_SEED_BITS = 2**64 - 1

Indices = NDArray[np.int64]


class TokenCounts(NamedTuple):
    """Places of one batch or one epoch: with a token, without one, and with a target."""

    real_tokens: int
    padding_tokens: int
    target_tokens: int


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of `num_examples` things in each epoch, from (seed, epoch, stream) alone.

    Random bits come straight from the bit generator, whose stream numpy promises never to change.
    """

    num_examples: int
    seed: int
    stream: int = 0

    def permutation(self, epoch: int) -> Indices:
        """Return the order of an epoch, int64 (num_examples)."""
        entropy = np.random.SeedSequence([self.seed & _SEED_BITS, epoch, self.stream])
        return np.argsort(np.random.PCG64(entropy).random_raw(self.num_examples), kind="stable")

    def example_at(self, epoch: int, index: int) -> int:
        """Return which example is at a position of an epoch."""
        return int(self.permutation(epoch)[index])


class BatchStream:
    """Every sample once an epoch, in batches of like lengths (or packed lines) in random order.

    Args:
        encoded: the samples.
        batch_size: lines of every batch; the last batches of an epoch have empty lines where samples run out.
        seq_tokens: the one length of all batches; None = at most MAX_SHAPES lengths, chosen to waste little padding
            (packed: the longest sample's).
        seed: of the order; any integer.
        packing: put several samples in a line, told apart by `segments_bt`, `segment_lengths_bs` and `positions_bt`.
        group_by_length: without packing, batches of samples of like length; False = every line as long as the longest.
        pad_to_multiple: chosen lengths are multiples of this.

    Raises:
        DataError: a sample is longer than `seq_tokens`.
    """

    def __init__(
        self,
        encoded: Encoded,
        *,
        batch_size: int,
        seq_tokens: int | None = None,
        seed: int = 0,
        packing: bool = False,
        group_by_length: bool = True,
        pad_to_multiple: int = 8,
    ) -> None:
        assert batch_size > 0, f"batch_size must be positive, got {batch_size}"
        self.encoded, self.batch_size, self.packing = encoded, batch_size, packing
        places = encoded.lengths - 1
        if seq_tokens is not None and places.max() > seq_tokens:
            raise DataError(
                f"a sample fills {places.max():,} places, more than the {seq_tokens:,} of a line; "
                "encode with a smaller max_tokens, or give a larger seq_tokens"
            )
        longest = max(1, int(places.max()))
        one_length = seq_tokens or -(-longest // pad_to_multiple) * pad_to_multiple
        self._lines = None if not packing else pack_lines(places, one_length, seed)
        self._places = places if self._lines is None else np.array([places[line].sum() for line in self._lines])
        self._max_segments = 1 if self._lines is None else max(map(len, self._lines))
        several = seq_tokens is None and not packing and group_by_length
        self._lengths = choose_lengths(places, pad_to_multiple) if several else [one_length]
        self._buckets = np.searchsorted(self._lengths, self._places)
        sizes = np.bincount(self._buckets, minlength=len(self._lengths))
        self.steps_per_epoch = int((sizes // batch_size).sum() + -(-(sizes % batch_size).sum() // batch_size))
        self._line_order = BatchOrder(num_examples=len(self._places), seed=seed, stream=0)
        self._batch_order = BatchOrder(num_examples=self.steps_per_epoch, seed=seed, stream=1)
        self._cached: tuple[int, list[Indices]] | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return every shape (lines, places) that a batch can have."""
        return [(self.batch_size, length) for length in self._lengths]

    @property
    def epoch_counts(self) -> TokenCounts:
        """Return the places of an epoch; they are the same in every epoch."""
        counts = [self.count_tokens(step) for step in range(self.steps_per_epoch)]
        return TokenCounts(*(sum(column) for column in zip(*counts)))

    def examples_at(self, step: int) -> list[list[int]]:
        """Return, for each line of the batch of a step, which samples it holds (empty lines are left out)."""
        lines = self._line_indices(step)
        return [[int(line)] if self._lines is None else self._lines[line].tolist() for line in lines]

    def count_tokens(self, step: int) -> TokenCounts:
        """Return the places of the batch of a step."""
        lines = self._line_indices(step)
        real = int(self._places[lines].sum())
        samples = np.concatenate([np.asarray(line) for line in self.examples_at(step)])
        targets = int(self.encoded.target_counts[samples].sum())
        return TokenCounts(real, self.batch_size * self._length_of(lines) - real, targets)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a step (0, 1, ...), CPU tensors of int64 (batch_size, places).

        Returns:
            tokens_bt, targets_bt; packed also positions_bt (from 0 in each segment), segments_bt (1, 2, ... in each
            line, 0 = padding) and segment_lengths_bs (their lengths in order, then that of the padding, then zeros: of
            one width in all batches, so that programs can be made for it).
        """
        shape = (self.batch_size, self._length_of(self._line_indices(step)))
        tokens_bt = np.full(shape, self.encoded.pad_id, dtype=np.int64)
        targets_bt = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        positions_bt, segments_bt = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        lengths_bs = np.zeros((self.batch_size, self._max_segments + 1), dtype=np.int64)
        lengths_bs[:, 0] = shape[1]
        for b, samples in enumerate(self.examples_at(step)):
            start = 0
            for segment, sample in enumerate(samples, start=1):
                first, last = self.encoded.offsets[sample : sample + 2]
                tokens = self.encoded.tokens[first:last]
                places = slice(start, start + len(tokens) - 1)
                tokens_bt[b, places] = tokens[:-1]
                targets_bt[b, places] = np.where(self.encoded.trained_of(sample)[1:], tokens[1:], IGNORE_INDEX)
                positions_bt[b, places] = np.arange(len(tokens) - 1)
                segments_bt[b, places] = segment
                lengths_bs[b, segment - 1 : segment + 1] = len(tokens) - 1, shape[1] - places.stop
                start = places.stop
        arrays = {"tokens_bt": tokens_bt, "targets_bt": targets_bt}
        if self.packing:
            arrays |= {"positions_bt": positions_bt, "segments_bt": segments_bt, "segment_lengths_bs": lengths_bs}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _length_of(self, lines: Indices) -> int:
        return self._lengths[int(self._buckets[lines].max())]

    def _line_indices(self, step: int) -> Indices:
        assert step >= 0, f"step must not be negative, got {step}"
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._plan_epoch(epoch)
        return self._cached[1][index]

    def _plan_epoch(self, epoch: int) -> list[Indices]:
        order = self._line_order.permutation(epoch)
        batches: list[Indices] = []
        rests = []
        for bucket in range(len(self._lengths)):
            lines = order[self._buckets[order] == bucket]
            num_full = len(lines) // self.batch_size * self.batch_size
            batches += list(lines[:num_full].reshape(-1, self.batch_size))
            rests.append(lines[num_full:])
        rest = np.concatenate(rests[::-1])  # longest first, so that a batch with empty lines is a short one
        batches += [rest[i : i + self.batch_size] for i in range(0, len(rest), self.batch_size)]
        return [batches[i] for i in self._batch_order.permutation(epoch)]


def choose_lengths(places: Indices, multiple: int, max_shapes: int = MAX_SHAPES) -> list[int]:
    """Return the lengths, rising, at most `max_shapes`, that give the samples the fewest places in all.

    places(lengths) = sum over samples of the least length that is not below the sample's own; a further length is
    taken only if it saves MIN_SAVING of them.

    Args:
        places: int64 (num_samples), what each sample fills.
        multiple: every length is a multiple of it.
    """
    candidates, counts = np.unique(-(-np.maximum(places, 1) // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[j]: samples under candidate j
    # cost[j]: fewest places for the samples up to candidate j, where j is the last length taken
    cost = candidates * below[1:]
    chosen = [[int(length)] for length in candidates]
    best_cost, best = cost[-1], chosen[-1]
    for _ in range(min(max_shapes, len(candidates)) - 1):
        options = cost[:, None] + candidates[None, :] * (below[None, 1:] - below[1:, None])
        options[np.tril_indices(len(candidates))] = 2**62  # lengths rise; room below the largest int64 for one more sum
        before = options.argmin(axis=0)
        cost = options.min(axis=0)
        chosen = [[*chosen[before[j]], int(candidates[j])] for j in range(len(candidates))]
        if cost[-1] > best_cost * (1 - MIN_SAVING):
            break
        best_cost, best = cost[-1], chosen[-1]
    return best


def pack_lines(places: Indices, capacity: int, seed: int) -> list[Indices]:
    """Return which samples share a line: best fit, longest first, equal lengths in an order that the seed gives.

    The lines are the same in every epoch; only their order changes.
    """
    order = BatchOrder(num_examples=len(places), seed=seed, stream=2).permutation(0)
    order = order[np.argsort(-places[order], kind="stable")]
    lines: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free places -> lines
    spaces: list[int] = []  # keys of by_space that hold lines, rising
    for sample in order.tolist():
        size = int(places[sample])
        found = bisect_left(spaces, size)
        if found == len(spaces):
            line, space = len(lines), capacity
            lines.append([])
        else:
            space = spaces[found]
            line = by_space[space].pop()
            if not by_space[space]:
                spaces.pop(found)
        lines[line].append(sample)
        if not by_space.setdefault(space - size, []):
            insort(spaces, space - size)
        by_space[space - size].append(line)
    return [np.array(line, dtype=np.int64) for line in lines]
