"""Plans that need no solver: the strategies that people use, and a seeded random grid.

The best one that fits is the MILP's start, its yardstick and its fallback. Each strategy has variants (where updates
run, where boundaries wait, what the spare device memory holds); the best variant that fits speaks for it.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from lazytrain.solver.choices import RECOMPUTE, Keep, Lane, list_boundaries, list_keeps, list_lanes, make_unit_plan
from lazytrain.solver.deadline import Deadline
from lazytrain.solver.evaluation import Evaluator
from lazytrain.solver.greedy import make_greedy_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.plan import DEVICE, HOST, Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem

FIXED_INTERVAL = 4
NUM_RANDOM = 20
RANDOM_SEED = 0
NUM_FILLED = 24  # of the streamed plans, the fastest
KeepRule = Callable[[int, tuple[Keep, ...]], Keep]  # block_idx, what it may keep -> what it keeps


class Baseline(NamedTuple):
    """A named plan that fits, and its simulated step."""

    name: str
    plan: Plan
    step_ms: float


def list_baselines(
    problem: Problem,
    *,
    num_random: int = NUM_RANDOM,
    with_greedy: bool = True,
    evaluator: Evaluator | None = None,
    deadline: Deadline | None = None,
) -> list[Baseline]:
    """Return the best plan of every strategy that has one that fits, the fastest first.

    Strategies:
        recompute_all, keep_all, offload_all: what every block does with its residuals.
        fixed_interval, sqrt_interval: every 4th block, or every block at a multiple of the square root of their number,
            keeps all; the others recompute. (A plan keeps every boundary, so that no block is recomputed twice.)
        fill: the spare device memory holds as many blocks, or residuals, as it can.
        random_grid: seeded. greedy: see greedy.py.

    Args:
        num_random: size of the random grid.
        with_greedy: the greedy plan takes about as long as all the others.
        evaluator: of this problem, with what it knows already.
        deadline: where it is over, strategies but the first are left out.
    """
    evaluator, deadline = evaluator or Evaluator(problem), deadline or Deadline(math.inf)
    found: list[Baseline | None] = []
    for name, keep_of in _list_rules(problem).items():
        if not found or not deadline.is_over:
            found.append(_best(evaluator, name, _uniform(problem, keep_of)))
    more: dict[str, Callable[[], Iterable[Plan]]] = {
        "fill": lambda: _filled(evaluator, deadline),
        "random_grid": lambda: _random_grid(problem, num_random),
        "greedy": lambda: filter(None, [make_greedy_plan(evaluator, deadline)] if with_greedy else []),
    }
    for name, make_plans in more.items():
        if not deadline.is_over:
            found.append(_best(evaluator, name, make_plans()))
    return sorted((b for b in found if b is not None), key=lambda b: b.step_ms)


def list_strategies(problem: Problem) -> list[str]:
    """Return the names of the fixed strategies: one rule for all blocks."""
    return list(_list_rules(problem))


def fits_strategy(problem: Problem, name: str) -> bool:
    """Return whether a variant of a fixed strategy fits."""
    return any(map(Accountant(problem).fits, _uniform(problem, _list_rules(problem)[name])))


def root_interval(num_blocks: int) -> int:
    """Return the square root of the number of blocks, rounded up."""
    return math.isqrt(num_blocks - 1) + 1


def _list_rules(problem: Problem) -> dict[str, KeepRule]:
    return {
        "recompute_all": lambda i, keeps: RECOMPUTE,
        "keep_all": lambda i, keeps: _largest(keeps, DEVICE),
        "offload_all": lambda i, keeps: _largest(keeps, HOST),
        "fixed_interval": _keep_every(FIXED_INTERVAL),
        "sqrt_interval": _keep_every(root_interval(len(problem.blocks))),
    }


def _best(evaluator: Evaluator, name: str, plans: Iterable[Plan]) -> Baseline | None:
    fitting = _keep_fitting(evaluator, list(plans))
    prices = evaluator.price([(plan.prefetch_depth, plan.units) for plan in fitting])
    steps = [price.step_ms for price in prices]
    return Baseline(name, fitting[steps.index(min(steps))], min(steps)) if steps else None


def _keep_fitting(evaluator: Evaluator, plans: Sequence[Plan]) -> list[Plan]:
    fits = evaluator.fits([(plan.prefetch_depth, plan.units) for plan in plans])
    return [plan for plan, fit in zip(plans, fits, strict=True) if fit]


def _lanes(problem: Problem, u: int) -> tuple[Lane, ...]:
    return list_lanes(problem, u)


def _edge_plans(problem: Problem) -> list[tuple[UnitPlan, UnitPlan]]:
    """Return pairs of decisions for embed and head: the same kind of lane for both, where both have it."""
    last = len(problem.units) - 1
    pairs = [(a, b) for a, b in product(_lanes(problem, 0), _lanes(problem, last)) if a == b]
    pairs = pairs or [(_lanes(problem, 0)[0], _lanes(problem, last)[0])]
    if not problem.units[0].num_params or not problem.units[last].num_params:
        pairs = list(product(_lanes(problem, 0), _lanes(problem, last)))
    return [(make_unit_plan(a), make_unit_plan(b)) for a, b in pairs]


def _uniform(problem: Problem, keep_of: KeepRule) -> Iterator[Plan]:
    """Yield plans whose blocks share one lane and boundary place."""
    keeps = [keep_of(i, list_keeps(problem, block)) for i, block in enumerate(problem.blocks)]
    for edges, lane, place in product(_edge_plans(problem), _block_lanes(problem), list_boundaries(problem)):
        blocks = [make_unit_plan(lane, keep, place) for keep in keeps]
        yield make_plan(problem, [edges[0], *blocks, edges[1]], problem.prefetch_depths[0])


def _block_lanes(problem: Problem) -> list[Lane]:
    """Return the lanes that every block has (blocks without parameters take any)."""
    with_params = [u for u in range(1, len(problem.units) - 1) if problem.units[u].num_params]
    return list(_lanes(problem, with_params[0] if with_params else 1))


def _largest(keeps: tuple[Keep, ...], place: str) -> Keep:
    return max((keep for keep in keeps if keep.place == place), key=lambda keep: keep.point, default=RECOMPUTE)


def _keep_every(interval: int) -> KeepRule:
    return lambda i, keeps: _largest(keeps, DEVICE) if i % interval == 0 else RECOMPUTE


def _filled(evaluator: Evaluator, deadline: Deadline) -> list[Plan]:
    """Return the fastest streamed plans, and the same with the device's spare memory filled: by blocks that stay, by
    residuals that are kept, by the one and then the other."""
    problem = evaluator.problem
    resident = [lane for lane in _block_lanes(problem) if not lane.is_streamed]
    streamed = [lane for lane in _block_lanes(problem) if lane.is_streamed]
    options = [list_keeps(problem, unit) for unit in problem.units]
    largest = {place: [_largest(keeps, place) for keeps in options] for place in (DEVICE, HOST)}
    blocks = range(1, len(problem.units) - 1)

    def keep(u: int, plan: UnitPlan) -> UnitPlan:
        return make_unit_plan(Lane(plan.weights, plan.states, plan.update, plan.grads), largest[DEVICE][u], DEVICE)

    starts = []
    for edges, lane, place in product(_edge_plans(problem), streamed, (DEVICE, HOST)):
        for rest in ([RECOMPUTE] * len(problem.units), largest[HOST]):
            units = [edges[0], *(make_unit_plan(lane, rest[u], place) for u in blocks), edges[1]]
            starts += [make_plan(problem, units, depth) for depth in problem.prefetch_depths]
    starts = _keep_fitting(evaluator, starts)
    prices = evaluator.price([(plan.prefetch_depth, plan.units) for plan in starts])
    order = sorted(range(len(starts)), key=lambda i: prices[i])
    starts = [starts[i] for i in order[:NUM_FILLED]]
    plans = [*starts, *_fill(evaluator, starts, keep)]
    for stay in resident:
        if deadline.is_over:
            break
        stays = _fill(evaluator, starts, lambda u, plan, stay=stay: _change(plan, stay))  # type: ignore[misc]
        plans += [*stays, *_fill(evaluator, stays, keep)]
    return plans


def _change(plan: UnitPlan, lane: Lane) -> UnitPlan:
    return make_unit_plan(lane, Keep(plan.residual_point, plan.residuals), plan.boundary)


def _fill(evaluator: Evaluator, plans: Sequence[Plan], change: Callable[[int, UnitPlan], UnitPlan]) -> list[Plan]:
    """Change as many blocks of each plan as fit, the last ones first (their residuals are needed first): bisection."""
    last = len(evaluator.problem.units) - 1
    low, high = [0] * len(plans), [last - 1] * len(plans)

    def changed(plan: Plan, count: int) -> Plan:
        units = [change(u, p) if last - count <= u < last else p for u, p in enumerate(plan.units)]
        return make_plan(evaluator.problem, units, plan.prefetch_depth)

    while low != high:
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        tried = [changed(plan, count) for plan, count in zip(plans, middle, strict=True)]
        fits = evaluator.fits([(plan.prefetch_depth, plan.units) for plan in tried])
        low = [m if fit else a for a, m, fit in zip(low, middle, fits, strict=True)]
        high = [b if fit else max(m - 1, a) for a, b, m, fit in zip(low, high, middle, fits, strict=True)]
    return [changed(plan, count) for plan, count in zip(plans, low, strict=True)]


def _random_grid(problem: Problem, num_random: int) -> Iterator[Plan]:
    """Yield seeded random plans: blocks in three groups of random sizes and order, each with random decisions."""
    rng = random.Random(RANDOM_SEED)
    edges, lanes, places = _edge_plans(problem), _block_lanes(problem), list_boundaries(problem)
    for _ in range(num_random):
        kinds = [(rng.choice(lanes), rng.random(), rng.choice(places)) for _ in range(3)]
        shares = [rng.random() for _ in kinds]
        spread = rng.random() < 0.5
        group = [k for k, share in enumerate(shares) for _ in range(max(1, round(share * len(problem.blocks))))]
        if spread:
            rng.shuffle(group)
        units = []
        for i, block in enumerate(problem.blocks):
            lane, pick, place = kinds[group[i % len(group)]]
            keeps = list_keeps(problem, block)
            own = lane if block.num_params else list_lanes(problem, i + 1)[0]
            units.append(make_unit_plan(own, keeps[int(pick * len(keeps))], place))
        first, last = rng.choice(edges)
        yield make_plan(problem, [first, *units, last], rng.choice(problem.prefetch_depths))
