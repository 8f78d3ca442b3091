"""What no plan can beat, the search that the simulator prices, and what it makes of starts, baselines and order."""

import random
from dataclasses import replace

import pytest

from lazytrain.solver.baselines import fits_strategy, list_baselines, list_strategies
from lazytrain.solver.bounds import bound_step
from lazytrain.solver.choices import list_block_plans, list_hull_keeps, list_lanes, make_unit_plan
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.greedy import make_greedy_plan
from lazytrain.solver.hardware import PRESETS
from lazytrain.solver.memory import Accountant, account
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Search
from lazytrain.solver.simulator import simulate_step_ms
from lazytrain.solver.tidying import TIE, count_runs, tidy
from lazytrain.solver.toys import make_toy_problem

AGREEMENT = 1e-6  # relative
STREAMED = UnitPlan(weights="host", states="host", grads="device")


def make_search(problem: Problem, plan: Plan, num_evaluations: int = 300) -> Search:
    start = plan.prefetch_depth, plan.units
    return Search(Evaluator(problem), start, num_evaluations=num_evaluations, deadline=Deadline(30.0))


def make_varied_problem(seed: int) -> Problem:
    """Return a toy problem in which compute, the link in one direction, NVMe or the CPU is short."""
    rng = random.Random(seed)
    problem = make_toy_problem(
        seed,
        num_blocks=rng.randint(1, 9),
        num_points=rng.randint(1, 4),
        allow_nvme=seed % 3 == 1,
        device_is_host=seed % 7 == 0,
    )
    slow = replace(problem.hardware, d2h_gbs=1.0), replace(problem.hardware, h2d_gbs=2.0), problem.hardware
    return replace(problem, hardware=slow[seed % 3], allow_device_update=seed % 4 != 1, allow_cpu_update=seed % 4 != 2)


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    ends = [make_unit_plan(rng.choice(list_lanes(problem, u))) for u in (0, len(problem.units) - 1)]
    blocks = [rng.choice(list(list_block_plans(problem, i))) for i in range(len(problem.blocks))]
    return make_plan(problem, [ends[0], *blocks, ends[1]], rng.choice(problem.prefetch_depths))


@pytest.mark.parametrize("seed", range(72))
def test_no_plan_beats_the_bound(seed: int) -> None:
    problem, rng = make_varied_problem(seed), random.Random(seed)
    if seed % 5 == 0:  # where everything fits it is time alone that bounds
        roomy = replace(problem.hardware, device_memory_bytes=1 << 44, host_memory_bytes=1 << 45, nvme_bytes=1 << 44)
        problem = replace(problem, hardware=roomy)
    evaluator = Evaluator(problem)
    bounds = {depth: bound_step(problem, depth).bound_ms for depth in problem.prefetch_depths}
    plans = [random_plan(problem, rng) for _ in range(100)]
    for baseline in list_baselines(problem, num_random=5, evaluator=evaluator)[:3]:
        plans += [baseline.plan, make_search(problem, baseline.plan, 100).plan]
    many = [(plan.prefetch_depth, plan.units) for plan in plans]
    for (depth, _), price, fits in zip(many, evaluator.price(many), evaluator.fits(many), strict=True):
        assert not fits or price.step_ms >= bounds[depth] * (1 - AGREEMENT)


def test_the_bound_is_reached_where_everything_fits() -> None:
    problem = make_toy_problem(3, num_blocks=12)
    result = solve(replace(problem, hardware=replace(problem.hardware, device_memory_bytes=1 << 44)), gap=5e-3)
    assert result.code == "optimal"
    assert result.plan is not None
    assert result.plan.predicted is not None
    assert result.plan.predicted.step_ms == pytest.approx(result.statistics["bound_ms"], rel=5e-3)


def test_the_bound_of_what_cannot_fit_is_infinite() -> None:
    problem = make_toy_problem(3, num_blocks=4)
    problem = replace(problem, hardware=replace(problem.hardware, device_memory_bytes=1))
    assert bound_step(problem, 2).bound_ms == float("inf")


@pytest.mark.parametrize("seed", range(8))
def test_search_only_gets_better_and_fits(seed: int) -> None:
    problem = make_toy_problem(seed, num_blocks=10, num_points=3)
    for baseline in list_baselines(problem, num_random=0)[-2:]:
        search = make_search(problem, baseline.plan)
        search.run()
        assert search.step_ms <= baseline.step_ms * (1 + AGREEMENT)
        assert search.step_ms == pytest.approx(simulate_step_ms(problem, search.plan), rel=AGREEMENT)
        assert Accountant(problem).fits(search.plan)
        search.plan.validate(problem)


