"""The planner where embed and head are streamed: memory, validation, and what the model and the simulator say."""

import random
from dataclasses import replace

import pytest
from test_solver_planning import AGREEMENT, all_plans, model_step_ms

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.choices import list_block_plans, list_lanes, make_unit_plan
from lazytrain.solver.costs import problem_from_shapes
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.greedy import make_greedy_plan
from lazytrain.solver.hardware import load_hardware
from lazytrain.solver.memory import account, align, find_shortage
from lazytrain.solver.milp import build_milp
from lazytrain.solver.models import load_shapes
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate, simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

GIB = 1 << 30
RESIDENT = UnitPlan()
ON_CPU = UnitPlan(states="host", update="cpu", grads="host")
STREAMED = UnitPlan(weights="host", states="host", grads="host")
STREAMED_ON_CPU = replace(STREAMED, update="cpu")


def make_problem(seed: int, *, tied: bool = False, num_blocks: int = 3) -> Problem:
    problem = make_toy_problem(seed, num_blocks=num_blocks)
    roomy = replace(problem.hardware, device_memory_bytes=1 << 44, host_memory_bytes=1 << 45)
    return replace(problem, hardware=roomy, tied=tied)


def with_ends(problem: Problem, embed: UnitPlan, head: UnitPlan) -> Plan:
    return make_plan(problem, [embed, *[STREAMED] * len(problem.blocks), head], 2)


def peak(problem: Problem, embed: UnitPlan, head: UnitPlan) -> int:
    return account(problem, with_ends(problem, embed, head)).device_peak_bytes


@pytest.mark.parametrize("seed", range(4))
def test_two_streamed_edges_need_one_slot_of_the_larger(seed: int) -> None:
    problem = make_problem(seed)
    embed, head = align(problem.embed.weight_bytes), align(problem.head.weight_bytes)
    resident = peak(problem, ON_CPU, ON_CPU)
    assert resident - peak(problem, STREAMED_ON_CPU, STREAMED_ON_CPU) == min(embed, head)
    for alone in ((STREAMED_ON_CPU, ON_CPU), (ON_CPU, STREAMED_ON_CPU)):
        assert peak(problem, *alone) == resident


def test_the_ring_of_blocks_is_not_sized_by_streamed_edges() -> None:
    problem = make_problem(1)
    large = replace(
        problem, embed=replace(problem.embed, weight_bytes=8 * GIB), head=replace(problem.head, num_params=0)
    )
    assert peak(large, STREAMED_ON_CPU, RESIDENT) == peak(large, ON_CPU, RESIDENT)


@pytest.mark.parametrize(
    ("ends", "change", "unit"),
    [
        ((RESIDENT, STREAMED), {"tied": True}, "head"),
        ((STREAMED, RESIDENT), {"allow_streamed_embed": False}, "embed"),
        ((replace(STREAMED, weights="nvme"), RESIDENT), {"allow_nvme": True}, "embed"),
        ((RESIDENT, replace(STREAMED, weights="nvme")), {"allow_nvme": True}, "head"),
    ],
)
def test_edges_that_cannot_be_streamed_are_refused_and_never_offered(
    ends: tuple[UnitPlan, UnitPlan], change: dict[str, bool], unit: str
) -> None:
    problem = replace(make_problem(1), **change)
    with pytest.raises(PlannerError, match=f"{unit}.*weights"):
        with_ends(problem, *ends).validate(problem)
    for u, plan in ((0, ends[0]), (len(problem.blocks) + 1, ends[1])):
        offered = [make_unit_plan(lane) for lane in list_lanes(problem, u)]
        assert (plan in offered) == (plan == RESIDENT)


def test_head_and_embed_take_turns_in_their_slot() -> None:
    problem = make_problem(1)
    played = simulate(problem, make_plan(problem, [STREAMED, *[RESIDENT] * 3, STREAMED], 2))
    at = {(event.name, event.unit): event for event in played.timeline}
    used = at["embed", "embed"], at["store weights", "embed"]
    assert at["load weights", "head"].start_ms >= max(event.end_ms for event in used)
    left = at["head", "head"], at["store weights", "head"]
    assert at["load weights", "embed"].start_ms >= max(event.end_ms for event in left), "loaded for the next step"
    moved = sum(u.weight_bytes + u.state_bytes + u.grad_bytes for u in (problem.embed, problem.head))
    assert played.moved_bytes["h2d"] == played.moved_bytes["d2h"] == moved


