"""The best plan so far, and what was done to find it: the state of one solve."""

from dataclasses import dataclass, field

from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem

HORIZON_SLACK = 1e-6


@dataclass(kw_only=True)
class Pursuit:
    """The best plan so far, and what was done."""

    problem: Problem
    evaluator: Evaluator
    deadline: Deadline
    best: Plan | None
    best_ms: float
    source: str
    solvers: tuple[str, ...]
    bounds_ms: dict[int, float] = field(default_factory=dict)  # by prefetch depth
    num_nodes: int = 0
    notes: list[str] = field(default_factory=list)

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
