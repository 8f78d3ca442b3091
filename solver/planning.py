"""Solve a planning problem: the best baseline as start, the MILP by SCIP, the simulator as referee.

Blocks at distance `period` take equal decisions (but for the first two and the last three), which breaks the symmetry
of many equal blocks; periods 1, 2 and every prefetch depth are tried, each from the best plan known so far. A search
then loosens the ties (search.py). Whatever the solver says, the plan is simulated, and the answer is never worse than
the best baseline.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from lazytrain.solver.backends import INFEASIBLE, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import Baseline, fits, list_baselines
from lazytrain.solver.bounds import bound_step
from lazytrain.solver.choices import Keep, Lane
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Search
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate, simulate_step_ms
from lazytrain.solver.starts import list_arrangements

PERIODS = (1, 2)
FEW_BLOCKS = 8  # so few that no tie is needed
NUM_NODES = 200
FIRST_SEARCH_S = 2.0
NUM_EVALUATIONS = 2000  # of the simulator, to polish a plan
LEAST_LEFT_S = 0.1
MAX_ARRANGEMENTS, NUM_STARTS = 200, 1
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
        if not solvers or left_s <= LEAST_LEFT_S:
            break
        limits = Limits(time_s=min(left_s, FIRST_SEARCH_S), gap=gap, num_nodes=NUM_NODES)
        try:
            _improve(search, period, depth, limits, solvers[0])
        except SolverUnavailableError as error:
            search.tried.append(str(error))
            solvers = solvers[1:]
    if solvers and start_s + time_limit_s - time.perf_counter() > LEAST_LEFT_S:
        try:
            starts = _find_starts(search, solvers[0])
        except SolverUnavailableError as error:
            search.tried.append(str(error))
            starts = []
        starts = [*starts, *(baseline.plan for baseline in baselines[:1]), *([search.best] if search.best else [])]
        _polish(search, starts, start_s + time_limit_s)
    seconds = time.perf_counter() - start_s
    if search.best is None:
        return Result(
            plan=None, code="infeasible", message=explain_infeasible(problem), statistics={"seconds": seconds}
        )
    return _finish(search, baselines, solvers[0] if solvers else "none", seconds, gap)


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


def _find_starts(search: _Search, solver: str) -> list[Plan]:
    """Bound the step over all plans, and return the best plans that are mixed like the optimum of that bound."""
    starts = []
    for depth in search.problem.prefetch_depths:
        bound = bound_step(search.problem, depth, solver=solver)
        search.bounds_ms[depth] = bound.bound_ms
        plans = islice(list_arrangements(search.problem, bound.mix, depth), MAX_ARRANGEMENTS) if bound.mix else ()
        priced = [(simulate_step_ms(search.problem, plan), i, plan) for i, plan in enumerate(plans)]
        starts += [plan for _, _, plan in sorted(priced, key=lambda item: item[:2])[:NUM_STARTS]]
    return starts


def _polish(search: _Search, starts: Iterable[Plan], deadline_s: float) -> None:
    """Let the local search improve on each start; where one doesn't fit, make it fit first."""
    for plan in starts:
        local = Search(search.problem, plan, num_evaluations=NUM_EVALUATIONS, deadline_s=deadline_s)
        if not local.make_fit():
            continue
        local.run()
        if search.best is None or local.step_ms < search.best_ms * (1 - HORIZON_SLACK):
            search.best, search.best_ms, search.source = local.plan, local.step_ms, "local search"


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
