"""One deadline for everything that a solve does: no step starts after it."""

import time
from collections.abc import Callable

PLAN_SECONDS = 5.0  # for a search; more finds plans that are a percent or two faster, where steps are many
Clock = Callable[[], float]  # seconds


class Deadline:
    """A point in time that all parts of a solve share.

    Example:
        >>> Deadline(5.0).part(0.5).left_s
        2.5
    """

    def __init__(self, limit_s: float, clock: Clock = time.perf_counter) -> None:
        self._clock, self._end_s = clock, clock() + limit_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; negative afterwards."""
        return self._end_s - self._clock()

    @property
    def is_over(self) -> bool:
        """Return whether no further step may start."""
        return self.left_s <= 0

    def part(self, share: float) -> "Deadline":
        """Return a deadline after a share of what is left."""
        return Deadline(max(share * self.left_s, 0.0), self._clock)
