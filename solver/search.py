"""Polish a plan by local search: the simulator prices every change, the memory account says whether it fits.

A *change* alters one decision of a block (or of an end). Each round prices changes of one block, whether they fit or
not; then it takes, the most promising first, changes that fit, changes that make room for others that don't, and
exchanges of two blocks; what was good once is tried for more blocks at once. Where the step stays the same, a plan that
burdens queues and memory less counts as better: it leaves room for the next change.

The order is fixed and the budget counts evaluations, so that the same problem gives the same plan.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from lazytrain.solver.choices import Keep, Lane, list_boundaries, list_hull_keeps, list_lanes, make_unit_plan
from lazytrain.solver.memory import Accountant, find_shortage
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_load

MIN_GAIN = 1e-6  # relative; less is rounding
LOAD_POWER = 4  # the nearer to full a queue is, the more it counts
TURNS = (0.5, 0.0, 1.0)  # which of the blocks that decide alike stands for them in a round
MAX_TRIALS = 40  # pairs priced in a round
MAX_FIT_CHECKS = 1500
# How many blocks a pair of changes takes: those that help, and those that make room.
SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 3), (3, 2))
Units = tuple[UnitPlan, ...]


class Change(NamedTuple):
    """Unit `where` takes the decisions `after` instead of `before`."""

    before: UnitPlan
    after: UnitPlan
    where: int


class Price(NamedTuple):
    """A step, and how much it burdens queues and the device's memory: among equal steps the lighter one is better."""

    step_ms: float
    burden: float

    def beats(self, other: "Price") -> bool:
        """Return whether this is better by more than rounding."""
        if self.step_ms < other.step_ms * (1 - MIN_GAIN):
            return True
        return self.step_ms <= other.step_ms and self.burden < other.burden * (1 - MIN_GAIN)


class Priced(NamedTuple):
    """A change, what it makes of the plan, and whether that fits."""

    change: Change
    price: Price
    fits: bool


