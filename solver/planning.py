"""Solve a planning problem: the best baseline as start, the MILP by SCIP, the simulator as referee.

Blocks at distance `period` take equal decisions (but for the first two and the last three), which breaks the symmetry
of many equal blocks; periods 1, 2, 4 and every prefetch depth are tried, each from the best plan known so far. Whatever
the solver says, the plan is simulated, and the answer is never worse than the best baseline.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lazytrain.solver.backends import INFEASIBLE, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import Baseline, fits, list_baselines
from lazytrain.solver.choices import Keep, Lane, list_boundaries, list_lanes, make_unit_plan
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.memory import GIB, account, find_shortage
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.plan import DEVICE, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate, simulate_step_ms

PERIODS = (1, 2, 4)
FEW_BLOCKS = 8  # so few that no tie is needed
NUM_NODES = 200
FIRST_SEARCH_S = 5.0
HORIZON_SLACK = 1e-6
PROOF_SLACK = 1e-3  # the simulator and the model agree to less
# Where no baseline fits there is no known step to bound the search by.
UNKNOWN_HORIZON_FACTOR = 20.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer.

    Attributes:
        code: "optimal" (proven within the gap, among the tied plans), "feasible" (a limit was hit first),
            "fallback" (a baseline: no solver, or nothing better was found), "infeasible".
        message: for people; where infeasible, what is missing per tier and what would make it fit.
        statistics: solver, seconds, gap, bound_ms, num_nodes, baseline and its step.
        baselines: those that fit, the fastest first.
    """

    plan: Plan | None
    code: str
    message: str
    statistics: dict[str, Any] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()


@dataclass(kw_only=True)
class _Search:
    """The best plan so far, and what the solver did."""

    problem: Problem
    best: Plan | None
    best_ms: float
    source: str
    bounds_ms: dict[int, float] = field(default_factory=dict)  # by prefetch depth, of the loosest ties tried
    num_nodes: int = 0
    tried: list[str] = field(default_factory=list)


def solve(problem: Problem, *, time_limit_s: float = 10.0, gap: float = 0.01) -> Result:
    """Return the plan with the least simulated step among baselines and solver's plans.

    Args:
        time_limit_s: for all solver runs together, a net: node limits end them before, so that plans are reproducible.
        gap: relative; the solver stops when its plan is proven to be this near to the best tied plan.

    Never raises for an infeasible problem: `plan` is None and `message` says what is missing.

    Raises:
        PlannerError: a number in the problem that can't be.

    Example:
        >>> solve(problem).plan.predicted.step_ms
    """
    problem.validate()
    start_s = time.perf_counter()
    baselines = list_baselines(problem)
    first = baselines[0] if baselines else None
    search = _Search(
        problem=problem,
        best=first.plan if first else None,
        best_ms=first.step_ms if first else _unknown_horizon(problem),
        source=f"fallback:{first.name}" if first else "",
    )
    solvers = list_solvers()
    for period, depth in _searches(problem):
        left_s = time_limit_s - (time.perf_counter() - start_s)
        if not solvers or left_s <= 0.1:
            break
        limits = Limits(time_s=min(left_s, FIRST_SEARCH_S), gap=gap, num_nodes=NUM_NODES)
        try:
            _improve(search, period, depth, limits, solvers[0])
        except SolverUnavailableError as error:
            search.tried.append(str(error))
            solvers = solvers[1:]
    seconds = time.perf_counter() - start_s
    if search.best is None:
        return Result(
            plan=None, code="infeasible", message=explain_infeasible(problem), statistics={"seconds": seconds}
        )
    return _finish(search, baselines, solvers[0] if solvers else "none", seconds, gap)


def explain_infeasible(problem: Problem) -> str:
    """Return what the leanest plans lack, tier by tier, and what would make one of them fit."""
    options = []
    for plan in _leanest_plans(problem):
        usage = account(problem, plan)
        missing = find_shortage(problem, usage)
        if not missing:
            return "the leanest plan fits; only the search failed. Raise the time limit."
        options.append((sum(missing.values()), missing, plan))
    _, missing, plan = min(options, key=lambda option: (len(option[1]), option[0]))
    needs = ", ".join(f"{_need(num_bytes)} more {_name(tier)} memory" for tier, num_bytes in sorted(missing.items()))
    hardware = problem.hardware
    have = f"device {hardware.device_memory_bytes / GIB:.2f} GiB, host {hardware.host_memory_bytes / GIB:.2f} GiB"
    have += f", NVMe {hardware.nvme_bytes / GIB:.2f} GiB" if problem.allow_nvme else ", NVMe not allowed"
    remedies = [f"give {needs}"]
    if not problem.allow_nvme:
        remedies.append("allow NVMe (name a spill directory)")
    remedies.append("cut the step in more microbatches, or shorten the sequences")
    return f"nothing fits ({have}). The leanest plan needs {needs}. To make it fit: {'; or '.join(remedies)}."


