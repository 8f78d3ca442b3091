"""Hand a linear model to CVXPY, and bring home what the solver said, whatever that was.

SCIP stops at a node limit, so that the same problem gives the same plan on any machine; the time limit is the net.
HiGHS, which comes with CVXPY, takes over where SCIP is missing: in a process of its own, since it may ignore its limit.
"""

import math
import os
import pickle
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
from cvxpy.reductions.solvers.conic_solvers.scip_conif import SCIP

from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.linear import LinearModel

OPTIMAL, STOPPED, INFEASIBLE, NOTHING = "optimal", "stopped", "infeasible", "nothing"
NUM_TYPICAL_NODES = 1000
PRIO = 0
HIGHS_START_S = 20.0  # to start a Python and import CVXPY on a busy machine


class Limits(NamedTuple):
    """When to stop.

    gap: the relative distance of point and bound. num_nodes: of the tree; reproducible, where time is not.
    """

    time_s: float = 20.0
    gap: float = 0.0
    num_nodes: int = NUM_TYPICAL_NODES


class Outcome(NamedTuple):
    """What a solver said of a model.

    status: "optimal" (within the gap); "stopped" (at a limit, with a point); "infeasible"; "nothing" (at a limit,
        without a point).
    bound: no point is better; minus infinity where nothing is known.
    """

    status: str
    x: np.ndarray | None
    bound: float
    num_nodes: int
    seconds: float


def solve_model(
    model: LinearModel, limits: Limits, *, solver: str = "scip", start: np.ndarray | None = None
) -> Outcome:
    """Solve a model.

    Args:
        solver: "scip" or "highs" (see `list_solvers`).
        start: a known point, or one with NaN where only the rest is known; SCIP alone uses it.

    Raises:
        SolverUnavailableError: the solver is not installed or broke down. Remedy: `pip install pyscipopt`.
    """
    if solver not in list_solvers():
        raise SolverUnavailableError(f"{solver} is not installed. Install it with: pip install pyscipopt")
    if solver == "highs":
        return _solve_with_highs(model, limits)
    return _solve_with_scip(model, limits, start)


def list_solvers() -> tuple[str, ...]:
    """Return the solvers that are installed, the preferred one first."""
    installed = cp.installed_solvers()
    return tuple(name for name in ("scip", "highs") if name.upper() in installed)


def make_cvxpy_problem(model: LinearModel) -> tuple[cp.Problem, cp.Variable]:
    """Return the model in CVXPY: one sparse constraint a kind of row (thousands of scalar ones would take seconds)."""
    a, b, is_equal = model.matrix()
    whole = [np.array(model.binary + model.integer, dtype=int)]
    x = (
        cp.Variable(model.num_vars, integer=whole)
        if model.integer
        else cp.Variable(model.num_vars, boolean=whole if model.binary else False)
    )
    objective = np.zeros(model.num_vars)
    objective[model.objective] = 1.0
    constraints = [a[~is_equal] @ x <= b[~is_equal]]
    if is_equal.any():
        constraints.append(a[is_equal] @ x == b[is_equal])
    lower, upper = np.array(model.lower), np.array(model.upper)
    is_binary = np.zeros(model.num_vars, dtype=bool)
    is_binary[[] if model.integer else model.binary] = True
    low, high = np.flatnonzero(np.isfinite(lower) & ~is_binary), np.flatnonzero(np.isfinite(upper) & ~is_binary)
    constraints += [x[low] >= lower[low]] if low.size else []
    constraints += [x[high] <= upper[high]] if high.size else []
    return cp.Problem(cp.Minimize(objective @ x), constraints), x