class Search:
    """A plan that is being improved (see the head of this file).

    Attributes:
        units, depth: the best decisions so far.
        left: evaluations that may still be made; num_evaluations: those made.
    """

    def __init__(self, problem: Problem, plan: Plan, *, num_evaluations: int, deadline_s: float) -> None:
        self.problem, self.units, self.depth = problem, plan.units, plan.prefetch_depth
        self.left, self.num_evaluations, self._deadline_s = num_evaluations, 0, deadline_s
        self._accountant = Accountant(problem)
        self._known: dict[tuple[int, Units], Price] = {}
        self._needs: dict[tuple[int, Units], tuple[int, int]] = {}
        self._options = [_list_options(problem, u) for u in range(len(problem.units))]
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
        return self.left <= 0 or time.perf_counter() > self._deadline_s

    def price(self, units: Units, depth: int | None = None) -> Price:
        """Return the price of some decisions, whether they fit or not."""
        key = (depth or self.depth, units)
        if key not in self._known:
            self.left -= 1
            self.num_evaluations += 1
            plan = make_plan(self.problem, units, key[0])
            step_ms, loads_ms = simulate_load(self.problem, plan)
            peak_bytes, _ = self._need(key)
            shares = [
                peak_bytes / self.problem.hardware.device_memory_bytes,
                *(load_ms / step_ms for load_ms in loads_ms if step_ms),
            ]
            self._known[key] = Price(step_ms, sum(share**LOAD_POWER for share in shares))
        return self._known[key]

    def fits(self, units: Units, depth: int | None = None) -> bool:
        """Return whether decisions fit in every tier."""
        return not self._need((depth or self.depth, units))[1]

    def take(self, units: Units, depth: int | None = None) -> bool:
        """Make decisions the best ones if they are better and fit; return whether they are."""
        price = self.price(units, depth)
        if not price.beats(self._price) or not self.fits(units, depth):
            return False
        self._price, self.units, self.depth = price, units, depth or self.depth
        return True

    def replace(self, units: Units) -> None:
        """Make decisions that fit the plan, whatever their price."""
        self._price, self.units = self.price(units), units

    def make_fit(self) -> bool:
        """Change the plan until it fits, each time by what frees most per loss; return whether it does now."""
        while not self.is_over:
            missing = self._missing_bytes(self.units)
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
        best: tuple[float, Units] | None = None
        for change in self._list_changes(0.5):
            units = self._extend(self.units, change, count)
            freed = 0 if units is None else missing - self._missing_bytes(units)
            if units is not None and freed > 0:
                loss_ms = max(self.price(units).step_ms - self.step_ms, 0.0) + MIN_GAIN * self.step_ms
                best = min(best or (inf, units), (loss_ms / freed, units), key=lambda item: item[0])
        return None if best is None else best[1]

    def run(self) -> None:
        """Improve until nothing helps or the budget is spent."""
        turn, in_vain = 0, 0
        while not self.is_over and in_vain < len(TURNS):
            priced = self.price_changes(TURNS[turn])
            is_better = any((self._take_singles(priced), self._take_pairs(priced)))
            turn, in_vain = (turn + 1) % len(TURNS), 0 if is_better else in_vain + 1
            if in_vain == len(TURNS) and (self._take_exchange() or self._take_depth()):
                in_vain = 0

    def _missing_bytes(self, units: Units) -> int:
        return self._need((self.depth, units))[1]

    def _need(self, key: tuple[int, Units]) -> tuple[int, int]:
        """Return the device's peak, and the bytes that are missing over all tiers."""
        if key not in self._needs:
            usage = self._accountant.account(make_plan(self.problem, key[1], key[0]))
            self._needs[key] = usage.device_peak_bytes, sum(find_shortage(self.problem, usage).values())
        return self._needs[key]

    def _list_changes(self, turn: float) -> Iterator[Change]:
        """Yield changes of one unit of those that decide alike: the first, the middle or the last (turn 0, 1/2, 1)."""
        alike: dict[tuple[bool, UnitPlan], list[int]] = {}
        last = len(self.units) - 1
        for u, unit in enumerate(self.units):
            alike.setdefault((u in (0, last), unit), []).append(u)
        for (_, before), where in alike.items():
            u = where[round(turn * (len(where) - 1))]
            for after in _list_neighbours(self._options[u], before):
                yield Change(before, after, u)

    def price_changes(self, turn: float) -> list[Priced]:
        """Return every change of one unit of those that decide alike (see `TURNS`), as far as the budget goes."""
        priced = []
        for change in self._list_changes(turn):
            if self.is_over:
                break
            units = self.changed(change)
            priced.append(Priced(change, self.price(units), self.fits(units)))
        return priced

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
        num_tried, is_better, left = MAX_TRIALS, False, self.left
        for *_, changes, shape in sorted(pairs, key=lambda pair: pair[:3])[:MAX_FIT_CHECKS]:
            if self.is_over or left - self.left > num_tried:
                break
            is_better |= self._take_all(changes, shape)
        return is_better

    def _take_all(self, changes: tuple[Change, ...], shape: tuple[int, ...]) -> bool:
        """Make changes to as many blocks as `shape` says, then to twice as many more, as long as that helps."""
        factor, is_better = 1, False
        while not self.is_over:
            units: Units | None = self.units
            for change, count in zip(changes, shape, strict=True):
                units = None if units is None else self._extend(units, change, factor * count)
            if units is None or not self.fits(units) or not self.take(units):
                if factor == 1:
                    break
                factor = 1
            else:
                is_better, factor = True, 2 * factor
        return is_better

    def _extend(self, units: Units, change: Change, count: int) -> Units | None:
        """Return the same change for the `count` blocks that are nearest to it; None if there are not so many.

        Of embed and head, which are alike if they decide alike, both may share a change: a slot is saved only together.
        """
        last, after = len(units) - 1, change.after
        where: Sequence[int] = range(1, last)
        if change.where in (0, last):
            lane = Lane(after.weights, after.states, after.update, after.grads)
            where = [u for u in (0, last) if lane in self._options[u].lanes]
        near = sorted((u for u in where if units[u] == change.before), key=lambda u: (abs(u - change.where), u))
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
        for u, v in product(ends, range(1, last)):
            if self.is_over:
                return False
            if self.units[u] != self.units[v]:
                units = list(self.units)
                units[u], units[v] = units[v], units[u]
                if self.take(tuple(units)):
                    return True
        return False

    def _take_depth(self) -> bool:
        depths = [depth for depth in self.problem.prefetch_depths if depth != self.depth]
        return any(self.take(self.units, depth) for depth in depths)


class _Options(NamedTuple):
    lanes: tuple[Lane, ...]
    keeps: tuple[Keep, ...]
    boundaries: tuple[str, ...]


def _list_options(problem: Problem, u: int) -> _Options:
    lanes = list_lanes(problem, u)
    if u in (0, len(problem.units) - 1):
        return _Options(lanes, (), ())
    return _Options(lanes, list_hull_keeps(problem, problem.units[u]), list_boundaries(problem))


def _list_neighbours(options: _Options, before: UnitPlan) -> Iterator[UnitPlan]:
    """Yield the decisions that differ from `before` in one choice."""
    lane = Lane(before.weights, before.states, before.update, before.grads)
    keep = Keep(before.residual_point, before.residuals)
    for other in options.lanes:
        if other != lane:
            yield make_unit_plan(other, keep, before.boundary)
    for other_keep in options.keeps:
        if other_keep != keep:
            yield make_unit_plan(lane, other_keep, before.boundary)
    for place in options.boundaries:
        if place != before.boundary:
            yield make_unit_plan(lane, keep, place)


def _apply(units: Units, change: Change) -> Units:
    return (*units[: change.where], change.after, *units[change.where + 1 :])