def test_weights_of_an_edge_that_has_the_slot_alone_come_only_after_a_cpu_update() -> None:
    problem = make_problem(1, tied=True)
    for embed, num_bytes in ((STREAMED, 0), (STREAMED_ON_CPU, problem.embed.weight_bytes)):
        played = simulate(problem, make_plan(problem, [embed, *[RESIDENT] * 3, RESIDENT], 2))
        states = problem.embed.state_bytes + problem.embed.grad_bytes if embed.moves_states else 0
        assert played.moved_bytes["h2d"] == states + num_bytes


@pytest.mark.parametrize("seed", range(24))
def test_model_and_simulator_agree_where_edges_stream(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_toy_problem(
        seed, num_blocks=rng.randint(1, 5), allow_nvme=seed % 3 == 1, device_is_host=seed % 6 == 0
    )
    slow = (problem.hardware, replace(problem.hardware, d2h_gbs=1.0), replace(problem.hardware, h2d_gbs=2.0))
    hardware = replace(slow[seed % 3], device_memory_bytes=1 << 44, host_memory_bytes=1 << 45, nvme_bytes=1 << 44)
    problem = replace(problem, hardware=hardware, tied=seed % 4 == 3)
    last = len(problem.units) - 1
    for _ in range(4):
        units = [rng.choice(list(list_block_plans(problem, i))) for i in range(len(problem.blocks))]
        if rng.random() < 0.4:
            units = [RESIDENT] * len(units)
        ends = [[lane for lane in list_lanes(problem, u) if lane.is_streamed] for u in (0, last)]
        embed, head = (make_unit_plan(rng.choice(lanes)) if lanes else RESIDENT for lanes in ends)
        plan = make_plan(problem, [embed, *units, head], rng.choice((2, 3)))
        step_ms = simulate_step_ms(problem, plan)
        milp = build_milp(problem, prefetch_depth=plan.prefetch_depth, horizon_ms=10 * step_ms)
        assert model_step_ms(milp, plan) == pytest.approx(step_ms, rel=AGREEMENT)


@pytest.mark.parametrize("seed", range(4))
def test_milp_equals_brute_force_where_only_streamed_edges_fit(seed: int) -> None:
    problem = replace(make_problem(seed, num_blocks=1), allow_residuals=False, prefetch_depths=(2,))
    resident = replace(problem, allow_streamed_embed=False, allow_streamed_head=False)
    least = min(account(problem, plan).device_peak_bytes for plan in all_plans(resident))
    hardware = replace(problem.hardware, device_memory_bytes=least - 1)
    problem = replace(problem, hardware=hardware)
    fitting = [plan for plan in all_plans(problem) if not find_shortage(problem, account(problem, plan))]
    assert fitting
    result = solve(problem, gap=0.0).plan
    assert result is not None
    assert result.predicted is not None
    best_ms = min(simulate_step_ms(problem, plan) for plan in fitting)
    assert result.predicted.step_ms == pytest.approx(best_ms, rel=AGREEMENT)


def test_stores_of_states_hold_nobody_where_no_grads_are_stored() -> None:
    """The first block waits for stores of grads, not for whatever the link still sends home."""
    problem = make_problem(1089, num_blocks=3)
    problem = replace(problem, hardware=replace(problem.hardware, d2h_gbs=1.0))
    plan = make_plan(problem, [*[RESIDENT] * 4, UnitPlan(states="host")], 2)
    step_ms = simulate_step_ms(problem, plan)
    milp = build_milp(problem, prefetch_depth=2, horizon_ms=10 * step_ms)
    assert model_step_ms(milp, plan) == pytest.approx(step_ms, rel=AGREEMENT)


def make_8b(gpu_gib: float) -> Problem:
    """Return the problem of an untied 8B model, whose embed and head hold a GiB each."""
    name, shapes = load_shapes("llama-3-8b")
    hardware = replace(load_hardware("h200"), device_memory_bytes=int(gpu_gib * GIB))
    return problem_from_shapes(shapes, hardware, batch=8, seq=1024, microbatch=1, name=name)


def test_an_8b_model_fits_where_only_streamed_edges_do() -> None:
    problem = make_8b(5.25)
    result = solve(problem, time_limit_s=5.0)
    assert result.plan is not None
    assert result.plan.embed.weights == result.plan.head.weights == "host"
    assert make_greedy_plan(Evaluator(problem), Deadline(30.0)) is not None
    assert "recompute_all" in {baseline.name for baseline in list_baselines(problem, with_greedy=False)}
    refused = solve(replace(problem, allow_streamed_embed=False))
    assert refused.code == "infeasible"
    roomy = make_8b(60.0)
    plan = solve(roomy, time_limit_s=5.0).plan
    assert plan is not None
    assert plan.embed.weights == plan.head.weights == "device", "where there is room nobody streams"
