"""Make a plan easier to read and to edit where that costs next to nothing: fewer runs of equal blocks."""

from collections.abc import Iterator
from itertools import islice, pairwise, permutations

from lazytrain.solver.plan import UnitPlan
from lazytrain.solver.search import Search, Units

TIE = 5e-4  # relative: as good as the same step
MAX_TOGETHER = 64  # plans priced in one go
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
    """Yield plans with fewer runs: kinds in one run each; a run like its neighbour; two blocks exchanged."""
    blocks, num_runs, seen = units[1:-1], count_runs(units), set[Units]()
    counts: dict[UnitPlan, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    if len(counts) <= MAX_KINDS:
        for order in permutations(counts):
            yield from _if_tidier(units, [kind for kind in order for _ in range(counts[kind])], num_runs, seen)
    starts = [i for i in range(len(blocks)) if i == 0 or blocks[i] != blocks[i - 1]]
    runs = sorted(zip(starts, [*starts[1:], len(blocks)], strict=True), key=lambda run: (run[1] - run[0], run))
    for first, end in runs:
        for neighbour in (first - 1, end):
            if 0 <= neighbour < len(blocks):
                same = [blocks[neighbour]] * (end - first)
                yield from _if_tidier(units, [*blocks[:first], *same, *blocks[end:]], num_runs, seen)
    for first, _ in runs:
        for other in range(len(blocks)):
            changed = list(blocks)
            changed[first], changed[other] = changed[other], changed[first]
            yield from _if_tidier(units, changed, num_runs, seen)


def _if_tidier(units: Units, blocks: list[UnitPlan], num_runs: int, seen: set[Units]) -> Iterator[Units]:
    changed = (units[0], *blocks, units[-1])
    if changed not in seen and count_runs(changed) < num_runs:
        seen.add(changed)
        yield changed
