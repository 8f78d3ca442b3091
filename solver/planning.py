"""Solve a planning problem: a bound over all plans, starts of several kinds, a search that the simulator prices.

With few blocks the MILP of event times (milp.py) is solved by SCIP for every prefetch depth. With many it is too slow;
a small MILP of counts (bounds.py) says what no plan can beat and how good plans are mixed, and a local search
(search.py) works on that mix and on the best baselines. Node and evaluation limits end the parts, so that the same
problem gives the same plan; the time limit is the net.

Whatever a solver says, the plan is simulated, and the answer is never worse than the best baseline.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from lazytrain.solver.backends import INFEASIBLE, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import Baseline, list_baselines
from lazytrain.solver.bounds import bound_step
from lazytrain.solver.choices import Keep, Lane
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.memory import Accountant, find_shortage
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Search
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate, simulate_step_ms
from lazytrain.solver.starts import list_arrangements
from lazytrain.solver.tidying import tidy

FEW_BLOCKS = 8  # so few that the event times can be solved for
NUM_NODES = 200
FIRST_SEARCH_S = 5.0
FIRST_EVALUATIONS, MORE_EVALUATIONS, TIDY_EVALUATIONS = 400, 1500, 300
MAX_STARTS = 4  # that are searched from
MAX_ARRANGEMENTS = 150  # of a mix
LEAST_LEFT_S = 0.1
HORIZON_SLACK = 1e-6
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


@dataclass(kw_only=True)
class _Pursuit:
    """The best plan so far, and what was done."""

    problem: Problem
    deadline_s: float
    best: Plan | None
    best_ms: float
    source: str
    solvers: tuple[str, ...]
    bounds_ms: dict[int, float] = field(default_factory=dict)  # by prefetch depth
    num_nodes: int = 0
    num_evaluations: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Return the time that is left."""
        return self.deadline_s - time.perf_counter()

    @property
    def bound_ms(self) -> float | None:
        """Return what no plan's step is shorter than; None where a bound is missing."""
        if set(self.bounds_ms) < set(self.problem.prefetch_depths):
            return None
        return min(self.bounds_ms.values())

    @property
    def gap(self) -> float | None:
        """Return how much shorter than the best plan's a step might be, relatively; None without a bound."""
        if self.best is None or self.bound_ms is None:
            return None
        return max(0.0, 1 - self.bound_ms / self.best_ms)

    def take(self, plan: Plan, step_ms: float, source: str) -> None:
        """Keep a plan that fits, if its simulated step is shorter (or as short, where only a baseline is known)."""
        slack = 1 + HORIZON_SLACK if self.source.startswith("fallback") else 1 - HORIZON_SLACK
        if self.best is None or step_ms <= self.best_ms * slack:
            self.best, self.best_ms, self.source = plan, step_ms, source


