"""Polish a plan by local search: the simulator prices every change, the memory account says whether it fits.

A *change* takes some of the blocks (or ends) that decide alike and alters one decision of theirs. Each round prices
changes of one block, whether they fit or not; then it takes the best of

    one change that fits,   a pair of changes of which one makes room for the other,   an exchange of two blocks

and, where that was good, the same for more blocks at once. The order is fixed and the budget counts evaluations, so
that the same problem gives the same plan.
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
from lazytrain.solver.simulator import simulate_step_ms

MIN_GAIN = 1e-6  # relative; less is rounding
MAX_PAIRS = 60  # priced in a round; as many may be tried in vain
MAX_FIT_CHECKS = 1500
# How many blocks a pair of changes takes: those that help, and those that make room.
SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 3), (3, 2))
FIRST, MIDDLE, LAST = "first", "middle", "last"


class Change(NamedTuple):
    """Units `where` take the decisions `after` instead of `before`."""

    before: UnitPlan
    after: UnitPlan
    where: tuple[int, ...]


class Priced(NamedTuple):
    """A change, the step that it makes, and whether the plan still fits."""

    change: Change
    step_ms: float
    fits: bool


class Search:
    """A plan that is being improved (see the head of this file).

    Attributes:
        units, depth, step_ms: the best decisions so far, and their simulated step.
        left: evaluations that may still be made.
    """

    def __init__(self, problem: Problem, plan: Plan, *, num_evaluations: int, deadline_s: float) -> None:
        self.problem, self.units, self.depth = problem, plan.units, plan.prefetch_depth
        self.left, self._deadline_s = num_evaluations, deadline_s
        self._accountant = Accountant(problem)
        self._known_ms: dict[tuple[int, tuple[UnitPlan, ...]], float] = {}
        self._options = [_list_options(problem, u) for u in range(len(problem.units))]
        self.step_ms = self.price(self.units)

    @property
    def plan(self) -> Plan:
        """Return the best plan so far."""
        return make_plan(self.problem, self.units, self.depth)

    @property
    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        return self.left <= 0 or time.perf_counter() > self._deadline_s

    def price(self, units: tuple[UnitPlan, ...], depth: int | None = None) -> float:
        """Return the simulated step of some decisions, whether they fit or not."""
        key = (depth or self.depth, units)
        if key not in self._known_ms:
            self.left -= 1
            self._known_ms[key] = simulate_step_ms(self.problem, make_plan(self.problem, units, key[0]))
        return self._known_ms[key]

    def fits(self, units: tuple[UnitPlan, ...], depth: int | None = None) -> bool:
        """Return whether decisions fit in every tier."""
        return self._accountant.fits(make_plan(self.problem, units, depth or self.depth))

    def take(self, units: tuple[UnitPlan, ...], depth: int | None = None) -> bool:
        """Make decisions the best ones if they are faster and fit; return whether they are."""
        if self.price(units, depth) >= self.step_ms * (1 - MIN_GAIN) or not self.fits(units, depth):
            return False
        self.step_ms = self.price(units, depth)
        self.units, self.depth = units, depth or self.depth
        return True

    def make_fit(self) -> bool:
        """Change the plan until it fits, each time by what frees most per loss; return whether it does now."""
        while not self.is_over:
            missing = self._missing_bytes(self.units)
            if not missing:
                return True
            best: tuple[float, tuple[UnitPlan, ...]] | None = None
            for change in self._list_changes():
                units = _apply(self.units, change)
                freed = missing - self._missing_bytes(units)
                if freed > 0:
                    loss_ms = max(self.price(units) - self.step_ms, 0.0) + MIN_GAIN * self.step_ms
                    best = min(best or (inf, units), (loss_ms / freed, units), key=lambda item: item[0])
            if best is None:
                return False
            self.units, self.step_ms = best[1], self.price(best[1])
        return False

    def _missing_bytes(self, units: tuple[UnitPlan, ...]) -> int:
        plan = make_plan(self.problem, units, self.depth)
        return sum(find_shortage(self.problem, self._accountant.account(plan)).values())

    def run(self) -> None:
        """Improve until nothing helps or the budget is spent."""
        while not self.is_over:
            priced = [self._price_change(change) for change in self._list_changes()]
            if not (
                self._take_single(priced) or self._take_pair(priced) or self._take_exchange() or self._take_depth()
            ):
                return

    def _list_changes(self) -> Iterator[Change]:
        """Yield changes of one unit: the first, the middle and the last of those that decide alike."""
        alike: dict[tuple[bool, UnitPlan], list[int]] = {}
        last = len(self.units) - 1
        for u, unit in enumerate(self.units):
            alike.setdefault((u in (0, last), unit), []).append(u)
        for (_, before), where in alike.items():
            for u in sorted({where[0], where[len(where) // 2], where[-1]}):
                for after in _list_neighbours(self._options[u], before):
                    yield Change(before, after, (u,))

    def _price_change(self, change: Change) -> Priced:
        if self.is_over:
            return Priced(change, inf, fits=False)
        units = _apply(self.units, change)
        return Priced(change, self.price(units), self.fits(units))

    def _take_single(self, priced: Sequence[Priced]) -> bool:
        better = [p for p in priced if p.fits and p.step_ms < self.step_ms * (1 - MIN_GAIN)]
        if not better:
            return False
        best = min(better, key=lambda p: p.step_ms)
        taken = self.take(_apply(self.units, best.change))
        self._repeat((best.change,))
        return taken

    def _take_pair(self, priced: Sequence[Priced]) -> bool:
        """Try changes that would help but don't fit, with changes that make room, the most promising first."""
        helps = [p for p in priced if not p.fits and p.step_ms < self.step_ms * (1 - MIN_GAIN)]
        rooms = [p for p in priced if p.fits]
        pairs: list[tuple[float, int, int, Change, Change, int, int]] = []
        for a, b, (num_helps, num_rooms) in product(helps, rooms, SHAPES):
            gain_ms, loss_ms = self.step_ms - a.step_ms, b.step_ms - self.step_ms
            expected = num_helps * gain_ms - num_rooms * loss_ms
            if expected > 0 and a.change.where != b.change.where:
                pairs.append((-expected, num_helps + num_rooms, len(pairs), a.change, b.change, num_helps, num_rooms))
        num_priced, seen = 0, set[tuple[UnitPlan, ...]]()
        for *_, a_change, b_change, num_helps, num_rooms in sorted(pairs, key=lambda pair: pair[:3])[:MAX_FIT_CHECKS]:
            if self.is_over or num_priced >= MAX_PAIRS:
                return False
            units = _extend(self.units, a_change, num_helps)
            units = None if units is None else _extend(units, b_change, num_rooms)
            if units is None or units in seen or not self.fits(units):
                continue
            seen.add(units)
            num_priced += 1
            if self.take(units):
                self._repeat((a_change, b_change))
                return True
        return False

    def _repeat(self, changes: tuple[Change, ...]) -> None:
        """Make the same changes to more blocks, twice as many each time, as long as that helps."""
        count = 1
        while not self.is_over:
            units: tuple[UnitPlan, ...] | None = self.units
            for change in changes:
                units = _extend(units, change, count) if units is not None else None
            if units is None or not self.take(units):
                if count == 1:
                    return
                count = 0
            count = max(1, 2 * count)

    def _take_exchange(self) -> bool:
        """Try to exchange neighbours in the order of blocks, and each block with the first and last of another kind."""
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
    unit, is_edge = problem.units[u], u in (0, len(problem.units) - 1)
    lanes = list_lanes(problem, unit, is_edge=is_edge)
    if is_edge:
        return _Options(lanes, (), ())
    return _Options(lanes, list_hull_keeps(problem, unit), list_boundaries(problem))


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


def _apply(units: tuple[UnitPlan, ...], change: Change) -> tuple[UnitPlan, ...]:
    return tuple(change.after if u in change.where else unit for u, unit in enumerate(units))


def _extend(units: tuple[UnitPlan, ...], change: Change, count: int) -> tuple[UnitPlan, ...] | None:
    """Return the same change for `count` more blocks, the nearest ones; None if there are not so many."""
    blocks = range(1, len(units) - 1)
    if change.where[0] not in blocks:
        return _apply(units, change)  # embed and head have no likes
    near = sorted((u for u in blocks if units[u] == change.before), key=lambda u: (abs(u - change.where[0]), u))
    return _apply(units, change._replace(where=tuple(near[:count]))) if len(near) >= count else None
