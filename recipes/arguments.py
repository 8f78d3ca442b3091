"""Command lines whose errors are one line: what was wrong, the nearest name that there is, where to read on."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """argparse, with an error of one line instead of the whole usage, and the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            first = unknown.split()[0].partition("=")[0]
            message = f"unknown option {first}{suggest(first, self._option_string_actions)}"
        print(f"error: {end_sentence(message)} See {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def end_sentence(text: str) -> str:
    """Return a text with a full stop behind it, where it has no end yet."""
    return text if text.endswith((".", "?")) else f"{text}."


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" for the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""
