"""The plans that the bench knows by name."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from lazytrain.errors import ConfigError
from lazytrain.planning import Planned, solve_problem
from lazytrain.solver.baselines import Baseline, list_baselines, list_strategies
from lazytrain.solver.choices import RESIDENT, Lane, list_keeps, list_lanes, make_unit_plan
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.fixed_interval import make_fixed_interval_plan
from lazytrain.solver.plan import DEVICE, HOST, NVME, Plan, make_plan
from lazytrain.solver.planning import Result
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate

FIXED_INTERVAL = "fixed-interval-"
ON_NVME = {"states-on-nvme": ("states",), "all-on-nvme": ("weights", "states")}
NVME_DEPTHS = (4, 8, 12)  # each slot more spares two reads of a block's weights a step
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
    if name in ON_NVME and not problem.allow_nvme:
        raise ConfigError(f"--plans: {name!r} needs a disk. Name a directory on NVMe with --spill-dir.")
    if not (name.endswith(".json") or name in heuristics or name in ON_NVME or _interval(name)):
        known = ", ".join(
            ["solved", "cpu-update", "device-update", *ON_NVME, f"{FIXED_INTERVAL}N", *sorted(heuristics)]
        )
        raise ConfigError(f"--plans: {name!r} is no plan. Name a plan.json, or of these: {known}.")
    plans = [Plan.load(name)] if name.endswith(".json") else _list_plans(name, problem)
    found = [_predict(problem, plan, name) for plan in plans]
    return min(found, key=_step_ms, default=None)


def _list_plans(name: str, problem: Problem) -> list[Plan]:
    """Return the heuristic's best plan, and its best without updates on the CPU, where copies are faster."""
    found: list[Plan | None] = []
    for variant in (problem, problem.without_cpu_updates()):
        interval = _interval(name)
        if variant is not None and name in ON_NVME:
            found.append(make_nvme_plan(variant, ON_NVME[name]))
        elif variant is not None and interval:
            found.append(make_fixed_interval_plan(variant, interval))
        elif variant is not None:
            found.append(next((b.plan for b in _list_heuristics(variant) if b.name == name), None))
    return [plan for plan in found if plan is not None]


def make_nvme_plan(problem: Problem, wanted: Sequence[str]) -> Plan | None:
    """Return the fastest of the plans that keep all blocks' `wanted`, and nothing else of them, on NVMe.

    All blocks are treated alike, and at most half of them have a slot. Embed and head have as much of it there as may
    be and fits. None: no plan fits.

    Args:
        wanted: "states", or "weights" and "states".
    """
    last = len(problem.units) - 1
    first = next((u for u in range(1, last) if problem.units[u].num_params), 1)
    num_points = min(len(block.points) for block in problem.blocks)
    keeps = [k for k in list_keeps(problem, problem.units[first]) if k.place != NVME and k.point < num_points]
    rests = []
    for lane, keep, place in product(_list_nvme_lanes(problem, first, wanted), keeps, (DEVICE, HOST)):
        rests.append([make_unit_plan(lane if b.num_params else RESIDENT, keep, place) for b in problem.blocks])
    depths = {*problem.prefetch_depths, *(depth for depth in NVME_DEPTHS if 2 * depth <= len(problem.blocks))}
    evaluator = Evaluator(problem)
    for there in (wanted, ("states",), ()):
        edges = product(*(map(make_unit_plan, _list_nvme_lanes(problem, u, there)) for u in (0, last)))
        plans = [
            (depth, (embed, *blocks, head)) for (embed, head), blocks, depth in product(edges, rests, sorted(depths))
        ]
        fitting = [plan for plan, fits in zip(plans, evaluator.fits(plans), strict=True) if fits]
        if fitting:
            prices = evaluator.price(fitting)
            depth, units = fitting[min(range(len(fitting)), key=lambda i: prices[i])]
            return make_plan(problem, units, depth)
    return None


def _list_nvme_lanes(problem: Problem, u: int, wanted: Sequence[str]) -> list[Lane]:
    """Return a unit's lanes with exactly that on NVMe; those of a unit that has nothing, in any case.

    Updated on the device, if that is allowed: the CPU's thread reads, updates and writes in turn.
    """
    lanes = list_lanes(problem, u)
    if problem.units[u].num_params == 0:
        return list(lanes)
    found = [lane for lane in lanes if [n for n in ("weights", "states") if getattr(lane, n) == NVME] == list(wanted)]
    return [lane for lane in found if lane.update == DEVICE] or found


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
