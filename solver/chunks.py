"""Into how many microbatches to cut a step: large chunks keep the matrix units busy, small ones fit."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.deadline import PLAN_SECONDS, Clock
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.planning import Result, solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.shortage import count_missing_bytes

NUM_SOLVED = 2
NUM_WORSE = 2  # so many numbers in a row without a faster step end the screening
NEAR = 1.01  # a baseline this near to the fastest one is worth solving for


class Choice(NamedTuple):
    """The problem with the best number of microbatches, its answer, and what was screened.

    screened: number of microbatches -> step of its best simple baseline in ms, None where none fits.
    """

    problem: Problem
    result: Result
    screened: dict[int, float | None]


def list_counts(batch: int) -> list[int]:
    """Return the numbers of microbatches that are worth a look: chunks of half the size each time, rounded up.

    Example:
        >>> list_counts(7)
        [1, 2, 4, 7]
    """
    sizes, size = [], batch
    while size > 1:
        sizes.append(size)
        size = -(-size // 2)
    return [-(-batch // size) for size in (*sizes, 1)]


def choose_microbatches(
    make_problem: Callable[[int], Problem],
    counts: Iterable[int],
    *,
    time_limit_s: float = PLAN_SECONDS,
    gap: float = 0.01,
    may_drop: bool = False,
    clock: Clock = time.perf_counter,
) -> Choice:
    """Return the best answer over numbers of microbatches.

    Each number is screened by baselines that take no search; those that promise most are solved for.

    Args:
        make_problem: a number of microbatches -> the problem cut so. Its costs are per chunk, so that smaller chunks
            may be slower; a trainer measures them, the command line reckons.
        counts: what to try; those whose problem comes out with another number of chunks are tried once.
        time_limit_s, gap, may_drop, clock: of each solver run, see `planning.solve`; there are at most two.

    Never raises for an infeasible problem: see `planning.solve`; the answer is then the one that lacks least.

    Raises:
        PlannerError: no count at all, or a problem that can't be.
    """
    problems: dict[int, Problem] = {}
    screened: dict[int, float | None] = {}
    num_worse = 0
    for count in sorted(set(counts)):
        problem = make_problem(count)
        if problem.num_microbatches in problems:
            continue
        problem.validate()
        problems[problem.num_microbatches] = problem
        baselines = list_baselines(problem, num_random=0, with_greedy=False)
        step_ms = baselines[0].step_ms if baselines else None
        best_ms = min((ms for ms in screened.values() if ms is not None), default=None)
        screened[problem.num_microbatches] = step_ms
        num_worse = num_worse + 1 if best_ms is not None and (step_ms is None or step_ms >= best_ms) else 0
        if num_worse == NUM_WORSE:
            break
    if not problems:
        raise PlannerError("there is no number of microbatches to try; give at least one, for example 1")
    answer = partial(solve, time_limit_s=time_limit_s, gap=gap, may_drop=may_drop, clock=clock)
    found = [(step_ms, count) for count, step_ms in screened.items() if step_ms is not None]
    if not found:
        problem = min(problems.values(), key=count_missing_bytes)
        return Choice(problem, answer(problem), screened)
    best_ms = min(found)[0]
    promising = [count for step_ms, count in sorted(found) if step_ms <= NEAR * best_ms][:NUM_SOLVED]
    answers = [(problems[count], answer(problems[count])) for count in promising]
    problem, result = min(answers, key=_step_ms)
    return Choice(problem, result, screened)


def _step_ms(answer: tuple[Problem, Result]) -> float:
    plan = answer[1].plan
    return plan.predicted.step_ms if plan is not None and plan.predicted is not None else float("inf")
