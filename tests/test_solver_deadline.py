"""One deadline holds over all parts of a solve: no step starts after it, whatever each step takes."""

from collections.abc import Callable
from typing import Any

import pytest

from lazytrain.solver import baselines, planning, searching
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.planning import solve
from lazytrain.solver.toys import make_toy_problem

LIMIT_S = 10.0
PRICE_SHARE = 0.05  # of another step's time


class FakeClock:
    """Time passes only where a step takes some; the steps' starts are noted."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.starts: list[tuple[str, float]] = []

    def __call__(self) -> float:
        return self.now_s

    def spend(self, name: str, seconds: float, run: Callable[..., Any]) -> Callable[..., Any]:
        def spent(*args: object, **options: object) -> object:
            self.starts.append((name, self.now_s))
            self.now_s += seconds
            return run(*args, **options)

        return spent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeClock:
    """Return a clock on which bounds, models, climbs, searches and batches of prices take the given seconds."""
    clock, seconds = FakeClock(), request.param
    steps = {"bound_step": planning, "solve_model": planning, "climb": searching, "tidy": searching}
    for name, module in steps.items():
        monkeypatch.setattr(module, name, clock.spend(name, seconds, getattr(module, name)))
    monkeypatch.setattr(baselines, "make_greedy_plan", clock.spend("greedy", seconds, baselines.make_greedy_plan))
    monkeypatch.setattr(Evaluator, "price", clock.spend("price", PRICE_SHARE * seconds, Evaluator.price))
    return clock


@pytest.mark.parametrize("allow_nvme", [False, True])
@pytest.mark.parametrize("num_blocks", [6, 14])
@pytest.mark.parametrize("clock", [0.3, 1.0, 4.0, 30.0], indirect=True)
def test_no_step_starts_after_the_deadline(clock: FakeClock, num_blocks: int, allow_nvme: bool) -> None:
    problem = make_toy_problem(3, num_blocks=num_blocks, num_points=3, allow_nvme=allow_nvme)
    plan = solve(problem, time_limit_s=LIMIT_S, gap=0.0, clock=clock).plan
    late = [(name, start_s) for name, start_s in clock.starts if start_s > LIMIT_S]
    assert not late
    assert plan is not None
    assert plan.solver["seconds"] == pytest.approx(clock.now_s)


@pytest.mark.parametrize("clock", [1.0], indirect=True)
def test_every_part_gets_its_turn(clock: FakeClock) -> None:
    solve(make_toy_problem(3, num_blocks=14, num_points=3), time_limit_s=40.0, gap=0.0, clock=clock)
    assert {name for name, _ in clock.starts} >= {"price", "greedy", "bound_step", "climb", "tidy"}
