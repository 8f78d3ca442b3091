"""Make a plan easier to read and to edit where that costs next to nothing: fewer runs of equal blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise, permutations

from lazytrain.solver.choices import intern_units
from lazytrain.solver.plan import UnitPlan
from lazytrain.solver.search import Search, Units

TIE = 2e-3  # relative: a plan that reads well is worth that
MAX_TOGETHER = 64  # plans priced in one go
# What a block decides apart from the rest: a run may take one of them from its neighbour.
PARTS = (("weights", "states", "update", "grads"), ("residual_point", "residuals"), ("boundary",))
MAX_KINDS = 4  # whose every order as runs is tried


def tidy(search: Search) -> None:
    """Replace the search's plan by one with fewer runs of equal blocks, as long as the step stays about the same."""
    limit_ms = search.step_ms * (1 + TIE)
    while not search.is_over:
        candidates = _list_tidier(search.units)
        while some := list(islice(candidates, MAX_TOGETHER)):
            fitting = [units for units, fits in zip(some, search.fit_all(some), strict=True) if fits]
            prices = search.price_all(fitting)
            good = [units for units, price in zip(fitting, prices, strict=True) if price.step_ms <= limit_ms]
            if good or search.is_over:
                break
        if not some or not good:
            return
        search.replace(good[0])


def count_runs(units: Units) -> int:
    """Return the number of runs of equal neighbours among the blocks."""
    return 1 + sum(a != b for a, b in pairwise(units[1:-1]))


def _list_tidier(units: Units) -> Iterator[Units]:
    """Yield plans with fewer runs: kinds in one run each; a run (or a part of what it decides) like its neighbour; two
    blocks exchanged."""
    blocks, num_runs, seen = units[1:-1], count_runs(units), set[Units]()
    counts: dict[UnitPlan, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    if len(counts) <= MAX_KINDS:
        for order in permutations(counts):
            yield from _if_tidier(units, [kind for kind in order for _ in range(counts[kind])], num_runs, seen)
    runs = _list_runs(blocks)
    for first, end in runs:
        for neighbour in (first - 1, end):
            if 0 <= neighbour < len(blocks):
                same = [blocks[neighbour]] * (end - first)
                yield from _if_tidier(units, [*blocks[:first], *same, *blocks[end:]], num_runs, seen)
    for fields in PARTS:
        parts = [tuple(getattr(block, name) for name in fields) for block in blocks]
        for first, end in _list_runs(parts):
            for neighbour in (first - 1, end):
                if 0 <= neighbour < len(blocks):
                    like = dict(zip(fields, parts[neighbour], strict=True))
                    alike = intern_units([replace(block, **like) for block in blocks[first:end]])
                    yield from _if_tidier(units, [*blocks[:first], *alike, *blocks[end:]], num_runs, seen)
    for first, _ in runs:
        for other in range(len(blocks)):
            changed = list(blocks)
            changed[first], changed[other] = changed[other], changed[first]
            yield from _if_tidier(units, changed, num_runs, seen)


def _list_runs(values: Sequence[object]) -> list[tuple[int, int]]:
    """Return (first, end) of the runs of equal values, the shortest first."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return sorted(zip(starts, [*starts[1:], len(values)], strict=True), key=lambda run: (run[1] - run[0], run))


def _if_tidier(units: Units, blocks: list[UnitPlan], num_runs: int, seen: set[Units]) -> Iterator[Units]:
    changed = (units[0], *blocks, units[-1])
    if changed not in seen and count_runs(changed) < num_runs:
        seen.add(changed)
        yield changed
