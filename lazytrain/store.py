"""Commands on what LazyTrain stores:

python -m lazytrain.store verify DIR    read a run, a checkpoint or a model; name every file and tensor that changed
python -m lazytrain.store bench DIR     read and write rates of a disk: buffered, direct, by number of threads
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lazytrain.durable import GIB
from lazytrain.errors import LazyTrainError
from lazytrain.store_bench import choose_manner, make_test_file, measure_rates, measure_streams
from lazytrain.store_io import Manner
from lazytrain.store_verify import verify_directory

THREADS = (1, 2, 4, 8)


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


def _bench(options: argparse.Namespace) -> int:
    num_bytes = options.size
    options.directory.mkdir(parents=True, exist_ok=True)
    path = make_test_file(options.directory, num_bytes)
    manners = [Manner(direct, threads) for direct in (False, True) for threads in THREADS]
    rates = []
    try:
        print(f"{options.directory}: {num_bytes / GIB:.2f} GiB, best of {options.rounds}, synced, page cache dropped")
        print(f"{'':22}{'write GB/s':>12}{'read GB/s':>12}")
        for measured in measure_rates(path, num_bytes, manners, rounds=options.rounds):
            rates.append(measured)
            write, read = measured.write_bytes_s / 1e9, measured.read_bytes_s / 1e9
            print(f"{measured.manner!s:22}{write:12.2f}{read:12.2f}", flush=True)
        chosen = choose_manner(path, num_bytes)
    finally:
        path.unlink()
    print(f"a run with much on NVMe would choose: {chosen}; over a while:")
    _, streams = measure_streams(options.directory, num_bytes, chosen, seconds=options.seconds)
    print(f"{'one way at a time':22}{streams.write_bytes_s / 1e9:12.2f}{streams.read_bytes_s / 1e9:12.2f}")
    print(f"{'both at once':22}{streams.both_write_bytes_s / 1e9:12.2f}{streams.both_read_bytes_s / 1e9:12.2f}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lazytrain.store", description="Check what LazyTrain stores.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="read everything and compare it with its checksums")
    verify.add_argument("directory", type=Path, help="a run directory, a checkpoint or a model directory")
    verify.set_defaults(run=_verify)
    bench = commands.add_parser("bench", help="measure the rates of a disk; takes room for two files and removes them")
    bench.add_argument("directory", type=Path, help="a directory on the disk")
    bench.add_argument("--size", type=_size, default=GIB, help="MiB to write and read (default: 1024)")
    bench.add_argument("--rounds", type=int, default=2, help="the best of this many counts (default: %(default)s)")
    bench.add_argument("--seconds", type=float, default=2.0, help="of each rate over a while (default: %(default)s)")
    bench.set_defaults(run=_bench)
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**20:
        raise argparse.ArgumentTypeError(f"{text} is no number of MiB from 1 to {2**20}")
    return int(text) * 2**20


if __name__ == "__main__":
    sys.exit(main())
