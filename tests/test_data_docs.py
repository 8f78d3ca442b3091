"""docs/data.md: its examples run, its flags and modules exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.recipes.options import parse_options

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples_run(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[index], f"example {index} of docs/data.md", "exec"), {})
    for line in re.findall(r"print\(.*?\)  # (.*)", EXAMPLES[index]):
        assert line in capsys.readouterr().out


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) == 3


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    flags = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert len(flags) > 10
    assert flags <= known


def test_jinja_is_needed_for_chats_only() -> None:
    code = "import sys; sys.modules['jinja2'] = None; import lazytrain.recipes.preparation"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
