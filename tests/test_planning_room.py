"""Plans leave room for the allocator's fragments, unless that costs more than it saves."""

from dataclasses import replace
from typing import Any

import pytest

from lazytrain import planning
from lazytrain.planning import LIMIT_SHARE, REFILL_MS_PER_GB, ROOM_TENSORS, solve_problem
from lazytrain.solver.memory import largest_tensor_bytes
from lazytrain.solver.planning import Result, solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.toys import make_toy_problem


def with_limit(problem: Problem, device_bytes: int) -> Problem:
    return replace(problem, hardware=replace(problem.hardware, device_memory_bytes=device_bytes))


def test_the_largest_tensor_is_the_heads_sum_of_grads_in_fp32() -> None:
    problem = make_toy_problem(3)
    problem = replace(problem, head=replace(problem.head, num_params=10**9))
    assert largest_tensor_bytes(problem) == 4 * 10**9


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_leaves_room_or_is_faster_by_what_a_full_device_costs(seed: int) -> None:
    problem = make_toy_problem(seed, num_blocks=2)
    limit, room = problem.hardware.device_memory_bytes, int(ROOM_TENSORS * largest_tensor_bytes(problem))
    roomy_limit = min(limit, int(limit / LIMIT_SHARE) - room)
    planned, full = solve_problem(problem), solve(problem)
    if full.plan is None:
        assert planned is None
        return
    assert planned is not None
    assert planned.problem is problem, "limits are told as they were given"
    assert planned.plan.problem_digest == problem.digest
    assert planned.result.plan is planned.plan
    assert planned.plan.predicted is not None
    assert full.plan.predicted is not None
    missing = planned.plan.predicted.device_peak_bytes - roomy_limit
    if missing > 0:
        roomy = solve(with_limit(problem, max(1, roomy_limit)))
        if roomy.plan is not None:
            assert roomy.plan.predicted is not None
            refills_ms = REFILL_MS_PER_GB * missing / 1e9
            assert planned.plan.predicted.step_ms + refills_ms < roomy.plan.predicted.step_ms
    assert planned.plan.predicted.step_ms <= 1.01 * (full.plan.predicted.step_ms + REFILL_MS_PER_GB * room / 1e9)


@pytest.mark.parametrize("num_bytes", [-1, 0, 1])
def test_a_device_that_has_no_room_for_the_largest_tensor_fits_nothing(num_bytes: int) -> None:
    problem = make_toy_problem(2, num_blocks=2)
    assert solve_problem(with_limit(problem, largest_tensor_bytes(problem) + num_bytes)) is None


def test_hosts_own_ram_is_solved_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def watch(problem: Problem, **options: Any) -> Result:
        solved.append(problem)
        return solve(problem, **options)

    monkeypatch.setattr(planning, "solve", watch)
    problem = make_toy_problem(4, num_blocks=2, device_is_host=True)
    assert planning.solve_problem(problem) is not None
    assert solved == [problem]


def test_where_only_a_full_device_fits_it_is_filled() -> None:
    problem = make_toy_problem(2, num_blocks=2)
    leanest = problem
    while (plan := solve(leanest).plan) is not None:
        assert plan.predicted is not None
        problem, leanest = leanest, with_limit(problem, plan.predicted.device_peak_bytes - 1)
    limit = problem.hardware.device_memory_bytes
    room = int(ROOM_TENSORS * largest_tensor_bytes(problem))
    assert solve(with_limit(problem, max(1, int(limit / LIMIT_SHARE) - room))).plan is None
    planned = solve_problem(problem)
    assert planned is not None
    assert planned.plan.predicted is not None
    assert planned.plan.predicted.device_peak_bytes <= limit
