"""A plan that fits, whatever its speed: what the host has no room for lies on the device, as far as that has any.

Where both are nearly full, no plan of equal blocks fits: some boundaries must wait on the device and the others in the
host's memory, and some blocks' states or grads as well. A byte weighs the same in both, so that filling the device to
the brim is enough; big things (boundaries) go before small ones (a block's weights or states), which fill the rest.

Where that is not enough either, boundaries are dropped and computed again, in stretches at the end of the model. The
stretch that backward meets first is the shortest: by the next one a boundary more has been given back.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from lazytrain.solver.baselines import FIXED_INTERVAL
from lazytrain.solver.choices import RECOMPUTE, Lane, list_boundaries, list_lanes, make_unit_plan
from lazytrain.solver.fitting import Fitter
from lazytrain.solver.fixed_interval import make_fixed_interval_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.plan import DEVICE, NONE, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.vectors import Decisions

NUM_STARTS = 12  # those that lack least
NUM_FILLED = 160
NUM_DROPPING = 5  # for each length
LENGTHS = (1, 2, 3, 4, 6)  # of the first stretch


class _Filling(NamedTuple):
    """Equal blocks, but for the boundaries of the last ones, and for some blocks in another lane."""

    embed: Lane
    lane: Lane
    head: Lane
    boundary: str
    num_kept: int = 0  # boundaries, of the last blocks, that are on the device
    length: int = 0  # of the last stretch of those; 0 = none is dropped
    other: Lane | None = None
    is_last: bool = True  # the blocks in the other lane: the last ones, or the first
    num_other: int = 0


def pack(problem: Problem, *, may_drop: bool = False) -> Plan | None:
    """Return a plan that fits, without residuals; None where none was found.

    Looked at are plans of equal blocks, and those with things moved to the device till it is full.

    Args:
        may_drop: where nothing fits else, drop boundaries, which costs two more forward passes of a block.
    """
    packer = _Packer(problem)
    for dropping in (False, True)[: 1 + may_drop]:
        starts = packer.list_starts(dropping=dropping)
        plan = next(packer.pick_fitting(starts), None) or next(packer.pick_fitting(packer.fill_lanes(starts)), None)
        if plan is not None:
            return plan
    return make_fixed_interval_plan(problem, FIXED_INTERVAL) if may_drop else None


class _Packer:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._fitter, self._account = problem, Fitter(problem), Accountant(problem)
        self._last, self._limit = len(problem.units) - 1, problem.hardware.device_memory_bytes
        blocks = range(1, self._last)
        self._without_params = [u for u in blocks if not problem.units[u].num_params]
        self._lanes = list_lanes(problem, next((u for u in blocks if problem.units[u].num_params), 1))
        self._keeps = [RECOMPUTE] * len(blocks)
        # What rings and slots give back where nothing is left to go through them.
        largest = max(unit.weight_bytes + unit.state_bytes + unit.grad_bytes for unit in problem.units)
        self._bonus = 2 * largest + 3 * max(unit.boundary_bytes for unit in problem.units)

    def list_starts(self, *, dropping: bool) -> list[_Filling]:
        """Return plans of equal blocks that leave the device room for what is missing, with boundaries there."""
        ends = list_lanes(self._problem, 0), list_lanes(self._problem, self._last)
        options = product(ends[0], self._lanes, ends[1], list_boundaries(self._problem))
        starts = [_Filling(*option) for option in options]
        if dropping:
            every, few = self._last - 1, list[_Filling]()
            for length in LENGTHS:
                dropped = [s._replace(num_kept=every, length=length) for s in starts if s.boundary != DEVICE]
                few += self._pick_promising(dropped, NUM_DROPPING, fits_device=False)
            starts = [s._replace(num_kept=k) for s in few for k in range(1, every + 1)]
            return self._pick_promising(starts, NUM_STARTS)
        best = self._pick_promising(starts, NUM_STARTS)
        kept = [s._replace(num_kept=k) for s in best for k in range(self._last) if not k or s.boundary != DEVICE]
        return self._pick_promising(kept, NUM_FILLED)

    def _pick_promising(self, fillings: Sequence[_Filling], count: int, *, fits_device: bool = True) -> list[_Filling]:
        """Return those for whose missing bytes the device may have room, the best first."""
        peaks, missing = self._measure(fillings)
        room = self._limit - peaks
        order = np.argsort(missing - np.maximum(room, 0), kind="stable")
        good = [i for i in order if not fits_device or 0 <= room[i] >= missing[i] - self._bonus]
        return [fillings[i] for i in good[:count]]

    def fill_lanes(self, starts: Sequence[_Filling]) -> list[_Filling]:
        """Return the starts with as many blocks in another lane as the device has room for: bisection."""
        found = [
            start._replace(other=other, is_last=is_last)
            for start, other, is_last in product(starts, self._lanes, (True, False))
            if other != start.lane
        ]
        low, high = np.zeros(len(found), dtype=int), np.full(len(found), self._last - 1)
        while (low < high).any():
            middle = (low + high + 1) // 2
            tried = [filling._replace(num_other=int(count)) for filling, count in zip(found, middle, strict=True)]
            fits = self._measure(tried)[0] <= self._limit
            low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(middle - 1, low))
        return [filling._replace(num_other=int(count)) for filling, count in zip(found, low, strict=True)]

    def pick_fitting(self, fillings: Sequence[_Filling]) -> Iterator[Plan]:
        """Yield plans that fit in every tier."""
        for filling, num_bytes in zip(fillings, self._measure(fillings)[1], strict=True):
            if not num_bytes:
                depth, units = self._decide(filling)
                plan = make_plan(self._problem, units, depth)
                if self._account.fits(plan):
                    yield plan

    def _decide(self, filling: _Filling) -> Decisions:
        lanes = [filling.lane] * (self._last - 1)
        if filling.other is not None:
            others, rest = [filling.other] * filling.num_other, lanes[filling.num_other :]
            lanes = [*rest, *others] if filling.is_last else [*others, *rest]
        places = [filling.boundary] * (self._last - 1 - filling.num_kept) + _stretch(filling.num_kept, filling.length)
        blocks = [make_unit_plan(*pair) for pair in zip(lanes, self._keeps, places, strict=True)]
        for u in self._without_params:
            blocks[u - 1] = make_unit_plan(list_lanes(self._problem, u)[0], RECOMPUTE, places[u - 1])
        ends = make_unit_plan(filling.embed), make_unit_plan(filling.head)
        return min(self._problem.prefetch_depths), (ends[0], *blocks, ends[1])

    def _measure(self, fillings: Sequence[_Filling]) -> tuple[np.ndarray, np.ndarray]:
        if not fillings:
            return np.zeros(0), np.zeros(0)
        return self._fitter.measure([self._decide(filling) for filling in fillings])


def _stretch(count: int, length: int) -> list[str]:
    """Return the places of the last boundaries: all on the device, or one a stretch; each is one longer than the next.

    Example:
        >>> _stretch(6, 2)
        ['device', 'device', 'none', 'none', 'device', 'none']
    """
    places: list[str] = []
    while len(places) < count:
        size = min(max(1, length), count - len(places))
        places = [DEVICE, *[NONE] * (size - 1), *places]
        length += length > 0
    return places
