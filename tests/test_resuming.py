"""Resuming: what must agree does, for every option there is; the score before training outlives the process."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazytrain.recipes.command import main
from lazytrain.recipes.default_model import write_default_model
from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.preparation import prepare
from lazytrain.recipes.resuming import COMPARED, DTYPE, FREE, SCORED, run_meta
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.sample import make_sample

NAMES = {field.name for field in dataclasses.fields(Options)}
FOLLOWING = {"num_rows", "num_tokens", "num_steps", "num_warmup_steps"}  # differ where rows or settings do
# Another value of each option than `base` has.
OTHER: dict[str, Any] = {
    "query_field": "original_question",
    "response_field": "query",
    "prompt": "metamath",
    "max_tokens": 190,
    "too_long": "truncate",
    "seed": 1,
    "steps": 4,
    "epochs": 3.0,
    "batch_size": 2,
    "accumulate": 2,
    "packing": True,
    "group_by_length": False,
    "lr": 0.5,
    "warmup_steps": 2,
    "weight_decay": 0.5,
    "max_grad_norm": 0.5,
    "master_bits": 24,
    "dtype": "bfloat16",
    "eval_limit": 3,
    "max_new_tokens": 3,
    "resume": "auto",
    "save_every": 2,
    "print_config": True,
    "dry_run": True,
    "plan_only": True,
    "tensorboard": True,
    "wandb": "mine",
    "device": "cpu",
    "gpu_memory": 2**30,
    "host_memory": 2**30,
    "spill_dir": Path("spill"),
    "plan": Path("plan.json"),
    "fresh_profile": True,
    "microbatches": 2,
    "plan_seconds": 9,
    "compile": True,
    "exact": True,
    "eval_before": False,
    "eval_batch_size": 3,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Return the options of a run over few rows of two kinds of columns, with one row that is too long."""
    directory = tmp_path_factory.mktemp("resuming")
    train, held_out = make_sample(0, num_train=30, num_held_out=6)
    train[3]["query"] += " And then?" * 90
    chats, talks = (
        [[{"role": "user", "content": row["query"]}, {"role": "assistant", "content": text}] for row in train]
        for text in ("5", "6")
    )
    for name, rows in (("train", train), ("other", train[1:]), ("held_out", held_out), ("more", [*held_out, train[0]])):
        lines = [json.dumps(row | {"chat": chat, "talk": talk}) for row, chat, talk in zip(rows, chats, talks)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    write_default_model(directory / "model", load_rows(directory / "train.jsonl").rows, seed=0)
    shutil.copytree(directory / "model", directory / "other_model")
    (directory / "other_model" / "lazytrain_checksums.json").unlink()
    config = json.loads((directory / "model" / "config.json").read_text())
    (directory / "other_model" / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    files = ("--model", "model", "--data", "train.jsonl", "--eval-data", "held_out.jsonl", "--out", "run")
    flags = [word if word.startswith("--") else str(directory / word) for word in files]
    return parse_options([*flags, "--prompt", "plain", "--max-tokens", "200", "--batch-size", "4"])


def other_value(base: Options, name: str) -> Any:
    """Return another value of an option."""
    directory = base.out.parent
    paths = {"model": "other_model", "data": "other.jsonl", "eval_data": "more.jsonl", "out": "other_run"}
    if name in paths:
        path = directory / paths[name]
        return str(path) if name.endswith("data") else path
    return OTHER[name]


def read_meta(options: Options) -> dict[str, Any]:
    return run_meta(options, prepare(options, lambda line: None))


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_every_option_has_one_entry() -> None:
    assert set(COMPARED) | SCORED | FREE == NAMES, "a new option must be compared, or be said to be free"
    assert len(COMPARED) + len(SCORED) + len(FREE) == len(NAMES), "an option has two entries"


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_an_option_that_shapes_the_training_is_told(name: str, base: Options) -> None:
    if name == "messages_field":
        base = dataclasses.replace(base, query_field="none", response_field="none", messages_field="chat")
        other = dataclasses.replace(base, messages_field="talk")
    else:
        other = dataclasses.replace(base, **{name: other_value(base, name)})
    assert getattr(other, name) != getattr(base, name)
    if COMPARED[name] == (DTYPE,):
        assert changed(read_meta(base), read_meta(other)) == set(), "it is recorded with the weights"
        return
    found = changed(read_meta(base), read_meta(other))
    assert found & set(COMPARED[name])
    assert found <= set(COMPARED[name]) | FOLLOWING


@pytest.mark.parametrize("name", sorted(SCORED | FREE))
def test_other_options_leave_the_training_as_it_is(name: str, base: Options) -> None:
    other = dataclasses.replace(base, **{name: other_value(base, name)})
    assert getattr(other, name) != getattr(base, name)
    assert changed(read_meta(base), read_meta(other)) == set()


def test_moved_files_are_the_same_training(base: Options, tmp_path: Path) -> None:
    shutil.copytree(base.out.parent, tmp_path / "moved")
    names = {name: tmp_path / "moved" / Path(getattr(base, name)).name for name in ("model", "data", "eval_data")}
    moved = dataclasses.replace(base, model=names["model"], data=str(names["data"]), eval_data=str(names["eval_data"]))
    assert read_meta(moved) == read_meta(base)


@pytest.mark.slow
def test_the_score_before_training_outlives_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*flags: str, code: int = 0) -> tuple[Any, str]:
        fixed = ("--device", "cpu", "--steps", "3", "--batch-size", "8", "--max-new-tokens", "6")
        assert main(["train", *fixed, "--out", str(tmp_path), *flags]) == code
        printed = capsys.readouterr()
        return json.loads((tmp_path / "outcome.json").read_text())["exact_match"]["before"], printed.out + printed.err

    first, _ = train("--eval-before", "--eval-limit", "6")
    assert first is not None
    resumed, printed = train("--resume", "auto", "--eval-limit", "6")
    assert resumed == first
    assert "before training: exact match" in printed
    other, printed = train("--resume", "auto", "--eval-limit", "5")
    assert other is None
    assert "the score before training is left out" in printed
    notes = [(tmp_path / name).read_bytes() for name in ("options.toml", "plan.json")]
    _, printed = train("--resume", "auto", "--eval-limit", "6", "--max-tokens", "64", code=2)
    assert "was saved with max_tokens = 96, this run has 64" in printed
    assert "plan" not in printed, "it is refused before minutes of profiling"
    _, printed = train("--resume", "auto", "--eval-limit", "6", "--dtype", "bfloat16", code=2)
    assert "Give the same --dtype" in printed
    assert "plan" not in printed
    assert notes == [(tmp_path / name).read_bytes() for name in ("options.toml", "plan.json")], "of the run as it is"
    train("--eval-limit", "6")
    anew, _ = train("--resume", "auto", "--eval-limit", "6")
    assert anew is None, "the score was of an earlier run in this directory"
