"""A plan.json that a person edited: priced anew, or refused in one line that names the field or the tier."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lazytrain.solver.__main__ import main
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.hardware import load_hardware
from lazytrain.solver.memory import GIB
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import Plan, UnitPlan, make_plan
from lazytrain.solver.simulator import simulate_step_ms

MODEL, MACHINE = "qwen2.5-0.5b", "h200"
COMMAND = ("--model", MODEL, "--hardware", MACHINE, "--batch", "2", "--seq", "256")
NUM_BLOCKS = 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with a plan that keeps everything on the device and recomputes all."""
    problem = problem_from_config(KNOWN_MODELS[MODEL], load_hardware(MACHINE), batch=2, seq=256, name=MODEL)
    make_plan(problem, [UnitPlan()] * (NUM_BLOCKS + 2), 2).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def edit(path: Path, **fields: Any) -> None:
    """Change the last two blocks of a plan whose blocks are one run."""
    data = json.loads(path.read_text())
    run = data["blocks"][0]
    data["blocks"] = [{**run, "last": NUM_BLOCKS - 3}, {**run, "first": NUM_BLOCKS - 2, **fields}]
    path.write_text(json.dumps(data))


def test_an_edited_plan_is_priced_and_saved_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(path, residual_point=1, residuals="device")
    again = path.with_name("again.json")
    assert main([*COMMAND, "--plan", str(path), "--json", str(again)]) == 0
    output = capsys.readouterr()
    assert re.search(r"^blocks 22-23 .* device +device$", output.out, re.M)
    assert output.err == ""
    problem = problem_from_config(KNOWN_MODELS[MODEL], load_hardware(MACHINE), batch=2, seq=256, name=MODEL)
    plan = Plan.load(again)
    assert plan.predicted is not None
    assert plan.predicted.step_ms == simulate_step_ms(problem, plan)
    assert plan.units == Plan.load(path).units


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"update": "cpu"}, "states"),
        ({"weights": "elsewhere"}, "weights"),
        ({"residuals": "host"}, "residuals"),
        ({"residual_point": 99, "residuals": "host"}, "residual_point"),
        ({"boundary": "nvme"}, "NVMe is not allowed"),
        ({"first": 21}, "first"),
        ({"wheels": "device"}, "wheels"),
    ],
)
def test_a_contradiction_is_named(
    fields: dict[str, Any], phrase: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(path, **fields)
    assert main([*COMMAND, "--plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert phrase in error
    assert error.count("\n") == 1


def test_a_plan_that_does_not_fit_is_refused_with_what_is_missing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--plan", str(path), "--gpu-memory", "2GiB"]) == 2
    missing = re.search(r"needs ([\d.]+) GiB more device memory at \w+", capsys.readouterr().err)
    assert missing is not None
    enough = int((2 + float(missing[1]) + 0.01) * GIB)
    assert main([*COMMAND, "--plan", str(path), "--gpu-memory", str(enough)]) == 0
    assert "another machine" in capsys.readouterr().err


def test_chunks_are_the_plans_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, "--plan", str(path), "--max-batch"])
    assert "--max-batch" in capsys.readouterr().err