def test_search_halves_the_distance_of_a_bad_plan_to_the_best_known_one() -> None:
    problem = make_toy_problem(1, num_blocks=12, num_points=3)
    baselines = list_baselines(problem)
    search = make_search(problem, baselines[-1].plan, 600)
    search.run()
    assert search.step_ms < (baselines[-1].step_ms + baselines[0].step_ms) / 2


def test_make_fit_ends_with_a_plan_that_fits() -> None:
    problem = make_toy_problem(2, num_blocks=8, num_points=3)
    peak = account(problem, make_plan(problem, [UnitPlan()] * 10, 2)).device_peak_bytes
    problem = replace(problem, hardware=replace(problem.hardware, device_memory_bytes=int(0.8 * peak)))
    search = make_search(problem, make_plan(problem, [UnitPlan()] * 10, 2), 2000)
    assert not Accountant(problem).fits(search.plan)
    assert search.make_fit()
    assert Accountant(problem).fits(search.plan)


def test_tidy_leaves_fewer_runs_and_the_same_step() -> None:
    problem = make_toy_problem(3, num_blocks=8)
    problem = replace(
        problem, hardware=replace(problem.hardware, device_memory_bytes=1 << 44, h2d_gbs=500, d2h_gbs=500)
    )
    search = make_search(problem, make_plan(problem, [UnitPlan(), *[UnitPlan(), STREAMED] * 4, UnitPlan()], 2))
    before_ms, num_runs = search.step_ms, count_runs(search.units)
    tidy(search)
    assert num_runs == 8
    assert count_runs(search.units) < num_runs
    assert search.step_ms <= before_ms * (1 + TIE)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_fits_and_is_at_least_as_fast_as_its_start(seed: int) -> None:
    problem = make_toy_problem(seed, num_blocks=8, num_points=3)
    plan = make_greedy_plan(Evaluator(problem), Deadline(30.0))
    if plan is None:
        assert (
            "recompute_all" not in [n for n in list_strategies(problem) if fits_strategy(problem, n)]
            or not problem.allow_device_update
        )
        return
    lean = make_plan(problem, [UnitPlan(weights="device", states="host", update="cpu", grads="host")] * 10, 2)
    assert Accountant(problem).fits(plan)
    assert simulate_step_ms(problem, plan) < simulate_step_ms(problem, lean)


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = make_toy_problem(5, num_blocks=12, num_points=3)
    first, second = (solve(problem, time_limit_s=60.0).plan for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.units == second.units
    assert first.prefetch_depth == second.prefetch_depth


def test_points_above_the_hull_are_tried_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of Llama-3 8B as an H200 measured it: without its point 1, above the hull, a step was 2 to 3% slower."""
    tight = replace(PRESETS["h200"], device_memory_bytes=24 << 30, host_memory_bytes=114 << 30)
    problem = problem_from_config(KNOWN_MODELS["llama-3-8b"], tight, batch=64, seq=1024, microbatch=16)
    times = ((0.0, 11.66, 33.5), (0.44, 11.71, 31.1), (0.88, 11.67, 27.04), (1.19, 11.67, 26.02))
    points = tuple(
        replace(point, residual_bytes=int(gib * 2**30), forward_ms=forward_ms, backward_ms=backward_ms)
        for point, (gib, forward_ms, backward_ms) in zip(problem.blocks[0].points, times)
    )
    problem = replace(problem, blocks=tuple(replace(block, points=points) for block in problem.blocks))
    assert {keep.point for keep in list_hull_keeps(problem, problem.blocks[0])} == {0, 2, 3}
    on_cpu = UnitPlan(weights="host", states="host", update="cpu", grads="host")
    start = make_plan(problem, [on_cpu, *[replace(on_cpu, boundary="host")] * 32, on_cpu], 2)
    wide = make_search(problem, start, 3000)
    wide.run()
    assert any(unit.residual_point == 1 for unit in wide.units)
    monkeypatch.setattr(Search, "_widen", lambda self: False)
    narrow = make_search(problem, start, 3000)
    narrow.run()
    assert wide.step_ms < 0.985 * narrow.step_ms
