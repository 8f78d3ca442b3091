"""The planner's own tables as Markdown: how fast it solves, what it gains, the largest batches, what fits where.

    python -m lazytrain.recipes.planner_tables solve-times|gains|batches|which-models

Every number is a prediction by the planner, with costs reckoned from a model's shapes, for preset machines (see
`lazytrain.solver.hardware`). Nothing is measured but the solver's own time, that of one core, which is also what a time
limit limits. Rows are printed as they are found.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.capacity import find_largest_batch
from lazytrain.solver.chunks import Choice, choose_microbatches, list_counts
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.fixed_interval import make_fixed_interval_plan
from lazytrain.solver.hardware import PRESETS, USABLE_HOST_SHARE
from lazytrain.solver.memory import GIB
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import Result, solve
from lazytrain.solver.problem import Hardware, Problem
from lazytrain.solver.shortage import count_missing_bytes, find_least_shortage
from lazytrain.solver.simulator import simulate, simulate_step_ms

SEQ = 1024
NUM_BLOCKS = (24, 28, 36, 48, 64, 80, 128)
# Compute, the link, and the CPU's update are short in turn: machine and rows of 1024 tokens for the 7B shape's blocks.
SOLVED_CASES = (("rtx3090", 16), ("h800", 64), ("h200", 8))
NUM_SEEDS = 3  # of each: the machine as it is, then with other rates
MAX_RATE_CHANGE = 1.25  # a factor, either way
ROOMY_HOST_BYTES = 1024 * GIB
# A dense 27B: the widths of Gemma 2 27B, with Llama's blocks. No known model has them.
SHAPE_27B = {
    **{"model_type": "llama", "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46},
    **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256000},
    "tie_word_embeddings": True,
}
SHAPES = {**KNOWN_MODELS, "27b shape": SHAPE_27B}
GAINS_MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "27b shape", "qwen2.5-32b")
GAINS_MACHINES = ("rtx3090", "h800", "h200")
GAINS_BATCHES = (1, 16, 64)
BATCH_MODELS = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b")
BATCH_DEVICE_BYTES = 24 * GIB
BATCH_MACHINE = "h200"  # its link and host; the limit above stands for the smaller card
WHICH_MACHINES = ("rtx3090", "rtx4090", "a100-40g", "h100", "h200")
WHICH_HOSTS_GIB = (64, 128, 256, 512)
WHICH_BATCH = 16
NUM_SPILLED_COUNTS = 3  # chunk sizes that are looked at where NVMe is used
INTERVAL = 4
FIELDS_RULE = f"fixed-interval-{INTERVAL}"  # as the bench calls it: boundaries kept, all else computed twice more
FIXED_RULES = ("recompute_all", FIELDS_RULE, "fixed_interval")
Row = Sequence[str]


class Answer(NamedTuple):
    """A plan for a model on a machine, and the heuristics' best steps over all chunk sizes, by name."""

    problem: Problem
    result: Result
    heuristics_ms: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m lazytrain.recipes.planner_tables", description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument(
        "--time-limit", type=float, default=PLAN_SECONDS, help="seconds of each solve (default: %(default)s)"
    )
    parser.add_argument("--only", help="only rows that begin with this, for example one machine")
    options = parser.parse_args(arguments)
    for row in TABLES[options.table](options.time_limit, options.only):
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


def list_solve_times(time_limit_s: float, only: str | None) -> Iterator[Row]:
    """Yield seconds of one core and gap by the number of blocks, median and worst of the cases."""
    yield "blocks", "seconds, median (worst)", "of it baselines", "gap, median (worst)", "ended before the limit"
    yield ("---",) * 5
    for count in NUM_BLOCKS:
        if only and not str(count).startswith(only):
            continue
        seconds, baseline_s, gaps, ended = [], [], [], 0
        cases = list(product(range(NUM_SEEDS), SOLVED_CASES))
        for seed, (machine, batch) in cases:
            config = {**KNOWN_MODELS["qwen2.5-7b"], "num_hidden_layers": count}
            hardware = replace(_vary(PRESETS[machine], seed), host_memory_bytes=ROOMY_HOST_BYTES)
            problem = _make(config, hardware, batch, 1)
            start_s = time.process_time()
            list_baselines(problem)
            baseline_s.append(time.process_time() - start_s)
            result = solve(problem, time_limit_s=time_limit_s, clock=time.process_time)
            gap = result.statistics["gap"]
            seconds.append(result.statistics["seconds"])
            gaps.append(float("nan") if gap is None else gap)
            ended += seconds[-1] < 0.98 * time_limit_s
            case = f"{count} blocks, {machine}, seed {seed}"
            print(f"{case}: {seconds[-1]:.1f} s, gap {gaps[-1]:.2%}", file=sys.stderr, flush=True)
        yield (
            str(count),
            f"{statistics.median(seconds):.1f} ({max(seconds):.1f})",
            f"{statistics.median(baseline_s):.1f}",
            f"{statistics.median(gaps):.1%} ({max(gaps):.1%})",
            f"{ended} of {len(cases)}",
        )


