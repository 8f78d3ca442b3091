"""Learning-rate schedules: pure functions `step -> lr`, steps counted from 0."""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(lr: float, *, num_warmup_steps: int = 0) -> Schedule:
    """Return lr after a linear warm-up: lr · min(1, (step + 1) / num_warmup_steps)."""
    return lambda step: lr * _warm_up(step, num_warmup_steps)


def linear(lr: float, *, num_steps: int, num_warmup_steps: int = 0, final_fraction: float = 0.0) -> Schedule:
    """Return a straight line from lr at the end of the warm-up to `final_fraction` · lr at `num_steps`."""

    def schedule(step: int) -> float:
        done = _progress(step, num_warmup_steps, num_steps)
        return lr * _warm_up(step, num_warmup_steps) * (1 - (1 - final_fraction) * done)

    return schedule


def cosine(lr: float, *, num_steps: int, num_warmup_steps: int = 0, final_fraction: float = 0.0) -> Schedule:
    """Return half a cosine from lr at the end of the warm-up to `final_fraction` · lr at `num_steps`."""

    def schedule(step: int) -> float:
        done = _progress(step, num_warmup_steps, num_steps)
        falling = final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * done))
        return lr * _warm_up(step, num_warmup_steps) * falling

    return schedule


def _warm_up(step: int, num_warmup_steps: int) -> float:
    return min(1.0, (step + 1) / num_warmup_steps) if num_warmup_steps > 0 else 1.0


def _progress(step: int, num_warmup_steps: int, num_steps: int) -> float:
    return min(1.0, max(0.0, (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)))
