"""The hunt for a fast plan: what is known so far, and the moves that may improve on it.

Every move ends with the simulator's word: a plan counts only if it fits by the memory account and its simulated step is
shorter. The bound comes from models without ties, and holds for every plan.
"""

import math
import time
from dataclasses import dataclass, field

from lazytrain.solver.backends import INFEASIBLE, NOTHING, OPTIMAL, Limits, Outcome, list_solvers, solve_model
from lazytrain.solver.baselines import Baseline, fits
from lazytrain.solver.decisions import write_point
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.milp import Milp, build_milp
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.rounding import round_plan
from lazytrain.solver.search import improve
from lazytrain.solver.simulator import simulate_step_ms

EXACT_SLACK = 1e-6  # of the horizon, so that the known plan stays inside
LEAST_GAIN_SHARE = 0.25  # of the gap: a tied model looks only for plans that are better by that much
MIN_SOLVE_S = 0.05


@dataclass(kw_only=True)
class Pursuit:
    """The best plan so far, the bound, and what was done (see the head of this file).

    Attributes:
        best, best_ms, source: None, a horizon and "" until a plan is known.
        bounds_ms: by prefetch depth, what no plan of that depth can beat.
        finished: how many solver runs ended with a proof or a point.
        notes: one line per run, for the statistics.
    """

    problem: Problem
    gap: float
    deadline_s: float
    best: Plan | None
    best_ms: float
    source: str
    solvers: tuple[str, ...] = field(default_factory=list_solvers)
    bounds_ms: dict[int, float] = field(default_factory=dict)
    finished: int = 0
    num_nodes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bound_ms(self) -> float:
        """Return what no plan can beat; 0 where not every prefetch depth has a bound."""
        known = set(self.bounds_ms) >= set(self.problem.prefetch_depths)
        return max(0.0, min(self.bounds_ms.values())) if known else 0.0

    @property
    def relative_gap(self) -> float:
        """Return how far the best plan may be from the best possible one."""
        return 1.0 if self.best is None else max(0.0, 1.0 - self.bound_ms / self.best_ms)

    @property
    def is_over(self) -> bool:
        """Return whether the gap is reached, the time is up, or nothing is left that can solve."""
        return self.relative_gap <= self.gap or self.left_s < MIN_SOLVE_S or not self.solvers

    @property
    def left_s(self) -> float:
        """Return the time that is left."""
        return self.deadline_s - time.perf_counter()

    def take(self, plan: Plan, source: str) -> bool:
        """Keep a plan if it fits and is faster; return whether it was."""
        if not fits(self.problem, plan):
            return False
        step_ms = simulate_step_ms(self.problem, plan)
        if self.best is not None and step_ms >= self.best_ms:
            return False
        self.best, self.best_ms, self.source = plan, step_ms, source
        return True

    def solve_exactly(self, depth: int, limits: Limits) -> None:
        """Solve the model without ties: its bound holds for all plans of this prefetch depth."""
        milp = build_milp(self.problem, prefetch_depth=depth, horizon_ms=self.best_ms * (1 + EXACT_SLACK))
        start = None if self.best is None else write_point(milp.model, milp.draft.choices, self.best)
        if self.best is not None and self.best.prefetch_depth != depth:
            start = None
        outcome = self._solve(milp, limits, f"depth {depth}", start=start)
        if outcome is None:
            return
        if outcome.status == INFEASIBLE:
            self.bounds_ms[depth] = math.inf if self.best is None else self.best_ms
        elif math.isfinite(outcome.bound):
            self.bounds_ms[depth] = outcome.bound
        if outcome.x is not None:
            self._take_from_milp(milp.read(outcome.x))

    def solve_tied(self, period: int, depth: int, limits: Limits) -> bool:
        """Solve the model in which blocks at distance `period` decide alike; return whether a better plan came of it."""
        horizon_ms = self.best_ms
        if self.best is not None:
            horizon_ms *= 1 - LEAST_GAIN_SHARE * self.gap
        milp = build_milp(self.problem, prefetch_depth=depth, horizon_ms=horizon_ms, period=period)
        outcome = self._solve(milp, limits, f"period {period}, depth {depth}")
        return outcome is not None and outcome.x is not None and self._take_from_milp(milp.read(outcome.x))

    def relax(self, depth: int) -> None:
        """Solve the relaxation without ties, for a bound, and round it to a plan."""
        milp = build_milp(self.problem, prefetch_depth=depth, horizon_ms=self.best_ms * (1 + EXACT_SLACK))
        relaxed = Milp(milp.model.relax(), milp.draft)
        outcome = self._solve(relaxed, Limits(time_s=self.left_s), f"relaxation, depth {depth}")
        if outcome is None or outcome.status == NOTHING:
            return
        if outcome.status == INFEASIBLE:
            self.bounds_ms[depth] = math.inf if self.best is None else self.best_ms
        elif outcome.status == OPTIMAL and outcome.x is not None:
            self.bounds_ms[depth] = outcome.bound
            rounded = round_plan(milp, outcome.x)
            if rounded is not None:
                self.take(rounded, "milp")

    def improve(self, num_trials: int, seed: int) -> None:
        """Let the local search work on the best plan."""
        if self.best is None:
            return
        plan, step_ms = improve(
            self.problem, self.best, self.best_ms, num_trials=num_trials, deadline_s=self.deadline_s, seed=seed
        )
        if step_ms < self.best_ms:
            self.best, self.best_ms = plan, step_ms
            self.source = "search" if self.source.startswith("fallback") else self.source

    def _take_from_milp(self, plan: Plan) -> bool:
        is_tie = self.source.startswith("fallback") and simulate_step_ms(self.problem, plan) <= self.best_ms * (
            1 + EXACT_SLACK
        )
        if is_tie and fits(self.problem, plan):
            self.best, self.best_ms = plan, simulate_step_ms(self.problem, plan)
            self.source = "milp"
            return True
        return self.take(plan, "milp")

    def _solve(self, milp: Milp, limits: Limits, label: str, start: object = None) -> Outcome | None:
        """Run the preferred solver, or the next one if it breaks down; None if none is left."""
        while self.solvers and self.left_s >= MIN_SOLVE_S:
            limits = limits._replace(time_s=min(limits.time_s, self.left_s))
            try:
                outcome = solve_model(milp.model, limits, solver=self.solvers[0], start=start)  # type: ignore[arg-type]
            except SolverUnavailableError as error:
                self.notes.append(str(error))
                self.solvers = self.solvers[1:]
                continue
            self.num_nodes += outcome.num_nodes
            self.finished += outcome.status != NOTHING
            self.notes.append(f"{label}: {outcome.status} in {outcome.seconds:.2f} s, {outcome.num_nodes} nodes")
            return outcome
        return None


def start_pursuit(
    problem: Problem, baselines: list[Baseline], *, gap: float, deadline_s: float, horizon_ms: float
) -> Pursuit:
    """Return a pursuit from the fastest baseline, or from nothing but a horizon."""
    first = baselines[0] if baselines else None
    return Pursuit(
        problem=problem,
        gap=gap,
        deadline_s=deadline_s,
        best=first.plan if first else None,
        best_ms=first.step_ms if first else horizon_ms,
        source=f"fallback:{first.name}" if first else "",
    )
