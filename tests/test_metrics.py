"""What a step's line says, what metrics.jsonl keeps, and memory per tier beside the plan."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazytrain.account import Account
from lazytrain.base import StepMetrics
from lazytrain.errors import NonFiniteError
from lazytrain.recipes import outcome
from lazytrain.recipes.batches import TokenCounts
from lazytrain.recipes.metrics import (
    MAX_SKIPPED_IN_ROW,
    MetricsFile,
    count_skipped,
    describe_metrics,
    model_tflops,
    read_metrics,
)
from lazytrain.recipes.outcome import Tier, describe_tier, measure_tiers

GIB = 2**30
COUNTS = TokenCounts(real_tokens=900, padding_tokens=100, target_tokens=400)
BATCH = {"tokens_bt": torch.zeros(10, 100, dtype=torch.int64)}
ACCOUNT = Account(500.0, 100.0, 100.0, 0.0, 0.0, 0.0, 300.0, 0.0, 0.0, 0.0, 0.0)


def make_metrics(step: int, account: Account | None = None) -> StepMetrics:
    return StepMetrics(step, 2.0, 3.0, 0.5, 1e-4, 400, False, None, 0.5, account)


def test_a_line_tells_real_and_padded_speed_work_and_bound() -> None:
    line = describe_metrics(make_metrics(0, ACCOUNT), COUNTS, num_params=10**9)
    assert line == (
        "loss 2.0000, norm 3.00, lr 1.00e-04, 1,800 tokens/s (2,000 with padding), 10.8 TFLOP/s, bound by h2d"
    )
    bare = describe_metrics(make_metrics(0), COUNTS._replace(padding_tokens=0))
    assert bare == "loss 2.0000, norm 3.00, lr 1.00e-04, 1,800 tokens/s"


def test_model_tflops_counts_real_tokens_only() -> None:
    assert model_tflops(10**12, COUNTS, 0.5) == pytest.approx(6 * 900 / 0.5)
    assert model_tflops(10**12, COUNTS._replace(padding_tokens=10**6), 0.5) == model_tflops(10**12, COUNTS, 0.5)


def test_a_line_is_kept_and_returned_and_later_steps_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, first_step=0) as file:
        rows = [file.write(make_metrics(step, ACCOUNT), COUNTS, BATCH, num_params=10**9) for step in range(3)]
    assert read_metrics(path) == [json.loads(json.dumps(row)) for row in rows]
    assert rows[0]["padded_tokens_per_s"] == 2000
    assert rows[0]["model_tflops"] == pytest.approx(10.8)
    with MetricsFile(path, first_step=1) as file:
        assert "model_tflops" not in file.write(make_metrics(1), COUNTS, BATCH)
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_steps_skipped_in_a_row_end_the_run() -> None:
    good, bad = make_metrics(0), make_metrics(7)._replace(skipped=True, grad_norm=float("nan"), bad_unit="head")
    assert count_skipped(5, good) == 0
    assert [count_skipped(n, bad) for n in range(MAX_SKIPPED_IN_ROW - 1)] == list(range(1, MAX_SKIPPED_IN_ROW))
    with pytest.raises(
        NonFiniteError, match=r"20 steps in a row were skipped, the last one 7: gradient norm nan in head"
    ):
        count_skipped(MAX_SKIPPED_IN_ROW - 1, bad)


def test_lines_are_on_the_disk_where_a_checkpoint_stands_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "metrics.jsonl", []
    real = os.fsync

    def fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append((name, os.fstat(fd).st_size if name.startswith("metrics") else 0))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with MetricsFile(path, first_step=0) as file:
        assert synced == [("metrics.jsonl.partial", 0), (tmp_path.name, 0)]
        for step in range(2):
            file.write(make_metrics(step), COUNTS, BATCH)
            file.sync()
            assert synced[-1] == ("metrics.jsonl", path.stat().st_size)
        file.write(make_metrics(2), COUNTS, BATCH)
    assert synced[-1] == ("metrics.jsonl", path.stat().st_size)


def planned(*, is_host: bool, nvme: bool) -> Any:
    hardware = SimpleNamespace(device_memory_bytes=8 * GIB, host_memory_bytes=32 * GIB, nvme_bytes=100 * GIB)
    predicted = SimpleNamespace(device_peak_bytes=2 * GIB, host_bytes=3 * GIB, nvme_bytes=5 * GIB)
    problem = SimpleNamespace(hardware=hardware, device_is_host=is_host, allow_nvme=nvme)
    return SimpleNamespace(plan=SimpleNamespace(predicted=predicted), problem=problem)


def engine(spilled: int | None) -> Any:
    """Return what is asked of an engine; checkpoints have a GiB of its room, which is no part of the plan."""
    spill = None if spilled is None else SimpleNamespace(reserved_bytes=spilled + GIB, shared_bytes=GIB)
    return SimpleNamespace(spill=spill)


@pytest.mark.parametrize(
    ("is_host", "spilled", "tiers"),
    [
        (False, None, [("device", 2, 1, 8), ("host", 3, 4, 32)]),
        (False, 6 * GIB, [("device", 2, 1, 8), ("host", 3, 4, 32), ("NVMe", 5, 6, 100)]),
        (True, None, [("host", 5, 4, 32)]),
    ],
)
def test_each_tier_stands_beside_its_plan(
    is_host: bool, spilled: int | None, tiers: list[tuple[str, int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "resident_host_bytes", lambda: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB)
    device = torch.device("cpu" if is_host else "cuda")
    found = measure_tiers(planned(is_host=is_host, nvme=spilled is not None), engine(spilled), device, GIB)
    assert found == [Tier(name, a * GIB, b * GIB, c * GIB) for name, a, b, c in tiers]


def test_a_tier_is_one_line() -> None:
    assert describe_tier(Tier("host", GIB, 3 * 2**19, 2 * GIB)) == (
        "host memory: planned 1.00 GiB, measured 1.5 MiB, of 2.00 GiB that the plan may fill"
    )
    assert "measured not counted" in describe_tier(Tier("device", GIB, None, GIB))
