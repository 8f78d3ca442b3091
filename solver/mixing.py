"""Climb among mixes: how many blocks decide alike, laid out by a rule, whatever their positions.

Good plans often alternate: a block that the CPU updates, then one that the device updates, so that every queue always
has a little to do. One block changed at a time never gets there. Here a plan is a list of (decisions, count) and a rule
that lays it out, and a change moves some blocks from one kind to another, or to a new kind.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from lazytrain.solver.choices import Options, list_neighbours, list_options
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.plan import UnitPlan
from lazytrain.solver.starts import put_in_runs, spread
from lazytrain.solver.vectors import Decisions

RULES = {"spread": spread, "runs": put_in_runs}
MOVED = (1, 2, 4, 8)  # blocks that change to another kind
MAX_KINDS, MAX_ROUNDS = 6, 30
Counts = tuple[tuple[UnitPlan, int], ...]


class Mix(NamedTuple):
    """Decisions for embed and head, how many blocks decide how, and the rule of `RULES` that lays them out."""

    rule: str
    embed: UnitPlan
    head: UnitPlan
    counts: Counts
    depth: int

    def lay_out(self) -> Decisions:
        """Return the plan."""
        num_blocks = sum(count for _, count in self.counts)
        return self.depth, (self.embed, *RULES[self.rule](self.counts, num_blocks), self.head)


def list_mixes(decisions: Decisions) -> list[Mix]:
    """Return a plan's mix under every rule."""
    depth, (embed, *blocks, head) = decisions
    counts = _merge([(block, 1) for block in blocks])
    return [Mix(rule, embed, head, counts, depth) for rule in RULES if len(counts) <= MAX_KINDS]


def climb(evaluator: Evaluator, mix: Mix, deadline: Deadline) -> Mix | None:
    """Return the mix after steps to the best neighbour that fits, as long as that helps; None if no start fits."""
    if not evaluator.fits([mix.lay_out()])[0]:
        return None
    options = [list_options(evaluator.problem, u) for u in range(len(evaluator.problem.units))]
    price = evaluator.price([mix.lay_out()])[0]
    for _ in range(MAX_ROUNDS):
        if deadline.is_over:
            break
        mixes = list(_list_neighbours(mix, options, evaluator.problem.prefetch_depths))
        fits = evaluator.fits([other.lay_out() for other in mixes])
        mixes = [other for other, fit in zip(mixes, fits, strict=True) if fit]
        prices = evaluator.price([other.lay_out() for other in mixes])
        best = min(range(len(mixes)), key=lambda i: prices[i], default=None)
        if best is None or not prices[best].beats(price):
            break
        mix, price = mixes[best], prices[best]
    return mix


def _list_neighbours(mix: Mix, options: Sequence[Options], depths: Sequence[int]) -> Iterator[Mix]:
    counts = mix.counts
    for a, b in permutations(range(len(counts)), 2):
        for moved in MOVED:
            if counts[a][1] >= moved:
                yield mix._replace(counts=_move(counts, a, moved, counts[b][0]))
        swapped = list(counts)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        if a < b:
            yield mix._replace(counts=tuple(swapped))
    for a, (kind, count) in enumerate(counts):
        for other in list_neighbours(options[1], kind):
            for moved in sorted({1, 3, count // 2, count}):
                if 0 < moved <= count:
                    changed = _move(counts, a, moved, other)
                    if len(changed) <= MAX_KINDS:
                        yield mix._replace(counts=changed)
    for other in list_neighbours(options[0], mix.embed):
        yield mix._replace(embed=other)
    for other in list_neighbours(options[-1], mix.head):
        yield mix._replace(head=other)
    yield from (mix._replace(depth=depth) for depth in depths if depth != mix.depth)
    yield from (mix._replace(rule=rule) for rule in RULES if rule != mix.rule)


def _move(
    counts: Sequence[tuple[UnitPlan, int]], a: int, moved: int, kind: UnitPlan
) -> tuple[tuple[UnitPlan, int], ...]:
    """Make `moved` blocks of kind number `a` another kind; a new one comes next to it."""
    before, after = counts[: a + 1], counts[a + 1 :]
    old, count = before[-1]
    return _merge([*before[:-1], (old, count - moved), (kind, moved), *after])


def _merge(counts: Sequence[tuple[UnitPlan, int]]) -> Counts:
    """Sum equal kinds up, in the order in which they come first (a kind that is there before keeps its place)."""
    merged: dict[int, tuple[UnitPlan, int]] = {}
    for kind, count in counts:
        merged[id(kind)] = kind, merged.get(id(kind), (kind, 0))[1] + count
    return tuple((kind, count) for kind, count in merged.values() if count)
