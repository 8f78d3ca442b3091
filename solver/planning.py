"""Solve a planning problem: the best baseline as start, the MILP by SCIP, the simulator as referee.

With few blocks the model is solved without ties, to the gap. With many, three moves take turns until the gap is reached
or the time is up: tied models (blocks at distance 1, 2, 4 ... decide alike, which breaks the symmetry of equal blocks),
the relaxation without ties (a bound for every plan, and a plan by rounding), and a local search with the simulator.
Node limits end the solver's runs, so that plans are reproducible; the time limit is the net.

Whatever the solver says, a plan counts only by the simulator's word, and is never worse than the best baseline.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from lazytrain.solver.backends import Limits
from lazytrain.solver.baselines import Baseline, list_baselines
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.pursuit import Pursuit, start_pursuit
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate

OPTIMAL, FEASIBLE, FALLBACK, INFEASIBLE = "optimal", "feasible", "fallback", "infeasible"
FEW_BLOCKS = 8  # so few that no ties are needed
EXACT_NODES = 5000
PERIODS = (2, 4, 3, 6)
TIED_NODES = 150
TRIALS_PER_MOVE = 300
# Where no baseline fits there is no known step to bound the search by.
UNKNOWN_HORIZON_FACTOR = 20.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer.

    Attributes:
        code: "optimal" (proven within the gap, among all plans), "feasible" (the solver helped, the proof is open),
            "fallback" (the solver is absent or said nothing in time: the best baseline, perhaps improved by the
            simulator's search), "infeasible".
        message: for people; where infeasible, what is missing per tier and what would make it fit.
        statistics: status, source, solver, seconds, gap, bound_ms, num_nodes, baselines, notes; remedies where
            infeasible.
    """

    plan: Plan | None
    code: str
    message: str
    statistics: dict[str, Any] = field(default_factory=dict)


def solve(problem: Problem, *, time_limit_s: float = 20.0, gap: float = 0.01) -> Result:
    """Return the fastest plan that was found, by its simulated step.

    Args:
        time_limit_s: for everything but the baselines; a net, see the head of this file.
        gap: relative; to stop when the plan is proven to be this near to the best one.

    Never raises for an infeasible problem: `plan` is None and `message` says what is missing.

    Raises:
        PlannerError: a number in the problem that can't be.

    Example:
        >>> solve(problem).plan.predicted.step_ms
    """
    problem.validate()
    start_s = time.perf_counter()
    baselines = list_baselines(problem)
    pursuit = start_pursuit(
        problem,
        baselines,
        gap=gap,
        deadline_s=time.perf_counter() + time_limit_s,
        horizon_ms=bound_any_step_ms(problem),
    )
    solver = pursuit.solvers[0] if pursuit.solvers else "none"
    if len(problem.blocks) <= FEW_BLOCKS:
        _pursue_exactly(pursuit)
    else:
        _pursue_with_ties(pursuit)
    seconds = time.perf_counter() - start_s
    if pursuit.best is None:
        message, remedies = explain_infeasible(problem)
        if not remedies:
            message += " (no plan was found in the time given)"
        statistics: dict[str, Any] = {"status": INFEASIBLE, "seconds": round(seconds, 3), "remedies": remedies}
        return Result(plan=None, code=INFEASIBLE, message=message, statistics=statistics)
    return _report(pursuit, pursuit.best, baselines, solver, seconds)


def bound_any_step_ms(problem: Problem) -> float:
    """Return a step time that any sensible plan stays below: all work in a row, several times over."""
    chunks, hardware = problem.num_microbatches, problem.hardware
    compute = sum(chunks * (unit.points[0].forward_ms + unit.points[0].backward_ms) for unit in problem.units)
    updates = sum(unit.cpu_update_ms + unit.device_update_ms for unit in problem.units)
    rates = [hardware.h2d_gbs, hardware.d2h_gbs, hardware.host_memory_gbs]
    rates += [hardware.nvme_read_gbs, hardware.nvme_write_gbs] if problem.allow_nvme else []
    moved = sum(
        2 * unit.weight_bytes + unit.state_bytes + unit.grad_bytes + chunks * unit.boundary_bytes
        for unit in problem.units
    )
    copies = sum(moved / (rate * 1e6) for rate in rates)
    return UNKNOWN_HORIZON_FACTOR * (compute + updates + copies + chunks * hardware.copy_latency_ms + 1.0)


def _pursue_exactly(pursuit: Pursuit) -> None:
    for depth in pursuit.problem.prefetch_depths:
        share_s = pursuit.left_s / (len(pursuit.problem.prefetch_depths) - len(pursuit.bounds_ms))
        pursuit.solve_exactly(depth, Limits(time_s=share_s, gap=pursuit.gap, num_nodes=EXACT_NODES))
    if not pursuit.is_over:
        pursuit.improve(TRIALS_PER_MOVE, seed=0)


def _pursue_with_ties(pursuit: Pursuit) -> None:
    depths = pursuit.problem.prefetch_depths
    limits = Limits(gap=pursuit.gap, num_nodes=TIED_NODES)
    for depth in depths:
        pursuit.solve_tied(1, depth, limits._replace(time_s=pursuit.left_s / 8))
    for depth in depths:
        pursuit.relax(depth)
    pursuit.improve(TRIALS_PER_MOVE, seed=0)
    runs = [(period, depth) for period in PERIODS for depth in depths if period < len(pursuit.problem.blocks)]
    for count, (period, depth) in enumerate(runs):
        if pursuit.is_over:
            return
        share_s = max(pursuit.left_s / 3, pursuit.left_s / (len(runs) - count))
        if pursuit.solve_tied(period, depth, limits._replace(time_s=share_s)):
            pursuit.improve(TRIALS_PER_MOVE, seed=1 + count)
    pursuit.improve(2 * TRIALS_PER_MOVE, seed=len(runs) + 1)


def _report(pursuit: Pursuit, best: Plan, baselines: list[Baseline], solver: str, seconds: float) -> Result:
    gap = pursuit.relative_gap
    if gap <= pursuit.gap and pursuit.finished:
        code = OPTIMAL
    else:
        code = FEASIBLE if pursuit.finished else FALLBACK
    statistics: dict[str, Any] = {
        "status": code,
        "source": pursuit.source,
        "solver": solver,
        "seconds": round(seconds, 3),
        "gap": round(gap, 5),
        "bound_ms": pursuit.bound_ms if math.isfinite(pursuit.bound_ms) else None,
        "num_nodes": pursuit.num_nodes,
        "baselines": {b.name: round(b.step_ms, 3) for b in baselines},
        "notes": pursuit.notes,
    }
    plan = best.with_prediction(simulate(pursuit.problem, best).predicted, **statistics)
    message = f"{code} ({pursuit.source}), at most {gap:.1%} above the best possible step, {seconds:.1f} s"
    return Result(plan=plan, code=code, message=message, statistics=statistics)
