"""The optimizer's benchmarks and the comparison run, and what they claim follows from what they measure."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lazytrain.errors import LazyTrainError
from lazytrain.recipes import bench_optimizer, compare_optimizers, metamathqa, plain_training
from lazytrain.recipes.default_model import write_default_model
from lazytrain.recipes.plain_training import Outcome
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.sample import make_sample

ROOT = Path(__file__).resolve().parents[1]
COURSE_TOLERANCE = 2e-3  # relative, of the losses of some steps: 8-bit states beside fp32 ones; worst seen 5e-4


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


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_the_recipe_trains_as_plain_pytorch_with_transformers_does(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, positions, loss, clipping, schedule and update: by code that shares nothing but the batches."""
    # Rough times are enough: a plan changes no bit.
    monkeypatch.setattr(metamathqa, "Profiler", functools.partial(metamathqa.Profiler, floor_s=0.001))
    train, held_out = make_sample(0, num_train=48, num_held_out=4)
    files = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for path, rows in zip(files, (train, held_out)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_default_model(tmp_path / "model", load_rows(files[0]).rows, seed=0)
    arguments = ["--model", str(tmp_path / "model"), "--data", str(files[0]), "--eval-data", str(files[1])]
    arguments += ["--steps", "8", "--batch-size", "4", "--lr", "3e-3", "--max-tokens", "256", "--device", "cpu"]
    arguments += ["--dtype", "float32", "--eval-limit", "0", *(["--packing"] if packing else [])]
    assert metamathqa.main([*arguments, "--out", str(tmp_path / "ours")]) == 0
    theirs = [*arguments, "--optimizers", "torch", "--forward", "transformers", "--seeds", "0"]
    assert compare_optimizers.main(["finetune", *theirs, "--out", str(tmp_path / "theirs")]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    [outcome] = json.loads((tmp_path / "theirs" / "finetune.json").read_text())
    assert losses == pytest.approx(outcome["losses"], rel=COURSE_TOLERANCE)
    assert losses[-1] < 0.6 * losses[0], "it learns, so that a wrong update would show"


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


def test_one_seed_is_held_against_the_spread_of_all_of_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [make_outcome("torch", seed, loss) for seed, loss in enumerate((1.0, 1.1))]
    compare_optimizers.compare("finetune", [*outcomes, make_outcome("bitsandbytes", 0, 1.05)])
    assert all("inside" in line for line in capsys.readouterr().out.splitlines())


def write_outcomes(folder: Path, *outcomes: Outcome, command: str = "finetune") -> str:
    folder.mkdir()
    path = folder / f"{command}.json"
    path.write_text(json.dumps([outcome._asdict() for outcome in outcomes]))
    return str(path)


def test_runs_of_several_programs_are_compared_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"8bit": (1.05, 1.05), "torch": (1.0, 1.1)}
    files = [
        write_outcomes(tmp_path / f"{kind}{seed}", make_outcome(kind, seed, loss))
        for kind, pair in losses.items()
        for seed, loss in enumerate(pair)
    ]
    assert compare_optimizers.main(["compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["torch"] * 2 + ["8bit"] * 4
    assert all("inside the spread" in line for line in lines[4:])
    twice = write_outcomes(tmp_path / "twice", make_outcome("torch", 1, 1.0))
    assert compare_optimizers.main(["compare", *files, twice]) == 2
    assert "torch, seed 1 is in another file" in capsys.readouterr().err


def test_runs_without_answers_are_left_out_of_the_comparison_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [make_outcome("torch", seed, 1.0) for seed in range(3)] + [make_outcome("8bit", s, 1.0) for s in (0, 2)]
    answered = [outcome._replace(exact_match=0.5) if outcome.seed else outcome for outcome in outcomes]
    compare_optimizers.compare("finetune", answered)
    lines = [line for line in capsys.readouterr().out.splitlines() if "exact_match" in line]
    assert len(lines) == 1
    assert "mean 0.50000, torch 0.50000 (seeds 0.50000 to 0.50000): inside the spread" in lines[0]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_outcomes(tmp_path / "a", make_outcome("torch", 0, 1.0))
    other = write_outcomes(tmp_path / "b", make_outcome("8bit", 0, 1.0), command="scratch")
    bad = tmp_path / "finetune.json"
    bad.write_text('[{"kind": "torch"}]')
    cases = {(good, other): "compare takes", (): "compare takes", (str(bad),): "not what this program writes"}
    cases[(str(tmp_path / "c" / "finetune.json"),)] = "No such file"
    cases[(write_outcomes(tmp_path / "d", make_outcome("sgd", 0, 1.0)),)] = "'sgd' is no optimizer"
    for files, text in cases.items():
        assert compare_optimizers.main(["compare", *files]) == 2
        assert text in capsys.readouterr().err


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    groups = [{"lr": torch.tensor(1.0)}, {"lr": 1.0}]
    kept = groups[0]["lr"]
    plain_training.set_lr(SimpleNamespace(param_groups=groups), 0.5)
    assert groups[0]["lr"] is kept
    assert [float(group["lr"]) for group in groups] == [0.5, 0.5]


def test_bytes_of_a_subclass_are_those_of_its_parts() -> None:
    codes, scales = torch.zeros(100, dtype=torch.uint8), torch.zeros(10)
    parts = SimpleNamespace(codes=codes, scales=scales, __tensor_flatten__=lambda: (["codes", "scales"], None))
    assert plain_training.stored_bytes(parts) == 140  # type: ignore[arg-type]
    assert plain_training.stored_bytes(scales) == 40


def test_what_was_trained_is_kept_where_answering_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object) -> float:
        raise LazyTrainError("no time left")

    monkeypatch.setattr(plain_training, "answer", answer)
    flags = ["--tiny", "--optimizers", "8bit", "--seeds", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert compare_optimizers.main(["finetune", *flags, "--steps", "2"]) == 2
    (row,) = json.loads((tmp_path / "finetune.json").read_text())
    assert (row["kind"], row["exact_match"], len(row["losses"])) == ("8bit", None, 2)
