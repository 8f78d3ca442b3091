"""The order that the executor and the simulator follow: of the backward sweep, and of users of one buffer."""

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


def last_users(keys: Sequence[int | None]) -> list[int]:
    """Return, per position, the last one before it with the same key, or -1; None shares with nobody.

    Example:
        >>> last_users([0, 1, None, 0, None])
        [-1, -1, -1, 0, -1]
    """
    seen: dict[int, int] = {}
    last = []
    for position, key in enumerate(keys):
        last.append(-1 if key is None else seen.get(key, -1))
        if key is not None:
            seen[key] = position
    return last
