"""The planner's answers: brute force agrees, the simulator agrees with the model, and there is always an answer."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lazytrain.solver import planning
from lazytrain.solver.backends import Limits, solve_model
from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.choices import list_block_plans, list_lanes, make_unit_plan
from lazytrain.solver.draft import Scale
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.memory import account, find_shortage
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.planning import solve, use_slack
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate, simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

AGREEMENT = 1e-6  # relative
GIB = 1 << 30
GENEROUS_S = 60.0  # so that limits of nodes and evaluations end a solve, whatever else this machine does
# Few enough decisions that every plan can be tried.
SMALL_SPACES = (
    {"allow_residuals": False, "allow_cpu_update": False},
    {"allow_residuals": False, "allow_device_update": False},
    {"allow_residuals": False},
)


def small_problem(seed: int) -> Problem:
    problem = make_toy_problem(seed, num_blocks=2, device_is_host=seed % 5 == 0)
    return replace(problem, **SMALL_SPACES[seed % len(SMALL_SPACES)], prefetch_depths=(2,))


def all_plans(problem: Problem) -> Iterator[Plan]:
    ends = [[make_unit_plan(lane) for lane in list_lanes(problem, u)] for u in (0, len(problem.units) - 1)]
    blocks = [list(list_block_plans(problem, i)) for i in range(len(problem.blocks))]
    for depth in problem.prefetch_depths:
        for units in product(ends[0], *blocks, ends[1]):
            yield make_plan(problem, units, depth)


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    def edge(u: int) -> UnitPlan:
        return make_unit_plan(rng.choice(list_lanes(problem, u)))

    blocks = [rng.choice(list(list_block_plans(problem, i))) for i in range(len(problem.blocks))]
    return make_plan(problem, [edge(0), *blocks, edge(len(blocks) + 1)], rng.choice((2, 3)))


def model_step_ms(milp: Milp, plan: Plan) -> float | None:
    """Return the least period of the model with all decisions fixed to a plan's; None = infeasible."""
    point = planning._point_of(milp, plan)
    assert point is not None
    lower, upper = np.array(milp.model.lower), np.array(milp.model.upper)
    fixed = ~np.isnan(point)
    lower[fixed] = upper[fixed] = point[fixed]
    a, b, is_equal = milp.model.matrix()
    cost = np.zeros(milp.model.num_vars)
    cost[milp.model.objective] = 1.0
    answer = linprog(
        cost, a[~is_equal], b[~is_equal], a[is_equal], b[is_equal], list(zip(lower, upper, strict=True)), "highs"
    )
    return float(answer.fun) if answer.status == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_milp_equals_brute_force(seed: int) -> None:
    problem = small_problem(seed)
    fitting = [plan for plan in all_plans(problem) if not find_shortage(problem, account(problem, plan))]
    best_ms = min((simulate_step_ms(problem, plan) for plan in fitting), default=None)
    result = solve(problem, gap=0.0)
    if best_ms is None:
        assert result.plan is None
        assert result.code == "infeasible"
    else:
        assert result.plan is not None
        assert result.plan.predicted is not None
        assert result.plan.predicted.step_ms == pytest.approx(best_ms, rel=AGREEMENT)


@pytest.mark.parametrize("seed", range(12))
def test_model_and_simulator_agree_on_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_toy_problem(
        seed, num_blocks=rng.randint(1, 5), num_points=rng.randint(1, 3), allow_nvme=seed % 2 == 1
    )
    roomy = replace(
        problem,
        hardware=replace(problem.hardware, device_memory_bytes=1 << 44, host_memory_bytes=1 << 45, nvme_bytes=1 << 44),
    )
    for _ in range(3):
        plan = random_plan(roomy, rng)
        step_ms = simulate_step_ms(roomy, plan)
        milp = build_milp(roomy, prefetch_depth=plan.prefetch_depth, horizon_ms=10 * step_ms)
        assert model_step_ms(milp, plan) == pytest.approx(step_ms, rel=AGREEMENT)
        tight = build_milp(problem, prefetch_depth=plan.prefetch_depth, horizon_ms=10 * step_ms)
        fits = not find_shortage(problem, account(problem, plan))
        assert (model_step_ms(tight, plan) is not None) == fits


