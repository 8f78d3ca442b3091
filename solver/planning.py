"""Solve a planning problem: a bound over all plans, starts of several kinds, a search that the simulator prices.

With few blocks the MILP of event times (milp.py) is solved by SCIP for every prefetch depth. With many it is too slow;
a small MILP of counts (bounds.py) says what no plan can beat and how good plans are mixed, and a local search
(search.py) works on that mix, on the best baselines and on mixes of those (mixing.py). Node and evaluation limits end
the parts, so that the same problem gives the same plan; the time limit, one deadline for all parts, is the net.

Whatever a solver says, the plan is simulated, and the answer is never worse than the best baseline.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from lazytrain.solver.backends import INFEASIBLE, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import Baseline, list_baselines
from lazytrain.solver.bounds import Bound, bound_step
from lazytrain.solver.choices import Keep, Lane
from lazytrain.solver.deadline import PLAN_SECONDS, Clock, Deadline
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.memory import Accountant
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.packing import pack
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.pursuit import HORIZON_SLACK, Pursuit
from lazytrain.solver.searching import make_fit, search
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate, simulate_step_ms
from lazytrain.solver.starts import list_arrangements
from lazytrain.solver.vectors import Decisions

FEW_BLOCKS = 8  # so few that the event times can be solved for
NUM_NODES = 200
FIRST_SEARCH_S = 5.0
MAX_ARRANGEMENTS = 150  # of a mix
LEAST_LEFT_S = 0.1
# Of the time that is left: for baselines, then for bounds.
BASELINES_SHARE, BOUNDS_SHARE = 0.4, 0.5
PROOF_SLACK = 1e-3  # the simulator and the model agree to less
# Where no baseline fits there is no known step to bound the search by.
UNKNOWN_HORIZON_FACTOR = 20.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer.

    Attributes:
        code: "optimal" (proven within the gap, among all plans), "feasible" (not proven), "fallback" (no solver, or
            nothing better than a baseline was found in time), "infeasible".
        message: for people; where infeasible, what is missing per tier and what would make it fit.
        statistics: solver, seconds, gap (of step and bound, None = no bound), bound_ms, num_nodes, num_evaluations,
            baseline and its step.
        baselines: those that fit, the fastest first.
    """

    plan: Plan | None
    code: str
    message: str
    statistics: dict[str, Any] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()


def solve(
    problem: Problem,
    *,
    time_limit_s: float = PLAN_SECONDS,
    gap: float = 0.01,
    rival_ms: float = math.inf,
    may_drop: bool = False,
    clock: Clock = time.perf_counter,
) -> Result:
    """Return the fastest plan that was found, by its simulated step.

    Args:
        time_limit_s: for everything: no step (a strategy, a bound, a batch of plans to price) starts after it. A net,
            see the head of this file.
        gap: relative; to stop when the plan is proven to be this near to the best one.
        rival_ms: the step of another problem's plan that would be taken instead: where no plan can beat it, there is no
            search.
        may_drop: where nothing else fits, take a plan that computes boundaries again, which no bound covers.
        clock: seconds, for tests.

    Never raises for an infeasible problem: `plan` is None and `message` says what is missing.

    Raises:
        PlannerError: a number in the problem that can't be.

    Example:
        >>> solve(problem).plan.predicted.step_ms
    """
    problem.validate()
    start_s = clock()
    deadline, evaluator = Deadline(time_limit_s, clock), Evaluator(problem)
    baselines = list_baselines(problem, evaluator=evaluator, deadline=deadline.part(BASELINES_SHARE))
    first = baselines[0] if baselines else None
    pursuit = Pursuit(
        problem=problem,
        evaluator=evaluator,
        deadline=deadline,
        best=first.plan if first else None,
        best_ms=first.step_ms if first else _unknown_horizon(problem),
        source=f"fallback:{first.name}" if first else "",
        solvers=list_solvers(),
    )
    solver = pursuit.solvers[0] if pursuit.solvers else "none"
    starts = _list_mixed(pursuit)
    if pursuit.best is None:
        make_fit(pursuit, starts)
    is_packed = pursuit.best is None and not deadline.is_over
    if is_packed:
        _take_packed(pursuit, may_drop)
    is_dropping = pursuit.best is not None and pursuit.best.drops_boundaries
    is_beaten = is_dropping or (pursuit.bound_ms is not None and pursuit.bound_ms >= rival_ms)
    if len(problem.blocks) <= FEW_BLOCKS and not is_beaten:
        _solve_exactly(pursuit, gap)
    if not is_beaten and (pursuit.gap is None or pursuit.gap > gap):
        search(pursuit, starts, baselines)
    seconds = clock() - start_s
    if pursuit.best is None:
        message = explain_infeasible(problem)
        if not is_packed:
            message = f"{time_limit_s:g} s ended before all was tried: raise the time limit. Else {message}"
        return Result(plan=None, code="infeasible", message=message, statistics={"seconds": seconds})
    return _finish(pursuit, baselines, solver, seconds, gap)


