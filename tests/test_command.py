"""The console script: it lists its commands, starts each, and names the nearest for one that there isn't."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from lazytrain.recipes import command
from lazytrain.recipes.command import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("docter", "doctor"), ("exports", "export")])
def test_an_unknown_command_names_the_nearest(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    assert capsys.readouterr().err == (
        f"error: unknown command {typed!r}, did you mean {meant}? See lazytrain --help\n"
    )


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: lazytrain COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_arguments_and_exit_code_are_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Module:
        @staticmethod
        def main(arguments: list[str]) -> int:
            seen.append(arguments)
            return 7

    monkeypatch.setattr(command, "import_module", lambda name: Module)
    assert main(["verify", "runs/mine"]) == 7
    assert seen == [["verify", "runs/mine"]]


def test_the_script_of_the_package_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["lazytrain"].partition(":")
    assert getattr(import_module(module), function) is main


def test_the_package_runs_as_a_module() -> None:
    done = run_python("-m", "lazytrain", "nothing")
    assert done.returncode == 2
    assert "unknown command 'nothing'" in done.stderr


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from lazytrain.recipes.command import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run_python("-c", code).returncode == 0
