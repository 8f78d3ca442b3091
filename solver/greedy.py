"""The greedy plan: from everything streamed and recomputed, the change that gains most per byte, until nothing fits."""

import time
from collections.abc import Sequence
from itertools import product

from lazytrain.solver.choices import list_boundaries, list_lanes, make_unit_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.plan import DEVICE, HOST, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import MIN_GAIN, Priced, Search

NUM_EVALUATIONS = 600
TIME_S = 3.0  # the net


def make_greedy_plan(problem: Problem) -> Plan | None:
    """Return the plan of a greedy search in which the simulator prices every step; None if no start fits.

    The time saved per byte that the device's peak grows by decides; the same change then goes on block by block while
    it still helps. Nothing is ever taken back.
    """
    accountant = Accountant(problem)
    starts = [plan for plan in _list_lean(problem) if accountant.fits(plan)]
    if not starts:
        return None
    deadline_s = time.perf_counter() + TIME_S
    searches = [Search(problem, plan, num_evaluations=NUM_EVALUATIONS, deadline_s=deadline_s) for plan in starts]
    search = min(searches, key=lambda candidate: candidate.step_ms)
    turn = 0.0
    while not search.is_over:
        better = [p for p in search.price_changes(turn) if p.fits and p.price.step_ms < search.step_ms * (1 - MIN_GAIN)]
        if not better and turn:
            break
        if not better:
            turn = 1.0
            continue
        _go_on(search, _pick(search, accountant, better))
    return search.plan


def _pick(search: Search, accountant: Accountant, better: Sequence[Priced]) -> Priced:
    """Return the change that saves most time per byte of the device's peak."""
    before = accountant.account(search.plan).device_peak_bytes

    def ratio(priced: Priced) -> tuple[bool, float]:
        plan = make_plan(search.problem, search.changed(priced.change), search.depth)
        added = accountant.account(plan).device_peak_bytes - before
        gain_ms = search.step_ms - priced.price.step_ms
        return added <= 0, gain_ms / max(added, 1)

    return max(better, key=ratio)


def _go_on(search: Search, priced: Priced) -> None:
    change = priced.change
    while search.take(search.changed(change)):
        alike = [u for u in range(1, len(search.units) - 1) if search.units[u] == change.before]
        if search.is_over or not alike:
            return
        change = change._replace(where=min(alike, key=lambda u: (abs(u - priced.change.where), u)))


def _list_lean(problem: Problem) -> list[Plan]:
    """Return the plans without residuals whose blocks are streamed; the ends, streamed or not, are updated alike."""
    last = len(problem.units) - 1
    lanes = [list_lanes(problem, u) for u in range(last + 1)]
    streamed = [lane for lane in lanes[1] if lane.weights == HOST]
    plans = []
    for place, wanted, weights in product(list_boundaries(problem)[1::-1], streamed, (DEVICE, HOST)):
        units = []
        for u in range(last + 1):
            edge = [lane for lane in lanes[u] if lane.update == wanted.update and lane.states == HOST]
            edge = [lane for lane in edge if lane.weights == weights] or edge
            lane = (wanted if wanted in lanes[u] else lanes[u][0]) if 0 < u < last else (edge or list(lanes[u]))[0]
            units.append(make_unit_plan(lane, boundary=place if 0 < u < last else DEVICE))
        plans.append(make_plan(problem, units, problem.prefetch_depths[0]))
    return plans