def test_model_and_simulator_agree_where_an_odd_number_of_units_share_the_update_buffers() -> None:
    """The unit that comes first takes the buffer of the last one, whose states leave late over a slow link."""
    visiting, rng = UnitPlan(states="host"), random.Random(437)
    problem = make_toy_problem(437, num_blocks=rng.randint(1, 6), num_points=rng.randint(1, 3))
    hardware = replace(problem.hardware, device_memory_bytes=1 << 44, host_memory_bytes=1 << 45)
    problem = replace(problem, hardware=hardware, allow_cpu_update=False)
    streamed = UnitPlan(weights="host", states="host", grads="host")
    blocks = [UnitPlan()] * (len(problem.blocks) - 1)
    plan = make_plan(problem, [visiting, *blocks, streamed, visiting], 2)
    step_ms = simulate_step_ms(problem, plan)
    milp = build_milp(problem, prefetch_depth=2, horizon_ms=10 * step_ms)
    assert model_step_ms(milp, plan) == pytest.approx(step_ms, rel=AGREEMENT)


@pytest.mark.parametrize(
    "scale", [Scale(size_bytes=2**20), Scale(time_ms=1000.0), Scale(size_bytes=2**33, time_ms=0.1)]
)
def test_units_of_the_model_change_nothing(scale: Scale) -> None:
    problem = make_toy_problem(3, num_blocks=3)
    horizon_ms = 2 * list_baselines(problem)[0].step_ms
    steps = []
    for units in (None, scale):
        milp = build_milp(problem, prefetch_depth=2, horizon_ms=horizon_ms, scale=units)
        outcome = solve_model(milp.model, Limits(gap=0.0))
        assert outcome.x is not None
        steps.append(simulate_step_ms(problem, milp.read(outcome.x)))
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)


def test_names_of_blocks_change_nothing() -> None:
    problem = make_toy_problem(5, num_blocks=4)
    renamed = replace(problem, blocks=tuple(replace(b, name=f"other.{9 - i}") for i, b in enumerate(problem.blocks)))
    first, second = (solve(either, time_limit_s=GENEROUS_S).plan for either in (problem, renamed))
    assert first is not None
    assert second is not None
    assert first.units == second.units


@pytest.mark.parametrize("seed", range(6))
def test_plan_is_never_worse_than_a_baseline_and_fits(seed: int) -> None:
    problem = make_toy_problem(seed, num_blocks=6, num_points=3)
    baselines, result = list_baselines(problem), solve(problem, time_limit_s=5.0)
    if not baselines:
        return
    assert result.plan is not None
    assert result.plan.predicted is not None
    assert result.plan.predicted.step_ms <= baselines[0].step_ms * (1 + AGREEMENT)
    assert not find_shortage(problem, account(problem, result.plan))
    result.plan.validate(problem)
    assert result.statistics["gap"] is None or 0 <= result.statistics["gap"] < 1


def test_without_a_solver_the_best_baseline_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_toy_problem(1, num_blocks=4)
    monkeypatch.setattr(planning, "list_solvers", lambda: ())
    result = solve(problem)
    assert result.code == "fallback"
    assert result.plan is not None
    assert simulate_step_ms(problem, result.plan) <= list_baselines(problem)[0].step_ms * (1 + AGREEMENT)


def test_a_late_solver_leaves_a_fallback() -> None:
    result = solve(make_toy_problem(1, num_blocks=12, num_points=3), time_limit_s=1e-6)
    assert result.plan is not None
    assert result.code == "fallback"
    assert result.statistics["gap"] is None


