"""Boundaries that are computed again: the order of the backward sweep, its time, its copies and its memory."""

from dataclasses import replace

import pytest
from test_solver_edges import ON_CPU, RESIDENT, STREAMED_ON_CPU, make_problem

from lazytrain.solver.errors import PlannerError
from lazytrain.solver.fixed_interval import make_fixed_interval_plan
from lazytrain.solver.memory import account, align, boundary_bytes
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate
from lazytrain.solver.visits import backward_visits

AGAIN = replace(STREAMED_ON_CPU, boundary="none")


def plans(blocks: list[UnitPlan]) -> tuple[Problem, Plan]:
    problem = make_problem(3, num_blocks=len(blocks))
    return problem, make_plan(problem, [ON_CPU, *blocks, ON_CPU], 2)


def test_each_run_of_lost_boundaries_goes_forward_then_backward() -> None:
    kept = STREAMED_ON_CPU
    assert backward_visits([kept] * 3) == [(2, False), (1, False), (0, False)]
    visits = backward_visits([kept, AGAIN, kept, AGAIN, AGAIN])
    assert visits == [(2, True), (3, True), (4, False), (3, False), (2, False), (0, True), (1, False), (0, False)]


def test_the_simulator_plays_what_the_executor_does() -> None:
    """The executor's counts of the same plan: test_sweep.py."""
    problem, again = plans([STREAMED_ON_CPU, AGAIN, AGAIN, AGAIN])
    _, kept = plans([STREAMED_ON_CPU] * 4)
    played, plain = simulate(problem, again), simulate(problem, kept)
    num, blocks = problem.num_microbatches, problem.blocks
    extra_ms = sum(num * unit.points[0].forward_ms for unit in blocks[:3])
    assert played.busy_ms["compute"] - plain.busy_ms["compute"] == pytest.approx(extra_ms)
    loads = sum(blocks[i].weight_bytes for i in (0, 1, 2, 3, 0, 1, 2, 3, 1, 0))
    assert played.moved_bytes["h2d"] == problem.embed.weight_bytes + loads + problem.head.weight_bytes


def test_a_repeated_forward_has_no_updates_on_the_cpu_beside_it() -> None:
    problem, again = plans([STREAMED_ON_CPU, AGAIN, AGAIN, AGAIN])
    _, kept = plans([STREAMED_ON_CPU] * 4)
    points = [replace(point, quiet_forward_ms=point.forward_ms / 2) for point in problem.blocks[0].points]
    slowed = replace(problem, blocks=tuple(replace(unit, points=tuple(points)) for unit in problem.blocks))
    played, plain = simulate(slowed, again), simulate(slowed, kept)
    extra_ms = 3 * slowed.num_microbatches * points[0].quiet_forward_ms
    assert played.busy_ms["compute"] - plain.busy_ms["compute"] == pytest.approx(extra_ms)


def test_memory_counts_regained_boundaries_while_they_live() -> None:
    problem, again = plans([RESIDENT, *[replace(RESIDENT, boundary="none")] * 3])
    _, kept = plans([RESIDENT] * 4)
    lean, full = dict(account(problem, again).device), dict(account(problem, kept).device)
    size = [align(boundary_bytes(problem, unit)) for unit in problem.blocks]
    assert full["head"] - lean["head"] == sum(size[1:])
    for i in range(4):
        name = problem.blocks[i].name
        assert lean[f"backward {name}"] == full[f"backward {name}"]
        assert f"forward again {name}" in lean or i == 3


@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_first_backward_has_no_sum_of_a_block_before_it(num: int) -> None:
    """While chunk c passes, c chunks' residuals are gone, and there is what the chunks before it summed to."""
    problem = replace(plans([RESIDENT] * 4)[0], num_microbatches=num)
    last, grads = problem.blocks[-1], align(problem.blocks[-1].grad_bytes)
    sums = (0, grads, grads + align(4 * last.num_params))[:num]  # as they are, then in fp32 beside the new ones
    keeps = replace(RESIDENT, residual_point=1, residuals="device")

    def measure(plan: UnitPlan, point: int) -> int:
        """Return what kept chunks and sums take."""
        usage = account(problem, make_plan(problem, [RESIDENT] * 4 + [plan, RESIDENT], 2))
        return dict(usage.device)[f"backward {last.name}"] - last.points[point].workspace_bytes

    def expect(chunk: int) -> int:
        return max((num - c) * chunk + total for c, total in enumerate(sums))

    boundary, residuals = align(last.boundary_bytes), align(last.points[1].residual_bytes)
    assert measure(keeps, 1) - measure(RESIDENT, 0) == expect(boundary + residuals) - expect(boundary)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([AGAIN, AGAIN, AGAIN], "first block"),
        ([replace(STREAMED_ON_CPU, boundary="host"), AGAIN, STREAMED_ON_CPU], "on the device"),
        ([STREAMED_ON_CPU, replace(AGAIN, residual_point=1, residuals="device"), AGAIN], "residuals"),
    ],
)
def test_plans_that_lose_a_boundary_are_refused(blocks: list[UnitPlan], reason: str) -> None:
    problem, plan = plans(blocks)
    with pytest.raises(PlannerError, match=reason):
        plan.validate(problem)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_fixed_heuristic_keeps_every_nth_boundary_and_nothing_else(interval: int) -> None:
    problem = make_problem(5, num_blocks=6)
    plan = make_fixed_interval_plan(problem, interval)
    assert plan is not None
    plan.validate(problem)
    assert [i for i, block in enumerate(plan.blocks) if block.boundary != "none"] == list(range(0, 6, interval))
    assert all(block.is_streamed and block.residual_point == 0 for block in plan.blocks)
    tiny = replace(problem, hardware=replace(problem.hardware, device_memory_bytes=1))
    assert make_fixed_interval_plan(tiny, interval) is None
