"""How much fits, and what more memory would bring: the largest batch, and the gain of one more GiB on each tier."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lazytrain.solver.baselines import FIXED_INTERVAL, fits_strategy, list_strategies, root_interval
from lazytrain.solver.bounds import may_fit
from lazytrain.solver.chunks import list_counts
from lazytrain.solver.deadline import PLAN_SECONDS, Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.fixed_interval import fits_fixed_interval
from lazytrain.solver.memory import GIB
from lazytrain.solver.packing import pack
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Search
from lazytrain.solver.shortage import count_missing_bytes
from lazytrain.solver.simulator import simulate_step_ms

MAX_BATCH = 1 << 16
FIT_S = 5.0
MORE_EVALUATIONS = 1000
NOTHING_KEPT = "recompute_all"
TIERS = {"device": "device_memory_bytes", "host": "host_memory_bytes", "nvme": "nvme_bytes"}
MakeProblem = Callable[[int, int], Problem]  # batch, number of microbatches -> the problem


class LargestBatch(NamedTuple):
    """The largest batch that fits, and those of strategies without a solver; 0 = not even the smallest one.

    num_microbatches: into how many chunks the largest batch must be cut at least. bound: no larger batch can fit.
    """

    batch: int
    num_microbatches: int
    bound: int
    strategies: dict[str, int]


def list_lean_counts(batch: int) -> list[int]:
    """Return the numbers of microbatches of which one fits if any does.

    The smallest chunks need least of everything but for the sum of a block's grads, which one chunk does without and
    two keep in 16 bits (`memory.chunk_sum_bytes`).
    """
    return sorted({batch, 1, min(2, batch)}, reverse=True)


def find_largest_batch(
    make_problem: MakeProblem, *, counts: Callable[[int], Sequence[int]] | None = None, limit: int = MAX_BATCH
) -> LargestBatch:
    """Return the largest batch for which some plan fits, by bisection on feasibility, and the strategies' ones.

    Memory alone is asked, not time: the largest batch may be slow.

    Args:
        make_problem: (batch, number of microbatches) -> the problem.
        counts: batch -> the numbers of microbatches to choose from; None = any.
        limit: the largest batch to think of.

    Raises:
        PlannerError: a problem that can't be.
    """
    any_of = counts or list_lean_counts

    def largest(fits: Callable[[Problem], bool], low: int, high: int) -> int:
        return _bisect(lambda batch: any(fits(make_problem(batch, count)) for count in any_of(batch)), low, high)

    lean = largest(_fits_lean, 0, limit)
    bound = largest(_may_fit, lean, limit)
    batch = largest(_is_solved, largest(_is_packed, lean, bound), bound)
    strategies: dict[str, int] = {}
    smallest = make_problem(1, 1)
    names = list_strategies(smallest) if any(len(block.points) > 1 for block in smallest.blocks) else [NOTHING_KEPT]
    for name in names:
        strategies[name] = largest(partial(fits_strategy, name=name), 0, batch)
    for name, interval in list_intervals(len(smallest.blocks)).items():
        strategies[name] = largest(partial(fits_fixed_interval, interval=interval), 0, batch)
    all_counts = counts or list_counts
    problems = [make_problem(batch, n) for n in all_counts(batch)] if batch else []
    fitting = (problem for fits in (_is_packed, _is_solved) for problem in problems if fits(problem))
    count = next((problem.num_microbatches for problem in fitting), 0)
    return LargestBatch(batch, count, bound, strategies)


def list_intervals(num_blocks: int) -> dict[str, int]:
    """Return name -> interval of the heuristics that keep every few boundaries and compute all else twice more."""
    return {f"fixed-interval-{FIXED_INTERVAL}": FIXED_INTERVAL, "fixed-interval-sqrt": root_interval(num_blocks)}


def find_gains(problem: Problem, plan: Plan, *, time_limit_s: float = PLAN_SECONDS) -> dict[str, float]:
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
        answer = solve(more, time_limit_s=time_limit_s, may_drop=True).plan
        solved_ms = answer.predicted.step_ms if answer is not None and answer.predicted is not None else now_ms
        gains[tier] = max(0.0, now_ms - min(solved_ms, _search_on(more, plan)))
    return gains


def _search_on(problem: Problem, plan: Plan) -> float:
    if plan.drops_boundaries:  # no search takes such a plan further
        return simulate_step_ms(problem, plan)
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


def _fits_lean(problem: Problem) -> bool:
    return count_missing_bytes(problem) == 0


def _may_fit(problem: Problem) -> bool:
    """Return whether the sums of memory, without the order of events, leave anything."""
    return _fits_lean(problem) or may_fit(problem, min(problem.prefetch_depths))


def _is_packed(problem: Problem) -> bool:
    """Return whether a plan is found that fits: a lean one, or one that memory is filled for."""
    return _fits_lean(problem) or pack(problem, may_drop=True) is not None


def _is_solved(problem: Problem) -> bool:
    """Return whether `solve` finds a plan at all, whatever its speed."""
    return solve(problem, time_limit_s=FIT_S, rival_ms=0.0, may_drop=True).plan is not None
