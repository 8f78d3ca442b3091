"""Issue copies ahead of the compute that needs them, as soon as the buffers they go to are free."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from lazytrain.lanes import Worker


class Job(NamedTuple):
    """One position's copies: `issue` may run once the compute at position `needs` is launched (-1 = at once)."""

    issue: Callable[[], Any]
    needs: int


class Prefetch:
    """Runs the jobs of one sweep in order on the loader, each as early as its `needs` allows.

    Args:
        held_from: a position from which on nothing is issued before `release`; None = nothing is held.
    """

    def __init__(self, jobs: Sequence[Job], loader: Worker, *, held_from: int | None = None) -> None:
        for position, job in enumerate(jobs):
            assert job.needs < position, f"position {position} waits for a later one"
        self._jobs, self._loader = jobs, loader
        self._end = len(jobs) if held_from is None else held_from
        self._futures: list[Future[Any]] = []
        self._issue_after(-1)

    def take(self, position: int) -> Any:
        """Return what the job at `position` issued; every earlier position must have been launched."""
        return self._futures[position].result()

    def launched(self, position: int) -> None:
        """Note that the compute at `position` is queued: later copies may follow it."""
        self._issue_after(position)

    def release(self) -> None:
        """Issue what was held and is free to go; call it before the first `take`."""
        self._end = len(self._jobs)
        self._issue_after(-1)

    def wait(self) -> None:
        """Wait until the loader has done all that was issued."""
        for future in self._futures:
            future.result()

    def _issue_after(self, position: int) -> None:
        while len(self._futures) < self._end and self._jobs[len(self._futures)].needs <= position:
            self._futures.append(self._loader.submit(self._jobs[len(self._futures)].issue))
