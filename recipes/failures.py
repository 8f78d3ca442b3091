"""What a user is told when the operating system refuses something: what, where, and what to do."""

import tempfile
from pathlib import Path

from lazytrain.errors import ConfigError


def make_directory(path: Path, flag: str) -> None:
    """Make the directory that a flag names, with those above it, and see that files can be made in it.

    Raises:
        ConfigError: names flag, path and reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except OSError as error:
        reason = "a file has that name" if path.is_file() else describe_error(error)
        raise ConfigError(f"{flag} {path} is no directory to write in: {reason}. Name another one.") from error


def describe_error(error: Exception) -> str:
    """Return an error as a line for people: an OSError without its number, with its file."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
