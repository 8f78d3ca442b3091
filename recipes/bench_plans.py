"""The plans that the bench knows by name."""

from dataclasses import replace
from functools import lru_cache

from lazytrain.errors import ConfigError
from lazytrain.planning import Planned, solve_problem
from lazytrain.solver.baselines import Baseline, list_baselines, list_strategies
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.fixed_interval import make_fixed_interval_plan
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import Result
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate

FIXED_INTERVAL = "fixed-interval-"
OTHER_HEURISTICS = ("fill", "random_grid", "greedy")


def choose_plan(name: str, problem: Problem, *, time_limit_s: float = PLAN_SECONDS) -> Planned | None:
    """Return the plan of that name for the profiled problem; None where it does not fit.

    Args:
        time_limit_s: of the solver, for each problem that it is given.
    """
    if name == "solved":
        return solve_problem(problem, problem.without_cpu_updates(), time_limit_s=time_limit_s)
    if name == "cpu-update":
        forced = replace(problem, allow_cpu_update=True, allow_device_update=False)
        return solve_problem(forced, time_limit_s=time_limit_s)
    if name == "device-update":
        quiet = problem.without_cpu_updates()
        forced = quiet or replace(problem, allow_cpu_update=False, allow_device_update=True)
        return solve_problem(forced, time_limit_s=time_limit_s)
    heuristics = {*list_strategies(problem), *OTHER_HEURISTICS}
    if not (name.endswith(".json") or name in heuristics or _interval(name)):
        known = ", ".join(["solved", "cpu-update", "device-update", f"{FIXED_INTERVAL}N", *sorted(heuristics)])
        raise ConfigError(f"--plans: {name!r} is no plan. Name a plan.json, or of these: {known}.")
    plans = [Plan.load(name)] if name.endswith(".json") else _list_plans(name, problem)
    found = [_predict(problem, plan, name) for plan in plans]
    return min(found, key=_step_ms, default=None)


def _list_plans(name: str, problem: Problem) -> list[Plan]:
    """Return the heuristic's best plan, and its best without updates on the CPU, where copies are faster."""
    found = []
    for variant in (problem, problem.without_cpu_updates()):
        interval = _interval(name)
        if variant is not None and interval:
            found.append(make_fixed_interval_plan(variant, interval))
        elif variant is not None:
            found.append(next((b.plan for b in _list_heuristics(variant) if b.name == name), None))
    return [plan for plan in found if plan is not None]


@lru_cache(maxsize=2)  # a problem and its variant without updates on the CPU: every name of a bench asks for the same
def _list_heuristics(problem: Problem) -> tuple[Baseline, ...]:
    return tuple(list_baselines(problem))


def _step_ms(planned: Planned) -> float:
    assert planned.plan.predicted is not None
    return planned.plan.predicted.step_ms


def _predict(problem: Problem, plan: Plan, name: str) -> Planned:
    """Return the plan with its prediction for this problem, or for the one whose copies the CPU leaves alone."""
    quiet = problem.without_cpu_updates()
    suited = problem if quiet is None or any(unit.update == "cpu" for unit in plan.units) else quiet
    plan.validate(suited)
    plan = plan.with_prediction(simulate(suited, plan).predicted)
    return Planned(plan, suited, Result(plan=plan, code="feasible", message=f"{name}, as given", statistics={}))


def _interval(name: str) -> int:
    """Return N of "fixed-interval-N", or 0."""
    number = name.removeprefix(FIXED_INTERVAL)
    return int(number) if number != name and number.isdecimal() else 0
