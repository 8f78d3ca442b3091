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
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, Plan, UnitPlan, make_plan
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
    ({"num_blocks": 2}, {"allow_cpu_update": False, "num_microbatches": 4}),
    ({"num_blocks": 1, "num_points": 4}, {"prefetch_depths": (2, 3), "num_microbatches": 3}),
    ({"num_blocks": 1, "allow_nvme": True}, {"allow_residuals": False}),
    ({"num_blocks": 4}, {"allow_residuals": False, "allow_device_update": False, "prefetch_depths": (2, 3)}),
)

SLOW_DRAM = 8.0
MUCH_BYTES = 1 << 45
STREAMED_EDGES = 4  # the family whose embed and head may be streamed, too


def make_instance(number: int) -> Problem:
    toy, options = FAMILIES[number % len(FAMILIES)]
    streams = number % len(FAMILIES) == STREAMED_EDGES
    few = {"prefetch_depths": (2,), "allow_streamed_embed": streams, "allow_streamed_head": streams}
    problem = make_toy_problem(FIRST_SEED + number, **toy)
    if number // len(FAMILIES) % 2:  # the host's DRAM is slower than the link and the updates together
        rate = problem.hardware.dram_gbs / SLOW_DRAM
        problem = replace(problem, hardware=replace(problem.hardware, dram_gbs=rate))
    return replace(problem, **{**few, **options})


def with_room(problem: Problem, **rates: float) -> Problem:
    """Return the problem on a machine where all fits, and with other rates."""
    room = {f"{tier}_bytes": MUCH_BYTES for tier in ("device_memory", "host_memory", "nvme")}
    return replace(problem, hardware=replace(problem.hardware, **room, **rates))


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
    roomy = with_room(problem)
    options = list_options(problem)
    for _ in range(NUM_PLANS):
        plan = make_plan(problem, [rng.choice(of) for of in options], rng.choice(problem.prefetch_depths))
        step_ms = simulate_step_ms(problem, plan)
        assert model_step_ms(roomy, plan, 10 * step_ms) == pytest.approx(step_ms, rel=AGREEMENT)
        assert (model_step_ms(problem, plan, 10 * step_ms) is not None) == Accountant(problem).fits(plan)


STAYS = UnitPlan()
VISITS = UnitPlan(weights=HOST, states=HOST, update=DEVICE, grads=HOST)
STATES_FROM_NVME = UnitPlan(states=NVME)
ALL_FROM_NVME = UnitPlan(weights=NVME, states=NVME)
ON_CPU = UnitPlan(weights=HOST, states=HOST, update=CPU, grads=HOST)
CPU_ON_NVME = UnitPlan(weights=NVME, states=NVME, update=CPU, grads=HOST)
SPILLS = UnitPlan(residuals=NVME, residual_point=1)
HARD_SEEDS = (53, 118)  # reads in backward from staging whose copies end in another order; fetches far ahead of compute
FAST = 0.05  # of the toy's compute and updates
# What a unit does without ends, in the model, with what stands before it on its queue: nothing may wait for that.
CORNERS: dict[str, tuple[int, dict[str, float], tuple[UnitPlan, ...]]] = {
    "states that came early stand before all updates on the CPU": (
        7,
        {},
        (VISITS, VISITS, STATES_FROM_NVME, replace(STATES_FROM_NVME, update=CPU, grads=HOST), STAYS),
    ),
    "weights that the device did not update are not stored": (
        3,
        {"h2d_gbs": 0.5, "d2h_gbs": 0.5},
        (STAYS, *[replace(VISITS, grads=DEVICE)] * 3, *[ON_CPU] * 3, STAYS),
    ),
    "weights that the CPU updated are not the writer's": (
        5,
        {"h2d_gbs": 20.0, "d2h_gbs": 20.0, "nvme_read_gbs": 2.0, "nvme_write_gbs": 1.0},
        (STAYS, SPILLS, SPILLS, CPU_ON_NVME, ON_CPU, ON_CPU, STAYS),
    ),
    "weights that are in their slot do not come": (
        0,
        {"h2d_gbs": 3.0, "nvme_read_gbs": 1.0, "nvme_write_gbs": 20.0},
        (STAYS, VISITS, VISITS, ALL_FROM_NVME, ALL_FROM_NVME, STAYS),
    ),
    "staging is read into once its last copy has ended, of the sweep before too": (
        0,
        {"h2d_gbs": 0.5, "nvme_read_gbs": 1.0, "nvme_write_gbs": 20.0},
        (STAYS, VISITS, *[CPU_ON_NVME] * 3, STAYS),
    ),
}


