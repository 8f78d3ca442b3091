"""The greedy plan: from everything streamed and recomputed, the change that gains most per byte, until nothing fits."""

from collections.abc import Sequence
from itertools import product

from lazytrain.solver.choices import list_boundaries, list_lanes, make_unit_plan
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import MIN_GAIN, Evaluator
from lazytrain.solver.plan import DEVICE, HOST, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.search import Priced, Search

NUM_EVALUATIONS = 600


def make_greedy_plan(evaluator: Evaluator, deadline: Deadline) -> Plan | None:
    """Return the plan of a greedy search in which the simulator prices every step; None if no start fits.

    The time saved per byte that the device's peak grows by decides; the same change then goes on block by block while
    it still helps. Nothing is ever taken back.
    """
    lean = [(plan.prefetch_depth, plan.units) for plan in _list_lean(evaluator.problem)]
    starts = [decisions for decisions, fits in zip(lean, evaluator.fits(lean), strict=True) if fits]
    if not starts:
        return None
    prices = evaluator.price(starts)
    start = starts[min(range(len(starts)), key=lambda i: prices[i].step_ms)]
    search = Search(evaluator, start, num_evaluations=NUM_EVALUATIONS, deadline=deadline)
    turn = 0.0
    while not search.is_over:
        better = [p for p in search.price_changes(turn) if p.fits and p.price.step_ms < search.step_ms * (1 - MIN_GAIN)]
        if not better and turn:
            break
        if not better:
            turn = 1.0
            continue
        _go_on(search, _pick(search, better))
    return search.plan


def _pick(search: Search, better: Sequence[Priced]) -> Priced:
    """Return the change that saves most time per byte of the device's peak."""
    plans = [(search.depth, search.units), *((search.depth, search.changed(priced.change)) for priced in better)]
    before, *after = (need.peak_bytes for need in search.evaluator.measure(plans))

    def ratio(index: int) -> tuple[bool, float]:
        added = after[index] - before
        return added <= 0, (search.step_ms - better[index].price.step_ms) / max(added, 1)

    return better[max(range(len(better)), key=ratio)]


def _go_on(search: Search, priced: Priced) -> None:
    """Take a change, then the same for the nearest blocks that decide alike, one by one, as long as each one helps."""
    change, last = priced.change, len(search.units) - 1
    alike = [u for u in range(1, last) if search.units[u] is change.before and u != change.where]
    nearest = sorted(alike, key=lambda u: (abs(u - change.where), u))
    chain = [search.changed(change)]
    for u in nearest if 0 < change.where < last else []:
        chain.append((*chain[-1][:u], change.after, *chain[-1][u + 1 :]))
    search.price_all(chain)
    for units in chain:
        if not search.take(units):
            return


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
