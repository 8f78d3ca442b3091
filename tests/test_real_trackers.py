"""TensorBoard and Weights & Biases themselves, where they are installed: what a run wrote is read back."""

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.trackers import SCALARS, open_trackers

ROOT = Path(__file__).resolve().parents[1]
ROW = {"loss": 2.0, "lr": 1e-3, "grad_norm": float("nan"), "shape": [1, 2]}
FLAGS = ("--device", "cpu", "--steps", "5", "--batch-size", "8", "--eval-limit", "4", "--max-new-tokens", "4")
WANDB_BLOCK, WANDB_HEADER, LAST_PIECES = 32768, 7, (1, 4)  # of LevelDB's log format


def read_events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return name -> (step, value) as TensorBoard shows them."""
    pytest.importorskip("tensorboard")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a run of Weights & Biases."""
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, pieces = path.read_bytes(), WANDB_HEADER, b""
    while at + WANDB_HEADER <= len(data):
        left = WANDB_BLOCK - at % WANDB_BLOCK
        if left < WANDB_HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += WANDB_HEADER
        pieces += data[at : at + length]
        at += length
        if kind in LAST_PIECES:
            record = protocol.Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def read_history(out: Path, run: int = -1) -> dict[int, dict[str, float]]:
    """Return step -> values of a run that Weights & Biases wrote offline."""
    path = sorted(out.glob("wandb/offline-run-*/*.wandb"))[run]
    rows = {}
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            rows[int(items["_step"])] = {name: x for name, x in items.items() if not name.startswith("_")}
    return rows


def options(out: Path, *flags: str) -> Options:
    return parse_options(["--out", str(out), *flags])


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first_step, last, loss in ((0, 6, 1.0), (4, 8, 2.0)):
        with open_trackers(options(tmp_path, "--tensorboard"), first_step=first_step, config={}) as trackers:
            for step in range(first_step, last):
                trackers.log_row(ROW | {"step": step, "loss": loss})
            trackers.log(last, {"exact_match/after": 0.5})
    events = read_events(tmp_path / "tensorboard")
    assert events["loss"] == [(step, 1.0 if step < 4 else 2.0) for step in range(8)]
    assert events["exact_match/after"] == [(8, 0.5)]
    assert "grad_norm" not in events, "nan is left out"


def test_wandb_has_all_steps_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    rows = [ROW | {"step": step, "loss": float(step)} for step in range(8)]
    for first_step, last in ((0, 6), (4, 8)):
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=first_step, config={"lr": 1}) as trackers:
            for row in rows[first_step:last]:
                trackers.log_row(row)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:last]))
    assert read_history(tmp_path) == {row["step"]: {"loss": row["loss"], "lr": 1e-3} for row in rows}
    ids = {path.stem for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert ids == {f"run-{(tmp_path / 'wandb_run_id').read_text().strip()}"}, "both are one run"


@pytest.mark.slow
def test_a_run_logs_the_same_numbers_to_all_three(tmp_path: Path) -> None:
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "lazytrain.recipes.metamathqa", *FLAGS, "--tensorboard", "--wandb", "mine"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "WANDB_MODE": "offline"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    score = json.loads((tmp_path / "outcome.json").read_text())["exact_match"]["after"]["exact_match"]
    history, events = read_history(tmp_path), read_events(tmp_path / "tensorboard")
    assert history.pop(5) == {"exact_match/after": score}
    assert events.pop("exact_match/after") == [(5, pytest.approx(score))]
    assert history == {row["step"]: {name: row[name] for name in SCALARS} for row in rows}
    assert set(events) == set(SCALARS)
    for name, values in events.items():
        assert values == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
