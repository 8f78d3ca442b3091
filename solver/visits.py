"""The backward sweep's order, with the boundaries that were not kept computed again."""

from collections.abc import Sequence

from lazytrain.solver.plan import NONE, UnitPlan


def backward_visits(blocks: Sequence[UnitPlan]) -> list[tuple[int, bool]]:
    """Return the backward sweep's visits in order: (block, whether only its forward runs again).

    A run of blocks without boundaries starts from the kept one before it: forward up to its last block, then backward
    through all.

    Example:
        >>> kept, none = UnitPlan(), UnitPlan(boundary="none")
        >>> backward_visits([kept, none, none])
        [(0, True), (1, True), (2, False), (1, False), (0, False)]
    """
    visits: list[tuple[int, bool]] = []
    end = len(blocks)
    while end > 0:
        start = end - 1
        while blocks[start].boundary == NONE:
            start -= 1
        visits += [(i, True) for i in range(start, end - 1)]
        visits += [(i, False) for i in reversed(range(start, end))]
        end = start
    return visits
