"""Where a step's time went: the parts sum to the step, and each gap has one owner."""

import random

import pytest

from lazytrain.account import Account, Work, account_step, merge
from lazytrain.lanes import QUEUE_NAMES, Span


def spans(*rows: tuple[str, str, float, float]) -> list[Span]:
    return [Span(name, "unit", queue, start, end) for name, queue, start, end in rows]


def test_every_gap_belongs_to_what_ended_it_followed_back() -> None:
    account = account_step(
        20.0,
        spans(
            ("load weights", "h2d", -3, 0.5),  # then nothing was launched for 0.5
            ("forward", "compute", 1, 5),
            ("update", "cpu", 4, 6),
            ("load weights", "h2d", 6, 7),  # waited for the update
            ("backward", "compute", 7, 12),
            ("head", "compute", 12, 13),
            ("store grads", "d2h", 13.5, 14),
            ("update", "compute", 14, 16),
            ("store grads", "d2h", 16, 25),  # nobody waits for it
        ),
    )
    assert account == Account(
        step_ms=20.0,
        forward_ms=4.0,
        backward_ms=5.0,
        head_ms=1.0,
        device_update_ms=2.0,
        other_ms=0.0,
        h2d_ms=0.5 + 1.0,
        d2h_ms=0.5,
        cpu_update_ms=1.0,
        nvme_ms=0.0,
        idle_ms=0.5 + 0.5 + 4.0,
    )
    assert account.bound == "idle"


def test_a_queue_that_is_always_busy_is_not_blamed_for_what_others_end() -> None:
    rows = [("update", "cpu", 0.0, 50.0)]
    for start in range(0, 50, 10):  # forward waits for the offload of the block before, not for the update
        rows += [("forward", "compute", start, start + 4.0), ("offload", "d2h", start + 4.0, start + 10.0)]
    account = account_step(50.0, spans(*rows))
    assert (account.d2h_ms, account.cpu_update_ms, account.idle_ms) == (30.0, 0.0, 0.0)
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
