"""Plan for a model and a machine that one need not have: `python -m lazytrain.solver --help`. Needs no torch."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lazytrain.solver.baselines import Baseline, list_baselines
from lazytrain.solver.capacity import MakeProblem, find_gains, find_largest_batch
from lazytrain.solver.chunks import choose_microbatches, list_counts
from lazytrain.solver.costs import MAX_TOKENS, problem_from_shapes
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.explanation import (
    format_baselines,
    format_gains,
    format_largest_batch,
    format_load,
    format_plan,
    format_prediction,
    format_screening,
)
from lazytrain.solver.hardware import CPU_PRESET, PRESETS, load_hardware
from lazytrain.solver.memory import GIB, account, find_shortage
from lazytrain.solver.models import KNOWN_MODELS, load_shapes
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Hardware, Problem, check_number
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import simulate
from lazytrain.solver.sizes import parse_size
from lazytrain.solver.traces import write_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line that says what was wrong or what is missing."""
    options = _parse(arguments)
    try:
        make_problem = _read_problem(options)
        answer = _solve(options, make_problem) if options.plan is None else _read_plan(options, make_problem)
    except (PlannerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problem, plan = answer.problem, answer.plan
    played = simulate(problem, plan)
    print(format_plan(problem, plan))
    print(format_prediction(problem, plan, played))
    print(format_baselines(answer.baselines, played.step_ms))
    if len(answer.screened) > 1:
        print(format_screening(answer.screened))
    if options.explain:
        print(format_load(problem, plan, played))
        print(format_gains(find_gains(problem, plan, time_limit_s=options.time_limit)))
    try:
        if options.json is not None:
            plan.save(options.json)
            print(f"plan written to {options.json}")
        if options.trace is not None:
            write_trace(options.trace, problem, plan, played)
            print(f"trace written to {options.trace}; open it in ui.perfetto.dev or chrome://tracing")
    except OSError as error:
        print(f"error: {error.filename} can't be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lazytrain plan", description=__doc__)
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument("--model", required=True, help=f"a config.json, a directory with one, or one of: {known}")
    parser.add_argument("--hardware", required=True, help=f"a JSON file, or one of: {', '.join(PRESETS)}")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, help="sequences a chunk (default: the best of a few sizes)")
    parser.add_argument("--gpu-memory", type=parse_size, help="device memory to fill, for example 24GiB")
    parser.add_argument("--host-memory", type=parse_size, help="host memory to fill")
    parser.add_argument("--nvme", type=parse_size, help="NVMe to fill (default: none)")
    parser.add_argument(
        "--time-limit", type=float, default=PLAN_SECONDS, help="seconds for each search (default: %(default)s)"
    )
    parser.add_argument("--max-batch", action="store_true", help="plan for the largest batch that fits")
    parser.add_argument("--plan", type=Path, help="price this plan.json, perhaps edited, instead of solving")
    parser.add_argument("--explain", action="store_true", help="what one more GiB would bring, tier by tier")
    parser.add_argument("--json", type=Path, help="write the plan here")
    parser.add_argument("--trace", type=Path, help="write the predicted step here, for Perfetto")
    options = parser.parse_args(arguments)
    if options.plan is not None and (options.max_batch or options.microbatch):
        parser.error("--plan says the chunks itself; leave out --max-batch and --microbatch")
    return options


def _read_problem(options: argparse.Namespace) -> MakeProblem:
    """Return (batch, number of microbatches) -> the problem that the options describe."""
    name, shapes = load_shapes(options.model)
    hardware = _limit(load_hardware(options.hardware), options)
    if options.time_limit <= 0:
        raise PlannerError(f"--time-limit is {options.time_limit}; it must be above 0")
    for what in ("batch", "seq"):
        check_number(getattr(options, what), what, low=1, high=MAX_TOKENS, integer=True)
    if options.microbatch is not None:
        high = MAX_TOKENS if options.max_batch else options.batch
        check_number(options.microbatch, "microbatch", low=1, high=high, integer=True)

    def make(batch: int, count: int) -> Problem:
        return problem_from_shapes(
            shapes,
            hardware,
            batch=batch,
            seq=options.seq,
            microbatch=min(options.microbatch or batch, -(-batch // count)),
            allow_nvme=options.nvme is not None,
            name=name,
            device_is_host=hardware.name == CPU_PRESET,
        )

    return make


class _Answer(NamedTuple):
    """What is printed: a plan that fits, heuristics beside it, and the numbers of microbatches that were screened."""

    problem: Problem
    plan: Plan
    baselines: Sequence[Baseline]
    screened: Mapping[int, float | None]


def _solve(options: argparse.Namespace, make_problem: MakeProblem) -> _Answer:
    batch, counts = options.batch, list_counts(options.batch)
    if options.max_batch:
        batch, count = _print_largest_batch(make_problem, options.microbatch)
        counts = [count]
    elif options.microbatch:
        counts = [-(-batch // options.microbatch)]
    choice = choose_microbatches(
        lambda count: make_problem(batch, count),
        counts,
        time_limit_s=options.time_limit,
        may_drop=True,
    )
    if choice.result.plan is None:
        raise PlannerError(choice.result.message)
    return _Answer(choice.problem, choice.result.plan, choice.result.baselines, choice.screened)


def _read_plan(options: argparse.Namespace, make_problem: MakeProblem) -> _Answer:
    """Return a plan that was saved, and perhaps edited, with a prediction of its own.

    Raises:
        PlannerError: a field that contradicts another one, or a tier that is too small; both named.
    """
    plan = Plan.load(options.plan)
    check_number(plan.num_microbatches, "plan.num_microbatches", low=1, high=options.batch, integer=True)
    problem = make_problem(options.batch, plan.num_microbatches)
    plan.validate(problem)
    usage = account(problem, plan)
    for tier, num_bytes in find_shortage(problem, usage).items():
        where = f" at {usage.device_peak_at}" if tier == "device" else ""
        raise PlannerError(
            f"{options.plan} does not fit: it needs {num_bytes / GIB:.2f} GiB more {tier} memory{where}; "
            "move or recompute more, or plan anew"
        )
    if plan.problem_digest != problem.digest:
        print(f"note: {options.plan} was made for other costs, another batch or another machine", file=sys.stderr)
    edited = replace(plan, solver={"source": f"read from {options.plan}"}, problem_digest=problem.digest)
    plan = edited.with_prediction(simulate(problem, edited).predicted)
    return _Answer(problem, plan, list_baselines(problem), {})


def _print_largest_batch(make_problem: MakeProblem, microbatch: int | None) -> tuple[int, int]:
    """Print the largest batch in chunks of at most so many sequences (None = of any size), and in one chunk."""
    counts = None if microbatch is None else lambda batch: [-(-batch // microbatch)]
    largest = find_largest_batch(make_problem, counts=counts)
    if not largest.batch:
        raise PlannerError(explain_infeasible(make_problem(1, 1)))
    print(format_largest_batch(largest))
    if microbatch is None:
        print(f"in one chunk: {find_largest_batch(make_problem, counts=lambda batch: [1]).batch}")
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
