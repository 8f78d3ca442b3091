"""The console script `lazytrain`: each sub-command is a program that can also be run as a module.

Nothing heavy is imported before the command is known, so that the planner and the doctor start without torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from lazytrain import __version__
from lazytrain.recipes.arguments import end_sentence, suggest


class Command(NamedTuple):
    """A module with a `main(arguments)`, what it is for, and what stands before the user's arguments."""

    module: str
    purpose: str
    first: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("lazytrain.recipes.metamathqa", "fine-tune all weights of a model, then measure exact match"),
    "plan": Command("lazytrain.solver.__main__", "plan for a model and a machine that you need not have"),
    "eval": Command("lazytrain.recipes.model_evaluation", "measure the exact match of a model directory"),
    "export": Command("lazytrain.recipes.run_export", "write a model directory from a run's newest checkpoint"),
    "verify": Command("lazytrain.store", "compare a run, a checkpoint or a model with its checksums", ("verify",)),
    "doctor": Command("lazytrain.recipes.doctor", "look at this machine: what is missing or slow, and what to do"),
    "bench": Command("lazytrain.recipes.bench", "measure whole training steps of a model's shape"),
}
HELP, VERSION = ("-h", "--help", "help"), ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; return its exit code, or 2 where there is no such command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(describe_commands(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in HELP:
        print(describe_commands())
        return 0
    if name in VERSION:
        print(f"lazytrain {__version__}")
        return 0
    if name not in COMMANDS:
        text = end_sentence(f"unknown command {name!r}{suggest(name, COMMANDS)}")
        print(f"error: {text} See lazytrain --help", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    return int(import_module(command.module).main([*command.first, *rest]))


def describe_commands() -> str:
    """Return the help: one line a command."""
    lines = ["usage: lazytrain COMMAND ...", "", "Fine-tune all the weights of a language model on one small GPU.", ""]
    lines += [f"  {name:<8} {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "lazytrain COMMAND --help lists a command's options."])


if __name__ == "__main__":
    sys.exit(main())
