"""Settings from files: what is read is what the flags would give, and a mistake is named with the nearest key."""

import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazytrain.errors import ConfigError
from lazytrain.recipes.config_file import _to_toml, read_config
from lazytrain.recipes.effective import effective_config
from lazytrain.recipes.metamathqa import main
from lazytrain.recipes.options import parse_options

FLAGS = (
    *("--model", "models/a b", "--data", 'rows "1".jsonl', "--batch-size", "4", "--lr", "1e-5", "--packing"),
    *("--gpu-memory", "24GiB", "--no-compile", "--too-long", "truncate", "--spill-dir", "/nvme"),
)
TOML = """
model = "models/a b"
data = 'rows "1".jsonl'
batch_size = 4
lr = 1e-5
packing = true
gpu-memory = "24GiB"
compile = false
too-long = "truncate"
spill-dir = "/nvme"
"""
YAML = """
model: models/a b
data: rows "1".jsonl
batch-size: 4
lr: 0.00001
packing: true
gpu_memory: 25769803776
compile: false
too-long: truncate
spill-dir: /nvme
"""


def write(tmp_path: Path, text: str, name: str = "run.toml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.yaml", YAML), ("run.yml", YAML)])
def test_a_file_gives_what_the_flags_give(name: str, text: str, tmp_path: Path) -> None:
    assert parse_options(["--config", write(tmp_path, text, name)]) == parse_options(FLAGS)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("--batch-size", "9"), "batch_size", 9),
        (("--no-packing",), "packing", False),
        (("--compile",), "compile", True),
        (("--model=other",), "model", Path("other")),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_flags_win_over_the_file(flags: tuple[str, ...], name: str, value: object, first: bool, tmp_path: Path) -> None:
    config = ("--config", write(tmp_path, TOML))
    options = parse_options([*flags, *config] if first else [*config, *flags])
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("bach-size = 4", ("unknown key 'bach-size'", "did you mean batch-size?")),
        ("learning = 4", ("unknown key 'learning'", "--help")),
        ("[training]\nlr = 1.0", ("'training' is a table", "at the top")),
        ("seed = 1.5", ("seed = 1.5", "no whole number")),
        ("config = 'other.toml'", ("unknown key 'config'",)),
        ("batch-size = 4\nbatch_size = 5", ("one setting",)),
        ("batch-size = 0", ("batch-size = 0", "below 1")),
        ("batch-size = 1.5", ("'1.5' is no whole number",)),
        ("batch-size = true", ("batch-size = True", "not a bool")),
        ("lr = 'fast'", ("'fast' is no number",)),
        ("lr = nan", ("finite",)),
        ("packing = 1", ("true or false",)),
        ("too-long = 'cut'", ("must be one of drop, truncate",)),
        ("model = 3", ('put it in "quotes"',)),
        ("data = ['a', 'b']", ("not a list",)),
        ("gpu-memory = '24 apples'", ("24GiB",)),
        ("lr = \nsteps = 3", ("can't be read", "line 1")),
    ],
)
def test_a_mistake_names_file_key_and_remedy(text: str, phrases: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(["--config", write(tmp_path, text)])
    assert all(phrase in str(error.value) for phrase in ("run.toml", *phrases)), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "phrase"), [("no.toml", "No such file"), ("run.ini", ".toml, .yaml")])
def test_a_file_that_cant_be_read_is_named(name: str, phrase: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=phrase):
        parse_options(["--config", str(tmp_path / name)])


def test_bad_yaml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1") as error:
        read_config(Path(write(tmp_path, "a: [1,", "run.yaml")))
    assert "\n" not in str(error.value)


def test_yaml_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"lazytrain\[yaml\]"):
        read_config(Path(write(tmp_path, YAML, "run.yaml")))


def test_a_tilde_is_the_home_as_on_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    options = parse_options(["--config", write(tmp_path, 'model = "~/models/a"\ndata = "~/rows.jsonl"')])
    assert (options.model, options.data) == (Path("/home/someone/models/a"), "/home/someone/rows.jsonl")


def test_an_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    assert parse_options(["--config", write(tmp_path, "", "run.yaml")]) == parse_options([])


@pytest.mark.parametrize(
    "arguments", [(), FLAGS, ("--steps", "5"), ("--epochs", "2.5", "--eval-before"), ("--accumulate", "2")]
)
def test_the_printed_settings_are_the_same_run_again(arguments: tuple[str, ...], tmp_path: Path) -> None:
    printed = effective_config(parse_options(arguments))
    again = parse_options(["--config", write(tmp_path, printed)])
    assert effective_config(again) == printed
    for name, value in vars(parse_options(arguments)).items():
        if value is not None:
            assert getattr(again, name) == value, name


def test_print_config_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["--out", str(out), "--lr", "0.5", "--print-config"]) == 0
    values = tomllib.loads(capsys.readouterr().out)
    assert values["lr"] == 0.5
    assert values["batch-size"] == 64
    assert not out.exists()


@given(st.one_of(st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)))
def test_values_come_back_from_toml(value: object) -> None:
    assert tomllib.loads(f"key = {_to_toml(value)}") == {"key": value}


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--bach-size", "4"), "unknown option --bach-size, did you mean --batch-size?"),
        (("--pack",), "unknown option --pack"),
        (("--batch-size", "x"), "'x' is no whole number"),
        (("--config",), "--config: expected one argument"),
        (("--epochs", "0"), "above 0"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: tuple[str, ...], phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_options(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert phrase in error
    assert error.count("\n") == 1
