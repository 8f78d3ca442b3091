"""Typed reading of JSON objects such as `config.json`: a wrong value is an error that names file, key and value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain.errors import ConfigError


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: it is missing, is no JSON, or holds something else than an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}). Give a directory that holds an HF model."
        ) from error
    except ValueError as error:
        size_bytes = path.stat().st_size
        raise ConfigError(f"{path} ({size_bytes} bytes) is no JSON: {error}. Fetch the file again.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a JSON {type(data).__name__}, not an object. Fetch the file again.")
    return data


@dataclass(frozen=True)
class Fields:
    """A JSON object and its source; every reader treats null as absent and raises ConfigError for a wrong value."""

    data: Mapping[str, Any]
    source: str

    def error(self, key: str, wanted: str) -> ConfigError:
        """Make the error that says what a key holds and what it must hold."""
        found = repr(self.data[key]) if key in self.data else "missing"
        return ConfigError(f"{self.source}: {key} is {found}; it must be {wanted}.")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Read a whole number of at least `least`."""
        value = default if self.data.get(key) is None else self.data[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
            raise self.error(key, f"a whole number of at least {least}")
        return value

    def optional_count(self, key: str, default: int) -> int | None:
        """Read a count; an explicit null is None, an absent key the default."""
        return None if key in self.data and self.data[key] is None else self.count(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number above 0 that fp32 can hold with room to spare."""
        value = default if self.data.get(key) is None else self.data[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 2**-100 < value < 2**100:
            raise self.error(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = default if self.data.get(key) is None else self.data[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def names(self, key: str) -> list[str]:
        """Read a list of names, empty where absent."""
        value = self.data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(key, "a list of names or null")
        return value

    def token_id(self, key: str) -> int | None:
        """Read one token id."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one token id or a list of them."""
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.error(key, "a token id, a list of token ids or null")
        return tuple(ids)
