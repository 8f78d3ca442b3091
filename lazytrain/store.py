"""Commands on what LazyTrain stores:

python -m lazytrain.store verify DIR    read a run, a checkpoint or a model; name every file and tensor that changed
python -m lazytrain.store bench DIR     read and write rates of a disk: buffered, direct, by number of threads
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lazytrain.errors import LazyTrainError
from lazytrain.store_verify import verify_directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 2 where something is damaged or can't be done."""
    options = _parse(arguments)
    try:
        return int(options.run(options))
    except (LazyTrainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _verify(options: argparse.Namespace) -> int:
    report = verify_directory(options.directory)
    for note in report.notes:
        print(note)
    for problem in report.problems:
        print(f"damaged: {problem}")
    print(f"{len(report.problems)} problems" if report.problems else "all that has a checksum is intact")
    return 2 if report.problems else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lazytrain.store", description="Check what LazyTrain stores.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="read everything and compare it with its checksums")
    verify.add_argument("directory", type=Path, help="a run directory, a checkpoint or a model directory")
    verify.set_defaults(run=_verify)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
