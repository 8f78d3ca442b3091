"""The optimizer's benchmarks and the comparison run, and what they claim follows from what they measure."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazytrain.recipes import bench_optimizer, compare_optimizers
from lazytrain.recipes.plain_training import Outcome

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "limit"), [(32, 6.1), (24, 5.1)])
def test_host_bytes_a_parameter_are_measured(bits: int, limit: float) -> None:
    """One layer of a 1B-parameter model, in a process of its own; the whole model is the benchmark's default."""
    command = [sys.executable, "-m", "lazytrain.recipes.bench_optimizer", "memory", "--master-bits", str(bits)]
    command += ["--layers", "1", "--vocabulary", "2048"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"([0-9.]+) bytes a parameter", done.stdout)
    assert found is not None
    assert limit - 0.1 < float(found[1]) <= limit


def test_speed_is_measured_beside_torch() -> None:
    before = torch.get_num_threads()
    try:
        ratios = bench_optimizer.measure_speed(elements=2**20, threads=2, rounds=2)
    finally:
        torch.set_num_threads(before)
    theirs, *ours = ratios.values()
    assert theirs == 1.0
    assert len(ours) == 2
    assert all(ratio > 0.0 for ratio in ours)


def test_comparison_from_scratch_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["scratch", "--tiny", "--steps", "3", "--optimizers", "torch", "8bit", "torchao", "--device", "cpu"]
    assert compare_optimizers.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "scratch.json").read_text())
    by_kind = {row["kind"]: row for row in rows}
    assert set(by_kind) >= {"torch", "8bit"}
    assert by_kind["8bit"]["state_bytes"] < by_kind["torch"]["state_bytes"] / 2
    assert by_kind["8bit"]["train_loss"] == pytest.approx(by_kind["torch"]["train_loss"], rel=1e-2)
    assert "8bit" in capsys.readouterr().out


def make_outcome(kind: str, seed: int, loss: float) -> Outcome:
    return Outcome(kind, seed, loss, loss, None, 1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("command", "loss", "verdict"),
    [
        ("scratch", 1.004, "within"),
        ("scratch", 1.006, "OVER"),
        ("finetune", 1.05, "inside"),
        ("finetune", 1.2, "OUTSIDE"),
    ],
)
def test_verdict_follows_from_the_numbers(
    command: str, loss: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [1.0, 1.0] if command == "scratch" else [1.0, 1.1]
    outcomes = [make_outcome("torch", seed, x) for seed, x in enumerate(others)]
    outcomes += [make_outcome("8bit", seed, loss) for seed in range(2)]
    compare_optimizers.compare(command, outcomes)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(verdict in line for line in lines)
