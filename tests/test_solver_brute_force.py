"""Random small instances: every plan is tried, and the planner's answer is the best; the model says what the simulator
says; the bound holds.

`LAZYTRAIN_INSTANCES=240 python -m pytest tests/test_solver_brute_force.py` tries that many instead of the few that are
fast.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from lazytrain.solver import planning
from lazytrain.solver.choices import list_block_plans, list_lanes, make_unit_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.milp import build_milp
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

AGREEMENT = 1e-6  # relative
NUM_INSTANCES = int(os.environ.get("LAZYTRAIN_INSTANCES", "32"))
NUM_PLANS = 4  # of each instance, whose time by the model is compared with the simulator's
FIRST_SEED = 5000
GENEROUS_S = 60.0
# What an instance may decide, so few that there are at most some thousand plans: options of the toy problem, of the
# problem itself.
FAMILIES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"num_blocks": 2}, {"allow_residuals": False}),
    ({"num_blocks": 2, "device_is_host": True}, {"allow_residuals": False}),
    ({"num_blocks": 3}, {"allow_residuals": False, "allow_cpu_update": False}),
    ({"num_blocks": 3}, {"allow_device_update": False}),
    ({"num_blocks": 2}, {"allow_cpu_update": False}),
    ({"num_blocks": 1, "num_points": 4}, {"prefetch_depths": (2, 3)}),
    ({"num_blocks": 1, "allow_nvme": True}, {"allow_residuals": False}),
    ({"num_blocks": 4}, {"allow_residuals": False, "allow_device_update": False, "prefetch_depths": (2, 3)}),
)

SLOW_DRAM = 8.0
STREAMED_EDGES = 4  # the family whose embed and head may be streamed, too


def make_instance(number: int) -> Problem:
    toy, options = FAMILIES[number % len(FAMILIES)]
    streams = number % len(FAMILIES) == STREAMED_EDGES
    few = {"prefetch_depths": (2,), "allow_streamed_embed": streams, "allow_streamed_head": streams}
    problem = make_toy_problem(FIRST_SEED + number, **toy)
    if number // len(FAMILIES) % 2:  # the host's DRAM is slower than the link and the updates together
        rate = problem.hardware.host_memory_gbs / SLOW_DRAM
        problem = replace(problem, hardware=replace(problem.hardware, host_memory_gbs=rate))
    return replace(problem, **{**few, **options})


def list_options(problem: Problem) -> list[list[UnitPlan]]:
    def edge(u: int) -> list[UnitPlan]:
        return [make_unit_plan(lane) for lane in list_lanes(problem, u)]

    last = len(problem.units) - 1
    return [edge(0), *(list(list_block_plans(problem, i)) for i in range(len(problem.blocks))), edge(last)]


def list_plans(problem: Problem) -> Iterator[Plan]:
    for depth, *units in product(problem.prefetch_depths, *list_options(problem)):
        yield make_plan(problem, units, depth)


def model_step_ms(problem: Problem, plan: Plan, horizon_ms: float) -> float | None:
    """Return the least period of the model with all decisions fixed to a plan's; None = infeasible."""
    milp = build_milp(problem, prefetch_depth=plan.prefetch_depth, horizon_ms=horizon_ms)
    point = planning._point_of(milp, plan)
    assert point is not None
    fixed = ~np.isnan(point)
    bounds = np.array([milp.model.lower, milp.model.upper], dtype=float).T
    bounds[fixed] = point[fixed, None]
    a, b, is_equal = milp.model.matrix()
    cost = np.zeros(milp.model.num_vars)
    cost[milp.model.objective] = 1.0
    answer = linprog(cost, a[~is_equal], b[~is_equal], a[is_equal], b[is_equal], bounds, "highs")
    return float(answer.fun) if answer.status == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_INSTANCES))
def test_no_plan_is_faster_than_the_answer(number: int) -> None:
    problem = make_instance(number)
    fits = Accountant(problem).fits
    best_ms = min((simulate_step_ms(problem, plan) for plan in list_plans(problem) if fits(plan)), default=None)
    result = solve(problem, gap=0.0, time_limit_s=GENEROUS_S)
    if best_ms is None:
        assert result.code == "infeasible"
        return
    assert result.plan is not None
    assert result.plan.predicted is not None
    assert result.plan.predicted.step_ms == pytest.approx(best_ms, rel=AGREEMENT)
    assert result.plan.predicted.step_ms == pytest.approx(simulate_step_ms(problem, result.plan), rel=AGREEMENT)
    assert result.statistics["bound_ms"] <= best_ms * (1 + AGREEMENT) + 1e-3, "it is rounded to 3 digits"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_INSTANCES))
def test_the_model_says_what_the_simulator_says(number: int) -> None:
    problem, rng = make_instance(number), random.Random(number)
    more = {f"{tier}_bytes": 1 << 44 for tier in ("device_memory", "nvme")}
    roomy = replace(problem, hardware=replace(problem.hardware, host_memory_bytes=1 << 45, **more))
    options = list_options(problem)
    for _ in range(NUM_PLANS):
        plan = make_plan(problem, [rng.choice(of) for of in options], rng.choice(problem.prefetch_depths))
        step_ms = simulate_step_ms(problem, plan)
        assert model_step_ms(roomy, plan, 10 * step_ms) == pytest.approx(step_ms, rel=AGREEMENT)
        assert (model_step_ms(problem, plan, 10 * step_ms) is not None) == Accountant(problem).fits(plan)


def test_every_family_is_tried_and_some_instances_do_not_fit() -> None:
    problems = [make_instance(number) for number in range(4 * len(FAMILIES))]
    fitting = [any(map(Accountant(problem).fits, list_plans(problem))) for problem in problems]
    assert len(problems) >= 30
    assert any(fitting)
    assert not all(fitting)
