"""Plan for a model and a machine that one need not have: `python -m lazytrain.solver --help`. Needs no torch."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.costs import problem_from_shapes
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.explanation import format_baselines, format_plan, format_prediction
from lazytrain.solver.hardware import CPU_PRESET, PRESETS, load_hardware
from lazytrain.solver.models import KNOWN_MODELS, load_shapes
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import MAX_BYTES, Hardware, Problem
from lazytrain.solver.simulator import simulate

SIZE_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
SIZE_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line that says what was wrong or what is missing."""
    options = _parse(arguments)
    try:
        problem = _make_problem(options)
        result = solve(problem, time_limit_s=options.time_limit)
    except (PlannerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result.plan is None:
        print(f"error: {result.message}", file=sys.stderr)
        return 2
    played = simulate(problem, result.plan)
    print(format_plan(problem, result.plan))
    print(format_prediction(problem, result.plan, played))
    print(format_baselines(result.baselines, played.step_ms))
    if options.json is not None:
        try:
            result.plan.save(options.json)
        except OSError as error:
            print(f"error: {options.json} can't be written: {error}", file=sys.stderr)
            return 2
        print(f"plan written to {options.json}")
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "24GiB", "500MB" or "1e9"; for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 24GiB or 500MB")
    size = float(match[1]) * SIZE_UNITS[match[2].upper()]
    if not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size that a machine can have; write for example 24GiB")
    return int(size)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lazytrain.solver", description=__doc__)
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument("--model", required=True, help=f"a config.json, a directory with one, or one of: {known}")
    parser.add_argument("--hardware", required=True, help=f"a JSON file, or one of: {', '.join(PRESETS)}")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, help="sequences a chunk (default: about 16k tokens, less if needed)")
    parser.add_argument("--gpu-memory", type=parse_size, help="device memory to fill, for example 24GiB")
    parser.add_argument("--host-memory", type=parse_size, help="host memory to fill")
    parser.add_argument("--nvme", type=parse_size, help="NVMe to fill (default: none)")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the plan here")
    return parser.parse_args(arguments)


def _make_problem(options: argparse.Namespace) -> Problem:
    name, shapes = load_shapes(options.model)
    hardware = _limit(load_hardware(options.hardware), options)
    if options.time_limit <= 0:
        raise PlannerError(f"--time-limit is {options.time_limit}; it must be above 0")

    def make(microbatch: int | None) -> Problem:
        return problem_from_shapes(
            shapes,
            hardware,
            batch=options.batch,
            seq=options.seq,
            microbatch=microbatch,
            allow_nvme=options.nvme is not None,
            name=name,
            device_is_host=hardware.name == CPU_PRESET,
        )

    problem = make(options.microbatch)
    size = options.batch // problem.num_microbatches
    while options.microbatch is None and size > 1 and not list_baselines(problem, num_random=0):
        size = max(1, size // 2)
        smaller = make(size)
        if size == 1 and not list_baselines(smaller, num_random=0):
            break  # smaller chunks don't help: the refusal names the first need
        problem = smaller
    return problem


def _limit(hardware: Hardware, options: argparse.Namespace) -> Hardware:
    limits = {
        "device_memory_bytes": options.gpu_memory,
        "host_memory_bytes": options.host_memory,
        "nvme_bytes": options.nvme,
    }
    return replace(hardware, **{name: value for name, value in limits.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
