"""From a mix of decisions (how many blocks take each option) to plans: the orders in which options may be laid out."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice, permutations, product
from typing import TypeVar

from lazytrain.solver.bounds import Kind
from lazytrain.solver.choices import make_unit_plan
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.problem import Problem

MAX_RUN_ORDERS = 24  # of lanes: 4 options in every order
T = TypeVar("T", bound=Hashable)


def list_arrangements(problem: Problem, mix: Sequence[Kind], prefetch_depth: int) -> Iterator[Plan]:
    """Yield plans of a mix: lanes, keeps and boundaries each in runs, in every order, or spread evenly.

    The plans need not fit.
    """
    orders = [
        (
            _list_orders(kind.lanes, len(kind.members)),
            _list_orders(kind.keeps, len(kind.members)),
            _list_orders(kind.boundaries, len(kind.members)),
        )
        for kind in mix
    ]
    most = max(len(lanes) for lanes, _, _ in orders), max(len(keeps) for _, keeps, _ in orders)
    most_places = max(len(places) for _, _, places in orders)
    for lane_turn, keep_turn, place_turn in product(range(most[0]), range(most[1]), range(most_places)):
        units = [UnitPlan()] * len(problem.units)
        for kind, (lanes, keeps, places) in zip(mix, orders, strict=True):
            picks = zip(
                kind.members,
                lanes[lane_turn % len(lanes)],
                keeps[keep_turn % len(keeps)],
                places[place_turn % len(places)],
                strict=True,
            )
            for u, lane, keep, place in picks:
                units[u] = make_unit_plan(lane, keep, place)
        yield make_plan(problem, units, prefetch_depth)


def _list_orders(counts: Sequence[tuple[T, int]], length: int) -> list[list[T]]:
    orders = [put_in_runs(order, length) for order in islice(permutations(counts), MAX_RUN_ORDERS)]
    return orders if len(counts) == 1 else [spread(counts, length), *orders]


def put_in_runs(counts: Sequence[tuple[T, int]], length: int) -> list[T]:
    """Return the options in the order that is given, `length` in all."""
    return [option for option, count in counts for _ in range(count)]


def spread(counts: Sequence[tuple[T, int]], length: int) -> list[T]:
    """Return the options as evenly spread as their counts allow: error diffusion."""
    credit, picks = [0.0] * len(counts), []
    for _ in range(length):
        for i, (_, count) in enumerate(counts):
            credit[i] += count / length
        pick = max(range(len(counts)), key=credit.__getitem__)
        credit[pick] -= 1.0
        picks.append(counts[pick][0])
    return picks