def _vary(hardware: Hardware, seed: int) -> Hardware:
    """Return the machine with other rates of compute, link, host memory and updates; with seed 0 as it is."""
    if not seed:
        return hardware
    names = (
        "matmul_tflops",
        "h2d_gbs",
        "d2h_gbs",
        "dram_gbs",
        "cpu_update_gparams_s",
        "device_update_gparams_s",
    )
    rng = random.Random(seed)
    return replace(
        hardware, **{name: getattr(hardware, name) * MAX_RATE_CHANGE ** rng.uniform(-1, 1) for name in names}
    )


def list_gains(time_limit_s: float, only: str | None) -> Iterator[Row]:
    """Yield the plan's step beside those of fixed rules and of the best heuristic."""
    yield (
        *("machine", "model", "tokens", "memory", "step ms", "tokens/s"),
        *("recompute all", "fixed interval 4", "keep every 4th", "best heuristic", "gap"),
    )
    yield ("---",) * 11
    for machine in GAINS_MACHINES:
        if only and not machine.startswith(only):
            continue
        for model in GAINS_MODELS:
            for batch in GAINS_BATCHES:
                yield machine, model, f"{batch}k", *_compare(model, PRESETS[machine], batch, time_limit_s)


def list_batches(time_limit_s: float, only: str | None) -> Iterator[Row]:
    """Yield the largest batch of every model, in one chunk and in as many as it takes; solved and by strategy."""
    hardware = replace(PRESETS[BATCH_MACHINE], device_memory_bytes=BATCH_DEVICE_BYTES)
    names: list[str] = []
    for model in BATCH_MODELS:
        for is_whole in (True, False):
            if only and not model.startswith(only):
                continue

            def make(batch: int, count: int, model: str = model) -> Problem:
                return _make(KNOWN_MODELS[model], hardware, batch, count)

            largest = find_largest_batch(make, counts=(lambda batch: [1]) if is_whole else None)
            if not names:
                names = sorted(largest.strategies)
                yield "model", "chunks", "solved", *(name.replace("_", " ") for name in names), "none above"
                yield ("---",) * (4 + len(names))
            sizes = (str(largest.strategies[name]) for name in names)
            chunks = "1" if is_whole else str(largest.num_microbatches)
            yield model, chunks, str(largest.batch), *sizes, str(largest.bound)


def list_which_models(time_limit_s: float, only: str | None) -> Iterator[Row]:
    """Yield, by machine and host memory, the largest known model that trains, without NVMe and with it."""
    yield "machine", "host", "in RAM", "tokens/s", "bound by", "with NVMe", "tokens/s", "bound by"
    yield ("---",) * 8
    for machine in WHICH_MACHINES:
        if only and not machine.startswith(only):
            continue
        for host_gib in WHICH_HOSTS_GIB:
            host_bytes = int(host_gib * USABLE_HOST_SHARE * GIB)
            hardware = replace(PRESETS[machine], host_memory_bytes=host_bytes)
            without = _find_largest_model(hardware, allow_nvme=False)
            spilled = _find_largest_model(hardware, allow_nvme=True)
            cells = _describe(without, hardware, time_limit_s)
            same = ("the same", "", "")
            more = same if spilled == without else _describe_spilled(spilled, hardware)
            yield machine, f"{host_gib} GiB", *cells, *more


