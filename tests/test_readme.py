"""The README stays true: its examples run, its links and rooms exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_python_examples_run(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_users_two_block_function_learns(tmp_path: Path) -> None:
    example = next(code for code in EXAMPLES if "def mix" in code)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = run_script(script)
    loss = float(re.search(r"loss (\S+)", done.stdout)[1])
    assert loss < 0.1, "the example starts at about 8, the mean square of its labels"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("mark", ["run", "test"])
def test_commands_are_one_line_each(mark: str) -> None:
    block = re.search(rf"<!-- command: {mark} -->\n```\n(.*?)\n```", README, re.DOTALL)
    assert block is not None
    assert "\n" not in block[1]
    assert block[1].startswith("python3 -m venv .venv && ")