def make_corner(name: str) -> tuple[Problem, Plan]:
    seed, rates, units = CORNERS[name]
    problem = make_toy_problem(seed, num_blocks=len(units) - 2, allow_nvme=True, device_is_host=not rates)
    if rates:
        rates = rates | {"dram_gbs": 1e3, "quiet_link_gbs": 0.0}
    problem = with_fast_blocks(with_room(replace(problem, num_microbatches=1), **rates))
    return problem, make_plan(problem, units, 2)


def test_the_model_reads_weights_behind_an_update_that_copies_slowed() -> None:
    rates = {"h2d_gbs": 40.0, "d2h_gbs": 40.0, "nvme_read_gbs": 1.0, "nvme_write_gbs": 40.0, "dram_gbs": 3.0}
    problem = with_fast_blocks(with_room(make_toy_problem(0, num_blocks=9, allow_nvme=True), **rates))
    long = replace(problem.head, points=tuple(replace(p, backward_ms=1e3) for p in problem.head.points))
    problem = replace(problem, head=long, num_microbatches=1)  # so that DRAM does not bind the whole step
    plan = make_plan(problem, [STAYS, *[VISITS] * 8, CPU_ON_NVME, STAYS], 2)
    step_ms = simulate_step_ms(problem, plan)
    assert model_step_ms(problem, plan, 10 * step_ms) == pytest.approx(step_ms, rel=AGREEMENT)


def with_fast_blocks(problem: Problem) -> Problem:
    """Return the problem with compute and updates that are seldom waited for."""
    blocks = []
    for block in problem.blocks:
        points = [replace(p, forward_ms=FAST * p.forward_ms, backward_ms=FAST * p.backward_ms) for p in block.points]
        blocks.append(replace(block, points=tuple(points), cpu_update_ms=FAST * block.cpu_update_ms))
    return replace(problem, blocks=tuple(blocks))


@pytest.mark.parametrize("name", CORNERS)
def test_the_model_is_no_stricter_than_the_simulator_in_corners(name: str) -> None:
    problem, plan = make_corner(name)
    step_ms = simulate_step_ms(problem, plan)
    assert model_step_ms(problem, plan, 10 * step_ms) == pytest.approx(step_ms, rel=AGREEMENT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(NUM_INSTANCES), *HARD_SEEDS}))
def test_the_model_says_what_the_simulator_says_where_copies_and_nvme_bind(seed: int) -> None:
    rng = random.Random(seed)
    rates = {name: 10 ** rng.uniform(-0.5, 1.5) for name in ("h2d_gbs", "d2h_gbs", "nvme_read_gbs", "nvme_write_gbs")}
    problem = make_toy_problem(seed, num_blocks=6, allow_nvme=seed % 4 > 0, device_is_host=seed % 5 == 0)
    problem = with_fast_blocks(with_room(problem, **rates))
    embed, options, *_, head = list_options(problem)
    streamed = [plan for plan in options if plan.is_streamed and plan.residuals == "none" and plan.boundary == DEVICE]
    for _ in range(NUM_PLANS):
        units = [rng.choice(streamed if rng.random() < 0.9 else options) for _ in problem.blocks]
        plan = make_plan(problem, [rng.choice(embed), *units, rng.choice(head)], rng.choice((2, 3)))
        step_ms = simulate_step_ms(problem, plan)
        assert model_step_ms(problem, plan, 10 * step_ms) == pytest.approx(step_ms, rel=AGREEMENT)


def test_every_family_is_tried_and_some_instances_do_not_fit() -> None:
    problems = [make_instance(number) for number in range(4 * len(FAMILIES))]
    fitting = [any(map(Accountant(problem).fits, list_plans(problem))) for problem in problems]
    assert len(problems) >= 30
    assert any(fitting)
    assert not all(fitting)
