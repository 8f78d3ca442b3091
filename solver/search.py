"""Polish a plan by local search: the simulator prices every change, the memory account says whether it fits.

A *change* alters one decision of a block (or of an end). Each round prices changes of one block, whether they fit or
not; then it takes, the most promising first, changes that fit, changes that make room for others that don't, and
exchanges of two blocks; what was good once is tried for more blocks at once. Where the step stays the same, a plan that
burdens queues and memory less counts as better: it leaves room for the next change.

The order is fixed and the budget counts evaluations, so that the same problem gives the same plan.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from lazytrain.solver.choices import Lane, intern_units, list_neighbours, list_options
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import MIN_GAIN, Evaluator, Price
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.pricing import MAX_TOGETHER
from lazytrain.solver.vectors import Decisions

TURNS = (0.5, 0.0, 1.0)  # which of the blocks that decide alike stands for them in a round
MAX_TRIALS = 40  # pairs priced in a round
MAX_TAKEN = 5  # of them, as long as each helps
MAX_FIT_CHECKS = 1500
# How many blocks a pair of changes takes: those that help, and those that make room.
SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 3), (3, 2))
Units = tuple[UnitPlan, ...]


class Change(NamedTuple):
    """Unit `where` takes the decisions `after` instead of `before`."""

    before: UnitPlan
    after: UnitPlan
    where: int


class Priced(NamedTuple):
    """A change, what it makes of the plan, and whether that fits."""

    change: Change
    price: Price
    fits: bool


class Search:
    """A plan that is being improved (see the head of this file).

    Attributes:
        units, depth: the best decisions so far.
        left: evaluations that may still be made.
    """

    def __init__(self, evaluator: Evaluator, decisions: Decisions, *, num_evaluations: int, deadline: Deadline) -> None:
        self.problem, self.evaluator, self.deadline = evaluator.problem, evaluator, deadline
        self.depth, self.units = decisions[0], intern_units(decisions[1])  # equal decisions are one object
        self.left = num_evaluations
        self._options = [list_options(self.problem, u) for u in range(len(self.problem.units))]
        self._price = self.price(self.units)

    @property
    def plan(self) -> Plan:
        """Return the best plan so far."""
        return make_plan(self.problem, self.units, self.depth)

    @property
    def step_ms(self) -> float:
        """Return its simulated step."""
        return self._price.step_ms

    @property
    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        return self.left <= 0 or self.deadline.is_over

    def price_all(self, many: Sequence[Units], depth: int | None = None) -> list[Price]:
        """Return the prices of decisions, whether they fit or not."""
        before = self.evaluator.num_priced
        prices = self.evaluator.price([(depth or self.depth, units) for units in many]) if many else []
        self.left -= self.evaluator.num_priced - before
        return prices

    def price(self, units: Units, depth: int | None = None) -> Price:
        """Return the price of some decisions, whether they fit or not."""
        return self.price_all([units], depth)[0]

    def fit_all(self, many: Sequence[Units], depth: int | None = None) -> list[bool]:
        """Return which decisions fit in every tier."""
        return self.evaluator.fits([(depth or self.depth, units) for units in many])

    def take(self, units: Units, depth: int | None = None) -> bool:
        """Make decisions the best ones if they are better and fit; return whether they are."""
        if not self.fit_all([units], depth)[0]:
            return False
        price = self.price(units, depth)
        if not price.beats(self._price):
            return False
        self._price, self.units, self.depth = price, units, depth or self.depth
        return True

    def take_best(self, many: Sequence[Units]) -> bool:
        """Make the best of some decisions the best ones if they are better and fit; return whether they are."""
        fitting = [units for units, fits in zip(many, self.fit_all(many), strict=True) if fits]
        prices = self.price_all(fitting)
        if not fitting:
            return False
        return self.take(fitting[min(range(len(fitting)), key=lambda i: prices[i])])

    def replace(self, units: Units) -> None:
        """Make decisions that fit the plan, whatever their price."""
        self._price, self.units = self.price(units), units

    def make_fit(self) -> bool:
        """Change the plan until it fits, each time by what frees most per loss; return whether it does now."""
        while not self.is_over:
            missing = self._missing_bytes([self.units])[0]
            if not missing:
                return True
            # One slot less takes both embed and head, of which neither frees anything by itself.
            best = self._find_freeing(missing, 1) or self._find_freeing(missing, 2)
            if best is None:
                return False
            self.replace(best)
        return False

    def _find_freeing(self, missing: int, count: int) -> Units | None:
        """Return the decisions that a change of `count` units gives which frees most per loss; None if none does."""
        changed = (self._extend(self.units, change, count) for change in self._list_changes(0.5))
        many = [units for units in changed if units is not None]
        freed = [missing - left for left in self._missing_bytes(many)]
        freeing = [(units, num_bytes) for units, num_bytes in zip(many, freed, strict=True) if num_bytes > 0]
        prices = self.price_all([units for units, _ in freeing])

        def loss(index: int) -> float:
            return (max(prices[index].step_ms - self.step_ms, 0.0) + MIN_GAIN * self.step_ms) / freeing[index][1]

        return freeing[min(range(len(freeing)), key=loss)][0] if freeing else None

    def run(self) -> None:
        """Improve until nothing helps or the budget is spent."""
        turn, in_vain = 0, 0
        while not self.is_over and in_vain < len(TURNS):
            priced = self.price_changes(TURNS[turn])
            is_better = any((self._take_singles(priced), self._take_pairs(priced)))
            turn, in_vain = (turn + 1) % len(TURNS), 0 if is_better else in_vain + 1
            if in_vain == len(TURNS) and (self._take_exchange() or self._take_depth() or self._widen()):
                in_vain = 0

    def _widen(self) -> bool:
        """Try all keeps from now on; return whether that is more than before.

        At first those on the hull do: few, so that the search is quick. But where all blocks keep little, it leaves
        evenly, so that a point above the hull may be best.
        """
        before = self._options
        self._options = [list_options(self.problem, u, wide=True) for u in range(len(self.units))]
        return self._options != before

    def _missing_bytes(self, many: Sequence[Units]) -> list[int]:
        return [need.missing_bytes for need in self.evaluator.measure([(self.depth, units) for units in many])]

    def _list_changes(self, turn: float) -> Iterator[Change]:
        """Yield changes of one unit of those that decide alike: the first, the middle or the last (turn 0, 1/2, 1)."""
        alike: dict[tuple[bool, int], list[int]] = {}
        last = len(self.units) - 1
        for u, unit in enumerate(self.units):
            alike.setdefault((u in (0, last), id(unit)), []).append(u)
        for where in alike.values():
            u = where[round(turn * (len(where) - 1))]
            before = self.units[u]
            for after in list_neighbours(self._options[u], before):
                yield Change(before, after, u)

    def price_changes(self, turn: float) -> list[Priced]:
        """Return every change of one unit of those that decide alike (see `TURNS`)."""
        changes = list(self._list_changes(turn))
        many = [self.changed(change) for change in changes]
        return list(map(Priced, changes, self.price_all(many), self.fit_all(many)))

    def changed(self, change: Change) -> Units:
        """Return the best decisions so far with a change."""
        return _apply(self.units, change)

    def _take_singles(self, priced: Sequence[Priced]) -> bool:
        """Take changes that help by themselves, the best first, as long as the next one still helps."""
        better = sorted((p for p in priced if p.fits and p.price.beats(self._price)), key=lambda p: p.price)
        is_better = False
        for change, _, _ in better:
            if self.is_over or not self._take_all((change,), (1,)):
                break
            is_better = True
        return is_better

    def _take_pairs(self, priced: Sequence[Priced]) -> bool:
        """Try changes that would help but don't fit, with changes that make room, the most promising first."""
        step_ms = self.step_ms
        helps = [p for p in priced if not p.fits and p.price.step_ms < step_ms * (1 - MIN_GAIN)]
        rooms = [p for p in priced if p.fits]
        pairs: list[tuple[float, int, int, tuple[Change, Change], tuple[int, int]]] = []
        for a, b, shape in product(helps, rooms, SHAPES):
            expected_ms = shape[0] * (step_ms - a.price.step_ms) - shape[1] * (b.price.step_ms - step_ms)
            if expected_ms > 0 and a.change.where != b.change.where:
                pairs.append((-expected_ms, sum(shape), len(pairs), (a.change, b.change), shape))
        tried: list[tuple[Units, tuple[Change, Change], tuple[int, int]]] = []
        promising = heapq.nsmallest(MAX_FIT_CHECKS, pairs, key=lambda pair: pair[:3])
        for first in range(0, len(promising), MAX_TOGETHER):
            if self.is_over or len(tried) >= MAX_TRIALS:
                break
            some = [
                (self._extend_all(changes, shape), changes, shape)
                for *_, changes, shape in promising[first : first + MAX_TOGETHER]
            ]
            known = [(units, changes, shape) for units, changes, shape in some if units is not None]
            fits = self.fit_all([units for units, _, _ in known])
            tried += [item for item, fit in zip(known, fits, strict=True) if fit]
        tried = tried[:MAX_TRIALS] if not self.is_over else []
        prices = self.price_all([units for units, _, _ in tried])
        is_better = False
        order = sorted(range(len(tried)), key=lambda i: prices[i])
        for index in order[:MAX_TAKEN]:
            if self.is_over or not self._take_all(tried[index][1], tried[index][2]):
                break
            is_better = True
        return is_better

    def _take_all(self, changes: tuple[Change, ...], shape: tuple[int, ...]) -> bool:
        """Make changes to as many blocks as `shape` says, then to twice as many more, as long as that helps."""
        factor, is_better = 1, False
        while not self.is_over:
            units = self._extend_all(changes, tuple(factor * count for count in shape))
            if units is None or not self.take(units):
                if factor == 1:
                    break
                factor = 1
            else:
                is_better, factor = True, 2 * factor
        return is_better

    def _extend_all(self, changes: tuple[Change, ...], shape: tuple[int, ...]) -> Units | None:
        units: Units | None = self.units
        for change, count in zip(changes, shape, strict=True):
            units = None if units is None else self._extend(units, change, count)
        return units

    def _extend(self, units: Units, change: Change, count: int) -> Units | None:
        """Return the same change for the `count` blocks that are nearest to it; None if there are not so many.

        Of embed and head, which are alike if they decide alike, both may share a change: a slot is saved only together.
        """
        last, after = len(units) - 1, change.after
        where: Sequence[int] = range(1, last)
        if change.where in (0, last):
            lane = Lane(after.weights, after.states, after.update, after.grads)
            where = [u for u in (0, last) if lane in self._options[u].lanes]
        near = sorted((u for u in where if units[u] is change.before), key=lambda u: (abs(u - change.where), u))
        if len(near) < count:
            return None
        changed = set(near[:count])
        return tuple(after if u in changed else unit for u, unit in enumerate(units))

    def _take_exchange(self) -> bool:
        """Try to exchange the first, middle and last block of each kind with every other block."""
        last = len(self.units) - 1
        kinds: dict[UnitPlan, list[int]] = {}
        for u in range(1, last):
            kinds.setdefault(self.units[u], []).append(u)
        ends = sorted({u for where in kinds.values() for u in (where[0], where[len(where) // 2], where[-1])})
        pairs = [(u, v) for u, v in product(ends, range(1, last)) if self.units[u] is not self.units[v]]
        for first in range(0, len(pairs), MAX_TOGETHER):
            if self.is_over:
                return False
            if self.take_best([_exchange(self.units, u, v) for u, v in pairs[first : first + MAX_TOGETHER]]):
                return True
        return False

    def _take_depth(self) -> bool:
        depths = [depth for depth in self.problem.prefetch_depths if depth != self.depth]
        return any(self.take(self.units, depth) for depth in depths)


def _apply(units: Units, change: Change) -> Units:
    return (*units[: change.where], change.after, *units[change.where + 1 :])


def _exchange(units: Units, u: int, v: int) -> Units:
    changed = list(units)
    changed[u], changed[v] = changed[v], changed[u]
    return tuple(changed)
