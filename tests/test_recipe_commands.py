"""What surrounds a run: dry run, eval and export of what it left, the settings that it notes, its report."""

import json
import tomllib
from pathlib import Path
from typing import cast

import pytest
import torch

from lazytrain.checkpoint import open_checkpoint
from lazytrain.configuration import load_config
from lazytrain.engine import Engine
from lazytrain.recipes import model_evaluation
from lazytrain.recipes.command import main
from lazytrain.recipes.model_evaluation import FileEngine
from lazytrain.shards import open_model_dir
from lazytrain.solver.plan import Plan
from lazytrain.store_manifest import MODEL_CHECKSUMS
from lazytrain.trainer import TrainState, read_params
from lazytrain.transformer import transformer_model

pytestmark = pytest.mark.slow
EVAL = ("--eval-limit", "6", "--max-new-tokens", "6")
FLAGS = ("--device", "cpu", "--steps", "3", "--batch-size", "8", *EVAL)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of three steps."""
    out = tmp_path_factory.mktemp("commands") / "run"
    assert main(["train", *FLAGS, "--out", str(out)]) == 0
    return out


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    files = open_model_dir(directory)
    return {name: files.read(name).clone() for name in files.tensors}


def assert_equal_models(first: Path, second: Path) -> None:
    ours, theirs = read_all(first), read_all(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_dry_run_prints_a_plan_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert Plan.from_dict(json.loads(printed.out)).predicted is not None
    assert "expected:" in printed.err
    assert [path for path in tmp_path.rglob("*") if path != scratch] == []


def test_a_dry_run_makes_no_spill_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FLAGS, "--dry-run", "--spill-dir", str(tmp_path / "nvme")]) == 2
    assert "Make it first" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_notes_its_settings_and_memory(out: Path) -> None:
    settings = tomllib.loads((out / "options.toml").read_text())
    assert (settings["steps"], settings["batch-size"], settings["lr"]) == (3, 8, 3e-3)
    tiers = json.loads((out / "outcome.json").read_text())["tiers"]
    assert set(tiers) == {"host"}, "on a CPU the device's memory is the host's, and no NVMe was allowed"
    assert tiers["host"]["planned_bytes"] > 2**20
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        places = row["real_tokens"] + row["padding_tokens"]
        assert row["padded_tokens_per_s"] == pytest.approx(places / row["step_s"])
        assert row["model_tflops"] * 1e12 / row["tokens_per_s"] / 6 == pytest.approx(num_params(out))
    assert "</html>" in (out / "report.html").read_text()


def num_params(out: Path) -> int:
    return sum(tensor.numel() for tensor in read_all(out / "model").values())


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_eval_of_the_model_gives_the_runs_own_samples(
    share: float, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_evaluation, "WEIGHTS_SHARE", share)
    rows = out / "sample" / "held_out.jsonl"
    flags = ("--model", str(out / "model"), "--data", str(rows), "--prompt", "plain", "--device", "cpu", *EVAL)
    assert main(["eval", *flags, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "samples.jsonl").read_bytes() == (out / "samples.jsonl").read_bytes()
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["total"] == score["correct"] + score["wrong"] + score["no_answer"] == 6
    assert "exact match" in capsys.readouterr().out


def test_all_weights_of_a_model_directory_can_be_read_as_a_state(out: Path) -> None:
    files = open_model_dir(out / "model")
    model = transformer_model(load_config(files.path))
    engine = FileEngine(model, files, torch.device("cpu"), torch.float32, 0)
    state = TrainState(step=0, num_updates=0, seed=0, engine=cast(Engine, engine))
    found = dict(read_params(state))
    assert found.keys() == files.tensors.keys()
    assert all(torch.equal(tensor, files.read(name)) for name, tensor in found.items())


def test_eval_of_nothing_says_so(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = out / "sample" / "held_out.jsonl"
    flags = ("--model", str(out / "model"), "--data", str(rows), "--eval-limit", "0", "--out", str(tmp_path))
    assert main(["eval", *flags]) == 0
    assert "no problems" in capsys.readouterr().err


def test_export_of_the_checkpoint_is_the_runs_own_model(out: Path, tmp_path: Path) -> None:
    assert main(["export", str(out), "--to", str(tmp_path / "model")]) == 0
    assert_equal_models(tmp_path / "model", out / "model")
    assert main(["verify", str(tmp_path / "model")]) == 0
    # A checkpoint is a model: other tools load it as it is, and an export is a copy of what it needs.
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert_equal_models(checkpoint, out / "model")
    names = {path.name for path in checkpoint.iterdir() if not path.name.endswith(".states")}
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"} <= names
    assert {path.name for path in (tmp_path / "model").iterdir()} == names - {"manifest.json"} | {MODEL_CHECKSUMS}
    (checkpoint / "config.json").rename(tmp_path / "config.json")
    assert main(["export", str(out), "--to", str(tmp_path / "model")]) == 2
    assert main(["export", str(out), "--to", str(tmp_path / "again"), "--model", str(out / "base_model")]) == 0
    (tmp_path / "config.json").rename(checkpoint / "config.json")
    assert_equal_models(tmp_path / "again", out / "model")


def test_a_run_with_blocks_on_nvme_says_what_it_takes_and_links_it(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((out / "plan.json").read_text())
    for blocks in plan["blocks"]:
        blocks.update(weights="nvme", states="nvme", update="device", grads="host", residuals="none", residual_point=0)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = ("--plan", str(tmp_path / "plan.json"), "--spill-dir", str(tmp_path / "nvme"), "--out", str(tmp_path / "run"))
    assert main(["train", *FLAGS, *run]) == 0
    printed = capsys.readouterr().out
    assert "on NVMe now, and" in printed
    assert "2 more checkpoints will hold there" in printed
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    linked = [name for name, record in open_checkpoint(path).files.items() if record.piece_checksums]
    assert len(linked) == 8  # weights and states of four blocks
    assert_equal_models(path, out / "model")  # placement never changes a bit
    assert main(["export", str(tmp_path / "run")]) == 0
    assert_equal_models(tmp_path / "run/model", out / "model")
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert main(["train", *FLAGS, *run, "--resume", "auto"]) == 0
    assert "resumed at step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("export", "{tmp}/nowhere"), "no directory"),
        (("export", "{tmp}"), "no valid checkpoint"),
        (("export", "{out}", "--to", "{out}/checkpoints"), "not an export of LazyTrain"),
        (("export", "{out}", "--to", "{out}/base_model"), "base model"),
        (("export", "{out}", "--model", "{tmp}"), "config.json"),
        (("eval", "--model", "{tmp}", "--data", "x.jsonl"), "config.json"),
        (("eval", "--model", "{out}/model", "--data", "{tmp}/x.jsonl"), "x.jsonl"),
        (("train", "--config", "{tmp}/no.toml"), "no.toml"),
        (("train", "--wandb", "project"), "lazytrain[wandb]"),
        (("train", "--out", "{out}/plan.json"), "--out {out}/plan.json is no directory to write in: a file has"),
        (("train", "--out", "/proc/no/run"), "--out /proc/no/run is no directory to write in: /proc/no: No such"),
        (("train", "--out", "{tmp}", "--spill-dir", "/proc/no"), "--spill-dir /proc/no is no directory to write in"),
        (("eval", "--model", "{out}/model", "--data", "x.jsonl", "--out", "/proc/no"), "--out /proc/no is no"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(
    arguments: tuple[str, ...],
    phrase: str,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lazytrain.recipes.trackers.find_spec", lambda name: None)
    assert main([word.format(tmp=tmp_path, out=out) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert phrase.format(out=out) in error
    assert "[Errno" not in error
    assert error.count("error:") == 1
    assert "Traceback" not in error


def test_a_run_that_diverges_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    flags = ("--device", "cpu", "--batch-size", "4", "--lr", "1e30", "--warmup-steps", "0", "--out", str(tmp_path))
    assert main(["train", *flags, "--steps", "4", "--eval-limit", "0"]) == 0
    assert "3 of 4 steps were skipped" in capsys.readouterr().out
    outcome = json.loads((tmp_path / "outcome.json").read_text(), parse_constant=refuse)
    assert outcome["num_skipped_steps"] == 3
    assert main(["train", *flags, "--steps", "40", "--eval-limit", "0"]) == 2
    error = capsys.readouterr().err
    assert "20 steps in a row were skipped" in error
    assert "lower --lr" in error
    assert "Traceback" not in error
