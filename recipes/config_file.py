"""Settings of a run as a file: TOML or YAML to a parser's defaults, and the settings in force back to TOML.

    model = "models/Qwen2.5-7B"
    batch-size = 32              # the flags' names; batch_size will do too
    gpu-memory = "24GiB"

One flat table: a key is a flag without its dashes, and a value is what one would write behind the flag.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazytrain.errors import ConfigError
from lazytrain.recipes.arguments import suggest

NOT_SETTINGS = {"help", "config", "print_config", "dry_run"}


def find_config(arguments: Sequence[str] | None) -> Path | None:
    """Return the file that --config names, before anything else of the command line is read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    try:
        found: Path | None = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:
        return None  # a --config without a value: the whole parser says so
    return found


def apply_config(parser: argparse.ArgumentParser, path: Path) -> None:
    """Make a file's settings the defaults of a parser.

    Raises:
        ConfigError: a file that can't be read; a key that is no flag, with the nearest one; a value that can't be.
    """
    actions = {name.replace("_", "-"): action for name, action in _settings(parser)}
    seen: dict[str, str] = {}
    for key, value in read_config(path).items():
        name = str(key).replace("_", "-")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {key!r} is a table. Write settings at the top, each on a line: lr = 1e-5")
        if name not in actions:
            raise ConfigError(f"{path}: unknown key {key!r}{suggest(name, actions) or '; see lazytrain train --help'}")
        if name in seen:
            raise ConfigError(f"{path}: {seen[name]!r} and {key!r} are one setting. Keep one of them.")
        seen[name] = key
        action = actions[name]
        try:
            parser.set_defaults(**{action.dest: _convert(action, value)})
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{path}: {key} = {value!r}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Return the top-level keys and values of a .toml, .yaml or .yml file.

    Raises:
        ConfigError: another suffix, no such file, a syntax error with its place, or YAML without PyYAML.
    """
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"--config {path}: the name must end in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if suffix == ".toml" else _read_yaml(text, path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"--config {path} can't be read: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; write one `key: value` a line")
    return values


def format_config(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> str:
    """Return settings as TOML that `apply_config` reads back, by group; what is unset stands as a comment.

    Args:
        values: dest -> value; None = unset.
    """
    settings = dict(_settings(parser))
    lines: list[str] = []
    for group in parser._action_groups:
        mine = [action for action in group._group_actions if settings.get(action.dest) is action]
        lines += ["", f"# {group.title}"] if mine else []
        for action in mine:
            key, value = action.dest.replace("_", "-"), values.get(action.dest)
            note = " ".join((action.help or "").replace("%%", "%").split())
            lines.append(f"# {key}: unset; {note}" if value is None else f"{key} = {_to_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _settings(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if action.option_strings and action.dest not in NOT_SETTINGS:
            yield action.dest, action


def _read_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{path}: YAML needs PyYAML, which is not installed. Write TOML, or: pip install 'lazytrain[yaml]'"
        ) from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    return {} if values is None else values


def _convert(action: argparse.Action, value: Any) -> Any:
    """Return a value as the flag's own parser would; raises ValueError or ArgumentTypeError."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a text or a number, not a {type(value).__name__}")
    if not isinstance(value, str) and action.type in (None, Path):
        raise ValueError('must be a text: put it in "quotes"')
    if isinstance(value, str) and value.startswith("~/"):
        value = os.path.expanduser(value)  # on a command line the shell does this
    made = action.type(str(value)) if callable(action.type) else value
    if action.choices is not None and made not in action.choices:
        raise ValueError(f"must be one of {', '.join(map(str, action.choices))}")
    return made


def _to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, but for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