def test_the_remedy_of_a_refusal_makes_it_fit() -> None:
    base = make_toy_problem(2, num_blocks=4)
    for device, host in ((1, 4 * GIB), (GIB // 4, 1), (GIB // 8, GIB // 8)):
        hardware = replace(base.hardware, device_memory_bytes=device, host_memory_bytes=host)
        problem = replace(base, hardware=hardware)
        result = solve(problem)
        assert result.plan is None, "the case should not fit"
        assert "GiB" in result.message
        needs = {tier: _needed(result.message, tier) for tier in ("device", "host")}
        assert any(needs.values()), result.message
        enough = replace(
            hardware,
            device_memory_bytes=device + needs["device"],
            host_memory_bytes=host + needs["host"],
        )
        assert solve(replace(problem, hardware=enough)).plan is not None, result.message


def _needed(message: str, tier: str) -> int:
    import re

    match = re.search(rf"([\d.]+) GiB more {tier} memory", message)
    return int(float(match[1]) * GIB) + 1 if match else 0


@pytest.mark.parametrize("field", ["forward_ms", "backward_ms"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e12])
def test_absurd_numbers_are_named(field: str, value: float) -> None:
    problem = make_toy_problem(1)
    block = problem.blocks[0]
    bad = replace(block, points=(replace(block.points[0], **{field: value}),))
    with pytest.raises(PlannerError, match=field):
        solve(replace(problem, blocks=(bad,)))


def test_problem_and_plan_go_to_json_and_back(tmp_path: object) -> None:
    problem = make_toy_problem(4, num_blocks=5, allow_nvme=True)
    assert Problem.from_dict(problem.to_dict()) == problem
    plan = solve(problem, time_limit_s=3.0).plan
    assert plan is not None
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_plan_or_a_clear_error(data: object) -> None:
    with pytest.raises(PlannerError):
        Plan.from_dict(data)


def test_simulation_accounts_for_every_queue() -> None:
    problem = make_toy_problem(7, num_blocks=4)
    plan = list_baselines(problem)[0].plan
    played = simulate(problem, plan)
    for queue, busy_ms in played.busy_ms.items():
        events = [event for event in played.timeline if event.queue == queue]
        assert all(event.end_ms >= event.start_ms for event in events)
        assert busy_ms <= played.step_ms * (1 + AGREEMENT)


def test_a_problem_that_cannot_beat_its_rival_is_not_searched() -> None:
    problem = make_toy_problem(3, num_blocks=12)
    searched = solve(problem, gap=0.0, time_limit_s=GENEROUS_S)
    rival_ms = 0.999 * searched.statistics["bound_ms"]
    beaten = solve(problem, gap=0.0, rival_ms=rival_ms, time_limit_s=GENEROUS_S)
    assert beaten.plan is not None
    assert searched.statistics["num_evaluations"] > 1.5 * beaten.statistics["num_evaluations"]
    assert beaten.plan.predicted is not None
    assert beaten.plan.predicted.step_ms >= searched.statistics["bound_ms"]


def test_as_many_offloads_are_under_way_as_memory_allows() -> None:
    toy, chunk = make_toy_problem(4), 1 << 30  # activations are most of what there is
    blocks = tuple(replace(block, boundary_bytes=chunk) for block in toy.blocks)
    problem = replace(toy, num_microbatches=4, blocks=blocks)
    leaving = UnitPlan(weights="host", states="host", grads="host", boundary="host")
    plan = make_plan(problem, [UnitPlan(), *[leaving] * len(problem.blocks), UnitPlan()], 2)
    assert plan.chunks_behind == 2

    def fit_in(num_bytes: int) -> Plan:
        hardware = replace(problem.hardware, device_memory_bytes=num_bytes, host_memory_bytes=1 << 50)
        return use_slack(replace(problem, hardware=hardware), plan)

    peaks = {n: account(problem, replace(plan, chunks_behind=n)).device_peak_bytes for n in (2, 3, 4)}
    assert (peaks[3] - peaks[2], peaks[4] - peaks[2]) == (chunk, 2 * chunk)
    assert [fit_in(peaks[n]).chunks_behind for n in (2, 3, 4)] == [2, 3, 4]
    assert fit_in(peaks[3] - 1).chunks_behind == 2
    assert fit_in(10 * peaks[4]).chunks_behind == problem.num_microbatches