def _leanest_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the plans without residuals whose blocks, and whose ends, share one kind of lane."""
    last = len(problem.units) - 1
    options = [list_lanes(problem, unit, is_edge=u in (0, last)) for u, unit in enumerate(problem.units)]
    for boundary in list_boundaries(problem):
        for edge in sorted({lane for u in (0, last) for lane in options[u]}):
            for lane in sorted({lane for lanes in options[1:last] for lane in lanes}):
                picked = [
                    wanted if (wanted := edge if u in (0, last) else lane) in lanes else lanes[0]
                    for u, lanes in enumerate(options)
                ]
                units = [make_unit_plan(p, boundary=boundary if 0 < u < last else DEVICE) for u, p in enumerate(picked)]
                yield make_plan(problem, units, min(problem.prefetch_depths))


def _finish(search: _Search, baselines: list[Baseline], solver: str, seconds: float, gap: float) -> Result:
    assert search.best is not None
    first = baselines[0] if baselines else None
    relative = None
    if set(search.bounds_ms) == set(search.problem.prefetch_depths):
        relative = max(0.0, 1 - min(search.bounds_ms.values()) / search.best_ms)
    statistics: dict[str, Any] = {
        "solver": solver,
        "source": search.source,
        "seconds": round(seconds, 3),
        "gap": relative,
        "num_nodes": search.num_nodes,
        "baseline": first.name if first else None,
        "baseline_ms": first.step_ms if first else None,
    }
    if search.tried:
        statistics["notes"] = search.tried
    is_proven = relative is not None and relative <= gap + PROOF_SLACK
    code = "optimal" if is_proven else "fallback" if search.source.startswith("fallback") else "feasible"
    statistics["status"] = code
    plan = search.best.with_prediction(simulate(search.problem, search.best).predicted, **statistics)
    text = "no proven bound" if relative is None else f"at most {relative:.1%} from the best tied plan"
    message = f"{search.source}, {text}, {seconds:.1f} s"
    return Result(plan=plan, code=code, message=message, statistics=statistics, baselines=tuple(baselines))


def _searches(problem: Problem) -> Iterator[tuple[int | None, int]]:
    """Yield (period, prefetch depth), the most promising first."""
    if len(problem.blocks) <= FEW_BLOCKS:
        yield from ((None, depth) for depth in problem.prefetch_depths)
        return
    for period in PERIODS:
        yield from ((period, depth) for depth in problem.prefetch_depths)


def _improve(search: _Search, period: int | None, depth: int, limits: Limits, solver: str) -> None:
    """Run the solver once from the best known plan; keep what is better, by the simulator's word."""
    problem = search.problem
    milp = build_milp(problem, prefetch_depth=depth, horizon_ms=search.best_ms * (1 + HORIZON_SLACK), period=period)
    start = None
    if search.best is not None and search.best.prefetch_depth == depth:
        start = _point_of(milp, search.best)
    outcome = solve_model(milp.model, limits, solver=solver, start=start)
    search.num_nodes += outcome.num_nodes
    label = f"period {period or 'free'}, depth {depth}: {outcome.status} in {outcome.seconds:.2f} s"
    search.tried.append(label)
    # A longer period only loosens the ties, so that its bound holds for the shorter ones too.
    if outcome.status == INFEASIBLE:
        search.bounds_ms[depth] = search.best_ms  # nothing here is better than the plan at hand
    elif math.isfinite(outcome.bound):
        search.bounds_ms[depth] = outcome.bound
    if outcome.x is None:
        return
    plan = milp.read(outcome.x)
    if not fits(problem, plan):
        search.tried.append(f"{label}: its plan does not fit by the memory account, dropped")
        return
    step_ms = simulate_step_ms(problem, plan)
    if step_ms <= search.best_ms:
        search.best, search.best_ms = plan, step_ms
        search.source = f"milp, period {period or 'free'}"


def _point_of(milp: Milp, plan: Plan) -> np.ndarray | None:
    """Return a plan's decisions as a partial point of the model (NaN = left to the solver); None if ties forbid it."""
    point = np.full(milp.model.num_vars, np.nan)
    for choice, unit in zip(milp.draft.choices, plan.units, strict=True):
        wanted = (
            (choice.lanes, Lane(unit.weights, unit.states, unit.update, unit.grads)),
            (choice.keeps, Keep(unit.residual_point, unit.residuals)),
            (choice.boundaries, unit.boundary),
        )
        for options, value in wanted:
            for option, expression in options:  # type: ignore[attr-defined]
                for index in expression.terms:
                    picked = float(option == value)
                    if not math.isnan(point[index]) and point[index] != picked:
                        return None
                    point[index] = picked
    return point


def _unknown_horizon(problem: Problem) -> float:
    """Return a step time that any sensible plan stays below: all work in a row, several times over."""
    chunks = problem.num_microbatches
    compute = sum(chunks * (unit.points[0].forward_ms + unit.points[0].backward_ms) for unit in problem.units)
    updates = sum(unit.cpu_update_ms + unit.device_update_ms for unit in problem.units)
    hardware = problem.hardware
    rates = [hardware.h2d_gbs, hardware.d2h_gbs]
    rates += [hardware.nvme_read_gbs, hardware.nvme_write_gbs] if problem.allow_nvme else []
    moved = sum(
        2 * unit.weight_bytes + unit.state_bytes + unit.grad_bytes + chunks * unit.boundary_bytes
        for unit in problem.units
    )
    copies = sum(moved / (rate * 1e6) for rate in rates)
    return UNKNOWN_HORIZON_FACTOR * (compute + updates + copies + 1.0)


def _need(num_bytes: int) -> str:
    """Return a size that is surely enough, rounded up to 0.01 GiB."""
    return f"{math.ceil(num_bytes / GIB * 100) / 100:.2f} GiB"


def _name(tier: str) -> str:
    return "NVMe" if tier == "nvme" else tier
