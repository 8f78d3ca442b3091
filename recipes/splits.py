"""Rows to train on and rows held out, so that no problem is on both sides."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from lazytrain.errors import DataError
from lazytrain.recipes.batches import BatchOrder
from lazytrain.recipes.rows import Row

_SAMPLE_STREAM = 3  # of the seed's: those before it order lines, batches and packing


class Split(NamedTuple):
    """Rows to train on and rows held out; `num_dropped` rows were in neither, so that no problem is in both."""

    train: list[Row]
    held_out: list[Row]
    num_dropped: int


def sample_rows(rows: Sequence[Row], count: int | None, seed: int) -> list[Row]:
    """Return `count` rows drawn by the seed, in the order of the file; all of them for None or where there are fewer.

    A smaller sample of the same seed is part of a larger one.
    """
    assert count is None or count >= 0, count
    if count is None or count >= len(rows):
        return list(rows)
    order = BatchOrder(num_examples=len(rows), seed=seed, stream=_SAMPLE_STREAM).permutation(0)
    return [rows[index] for index in sorted(order[:count].tolist())]


def drop_overlap(train: Sequence[Row], held_out: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the training rows that share no problem with the held-out ones, and how many others there were.

    Two rows share a problem if the query or the original question of one is that of the other, whatever the case and
    the spaces.
    """
    taken = {key for row in held_out for key in _problem_keys(row)}
    kept = [row for row in train if not taken.intersection(_problem_keys(row))]
    return kept, len(train) - len(kept)


def split_rows(rows: Sequence[Row], num_held_out: int, seed: int) -> Split:
    """Hold out `num_held_out` rows at random, so that no problem is on both sides.

    All rephrasings of one original question go to the same side; rows that would be left over are dropped and counted.

    Raises:
        DataError: fewer rows than are to be held out, or nothing left to train on.
    """
    if not 0 < num_held_out < len(rows):
        raise DataError(f"can't hold out {num_held_out:,} of {len(rows):,} rows; hold out fewer, or give more data")
    rng = Random(seed)
    order = sorted(range(len(rows)), key=lambda _: rng.random())
    groups: dict[str, list[Row]] = {}
    for index in order:
        groups.setdefault(_fold(rows[index].original_question), []).append(rows[index])
    held_out: list[Row] = []
    for group in groups.values():
        if len(held_out) >= num_held_out:
            break
        held_out.extend(group)
    held_out = held_out[:num_held_out]
    train, num_shared = drop_overlap(rows, held_out)  # the held-out rows themselves are among those dropped
    if not train:
        raise DataError(
            f"all {len(rows):,} rows share their problems with the {num_held_out:,} held out; hold out fewer"
        )
    return Split(train, held_out, num_shared - len(held_out))


def _problem_keys(row: Row) -> set[str]:
    return {_fold(row.query), _fold(row.original_question)}


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())
