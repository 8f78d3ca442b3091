"""Whatever the solver says is brought home: optimal, stopped, infeasible, nothing, not installed."""

import pytest

from lazytrain.solver import backends
from lazytrain.solver.backends import INFEASIBLE, NOTHING, OPTIMAL, STOPPED, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.toys import make_toy_problem


def make_milp(horizon_factor: float, *, num_blocks: int = 4) -> Milp:
    problem = make_toy_problem(3, num_blocks=num_blocks, num_points=3)
    best_ms = list_baselines(problem)[0].step_ms
    return build_milp(problem, prefetch_depth=2, horizon_ms=horizon_factor * best_ms)


def test_optimal_is_within_the_gap_of_the_bound() -> None:
    milp = make_milp(1.0001)
    outcome = solve_model(milp.model, Limits(gap=0.0))
    assert outcome.status == OPTIMAL
    assert outcome.x is not None
    assert outcome.x[milp.model.objective] == pytest.approx(outcome.bound, rel=1e-6)


def test_infeasible_has_no_point() -> None:
    outcome = solve_model(make_milp(0.01).model, Limits())
    assert outcome.status == INFEASIBLE
    assert outcome.x is None


def test_a_limit_leaves_a_point_or_nothing_but_no_error() -> None:
    outcome = solve_model(make_milp(1.5, num_blocks=12).model, Limits(time_s=0.01, num_nodes=1))
    assert outcome.status in (STOPPED, NOTHING, OPTIMAL)
    assert (outcome.x is None) == (outcome.status == NOTHING)


def test_a_missing_solver_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "list_solvers", lambda: ("highs",))
    with pytest.raises(SolverUnavailableError, match="pip install pyscipopt"):
        solve_model(make_milp(1.1).model, Limits())


@pytest.mark.slow
@pytest.mark.skipif("highs" not in list_solvers(), reason="HiGHS is not installed")
def test_highs_finds_the_same_optimum() -> None:
    milp = make_milp(1.0001, num_blocks=2)
    first = solve_model(milp.model, Limits(gap=0.0))
    second = solve_model(milp.model, Limits(gap=0.0, time_s=60.0), solver="highs")
    assert first.x is not None
    assert second.x is not None
    assert second.x[milp.model.objective] == pytest.approx(first.x[milp.model.objective], rel=1e-5)