def solve(problem: Problem, *, time_limit_s: float = 10.0, gap: float = 0.01, rival_ms: float = math.inf) -> Result:
    """Return the fastest plan that was found, by its simulated step.

    Args:
        time_limit_s: for everything but the baselines; a net, see the head of this file.
        gap: relative; to stop when the plan is proven to be this near to the best one.
        rival_ms: the step of another problem's plan that would be taken instead: where no plan can beat it, there is no
            search.

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
    pursuit = _Pursuit(
        problem=problem,
        deadline_s=time.perf_counter() + time_limit_s,
        best=first.plan if first else None,
        best_ms=first.step_ms if first else _unknown_horizon(problem),
        source=f"fallback:{first.name}" if first else "",
        solvers=list_solvers(),
    )
    solver = pursuit.solvers[0] if pursuit.solvers else "none"
    if pursuit.left_s > LEAST_LEFT_S:
        starts = _list_mixed(pursuit)
        if pursuit.best is None:
            _make_fit(pursuit, starts)
        is_beaten = pursuit.bound_ms is not None and pursuit.bound_ms >= rival_ms
        if len(problem.blocks) <= FEW_BLOCKS and not is_beaten:
            _solve_exactly(pursuit, gap)
        if not is_beaten and (pursuit.gap is None or pursuit.gap > gap):
            _search(pursuit, starts, baselines)
    seconds = time.perf_counter() - start_s
    if pursuit.best is None:
        return Result(
            plan=None, code="infeasible", message=explain_infeasible(problem), statistics={"seconds": seconds}
        )
    return _finish(pursuit, baselines, solver, seconds, gap)


def _finish(pursuit: _Pursuit, baselines: list[Baseline], solver: str, seconds: float, gap: float) -> Result:
    assert pursuit.best is not None
    first, relative = (baselines[0] if baselines else None), pursuit.gap
    statistics: dict[str, Any] = {
        "solver": solver,
        "source": pursuit.source,
        "seconds": round(seconds, 3),
        "gap": relative,
        "bound_ms": None if relative is None else round(min(pursuit.bounds_ms.values()), 3),
        "num_nodes": pursuit.num_nodes,
        "num_evaluations": pursuit.num_evaluations,
        "baseline": first.name if first else None,
        "baseline_ms": first.step_ms if first else None,
    }
    if pursuit.notes:
        statistics["notes"] = pursuit.notes
    is_proven = relative is not None and relative <= gap + PROOF_SLACK
    is_fallback = solver == "none" or pursuit.source.startswith("fallback")
    code = "optimal" if is_proven else "fallback" if is_fallback else "feasible"
    statistics["status"] = code
    plan = pursuit.best.with_prediction(simulate(pursuit.problem, pursuit.best).predicted, **statistics)
    text = "no proven bound" if relative is None else f"no plan can be more than {relative:.1%} faster"
    message = f"{pursuit.source}, {text}, {seconds:.1f} s"
    return Result(plan=plan, code=code, message=message, statistics=statistics, baselines=tuple(baselines))


def _list_mixed(pursuit: _Pursuit) -> list[Plan]:
    """Bound the step of every prefetch depth; return the best plans, by depth, that are mixed like the optimum."""
    plans: list[Plan] = []
    accountant = Accountant(pursuit.problem)
    for depth in pursuit.problem.prefetch_depths:
        bound = _with_solver(pursuit, lambda solver, depth=depth: bound_step(pursuit.problem, depth, solver=solver))  # type: ignore[misc]
        if bound is None:
            return plans
        pursuit.bounds_ms[depth] = bound.bound_ms
        mixes = [bound.mix]
        if any(lane.is_streamed for kind in (*bound.mix[:1], *bound.mix[-1:]) for lane, _ in kind.lanes):
            # The sums know little of when the link is busy: what they say with embed and head resident may be better.
            less = replace(pursuit.problem, allow_streamed_embed=False, allow_streamed_head=False)
            other = _with_solver(pursuit, lambda solver, depth=depth, less=less: bound_step(less, depth, solver=solver))  # type: ignore[misc]
            mixes += [other.mix] if other is not None else []
        for mix in filter(None, mixes):
            orders = list(islice(list_arrangements(pursuit.problem, mix, depth), MAX_ARRANGEMENTS))
            missing = [sum(find_shortage(pursuit.problem, accountant.account(plan)).values()) for plan in orders]
            nearest = [plan for plan, num_bytes in zip(orders, missing, strict=True) if num_bytes == min(missing)]
            plans.append(min(nearest, key=lambda plan: simulate_step_ms(pursuit.problem, plan)))
            pursuit.num_evaluations += len(nearest)
    return plans


def _make_fit(pursuit: _Pursuit, starts: list[Plan]) -> None:
    """Change the starts until they fit: a plan, and a step to bound the others by, where no baseline is one."""
    for plan in starts:
        search = Search(pursuit.problem, plan, num_evaluations=FIRST_EVALUATIONS, deadline_s=pursuit.deadline_s)
        if search.make_fit():
            pursuit.take(search.plan, search.step_ms, "search")
        pursuit.num_evaluations += search.num_evaluations


def _search(pursuit: _Pursuit, starts: list[Plan], baselines: list[Baseline]) -> None:
    """Search from each start for a while, then on where it was not at its end, the two best; tidy the best plan."""
    plans = [*starts, *(baseline.plan for baseline in baselines[:2])]
    plans += [pursuit.best] if pursuit.best is not None and pursuit.best not in plans else []
    searches = []
    for plan in plans:
        search = Search(pursuit.problem, plan, num_evaluations=FIRST_EVALUATIONS, deadline_s=pursuit.deadline_s)
        if search.make_fit():
            searches.append(search)
    chosen = sorted(searches, key=lambda search: search.step_ms)[:MAX_STARTS]
    searches = [search for search in searches if search in chosen]  # mixes first: they gain more
    for search in searches:
        search.run()
    searches.sort(key=lambda search: search.step_ms)
    for search in [search for search in searches if search.left <= 0][:2]:
        search.left = MORE_EVALUATIONS
        search.run()
    pursuit.num_evaluations += sum(search.num_evaluations for search in searches)
    if searches:
        best = min(searches, key=lambda search: search.step_ms)
        best.left = TIDY_EVALUATIONS
        tidy(best)
        pursuit.take(best.plan, best.step_ms, "search")


def _solve_exactly(pursuit: _Pursuit, gap: float) -> None:
    """Solve the event times of every prefetch depth; keep what is better by the simulator's word."""
    problem = pursuit.problem
    for depth in problem.prefetch_depths:
        milp = build_milp(problem, prefetch_depth=depth, horizon_ms=pursuit.best_ms * (1 + HORIZON_SLACK))
        start = None
        if pursuit.best is not None and pursuit.best.prefetch_depth == depth:
            start = _point_of(milp, pursuit.best)
        limits = Limits(time_s=min(max(pursuit.left_s, LEAST_LEFT_S), FIRST_SEARCH_S), gap=gap, num_nodes=NUM_NODES)
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


def _with_solver(pursuit: _Pursuit, run: Callable[[str], T]) -> T | None:
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
