"""Prices and needs of plans, by the hundred, each worked out once per problem."""

from collections.abc import Sequence
from typing import NamedTuple

from lazytrain.solver.fitting import Fitter
from lazytrain.solver.plan import make_plan
from lazytrain.solver.pricing import Pricer
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_load
from lazytrain.solver.vectors import Decisions

MIN_GAIN = 1e-6  # relative; less is rounding
LOAD_POWER = 4  # the nearer to full a queue is, the more it counts
FEW = 10  # plans that are played one by one about as fast as together


class Price(NamedTuple):
    """A step, and how much it burdens queues and the device's memory: among equal steps the lighter one is better."""

    step_ms: float
    burden: float

    def beats(self, other: "Price") -> bool:
        """Return whether this is better by more than rounding."""
        if self.step_ms < other.step_ms * (1 - MIN_GAIN):
            return True
        return self.step_ms <= other.step_ms * (1 + MIN_GAIN**2) and self.burden < other.burden * (1 - MIN_GAIN)


class Need(NamedTuple):
    """The peak of the device's memory, and the bytes that are missing over all tiers."""

    peak_bytes: int
    missing_bytes: int


class Evaluator:
    """What plans of one problem cost. `num_priced` counts those that were simulated."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.num_priced = problem, 0
        self._pricer, self._fitter = Pricer(problem), Fitter(problem)
        # By the identity of their decisions, which are kept in `_needs`.
        self._prices: dict[tuple[int, ...], Price] = {}
        self._needs: dict[tuple[int, ...], tuple[Need, Decisions]] = {}

    def price(self, many: Sequence[Decisions]) -> list[Price]:
        """Return the prices of plans, whether they fit or not."""
        keys = list(map(_identify, many))
        new = {key: plan for key, plan in zip(keys, many, strict=True) if key not in self._prices}
        plans, budget = list(new.values()), self.problem.hardware.device_memory_bytes
        needs = self.measure(plans)
        self.num_priced += len(plans)
        if len(plans) <= FEW:
            played = [simulate_load(self.problem, make_plan(self.problem, units, depth)) for depth, units in plans]
        else:
            steps, loads = self._pricer.price(plans)
            played = [(float(step), tuple(column)) for step, column in zip(steps, loads.T.tolist(), strict=True)]
        for key, need, (step_ms, loads_ms) in zip(new, needs, played, strict=True):
            shares = [need.peak_bytes / budget, *(load_ms / step_ms for load_ms in loads_ms if step_ms)]
            self._prices[key] = Price(step_ms, sum(share**LOAD_POWER for share in shares))
        return [self._prices[key] for key in keys]

    def measure(self, many: Sequence[Decisions]) -> list[Need]:
        """Return what plans need."""
        keys = list(map(_identify, many))
        new = {key: plan for key, plan in zip(keys, many, strict=True) if key not in self._needs}
        if new:
            peaks, missing = self._fitter.measure(list(new.values()))
            needs = map(Need, peaks.tolist(), missing.tolist())
            self._needs.update(zip(new, zip(needs, new.values(), strict=True), strict=True))
        return [self._needs[key][0] for key in keys]

    def fits(self, many: Sequence[Decisions]) -> list[bool]:
        """Return which plans fit in every tier."""
        return [not need.missing_bytes for need in self.measure(many)]


def _identify(decisions: Decisions) -> tuple[int, ...]:
    return (decisions[0], *map(id, decisions[1]))
