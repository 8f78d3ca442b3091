"""docs/optimizer.md: its examples run, and the tests that it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "optimizer.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples_run(index: int) -> None:
    exec(compile(EXAMPLES[index], f"example {index} of docs/optimizer.md", "exec"), {})


def test_both_examples_are_found() -> None:
    assert len(EXAMPLES) == 2


def test_named_tests_exist() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and "test_" in line]
    assert len(rows) > 10
    for row in rows:
        files = re.findall(r"`(test_\w+\.py)`((?:[:, ]*`test_\w+`)*)", row)
        assert files, row
        for name, tests in files:
            source = (ROOT / "tests" / name).read_text()
            for test in re.findall(r"`(test_\w+)`", tests):
                assert f"def {test}(" in source, (name, test)


def test_named_modules_exist() -> None:
    for room, name in re.findall(r"lazytrain\.(kernels|recipes)\.(\w+)", TEXT):
        assert (ROOT / room / f"{name}.py").is_file(), name
