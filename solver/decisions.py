"""The binaries of the MILP: one-hot choices per unit, tied where blocks repeat, and how to read a plan out of them."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import numpy as np

from lazytrain.solver.choices import (
    RECOMPUTE,
    Keep,
    Lane,
    list_boundaries,
    list_hull_keeps,
    list_keeps,
    list_lanes,
    make_unit_plan,
)
from lazytrain.solver.linear import Affine, LinearModel, total
from lazytrain.solver.plan import DEVICE, Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem

NUM_FREE_FIRST, NUM_FREE_LAST = 2, 3
T = TypeVar("T")


class UnitChoice(NamedTuple):
    """One unit's options, each with the binary that picks it."""

    lanes: tuple[tuple[Lane, Affine], ...]
    keeps: tuple[tuple[Keep, Affine], ...]
    boundaries: tuple[tuple[str, Affine], ...]

    def lane(self, wanted: Callable[[Lane], float]) -> Affine:
        """Return the sum of `wanted(lane)` over the lane that is picked; True counts 1."""
        return total(var * float(wanted(lane)) for lane, var in self.lanes if wanted(lane))

    def keep(self, wanted: Callable[[Keep], float]) -> Affine:
        """Return the sum of `wanted(keep)` over the keep that is picked."""
        return total(var * float(wanted(keep)) for keep, var in self.keeps if wanted(keep))

    def boundary(self, wanted: Callable[[str], float]) -> Affine:
        """Return the sum of `wanted(place)` over the boundary's place."""
        return total(var * float(wanted(place)) for place, var in self.boundaries if wanted(place))

    def read(self, x: np.ndarray) -> UnitPlan:
        """Return the decisions at a solution: of each group the option with the largest value."""
        lane = max(self.lanes, key=lambda item: item[1].value(x))[0]
        keep = max(self.keeps, key=lambda item: item[1].value(x))[0]
        boundary = max(self.boundaries, key=lambda item: item[1].value(x))[0]
        return make_unit_plan(lane, keep, boundary)


def add_choices(model: LinearModel, problem: Problem, *, period: int | None) -> tuple[UnitChoice, ...]:
    """Add the binaries of all units, in forward order.

    Args:
        period: blocks i and i + period of equal costs take equal decisions; the first 2 and the last 3 are free.
            None = every block decides for itself, and with all points of its curve, not only those of the hull.
    """
    made: dict[Hashable, UnitChoice] = {}
    choices = []
    for u, unit in enumerate(problem.units):
        key = _tie_key(problem, u, period)
        if key not in made:
            is_edge = u in (0, len(problem.units) - 1)
            keeps = (RECOMPUTE,) if is_edge else (list_keeps if period is None else list_hull_keeps)(problem, unit)
            made[key] = UnitChoice(
                _add_one_hot(model, list_lanes(problem, u)),
                _add_one_hot(model, keeps),
                _add_one_hot(model, (DEVICE,) if is_edge else list_boundaries(problem)),
            )
        choices.append(made[key])
    return tuple(choices)


def read_plan(problem: Problem, choices: tuple[UnitChoice, ...], x: np.ndarray, prefetch_depth: int) -> Plan:
    """Return the plan that a solution stands for."""
    return make_plan(problem, [choice.read(x) for choice in choices], prefetch_depth)


def _tie_key(problem: Problem, u: int, period: int | None) -> Hashable:
    num_blocks = len(problem.blocks)
    block_idx = u - 1
    is_free = block_idx < NUM_FREE_FIRST or block_idx >= num_blocks - NUM_FREE_LAST
    if period is None or is_free or num_blocks <= NUM_FREE_FIRST + NUM_FREE_LAST:
        return u
    unit = problem.units[u]
    costs = tuple(getattr(unit, name) for name in unit.__dataclass_fields__ if name != "name")
    return "tied", block_idx % period, costs


def _add_one_hot(model: LinearModel, options: tuple[T, ...]) -> tuple[tuple[T, Affine], ...]:
    if len(options) == 1:
        return ((options[0], Affine(constant=1.0)),)
    picks = tuple((option, model.add_var(binary=True)) for option in options)
    model.add_equal(total(var for _, var in picks), 1.0)
    return picks
