"""docs/planner.md, docs/hardware.md: commands and examples run, in order, in a fresh folder; links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.solver.plan import UnitPlan

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("planner.md", "hardware.md"))
PLANNER = PAGES[0].read_text()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", PLANNER, re.S) for line in block.splitlines()]
EXAMPLES = re.findall(r"```python\n(.*?)```", PLANNER, re.S)


def run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_commands_run_in_order(tmp_path: Path) -> None:
    assert len(COMMANDS) == 4
    outputs = []
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "python"
        outputs.append(run(arguments, tmp_path))
    step = [re.search(r"expected step: ([\d.]+) ms", output) for output in outputs]
    assert all(step)
    assert step[0][1] == step[1][1], "the saved plan is priced as it was solved"  # type: ignore[index]
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for phrase in ("one more GiB", "busy: compute", "fullest: "):
        assert phrase in outputs[2]
    assert "largest batch" in outputs[3]


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples_run(index: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[index])
    assert run(["example.py"], tmp_path).strip()


def test_the_line_of_a_plan_is_one() -> None:
    line = re.search(r"```json\n(.*?)```", PLANNER, re.S)
    assert line is not None
    values = {k: v for k, v in json.loads(line[1]).items() if k not in ("first", "last")}
    assert UnitPlan(**values).contradiction() is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`(solver/\w+\.py)`", text):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"lazytrain\.recipes\.(\w+)", text):
        assert (ROOT / "recipes" / f"{name}.py").is_file(), name


def test_every_option_of_the_command_that_the_page_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    from lazytrain.solver.__main__ import main

    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z][a-z-]+", PLANNER)) <= known
