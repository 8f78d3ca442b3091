"""Plan for a model and a machine that one need not have: `python -m lazytrain.solver --help`. Needs no torch."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lazytrain.solver.capacity import find_gains, find_largest_batch
from lazytrain.solver.chunks import choose_microbatches, list_counts
from lazytrain.solver.costs import MAX_TOKENS, problem_from_shapes
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.explanation import (
    format_baselines,
    format_gains,
    format_largest_batch,
    format_plan,
    format_prediction,
    format_screening,
)
from lazytrain.solver.hardware import CPU_PRESET, PRESETS, load_hardware
from lazytrain.solver.models import KNOWN_MODELS, load_shapes
from lazytrain.solver.problem import MAX_BYTES, Hardware, Problem, check_number
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate
from lazytrain.solver.traces import write_trace

SIZE_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
SIZE_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line that says what was wrong or what is missing."""
    options = _parse(arguments)
    try:
        make_problem = _read_problem(options)
        batch, counts = options.batch, list_counts(options.batch)
        if options.max_batch:
            batch, count = _print_largest_batch(make_problem)
            counts = [count]
        elif options.microbatch:
            counts = [-(-batch // options.microbatch)]
        problem, result, screened = choose_microbatches(
            lambda count: make_problem(batch, count), counts, time_limit_s=options.time_limit
        )
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
    if len(screened) > 1:
        print(format_screening(screened))
    if options.explain:
        print(format_gains(find_gains(problem, result.plan, time_limit_s=options.time_limit)))
    try:
        if options.json is not None:
            result.plan.save(options.json)
            print(f"plan written to {options.json}")
        if options.trace is not None:
            write_trace(options.trace, problem, result.plan, played)
            print(f"trace written to {options.trace}; open it in ui.perfetto.dev or chrome://tracing")
    except OSError as error:
        print(f"error: {error.filename} can't be written: {error.strerror}", file=sys.stderr)
        return 2
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
    parser.add_argument("--microbatch", type=int, help="sequences a chunk (default: the best of a few sizes)")
    parser.add_argument("--gpu-memory", type=parse_size, help="device memory to fill, for example 24GiB")
    parser.add_argument("--host-memory", type=parse_size, help="host memory to fill")
    parser.add_argument("--nvme", type=parse_size, help="NVMe to fill (default: none)")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver (default: %(default)s)")
    parser.add_argument("--max-batch", action="store_true", help="plan for the largest batch that fits")
    parser.add_argument("--explain", action="store_true", help="what one more GiB would bring, tier by tier")
    parser.add_argument("--json", type=Path, help="write the plan here")
    parser.add_argument("--trace", type=Path, help="write the predicted step here, for Perfetto")
    return parser.parse_args(arguments)


def _read_problem(options: argparse.Namespace) -> Callable[[int, int], Problem]:
    """Return (batch, number of microbatches) -> the problem that the options describe."""
    name, shapes = load_shapes(options.model)
    hardware = _limit(load_hardware(options.hardware), options)
    if options.time_limit <= 0:
        raise PlannerError(f"--time-limit is {options.time_limit}; it must be above 0")
    for what in ("batch", "seq"):
        check_number(getattr(options, what), what, low=1, high=MAX_TOKENS, integer=True)
    if options.microbatch is not None:
        check_number(options.microbatch, "microbatch", low=1, high=options.batch, integer=True)

    def make(batch: int, count: int) -> Problem:
        return problem_from_shapes(
            shapes,
            hardware,
            batch=batch,
            seq=options.seq,
            microbatch=options.microbatch or -(-batch // count),
            allow_nvme=options.nvme is not None,
            name=name,
            device_is_host=hardware.name == CPU_PRESET,
        )

    return make


def _print_largest_batch(make_problem: Callable[[int, int], Problem]) -> tuple[int, int]:
    largest = find_largest_batch(make_problem)
    if not largest.batch:
        raise PlannerError(explain_infeasible(make_problem(1, 1)))
    print(format_largest_batch(largest))
    return largest.batch, largest.num_microbatches


def _limit(hardware: Hardware, options: argparse.Namespace) -> Hardware:
    limits = {
        "device_memory_bytes": options.gpu_memory,
        "host_memory_bytes": options.host_memory,
        "nvme_bytes": options.nvme,
    }
    return replace(hardware, **{name: value for name, value in limits.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
