"""How much fits, and what more memory would bring: the largest batch, and the gain of one more GiB on each tier."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from lazytrain.solver.baselines import list_fitting_strategies
from lazytrain.solver.bounds import bound_step
from lazytrain.solver.chunks import list_counts
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.memory import GIB
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Search
from lazytrain.solver.shortage import count_missing_bytes
from lazytrain.solver.starts import list_arrangements

MAX_BATCH = 1 << 16
FIT_EVALUATIONS, FIT_S = 300, 5.0
MORE_EVALUATIONS = 1000
TIERS = {"device": "device_memory_bytes", "host": "host_memory_bytes", "nvme": "nvme_bytes"}
MakeProblem = Callable[[int, int], Problem]  # batch, number of microbatches -> the problem


class LargestBatch(NamedTuple):
    """The largest batch that fits, and those of strategies without a solver; 0 = not even one sequence.

    num_microbatches: into how many chunks the largest batch must be cut at most. bound: no larger batch is worth a try.
    """

    batch: int
    num_microbatches: int
    bound: int
    strategies: dict[str, int]


def find_largest_batch(make_problem: MakeProblem, *, limit: int = MAX_BATCH) -> LargestBatch:
    """Return the largest batch for which some plan fits, by bisection on feasibility, and the strategies' ones.

    Args:
        limit: the largest batch to think of.

    Raises:
        PlannerError: a problem that can't be.
    """
    bound = _bisect(lambda batch: bool(_find_count(make_problem, batch, _may_fit)), 0, limit)
    lean = _bisect(lambda batch: bool(_find_count(make_problem, batch, _fits_lean)), 0, bound)
    batch = _bisect(lambda batch: bool(_find_count(make_problem, batch, _fits_somehow)), lean, bound)
    strategies: dict[str, int] = {}
    for name in list_fitting_strategies(make_problem(1, 1), every=True):

        def fits(problem: Problem, name: str = name) -> bool:
            return name in list_fitting_strategies(problem)

        strategies[name] = _bisect(
            lambda size, fits=fits: bool(_find_count(make_problem, size, fits)),  # type: ignore[misc]
            0,
            batch,
        )
    count = _find_count(make_problem, batch, _fits_somehow) if batch else 0
    return LargestBatch(batch, count, bound, strategies)


def find_gains(problem: Problem, plan: Plan, *, time_limit_s: float = 5.0) -> dict[str, float]:
    """Return tier -> ms that a step would be shorter with one more GiB there: by solving again, and from `plan` on.

    `plan` must fit; tiers are device, host and (where it is allowed) nvme. Exactness is that of the search: a gain
    below its noise (about 0.5 % of a step) means little.
    """
    now_ms = _search_on(problem, plan)
    gains = {}
    for tier, field in TIERS.items():
        if tier == "nvme" and not problem.allow_nvme:
            continue
        more = replace(problem, hardware=replace(problem.hardware, **{field: getattr(problem.hardware, field) + GIB}))
        answer = solve(more, time_limit_s=time_limit_s).plan
        solved_ms = answer.predicted.step_ms if answer is not None and answer.predicted is not None else now_ms
        gains[tier] = max(0.0, now_ms - min(solved_ms, _search_on(more, plan)))
    return gains


def _search_on(problem: Problem, plan: Plan) -> float:
    decisions = plan.prefetch_depth, plan.units
    search = Search(Evaluator(problem), decisions, num_evaluations=MORE_EVALUATIONS, deadline=Deadline(FIT_S))
    search.run()
    return search.step_ms


def _bisect(holds: Callable[[int], bool], low: int, limit: int) -> int:
    """Return the largest number in [low, limit] for which `holds`, which is true up to it; `low` is taken as true."""
    step = 1
    while low + step <= limit and holds(low + step):
        low, step = low + step, 2 * step
    high = min(low + step, limit + 1)  # does not hold
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _find_count(make_problem: MakeProblem, batch: int, fits: Callable[[Problem], bool]) -> int:
    """Return the first number of microbatches with which a batch fits; 0 if there is none."""
    counts: Iterable[int] = list_counts(batch)
    return next((count for count in counts if fits(make_problem(batch, count))), 0)


def _fits_lean(problem: Problem) -> bool:
    return count_missing_bytes(problem) == 0


def _may_fit(problem: Problem) -> bool:
    """Return whether the sums of memory, without the order of events, leave anything."""
    depth = min(problem.prefetch_depths)
    return _fits_lean(problem) or bound_step(problem, depth).bound_ms < float("inf")


def _fits_somehow(problem: Problem) -> bool:
    """Return whether a plan is found that fits: a lean one, or a mix that is made to fit."""
    if _fits_lean(problem):
        return True
    bound = bound_step(problem, min(problem.prefetch_depths))
    if not bound.mix:
        return False
    plan = next(list_arrangements(problem, bound.mix, min(problem.prefetch_depths)))
    start = plan.prefetch_depth, plan.units
    search = Search(Evaluator(problem), start, num_evaluations=FIT_EVALUATIONS, deadline=Deadline(FIT_S))
    return search.make_fit()
