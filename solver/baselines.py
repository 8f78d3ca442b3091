"""Plans that need no solver: the strategies that people use, and a seeded random grid.

The best one that fits is the MILP's start, its yardstick and its fallback. Each strategy has variants (where updates
run, where boundaries wait, what the spare device memory holds); the best variant that fits speaks for it.
"""

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from lazytrain.solver.choices import RECOMPUTE, Keep, Lane, list_boundaries, list_keeps, list_lanes, make_unit_plan
from lazytrain.solver.greedy import make_greedy_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.plan import DEVICE, HOST, Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_step_ms

FIXED_INTERVAL = 4
NUM_RANDOM = 20
RANDOM_SEED = 0
Fits = Callable[[Plan], bool]
KeepRule = Callable[[int, tuple[Keep, ...]], Keep]  # block_idx, what it may keep -> what it keeps


class Baseline(NamedTuple):
    """A named plan that fits, and its simulated step."""

    name: str
    plan: Plan
    step_ms: float


def list_baselines(problem: Problem, *, num_random: int = NUM_RANDOM, with_greedy: bool = True) -> list[Baseline]:
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
    """
    fits = Accountant(problem).fits
    greedy = make_greedy_plan(problem) if with_greedy else None
    found = [_best(problem, fits, name, _uniform(problem, keep_of)) for name, keep_of in _list_rules(problem).items()]
    found += [
        _best(problem, fits, "fill", _filled(problem, fits)),
        _best(problem, fits, "random_grid", _random_grid(problem, num_random)),
        _best(problem, fits, "greedy", iter([greedy] if greedy is not None else [])),
    ]
    return sorted((b for b in found if b is not None), key=lambda b: b.step_ms)


def list_fitting_strategies(problem: Problem, *, every: bool = False) -> list[str]:
    """Return the names of the fixed strategies (one rule for all blocks) of which a variant fits; or of every one."""
    fits = Accountant(problem).fits
    rules = _list_rules(problem)
    return [name for name, keep_of in rules.items() if every or any(map(fits, _uniform(problem, keep_of)))]


def _list_rules(problem: Problem) -> dict[str, KeepRule]:
    root = math.isqrt(len(problem.blocks) - 1) + 1
    return {
        "recompute_all": lambda i, keeps: RECOMPUTE,
        "keep_all": lambda i, keeps: _largest(keeps, DEVICE),
        "offload_all": lambda i, keeps: _largest(keeps, HOST),
        "fixed_interval": _keep_every(FIXED_INTERVAL),
        "sqrt_interval": _keep_every(root),
    }


def _best(problem: Problem, fits: Fits, name: str, plans: Iterator[Plan]) -> Baseline | None:
    best: Baseline | None = None
    seen = set()
    for plan in plans:
        key = plan.prefetch_depth, plan.units
        if key not in seen and fits(plan):
            seen.add(key)
            step_ms = simulate_step_ms(problem, plan)
            if best is None or step_ms < best.step_ms:
                best = Baseline(name, plan, step_ms)
    return best


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


def _filled(problem: Problem, fits: Fits) -> Iterator[Plan]:
    """Yield streamed plans, and the same with the device's spare memory filled: by blocks that stay, by residuals that
    are kept, by the one and then the other."""
    resident = [lane for lane in _block_lanes(problem) if not lane.is_streamed]
    streamed = [lane for lane in _block_lanes(problem) if lane.is_streamed]
    options = [list_keeps(problem, unit) for unit in problem.units]
    largest = {place: [_largest(keeps, place) for keeps in options] for place in (DEVICE, HOST)}

    def keep(u: int, plan: UnitPlan) -> UnitPlan:
        return make_unit_plan(Lane(plan.weights, plan.states, plan.update, plan.grads), largest[DEVICE][u], DEVICE)

    for edges, lane, place in product(_edge_plans(problem), streamed, (DEVICE, HOST)):
        for rest in (RECOMPUTE, HOST):
            lean = [
                make_unit_plan(lane, rest if isinstance(rest, Keep) else largest[rest][u], place)
                for u in range(1, len(problem.units) - 1)
            ]
            start = [edges[0], *lean, edges[1]]
            for depth in problem.prefetch_depths:
                if fits(make_plan(problem, start, depth)):
                    kept = _fill(problem, fits, start, depth, keep)
                    yield make_plan(problem, kept, depth)
                    for stay in resident:
                        stays = _fill(problem, fits, start, depth, lambda u, plan, stay=stay: _change(plan, stay))  # type: ignore[misc]
                        yield make_plan(problem, stays, depth)
                        both = _fill(problem, fits, stays, depth, keep)
                        yield make_plan(problem, both, depth)


def _change(plan: UnitPlan, lane: Lane) -> UnitPlan:
    return make_unit_plan(lane, Keep(plan.residual_point, plan.residuals), plan.boundary)


def _fill(
    problem: Problem, fits: Fits, units: list[UnitPlan], depth: int, change: Callable[[int, UnitPlan], UnitPlan]
) -> list[UnitPlan]:
    """Change as many blocks as fit, the last ones first (their residuals are needed first): bisection."""
    low, high = 0, len(units) - 2

    def changed(count: int) -> list[UnitPlan]:
        first = len(units) - 1 - count
        return [change(u, p) if first <= u < len(units) - 1 else p for u, p in enumerate(units)]

    while low < high:
        middle = (low + high + 1) // 2
        if fits(make_plan(problem, changed(middle), depth)):
            low = middle
        else:
            high = middle - 1
    return changed(low)


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