class _StartedScip(SCIP):  # type: ignore[misc]
    """CVXPY's interface to SCIP, with a starting point, and with SCIP's own words kept: CVXPY turns a node limit into
    a KeyError, a limit without a point into an error, and loses the bound."""

    def __init__(self, start: np.ndarray | None, decide_first: list[int]) -> None:
        super().__init__()
        self._start, self._decide_first = start, decide_first
        self.outcome: Outcome | None = None

    def name(self) -> str:
        return "SCIP_FROM_A_START"

    def _solve(self, model: Any, variables: list[Any], constraints: list[Any], data: Any, dims: Any) -> dict[str, Any]:
        if self._start is not None:
            point = model.createPartialSol()
            for variable, value in zip(variables, self._start):
                if not math.isnan(value):
                    model.setSolVal(point, variable, float(value))
            model.addSol(point)
        for index in self._decide_first:
            model.chgVarBranchPriority(variables[index], PRIO)
        model.optimize()
        status, x = model.getStatus(), None
        if model.getNSols():
            best = model.getBestSol()
            x = np.array([best[variable] for variable in variables])
        self.outcome = Outcome(
            _name_status(status, x), x, float(model.getDualbound()), int(model.getNTotalNodes()), model.getSolvingTime()
        )
        words = {OPTIMAL: cp.OPTIMAL, STOPPED: cp.OPTIMAL_INACCURATE, INFEASIBLE: cp.INFEASIBLE}
        solution = {
            "status": words.get(self.outcome.status, cp.SOLVER_ERROR),
            "solve_time": self.outcome.seconds,
            "num_iters": self.outcome.num_nodes,
        }
        if x is not None:
            solution |= {"primal": x, "value": float(data["c"] @ x)}
        return solution


def _name_status(scip_status: str, x: np.ndarray | None) -> str:
    if scip_status in ("infeasible", "inforunbd"):
        return INFEASIBLE
    if x is None:
        return NOTHING
    return OPTIMAL if scip_status in ("optimal", "gaplimit") else STOPPED


def _solve_with_scip(model: LinearModel, limits: Limits, start: np.ndarray | None) -> Outcome:
    problem, _ = make_cvxpy_problem(model)
    solver = _StartedScip(start, model.decide_first)
    parameters = {
        "limits/time": max(0.01, limits.time_s),
        "limits/gap": limits.gap,
        "limits/totalnodes": limits.num_nodes,
        "misc/catchctrlc": False,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CVXPY warns of inexact solutions; the outcome says so
            problem.solve(solver=solver, scip_params=parameters)
    except cp.SolverError as error:
        if solver.outcome is None:
            raise SolverUnavailableError(f"SCIP broke down: {error}") from error
    assert solver.outcome is not None
    return solver.outcome


def _solve_with_highs(model: LinearModel, limits: Limits) -> Outcome:
    """Run HiGHS in a process of its own, which is ended if it ignores its limit."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from lazytrain.solver.backends import serve_highs; serve_highs()"],
            input=pickle.dumps((model, limits)),
            capture_output=True,
            timeout=limits.time_s + HIGHS_START_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(NOTHING, None, -math.inf, 0, time.perf_counter() - start_s)
    if done.returncode:
        last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SolverUnavailableError(f"HiGHS broke down: {''.join(last_line) or done.returncode}")
    return Outcome(*pickle.loads(done.stdout))


def serve_highs() -> None:
    """Solve the pickled (model, limits) of standard input with HiGHS; write the outcome's fields to standard output."""
    model, limits = pickle.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # HiGHS prints to standard output
    problem, x = make_cvxpy_problem(model)
    options = {"time_limit": max(0.01, limits.time_s), "mip_rel_gap": limits.gap, "mip_max_nodes": limits.num_nodes}
    status, point, bound = NOTHING, None, -math.inf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem.solve(solver=cp.HIGHS, **options)
    except cp.SolverError:
        problem_status = None
    else:
        problem_status = problem.status
    if problem_status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE):
        status = INFEASIBLE
    elif problem_status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE) and x.value is not None:
        point = np.asarray(x.value)
        status = OPTIMAL if problem_status == cp.OPTIMAL else STOPPED
        bound = float(problem.value) * (1 - limits.gap) if status == OPTIMAL else -math.inf
    seconds = float(problem.solver_stats.solve_time or 0.0) if problem.solver_stats else 0.0
    with answer:
        answer.write(pickle.dumps((status, point, bound, 0, seconds)))
