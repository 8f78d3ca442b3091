"""Plans that memory is filled for: they fit, wherever a fixed rule does, or a plan picked at random."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from lazytrain.solver.baselines import fits_strategy, list_strategies
from lazytrain.solver.bounds import may_fit
from lazytrain.solver.choices import list_lanes, make_unit_plan
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.fitting import Fitter
from lazytrain.solver.fixed_interval import fits_fixed_interval
from lazytrain.solver.hardware import PRESETS
from lazytrain.solver.memory import GIB, Accountant, account
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.packing import _stretch, pack
from lazytrain.solver.plan import DEVICE, NONE, make_plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

SEEDS = range(12)
NUM_FILLED = 20


def make_problem(seed: int, *, num_blocks: int, device: float, host: float, chunks: int = 2) -> Problem:
    """Return a problem whose tiers hold shares of what the plan that recomputes all on the device needs."""
    problem = replace(make_toy_problem(seed, num_blocks=num_blocks), num_microbatches=chunks, allow_nvme=False)
    problem = replace(problem, blocks=(problem.blocks[0],) * num_blocks)
    units = [make_unit_plan(list_lanes(problem, u)[0]) for u in range(num_blocks + 2)]
    usage = account(problem, make_plan(problem, units, 2))
    all_bytes = usage.device_peak_bytes + usage.host_bytes
    hardware = replace(
        problem.hardware, device_memory_bytes=int(device * all_bytes), host_memory_bytes=max(1, int(host * all_bytes))
    )
    return replace(problem, hardware=hardware)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_packed_fits_and_no_fixed_rule_fits_where_nothing_is(seed: int) -> None:
    rng = random.Random(seed)
    device, host = rng.uniform(0.2, 0.9), rng.uniform(0.0, 0.8)
    problem = make_problem(seed, num_blocks=9, device=device, host=host, chunks=1 + seed % 3)
    plan = pack(problem, may_drop=True)
    if plan is None:
        assert not any(fits_strategy(problem, name) for name in list_strategies(problem))
        assert not fits_fixed_interval(problem, 4)
    else:
        plan.validate(problem)
        assert Accountant(problem).fits(plan)
        assert may_fit(problem, 2), "the rows of memory leave every plan that fits"


def test_memory_that_some_plan_fills_to_the_brim_is_filled_as_well() -> None:
    found = []
    for seed in range(NUM_FILLED):
        rng, problem = random.Random(seed), make_problem(seed, num_blocks=9, device=1.0, host=1.0)
        units = [
            make_unit_plan(rng.choice(list_lanes(problem, u)), boundary=rng.choice((DEVICE, "host"))) for u in range(11)
        ]
        ends = [replace(units[u], boundary=DEVICE) for u in (0, -1)]
        usage = account(problem, make_plan(problem, [ends[0], *units[1:-1], ends[1]], 2))
        hardware = replace(
            problem.hardware, device_memory_bytes=usage.device_peak_bytes, host_memory_bytes=usage.host_bytes
        )
        found.append(pack(replace(problem, hardware=hardware)) is not None)
    assert all(found)


def test_boundaries_are_dropped_only_where_nothing_else_fits() -> None:
    hardware = replace(PRESETS["h200"], device_memory_bytes=24 * GIB)

    def make(batch: int) -> Problem:
        return problem_from_config(KNOWN_MODELS["qwen2.5-14b"], hardware, batch=batch, seq=1024, microbatch=batch)

    large, small = make(60), make(33)
    assert solve(large).plan is None
    answer = solve(large, may_drop=True)
    assert answer.plan is not None
    assert answer.plan.drops_boundaries
    assert answer.code == "feasible"
    assert answer.statistics["gap"] is None, "no bound covers such plans"
    assert answer.plan.predicted is not None
    assert answer.plan.predicted.step_ms == simulate_step_ms(large, answer.plan)
    assert Accountant(large).fits(answer.plan)
    hurried = solve(large, may_drop=True, time_limit_s=1e-6)
    assert hurried.plan is None
    assert "raise the time limit" in hurried.message, "more memory is not what it lacks"
    kept = solve(small, may_drop=True, rival_ms=0.0).plan
    assert kept is not None
    assert not kept.drops_boundaries


@pytest.mark.parametrize(("count", "length"), [(0, 0), (5, 0), (5, 1), (6, 2), (11, 3), (1, 4), (40, 6)])
def test_stretches_begin_with_a_boundary_and_are_longer_the_later_backward_meets_them(count: int, length: int) -> None:
    places = _stretch(count, length)
    assert len(places) == count
    starts = [i for i, place in enumerate(places) if place == DEVICE] + [count]
    sizes = [b - a for a, b in pairwise(starts)]
    assert not places or starts[0] == 0
    if length:
        assert sizes[1:] == list(range(length + len(sizes) - 2, length - 1, -1))
        assert len(sizes) == 0 or sizes[0] <= length + len(sizes) - 1
    else:
        assert NONE not in places


@pytest.mark.parametrize("seed", SEEDS)
def test_vectors_count_boundaries_that_are_computed_again(seed: int) -> None:
    problem = make_problem(seed, num_blocks=8, device=1.0, host=1.0, chunks=1 + seed % 3)
    rng, plans = random.Random(seed), []
    for _ in range(20):
        lanes = [rng.choice(list_lanes(problem, u)) for u in range(10)]
        places = [rng.choice((DEVICE, "host")) for _ in range(8 - 5)] + _stretch(5, rng.randrange(4))
        blocks = [make_unit_plan(lane, boundary=place) for lane, place in zip(lanes[1:-1], places, strict=True)]
        plans.append(make_plan(problem, [make_unit_plan(lanes[0]), *blocks, make_unit_plan(lanes[-1])], 2))
    peaks, _ = Fitter(problem).measure([(plan.prefetch_depth, plan.units) for plan in plans])
    assert peaks.tolist() == [account(problem, plan).device_peak_bytes for plan in plans]