def _make(config: object, hardware: Hardware, batch: int, count: int, *, allow_nvme: bool = False) -> Problem:
    microbatch = -(-batch // count)
    return problem_from_config(
        config, hardware, batch=batch, seq=SEQ, microbatch=microbatch, allow_nvme=allow_nvme, name="table"
    )


def _make_counted(model: str, hardware: Hardware, batch: int, *, allow_nvme: bool) -> Callable[[int], Problem]:
    return lambda count: _make(SHAPES[model], hardware, batch, count, allow_nvme=allow_nvme)


def _choose(model: str, hardware: Hardware, batch: int, time_limit_s: float, *, allow_nvme: bool) -> Choice:
    make = _make_counted(model, hardware, batch, allow_nvme=allow_nvme)
    return choose_microbatches(make, list_counts(batch), time_limit_s=time_limit_s, clock=time.process_time)


def _fits(model: str, hardware: Hardware, batch: int, *, allow_nvme: bool) -> bool:
    make = _make_counted(model, hardware, batch, allow_nvme=allow_nvme)
    return any(count_missing_bytes(make(count)) == 0 for count in list_counts(batch))


def _answer(model: str, hardware: Hardware, batch: int, time_limit_s: float, *, allow_nvme: bool) -> Answer:
    choice = _choose(model, hardware, batch, time_limit_s, allow_nvme=allow_nvme)
    steps: dict[str, float] = {}
    make = _make_counted(model, hardware, batch, allow_nvme=allow_nvme)
    for count in list_counts(batch):
        problem = make(count)
        for baseline in list_baselines(problem, num_random=0, with_greedy=False):
            steps[baseline.name] = min(baseline.step_ms, steps.get(baseline.name, float("inf")))
        if (fixed := make_fixed_interval_plan(problem, INTERVAL)) is not None:
            steps[FIELDS_RULE] = min(simulate_step_ms(problem, fixed), steps.get(FIELDS_RULE, float("inf")))
    for baseline in choice.result.baselines:
        steps[baseline.name] = min(baseline.step_ms, steps.get(baseline.name, float("inf")))
    return Answer(choice.problem, choice.result, steps)


def _compare(model: str, hardware: Hardware, batch: int, time_limit_s: float) -> Row:
    """Return memory, step, tokens/s, the heuristics' steps as multiples of it, and the gap."""
    allow_nvme = not _fits(model, hardware, batch, allow_nvme=False)
    answer = _answer(model, hardware, batch, time_limit_s, allow_nvme=allow_nvme)
    plan = answer.result.plan
    if plan is None or plan.predicted is None:
        missing = find_least_shortage(answer.problem).items()
        needs = ", ".join(f"{tier} {num_bytes / GIB:+.1f} GiB" for tier, num_bytes in missing)
        return f"does not fit, NVMe included ({needs})", *("-",) * 7
    step_ms, gap = plan.predicted.step_ms, answer.result.statistics["gap"]

    def ratio(name: str) -> str:
        return f"{answer.heuristics_ms[name] / step_ms:.2f}" if name in answer.heuristics_ms else "does not fit"

    best = min(answer.heuristics_ms, key=lambda name: answer.heuristics_ms[name], default=None)
    return (
        "NVMe" if allow_nvme else "host",
        f"{step_ms:.0f}",
        f"{answer.problem.tokens_per_step / step_ms * 1e3:,.0f}",
        *(ratio(name) for name in FIXED_RULES),
        "-" if best is None else f"{ratio(best)} ({best})",
        "-" if gap is None else f"{gap:.1%}",
    )


def _find_largest_model(hardware: Hardware, *, allow_nvme: bool) -> str | None:
    def num_params(model: str) -> int:
        return sum(unit.num_params for unit in _make(KNOWN_MODELS[model], hardware, 1, 1).units)

    models = sorted(KNOWN_MODELS, key=num_params, reverse=True)
    fitting = (model for model in models if _fits(model, hardware, WHICH_BATCH, allow_nvme=allow_nvme))
    return next(fitting, None)


def _describe(model: str | None, hardware: Hardware, time_limit_s: float) -> Row:
    if model is None:
        return "none", "-", "-"
    choice = _choose(model, hardware, WHICH_BATCH, time_limit_s, allow_nvme=False)
    if choice.result.plan is None:
        return f"{model}, but no plan was found", "-", "-"
    return _rate(model, choice.problem, choice.result.plan)


def _describe_spilled(model: str | None, hardware: Hardware) -> Row:
    """Return the same of the best simple heuristic, since a search with NVMe takes minutes."""
    if model is None:
        return "none", "-", "-"
    make = _make_counted(model, hardware, WHICH_BATCH, allow_nvme=True)
    problems = [make(count) for count in list_counts(WHICH_BATCH)[:NUM_SPILLED_COUNTS]]
    found = [
        (b.step_ms, i, b) for i, p in enumerate(problems) for b in list_baselines(p, num_random=0, with_greedy=False)
    ]
    if not found:
        return f"{model}, but no plan was found", "-", "-"
    _, index, best = min(found, key=lambda item: item[:2])
    return _rate(model, problems[index], best.plan)


def _rate(model: str, problem: Problem, plan: Plan) -> Row:
    played = simulate(problem, plan)
    return model, f"{problem.tokens_per_step / played.step_ms * 1e3:,.0f}", played.bound_by


TABLES: dict[str, Callable[[float, str | None], Iterator[Row]]] = {
    "solve-times": list_solve_times,
    "gains": list_gains,
    "batches": list_batches,
    "which-models": list_which_models,
}

if __name__ == "__main__":
    sys.exit(main())
