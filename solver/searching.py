"""Search from many starts: mixes that climb, then a local search from each; fewer and fewer go on, the longer.

A start says little of what becomes of it, so that none is dropped before it was searched from for a while.
"""

import random

from lazytrain.solver.baselines import Baseline
from lazytrain.solver.choices import intern_units, list_options, make_unit_plan
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.mixing import climb, list_mixes
from lazytrain.solver.pursuit import Pursuit
from lazytrain.solver.search import Search
from lazytrain.solver.tidying import tidy
from lazytrain.solver.vectors import Decisions

NUM_BASELINES = 4  # that are climbed from
HEATS = ((8, 200), (4, 400), (2, 1000), (1, 1500))  # so many searches go on, for so many evaluations each
NUM_KICKS, KICK_EVALUATIONS, KICK_SHARE, KICK_SEED = 12, 300, 0.5, 0  # share: the longest stretch's, of the blocks
FIT_EVALUATIONS, TIDY_EVALUATIONS = 400, 2000
CLIMB_SHARE, SEARCH_SHARE = 0.4, 0.9  # of the time that is left; the rest is for tidying


def make_fit(pursuit: Pursuit, starts: list[Decisions]) -> None:
    """Change the starts until they fit: a plan, and a step to bound the others by, where no baseline is one."""
    deadline = pursuit.deadline.part(SEARCH_SHARE)
    for start in starts:
        found = _start(pursuit, start, deadline)
        if found is not None:
            pursuit.take(found.plan, found.step_ms, "search")


def search(pursuit: Pursuit, starts: list[Decisions], baselines: list[Baseline]) -> None:
    """Search from the starts, from baselines and from mixes of those; tidy the best plan and take it."""
    deadline = pursuit.deadline.part(SEARCH_SHARE)
    plans = [baseline.plan for baseline in baselines[:NUM_BASELINES]]
    plans += [pursuit.best] if pursuit.best is not None and pursuit.best not in plans else []
    known = [(plan.prefetch_depth, intern_units(plan.units)) for plan in plans]
    starts = list(dict.fromkeys([*starts, *_climb(pursuit, known), *known]))
    searches = [found for found in (_start(pursuit, start, deadline) for start in starts) if found is not None]
    for num_searches, num_evaluations in HEATS:
        searches = sorted(searches, key=lambda found: found.step_ms)[:num_searches]
        for found in searches:
            found.left = num_evaluations
            found.run()
    if searches:
        best = _kick(pursuit, min(searches, key=lambda found: found.step_ms), deadline)
        best.left, best.deadline = TIDY_EVALUATIONS, pursuit.deadline
        if not pursuit.deadline.is_over:
            tidy(best)
        pursuit.take(best.plan, best.step_ms, "search")


def _kick(pursuit: Pursuit, best: Search, deadline: Deadline) -> Search:
    """Search on from the best plan with a stretch of blocks deciding otherwise, again and again; return the best."""
    rng = random.Random(KICK_SEED)
    num_blocks = len(best.units) - 2
    for _ in range(NUM_KICKS):
        length = rng.randint(1, max(1, round(KICK_SHARE * num_blocks)))
        first, step = rng.randint(1, num_blocks - length + 1), rng.choice((1, 1, 2, 3))
        options = list_options(pursuit.problem, first)
        other = make_unit_plan(rng.choice(options.lanes), rng.choice(options.keeps), rng.choice(options.boundaries))
        units = list(best.units)
        units[first : first + length : step] = [other] * len(range(0, length, step))
        found = _start(pursuit, (best.depth, tuple(units)), deadline)
        if found is not None:
            found.left = KICK_EVALUATIONS
            found.run()
            best = min(best, found, key=lambda one: one.step_ms)
    return best


def _climb(pursuit: Pursuit, known: list[Decisions]) -> list[Decisions]:
    deadline, plans = pursuit.deadline.part(CLIMB_SHARE), list[Decisions]()
    for mix in [mix for start in known for mix in list_mixes(start)]:
        climbed = None if deadline.is_over else climb(pursuit.evaluator, mix, deadline)
        plans += [climbed.lay_out()] if climbed is not None else []
    return plans


def _start(pursuit: Pursuit, start: Decisions, deadline: Deadline) -> Search | None:
    """Return a search from a start that fits, or was made to fit; None if that failed or time is over."""
    if deadline.is_over:
        return None
    found = Search(pursuit.evaluator, start, num_evaluations=FIT_EVALUATIONS, deadline=deadline)
    return found if found.make_fit() else None
