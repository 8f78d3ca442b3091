"""Many plans at once cost what the simulator and the memory account say of each of them."""

import random
from dataclasses import replace

import pytest

from lazytrain.solver import simulator
from lazytrain.solver.choices import list_block_plans, list_lanes, make_unit_plan
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.fitting import Fitter
from lazytrain.solver.memory import account, find_shortage
from lazytrain.solver.plan import Plan, make_plan
from lazytrain.solver.pricing import Pricer
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_load, simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

AGREEMENT = 1e-9  # relative
NUM_PLANS = 25


def make_varied_problem(seed: int) -> Problem:
    """Return a toy problem in which other queues are short, with and without NVMe, a device and parameters."""
    rng = random.Random(seed)
    problem = make_toy_problem(
        seed, num_blocks=rng.randint(1, 9), num_points=3, allow_nvme=seed % 3 == 1, device_is_host=seed % 7 == 0
    )
    slow = replace(problem.hardware, d2h_gbs=1.0), replace(problem.hardware, h2d_gbs=2.0), problem.hardware
    bare = replace(problem.blocks[0], num_params=0, weight_bytes=0, state_bytes=0, grad_bytes=0)
    blocks = (bare, *problem.blocks[1:]) if seed % 5 == 0 else problem.blocks
    return replace(problem, hardware=slow[seed % 3], blocks=blocks, num_microbatches=1 + seed % 4, tied=seed % 4 == 3)


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    ends = [make_unit_plan(rng.choice(list_lanes(problem, u))) for u in (0, len(problem.units) - 1)]
    blocks = [rng.choice(list(list_block_plans(problem, i))) for i in range(len(problem.blocks))]
    return make_plan(problem, [ends[0], *blocks, ends[1]], rng.choice((2, 3, 4)))


@pytest.mark.parametrize("seed", range(30))
def test_steps_and_loads_are_the_simulators(seed: int) -> None:
    problem, rng = make_varied_problem(seed), random.Random(seed)
    plans = [random_plan(problem, rng) for _ in range(NUM_PLANS)]
    steps, loads = Pricer(problem).price([(plan.prefetch_depth, plan.units) for plan in plans])
    for i, plan in enumerate(plans):
        step_ms, loads_ms = simulate_load(problem, plan)
        assert steps[i] == pytest.approx(step_ms, rel=AGREEMENT)
        assert sorted(loads[:, i]) == pytest.approx(sorted(loads_ms), rel=AGREEMENT, abs=AGREEMENT)


@pytest.mark.parametrize("seed", [57, 72, 180])
def test_a_queue_that_falls_behind_binds_though_two_steps_took_the_same_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, rng = make_varied_problem(seed), random.Random(seed)
    problem = replace(problem, hardware=replace(problem.hardware, dram_gbs=8.0))
    plans = [random_plan(problem, rng) for _ in range(NUM_PLANS)]
    steps, _ = Pricer(problem).price([(plan.prefetch_depth, plan.units) for plan in plans])
    monkeypatch.setattr(simulator, "SETTLED", -1.0)  # none is the last
    assert steps == pytest.approx([simulate_step_ms(problem, plan) for plan in plans], rel=AGREEMENT)


@pytest.mark.parametrize("seed", range(30))
def test_peaks_and_shortages_are_the_accounts(seed: int) -> None:
    problem, rng = make_varied_problem(seed), random.Random(seed)
    plans = [random_plan(problem, rng) for _ in range(NUM_PLANS)]
    peaks, missing = Fitter(problem).measure([(plan.prefetch_depth, plan.units) for plan in plans])
    for i, plan in enumerate(plans):
        usage = account(problem, plan)
        assert peaks[i] == usage.device_peak_bytes
        assert missing[i] == sum(find_shortage(problem, usage).values())


def test_an_evaluator_says_the_same_of_few_and_of_many_and_counts_each_once() -> None:
    problem, rng = make_varied_problem(4), random.Random(4)
    plans = [random_plan(problem, rng) for _ in range(NUM_PLANS)]
    many = [(plan.prefetch_depth, plan.units) for plan in plans]
    together, one_by_one = Evaluator(problem), Evaluator(problem)
    prices = together.price([*many, *many])
    for plan, price, decisions in zip(plans, prices, many):
        assert price.step_ms == pytest.approx(simulate_step_ms(problem, plan), rel=AGREEMENT)
        assert one_by_one.price([decisions])[0] == pytest.approx(price, rel=AGREEMENT)
    assert together.num_priced == one_by_one.num_priced == len(set(many))