def use_slack(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with as many chunks' offloads under way as there is memory for, up to all chunks of a block.

    The simulator moves all chunks of a block as one, and lets one block's be under way.
    """
    accountant, counts = Accountant(problem), range(plan.chunks_behind + 1, plan.num_microbatches + 1)
    # What is needed grows with the count.
    num_fitting = bisect_left(counts, True, key=lambda n: not accountant.fits(replace(plan, chunks_behind=n)))
    return replace(plan, chunks_behind=plan.chunks_behind + num_fitting)


def _take_packed(pursuit: Pursuit, may_drop: bool) -> None:
    """Take a plan that memory was filled for, where one fits."""
    plan = pack(pursuit.problem, may_drop=may_drop)
    if plan is None:
        return
    pursuit.take(plan, simulate_step_ms(pursuit.problem, plan), "packed")
    if plan.drops_boundaries:
        pursuit.bounds_ms.clear()


def _finish(pursuit: Pursuit, baselines: list[Baseline], solver: str, seconds: float, gap: float) -> Result:
    assert pursuit.best is not None
    first, relative = (baselines[0] if baselines else None), pursuit.gap
    statistics: dict[str, Any] = {
        "solver": solver,
        "source": pursuit.source,
        "seconds": round(seconds, 3),
        "gap": relative,
        "bound_ms": None if relative is None else round(min(pursuit.bounds_ms.values()), 3),
        "num_nodes": pursuit.num_nodes,
        "num_evaluations": pursuit.evaluator.num_priced,
        "baseline": first.name if first else None,
        "baseline_ms": first.step_ms if first else None,
    }
    if pursuit.notes:
        statistics["notes"] = pursuit.notes
    is_proven = relative is not None and relative <= gap + PROOF_SLACK
    is_fallback = solver == "none" or pursuit.source.startswith("fallback")
    code = "optimal" if is_proven else "fallback" if is_fallback else "feasible"
    statistics["status"] = code
    plan = use_slack(pursuit.problem, pursuit.best)
    plan = plan.with_prediction(simulate(pursuit.problem, plan).predicted, **statistics)
    text = "no proven bound" if relative is None else f"no plan can be more than {relative:.1%} faster"
    message = f"{pursuit.source}, {text}, {seconds:.1f} s"
    return Result(plan=plan, code=code, message=message, statistics=statistics, baselines=tuple(baselines))


def _list_mixed(pursuit: Pursuit) -> list[Decisions]:
    """Bound the step of every prefetch depth; return the best plans, by depth, that are mixed like the optimum."""
    problem, plans = pursuit.problem, list[Decisions]()
    bounds = pursuit.deadline.part(BOUNDS_SHARE)
    for depth in problem.prefetch_depths:
        bound = _bound(pursuit, problem, depth, bounds)
        if bound is None:
            return plans
        pursuit.bounds_ms[depth] = bound.bound_ms
        mixes = [bound.mix]
        if not bounds.is_over and any(
            lane.is_streamed for kind in (*bound.mix[:1], *bound.mix[-1:]) for lane, _ in kind.lanes
        ):
            # The sums know little of when the link is busy: what they say with embed and head resident may be better.
            less = replace(problem, allow_streamed_embed=False, allow_streamed_head=False)
            other = _bound(pursuit, less, depth, bounds)
            mixes += [other.mix] if other is not None else []
        for mix in filter(None, mixes):
            if pursuit.deadline.is_over:
                return plans
            orders = [(depth, plan.units) for plan in islice(list_arrangements(problem, mix, depth), MAX_ARRANGEMENTS)]
            missing = [need.missing_bytes for need in pursuit.evaluator.measure(orders)]
            nearest = [plan for plan, num_bytes in zip(orders, missing, strict=True) if num_bytes == min(missing)]
            prices = pursuit.evaluator.price(nearest)
            plans.append(nearest[min(range(len(nearest)), key=lambda i: prices[i])])
    return plans


def _bound(pursuit: Pursuit, problem: Problem, depth: int, deadline: Deadline) -> Bound | None:
    """Return the bound of one prefetch depth; None without a solver or without time."""
    if pursuit.deadline.is_over:
        return None
    return _with_solver(pursuit, lambda solver: bound_step(problem, depth, solver=solver, time_s=deadline.left_s))


def _solve_exactly(pursuit: Pursuit, gap: float) -> None:
    """Solve the event times of every prefetch depth; keep what is better by the simulator's word."""
    problem = pursuit.problem
    for depth in problem.prefetch_depths:
        if pursuit.deadline.is_over:
            return
        milp = build_milp(problem, prefetch_depth=depth, horizon_ms=pursuit.best_ms * (1 + HORIZON_SLACK))
        start = None
        if pursuit.best is not None and pursuit.best.prefetch_depth == depth:
            start = _point_of(milp, pursuit.best)
        time_s = min(pursuit.deadline.left_s, FIRST_SEARCH_S)
        limits = Limits(time_s=max(time_s, LEAST_LEFT_S), gap=gap, num_nodes=NUM_NODES)
        outcome = _with_solver(
            pursuit,
            lambda solver, milp=milp, limits=limits, start=start: solve_model(  # type: ignore[misc]
                milp.model, limits, solver=solver, start=start
            ),
        )
        if outcome is None:
            return
        pursuit.num_nodes += outcome.num_nodes
        pursuit.notes.append(f"depth {depth}: {outcome.status} in {outcome.seconds:.2f} s")
        bound_ms = pursuit.best_ms if outcome.status == INFEASIBLE else outcome.bound
        if math.isfinite(bound_ms):
            pursuit.bounds_ms[depth] = max(bound_ms, pursuit.bounds_ms.get(depth, 0.0))
        if outcome.x is not None:
            plan = milp.read(outcome.x)
            if Accountant(problem).fits(plan):
                pursuit.take(plan, simulate_step_ms(problem, plan), "milp")


def _with_solver(pursuit: Pursuit, run: Callable[[str], T]) -> T | None:
    """Run something with the preferred solver, or the next one where it breaks down; None if none is left."""
    while pursuit.solvers:
        try:
            return run(pursuit.solvers[0])
        except SolverUnavailableError as error:
            pursuit.notes.append(str(error))
            pursuit.solvers = pursuit.solvers[1:]
    return None


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
