"""From a relaxed solution to a plan: spread each option over the blocks as its fractions say, then make it fit."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from lazytrain.solver.baselines import fits, make_plan
from lazytrain.solver.choices import RECOMPUTE, Keep, Lane, list_lanes, make_unit_plan
from lazytrain.solver.milp import Milp
from lazytrain.solver.plan import DEVICE, Plan, UnitPlan
from lazytrain.solver.problem import Problem

T = TypeVar("T", bound=Hashable)


def round_plan(milp: Milp, x: np.ndarray) -> Plan | None:
    """Return a plan near a relaxed solution that fits; None if taking things off the device does not make it fit."""
    draft = milp.draft
    blocks = draft.choices[1:-1]
    lanes = _spread([[(lane, var.value(x)) for lane, var in choice.lanes] for choice in blocks])
    keeps = _spread([[(keep, var.value(x)) for keep, var in choice.keeps] for choice in blocks])
    places = _spread([[(place, var.value(x)) for place, var in choice.boundaries] for choice in blocks])
    units = [make_unit_plan(*parts) for parts in zip(lanes, keeps, places, strict=True)]
    everything = [draft.choices[0].read(x), *units, draft.choices[-1].read(x)]
    return _make_fit(draft.problem, everything, draft.prefetch_depth)


def _spread(fractions: Sequence[Sequence[tuple[T, float]]]) -> list[T]:
    """Pick an option per block so that counts follow the sums of fractions all along: error diffusion."""
    credit: dict[T, float] = {}
    picks = []
    for options in fractions:
        for option, fraction in options:
            credit[option] = credit.get(option, 0.0) + fraction
        pick = max((option for option, _ in options), key=lambda option: credit[option])
        credit[pick] -= 1.0
        picks.append(pick)
    return picks


def _make_fit(problem: Problem, units: list[UnitPlan], depth: int) -> Plan | None:
    """Take residuals, then resident blocks, off the device, every other one first, until the plan fits."""
    plan = make_plan(problem, units, depth)
    last = len(units) - 1
    streamed = next((lane for lane in list_lanes(problem, problem.units[1], is_edge=False) if lane.is_streamed), None)
    odd_then_even = [*range(1, last, 2), *range(2, last, 2)]
    for what in ("residuals", "weights"):
        for u in odd_then_even:
            if fits(problem, plan):
                return plan
            old = units[u]
            if getattr(old, what) != DEVICE or (what == "weights" and streamed is None):
                continue
            lane = Lane(old.weights, old.states, old.update, old.grads)
            if what == "weights" and streamed in list_lanes(problem, problem.units[u], is_edge=False):
                assert streamed is not None
                lane = streamed
            keep = RECOMPUTE if what == "residuals" else Keep(old.residual_point, old.residuals)
            units[u] = make_unit_plan(lane, keep, old.boundary)
            plan = make_plan(problem, units, depth)
    return plan if fits(problem, plan) else None
