"""Every command that the README and the pages show does what its page says, at a size that CI can afford."""

import json
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from lazytrain.recipes.command import COMMANDS
from lazytrain.recipes.default_model import write_default_model
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.sample import write_sample

ROOT = Path(__file__).resolve().parents[1]
# In an order in which what a page uses is there: recipe.md makes the run. docs/planner.md: test_solver_docs.py.
NAMES = ["README.md", *(f"docs/{name}.md" for name in ("recipe", "checkpoints", "hardware", "optimizer", "data"))]
PAGES = [ROOT / name for name in (*NAMES, "docs/troubleshooting.md")]
TRAIN = "--device cpu --steps 2 --batch-size 4 --max-tokens 200 --eval-limit 2 --max-new-tokens 4"
# What makes each program small. Later flags win over the page's own.
SMALL = {
    "train": TRAIN,
    "recipes.metamathqa": TRAIN,
    "recipes.compare_optimizers": "--device cpu --tiny --steps 2 --batch-size 2 --max-tokens 200 --eval-limit 2",
    "eval": "--device cpu --eval-limit 2 --max-new-tokens 4",
    "doctor": "--size 1",
    "recipes.bench": "--device cpu --model DIR --batch 2 --seq 16 --steps 1 --warmup 1 --floor 0.01 --plan-seconds 1",
    "store bench": "--size 1 --rounds 1",
    "plan": "--time-limit 1",
    "solver": "--time-limit 1",
    "export": "",
    "verify": "",
    "store verify": "",
}
ELSEWHERE = {"recipes.bench_optimizer": "test_optimizer_recipes.py", "kernels.bench_kernels": "test_kernels_bench.py"}


def shown_commands(page: Path) -> list[str]:
    """Return the commands in fenced blocks without a language and in indented ones, without what is said of them."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    fenced = "".join(body for language, body in blocks if not language)
    lines = re.sub(r"\s*\\\n\s*", " ", fenced).splitlines()
    lines += re.findall(r"^    (\S.*)$", outside, re.M)
    commands = [re.sub(r"(?<=\S)\s{2,}.*$", "", line) for line in lines]
    return [line for line in commands if re.match(r"(lazytrain |python -m lazytrain|\w+=\S+ pytest)", line)]


def find_program(command: str) -> tuple[str, list[str], Callable[[list[str]], int]]:
    """Return the key of `SMALL`, the arguments, and what to call with them."""
    words = shlex.split(command)
    if words[0] == "lazytrain":
        name, arguments = words[1], words[2:]
        return name, arguments, lambda rest: import_module("lazytrain.recipes.command").main([name, *rest])
    assert words[:2] == ["python", "-m"], command
    module, arguments = words[2], words[3:]
    name = module.removeprefix("lazytrain.")
    if name == "store":
        name, first, arguments = f"store {arguments[0]}", [arguments[0]], arguments[1:]
        return name, arguments, lambda rest: int(import_module(module).main([*first, *rest]))
    target = f"{module}.__main__" if name == "solver" else module
    return name, arguments, lambda rest: int(import_module(target).main(rest))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with what the pages call DIR, FILE and run.toml."""
    monkeypatch.chdir(tmp_path)
    rows, held_out = write_sample(tmp_path / "sample")
    write_default_model(tmp_path / "DIR", load_rows(rows).rows, seed=0)
    (tmp_path / "FILE").mkdir()
    lines = rows.read_text().splitlines()[:64]
    (tmp_path / "FILE" / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "FILE" / "test.jsonl").write_text(held_out.read_text())
    (tmp_path / "run.toml").write_text('model = "DIR"\ndata = "FILE"\nout = "runs/from_toml"\n')
    (tmp_path / "nvme").mkdir()
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, printed = set(), {}
    for page in PAGES:
        for command in dict.fromkeys(shown_commands(page)):
            if "pytest" in command or command in done:
                continue
            done.add(command)
            name, arguments, call = find_program(command)
            if name in ELSEWHERE:
                assert name.split(".")[1] in (ROOT / "tests" / ELSEWHERE[name]).read_text(), command
                continue
            assert name in SMALL, f"{page.name} shows {command!r}: say here how to make it small"
            told = " ".join(arguments).replace("/nvme", "nvme").replace("RUN", "runs/a")
            code = call([*told.split(), *SMALL[name].split()])
            printed[command] = capsys.readouterr()
            assert code == 0, (page.name, command, printed[command].err[-2000:])
    names = {find_program(command)[0] for command in done}
    assert names >= {"train", "eval", "export", "doctor", "verify", "plan", "store verify", "recipes.bench"}
    assert {name for name in names if name in COMMANDS} == set(COMMANDS) - {"bench"}, "shown as a module"
    assert "resumed at step 2 of 2" in next(out.out for line, out in printed.items() if "--resume" in line)
    assert json.loads(next(out.out for line, out in printed.items() if "doctor" in line))
    for left in ("mine/model", "a/model", "a/report.html", "from_toml/outcome.json", "eval/score.json"):
        assert (here / "runs" / left).exists(), left
    assert (here / "models" / "mine" / "model.safetensors.index.json").exists()


def test_the_long_tests_that_pages_name_exist_and_know_their_variable() -> None:
    lines = [line for page in PAGES for line in shown_commands(page) if "pytest" in line]
    assert len(lines) == 3
    for line in lines:
        variable, path = re.match(r"(\w+)=\S+ pytest (\S+)", line).groups()  # type: ignore[union-attr]
        assert variable in (ROOT / path).read_text(), line


def test_commands_are_found_and_cut_where_their_explanation_begins(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nlazytrain train      a few minutes\nlazytrain eval --model DIR \\\n    --out x  # slow\nhello\n```\n"
        "text\n\n    python -m lazytrain.store verify RUN        # or a model\n\n```python\nlazytrain = 1\n```\n"
    )
    assert shown_commands(page) == [
        "lazytrain train",
        "lazytrain eval --model DIR --out x",
        "python -m lazytrain.store verify RUN",
    ]
