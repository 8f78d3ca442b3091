"""Mixes climb to better ones that fit, and are laid out evenly or in runs."""

from collections import Counter

import pytest

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.choices import intern_units
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.memory import Accountant
from lazytrain.solver.mixing import climb, list_mixes
from lazytrain.solver.plan import make_plan
from lazytrain.solver.simulator import simulate_step_ms
from lazytrain.solver.starts import put_in_runs, spread
from lazytrain.solver.toys import make_toy_problem


def test_spread_is_even_and_runs_are_runs() -> None:
    counts = (("a", 6), ("b", 3), ("c", 3))
    laid_out = spread(counts, 12)
    assert Counter(laid_out) == dict(counts)
    for first in range(9):
        assert 1 <= laid_out[first : first + 4].count("a") <= 3
    assert put_in_runs(counts, 12) == ["a"] * 6 + ["b"] * 3 + ["c"] * 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("allow_nvme", [False, True])
def test_a_climb_ends_with_a_plan_that_fits_and_is_no_slower(seed: int, allow_nvme: bool) -> None:
    problem = make_toy_problem(seed, num_blocks=10, num_points=3, allow_nvme=allow_nvme)
    evaluator = Evaluator(problem)
    for baseline in list_baselines(problem, num_random=3, with_greedy=False)[:2]:
        for mix in list_mixes((baseline.plan.prefetch_depth, intern_units(baseline.plan.units))):
            climbed = climb(evaluator, mix, Deadline(60.0))
            start_depth, start_units = mix.lay_out()
            fits = Accountant(problem).fits(make_plan(problem, start_units, start_depth))
            assert (climbed is not None) == fits
            if climbed is None:
                continue
            depth, units = climbed.lay_out()
            plan = make_plan(problem, units, depth)
            plan.validate(problem)
            assert Accountant(problem).fits(plan)
            before_ms = simulate_step_ms(problem, make_plan(problem, start_units, start_depth))
            assert simulate_step_ms(problem, plan) <= before_ms * (1 + 1e-9)


def test_a_climb_gains_where_its_start_is_poor() -> None:
    problem = make_toy_problem(1, num_blocks=12, num_points=3)
    worst = list_baselines(problem)[-1]
    climbed = [
        climb(Evaluator(problem), mix, Deadline(60.0))
        for mix in list_mixes((worst.plan.prefetch_depth, intern_units(worst.plan.units)))
    ]
    steps = [Evaluator(problem).price([mix.lay_out()])[0].step_ms for mix in climbed if mix is not None]
    assert min(steps) < 0.95 * worst.step_ms
