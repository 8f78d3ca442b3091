"""Where a step's time went: the parts sum to the step, and each gap has one owner."""

import random

import pytest

from lazytrain.account import Account, Work, account_step, merge
from lazytrain.lanes import QUEUE_NAMES, Span


def spans(*rows: tuple[str, str, float, float]) -> list[Span]:
    return [Span(name, "unit", queue, start, end) for name, queue, start, end in rows]


def test_every_gap_belongs_to_what_was_busy_then() -> None:
    account = account_step(
        20.0,
        spans(
            ("forward", "compute", 1, 5),
            ("load weights", "h2d", -3, 0.5),
            ("backward", "compute", 7, 12),
            ("update", "cpu", 4, 6),
            ("load weights", "h2d", 5.5, 6.5),
            ("head", "compute", 12, 13),
            ("update", "compute", 15, 16),
            ("store grads", "d2h", 13.5, 25),
        ),
    )
    assert account == Account(
        step_ms=20.0,
        forward_ms=4.0,
        backward_ms=5.0,
        head_ms=1.0,
        device_update_ms=1.0,
        other_ms=0.0,
        h2d_ms=0.5 + 0.5,  # the CPU's update is named before the copy that follows it
        d2h_ms=1.5 + 4.0,
        cpu_update_ms=1.0,
        nvme_ms=0.0,
        idle_ms=0.5 + 0.5 + 0.5,
    )
    assert account.bound == "d2h"


@pytest.mark.parametrize("seed", range(20))
def test_parts_sum_to_the_step(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for queue in QUEUE_NAMES:
        at = rng.uniform(-5, 5)
        for _ in range(30):
            start = at + rng.choice([0.0, rng.uniform(0, 3)])
            at = start + rng.uniform(0, 2)
            rows.append((rng.choice(["forward", "backward", "embed", "update"]), queue, start, at))
    step_ms = rng.uniform(20, 60)
    account = account_step(step_ms, spans(*rows))
    assert sum(account[1:]) == pytest.approx(step_ms, rel=1e-12)
    assert min(account) >= 0
    compute = merge(Work(max(0.0, s), min(step_ms, e)) for _, queue, s, e in rows if queue == "compute" and e > 0)
    assert account.compute_ms == pytest.approx(sum(max(0.0, w.end_ms - w.start_ms) for w in compute))


def test_a_step_that_computes_all_the_time_says_so() -> None:
    account = account_step(10.0, spans(("backward", "compute", 0, 9.5), ("load", "h2d", 9.5, 9.9)))
    assert account.bound == "compute"
    assert account.describe() == "bound by compute: 10.0 ms = backward 9.5, exposed h2d 0.4, idle 0.1"
