"""Improve a plan with the simulator as the judge: seeded local search over groups of blocks.

The MILP finds the structure; this finds what its ties between blocks leave on the table, and gives the MILP a start.
"""

import random
import time
from collections.abc import Sequence

from lazytrain.solver.baselines import fits, make_plan
from lazytrain.solver.choices import Keep, Lane, list_boundaries, list_keeps, list_lanes, make_unit_plan
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_step_ms

MIN_GAIN = 1e-6  # relative; less is rounding
STRIDES = (1, 1, 2, 3, 4)


def improve(
    problem: Problem, plan: Plan, step_ms: float, *, num_trials: int, deadline_s: float, seed: int = 0
) -> tuple[Plan, float]:
    """Return a plan that is at least as fast, and its step.

    Args:
        plan, step_ms: a plan that fits, and its simulated step.
        num_trials: changes to try; reproducible, where the deadline is only the net.
        deadline_s: on the clock of `time.perf_counter`.
    """
    rng = random.Random(seed)
    best, best_ms, seen = plan, step_ms, {(plan.prefetch_depth, plan.units)}
    for _ in range(num_trials):
        if time.perf_counter() > deadline_s:
            break
        trial = _change(problem, best, rng)
        key = (trial.prefetch_depth, trial.units)
        if key in seen or not fits(problem, trial):
            continue
        seen.add(key)
        trial_ms = simulate_step_ms(problem, trial)
        if trial_ms < best_ms * (1 - MIN_GAIN):
            best, best_ms = trial, trial_ms
    return best, best_ms


def _change(problem: Problem, plan: Plan, rng: random.Random) -> Plan:
    """Return the plan with one decision of one group of units changed, and now and then two."""
    units, depth = list(plan.units), plan.prefetch_depth
    if rng.random() < 0.03 and len(problem.prefetch_depths) > 1:
        depth = rng.choice(problem.prefetch_depths)
    for _ in range(2 if rng.random() < 0.3 else 1):
        _change_group(problem, units, rng)
    return make_plan(problem, units, depth)


def _change_group(problem: Problem, units: list[UnitPlan], rng: random.Random) -> None:
    last = len(units) - 1
    if rng.random() < 0.1:
        u = rng.choice((0, last))
        units[u] = make_unit_plan(rng.choice(list_lanes(problem, problem.units[u], is_edge=True)))
        return
    group = _pick_group(units, rng)
    example = rng.choice(group)
    unit = problem.units[example]
    kind = rng.choice(("lane", "lane", "keep", "keep", "boundary", "copy"))
    lane = rng.choice(list_lanes(problem, unit, is_edge=False))
    keep, place = rng.choice(list_keeps(problem, unit)), rng.choice(list_boundaries(problem))
    other = units[rng.randint(1, last - 1)]
    for u in group:
        old, own = units[u], problem.units[u]
        lanes, keeps = list_lanes(problem, own, is_edge=False), list_keeps(problem, own)
        if kind == "lane" and lane in lanes:
            units[u] = make_unit_plan(lane, Keep(old.residual_point, old.residuals), old.boundary)
        elif kind == "keep" and keep in keeps:
            units[u] = make_unit_plan(_lane_of(old), keep, old.boundary)
        elif kind == "boundary":
            units[u] = make_unit_plan(_lane_of(old), Keep(old.residual_point, old.residuals), place)
        elif kind == "copy" and _lane_of(other) in lanes and Keep(other.residual_point, other.residuals) in keeps:
            units[u] = other


def _pick_group(units: Sequence[UnitPlan], rng: random.Random) -> list[int]:
    """Return blocks' units: one, a run, every k-th of a run, or all that decide like one of them."""
    last = len(units) - 1
    first, end = sorted((rng.randint(1, last - 1), rng.randint(1, last - 1)))
    shape = rng.random()
    if shape < 0.35:
        return [first]
    if shape < 0.5:
        return [u for u in range(1, last) if units[u] == units[first]]
    return list(range(first, end + 1, rng.choice(STRIDES)))


def _lane_of(plan: UnitPlan) -> Lane:
    return Lane(plan.weights, plan.states, plan.update, plan.grads)
