"""The largest batch of a model's shape in one chunk (microbatch) on this machine: planned, then run, and the next one.

    python -m lazytrain.recipes.largest_batch --model qwen2.5-7b --gpu-memory 24GiB
    python -m lazytrain.recipes.largest_batch --model qwen2.5-14b --gpu-memory 24GiB --microbatch 8

profile a few rows -> the largest batch, by the planner -> steps with it -> steps past it: the same plan, a larger batch

With --microbatch the batch is cut in chunks of so many rows, and grows by whole chunks. Weights and tokens are random.
Recompute alone is profiled: what is kept beside boundaries makes a step faster, never a batch larger.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from lazytrain.configuration import ModelConfig
from lazytrain.errors import ConfigError, MemoryBudgetError
from lazytrain.optimizer import adamw8bit
from lazytrain.planning import default_limits
from lazytrain.profiler import Profiler
from lazytrain.programs import ProgramCache
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.failures import make_directory
from lazytrain.recipes.measuring import check_counts, limit_device, run_to_exit_code
from lazytrain.recipes.random_model import load_shape, make_fill, random_batch
from lazytrain.solver.capacity import find_largest_batch
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.explanation import format_largest_batch, format_plan
from lazytrain.solver.growth import add_chunks, grow_chunk
from lazytrain.solver.memory import GIB, Usage, account
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.sizes import parse_size
from lazytrain.trainer import TrainState, TrainStep, make_train_step
from lazytrain.transformer import transformer_model

PROFILED_ROWS = 8
RAN = "ran"
MAX_SMALLER, SMALLER = 3, 31 / 32  # tries below a largest batch that does not run


class Attempt(NamedTuple):
    """Steps with a batch: how they ended (RAN, or what memory was out), the last one's time, the allocator's peak."""

    batch: int
    outcome: str
    step_ms: float | None
    device_peak_bytes: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return 0, or 2 after one line that says what was wrong."""
    options = _parse(arguments)
    return run_to_exit_code(lambda: run(options, lambda line: print(line, flush=True)))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[Attempt]:
    """Return the attempts in order; write them with the planner's numbers to `largest_batch.json` in `options.out`."""
    start_s = time.perf_counter()
    check_counts(options, {"microbatch": 1, "seq": 1, "steps": 1})
    device = limit_device(options)
    make_directory(options.out, "--out")
    config = load_shape(options.model)
    compile = device.type == "cuda" if options.compile is None else options.compile
    programs = ProgramCache(compile=compile, budgets=())
    model = transformer_model(config)
    measured = _profile(options, config, device, programs, say)
    (options.out / "problem.json").write_text(json.dumps(measured.to_dict()) + "\n", encoding="utf-8")
    say(f"[{time.perf_counter() - start_s:.0f} s] profiled")

    def make_problem(batch: int, _: int = 0) -> Problem:
        """Return the problem of a batch, counted in rows or in chunks."""
        return (
            grow_chunk(measured, batch / PROFILED_ROWS) if options.microbatch is None else add_chunks(measured, batch)
        )

    largest = find_largest_batch(make_problem, counts=lambda batch: [batch])
    say(format_largest_batch(largest))
    problem, following = make_problem(max(1, largest.batch)), make_problem(largest.batch + 1)
    plan, usage = _solve(problem, options.plan_seconds)
    refusal = explain_infeasible(following) if solve(following, may_drop=True).plan is None else None
    say(format_plan(problem, plan))
    say(
        f"[{time.perf_counter() - start_s:.0f} s] planned: {usage.device_peak_bytes / GIB:.2f} GiB of the device at "
        f"{usage.device_peak_at}, {usage.host_bytes / GIB:.2f} GiB of the host. One more: {refusal or 'a plan fits'}"
    )

    def make_step(plan: Plan) -> TrainStep:
        return make_train_step(model, adamw8bit(1e-5), plan, device=device, dtype=torch.bfloat16, programs=programs)

    runner = Runner(make_step, plan, config, rows=options.microbatch, seq=options.seq)

    def attempt(batch: int, num_steps: int) -> Attempt:
        done = runner.attempt(batch, num_steps)
        say(f"[{time.perf_counter() - start_s:.0f} s] {describe(done)}")
        return done

    limit = options.gpu_memory if device.type == "cuda" else None
    attempts = find_edge(attempt, largest.batch, num_steps=options.steps, limit_bytes=limit)
    runner.close()
    report = {
        "model": options.model,
        "seq": options.seq,
        "rows_per_unit": options.microbatch or 1,
        "largest": largest._asdict(),
        "predicted_device_bytes": usage.device_peak_bytes,
        "predicted_host_bytes": usage.host_bytes,
        "refusal": refusal,
        "attempts": [attempt._asdict() for attempt in attempts],
    }
    (options.out / "largest_batch.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plan.save(options.out / "plan.json")
    return attempts


def describe(attempt: Attempt) -> str:
    """Return an attempt as a line."""
    line = f"batch {attempt.batch}: {attempt.outcome}"
    if attempt.step_ms is not None:
        line += f", {attempt.step_ms:,.1f} ms the last step"
    if attempt.device_peak_bytes is not None:
        line += f", device peak {attempt.device_peak_bytes / GIB:.2f} GiB"
    return line


def _profile(
    options: argparse.Namespace,
    config: ModelConfig,
    device: torch.device,
    programs: ProgramCache,
    say: Callable[[str], None],
) -> Problem:
    """Return the measured problem of one chunk: of --microbatch rows, or of a few."""
    rows = options.microbatch or PROFILED_ROWS
    limits = default_limits(device, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
    if options.problem is not None:
        kept = Problem.load(options.problem)
        if kept.tokens_per_step != rows * options.seq:
            raise ConfigError(
                f"--problem {options.problem} is of {kept.tokens_per_step} tokens; needed are {rows} rows."
            )
        device_bytes, host_bytes = limits["device"], limits["host"]
        hardware = replace(kept.hardware, device_memory_bytes=device_bytes, host_memory_bytes=host_bytes)
        return replace(kept, hardware=hardware)
    profiler = Profiler(
        model=transformer_model(config),
        settings=adamw8bit(1e-5).settings,
        batch=random_batch(config, rows, options.seq, seed=0),
        device=device,
        dtype=torch.bfloat16,
        programs=programs,
        limits=limits,
        name=options.model,
        floor_s=options.floor,
    )
    return profiler.problem(1, say)


def _solve(problem: Problem, time_limit_s: float) -> tuple[Plan, Usage]:
    """Return a plan for the largest batch, and what it needs.

    Raises:
        MemoryBudgetError: nothing fits, not even the smallest batch.
    """
    result = solve(problem, time_limit_s=time_limit_s, may_drop=True)
    if result.plan is None:
        raise MemoryBudgetError(result.message)
    return result.plan, account(problem, result.plan)


def find_edge(
    attempt: Callable[[int, int], Attempt], largest: int, *, num_steps: int, limit_bytes: int | None
) -> list[Attempt]:
    """Return the attempts around the planned largest batch: it, or the next smaller one that runs, and larger ones.

    Past it one step each is taken: with one more, and, where that runs, with as many as do not fit the limit by the
    peaks that were measured.

    Args:
        attempt: (batch, number of steps) -> how it ended.
        limit_bytes: of the device's allocator; None = it has none, and one more is all that is tried.
    """
    attempts = [attempt(largest, num_steps)]
    for _ in range(MAX_SMALLER):
        if attempts[-1].outcome == RAN or attempts[-1].batch == 1:
            break
        attempts.append(attempt(max(1, int(attempts[-1].batch * SMALLER)), num_steps))
    before = attempts[-1]
    if before.batch < largest or before.outcome != RAN:
        return attempts
    more = attempt(largest + 1, 1)
    attempts.append(more)
    if more.outcome == RAN and limit_bytes and more.device_peak_bytes and before.device_peak_bytes:
        slope = max(1, more.device_peak_bytes - before.device_peak_bytes)
        room = max(0, limit_bytes - more.device_peak_bytes)
        attempts.append(attempt(more.batch + 1 + room // slope, 1))
    return attempts


class Runner:
    """Takes steps of one plan with any batch; the same weights go on from batch to batch where the plan is the same.

    Args:
        rows: of a chunk; None = a batch is one chunk of as many rows.
    """

    def __init__(
        self, make_step: Callable[[Plan], TrainStep], plan: Plan, config: ModelConfig, *, rows: int | None, seq: int
    ) -> None:
        self._make_step, self._plan, self._config, self._rows, self._seq = make_step, plan, config, rows, seq
        self._step: TrainStep | None = None
        self._state: TrainState | None = None

    def attempt(self, batch: int, num_steps: int) -> Attempt:
        """Take steps with a batch: rows, or chunks of `rows`."""
        plan = self._plan if self._rows is None else replace(self._plan, num_microbatches=batch)
        data = random_batch(self._config, batch * (self._rows or 1), self._seq, seed=0)
        outcome, step_ms, on_gpu = RAN, None, torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            if self._step is None or self._step.plan != plan:
                self.close()
                self._step = self._make_step(plan)
            if self._state is None:
                self._state = self._step.restore(make_fill(), step=0, num_updates=0, seed=0)
            for _ in range(num_steps):
                self._state, metrics = self._step(self._state, data)
                step_ms = metrics.step_s * 1e3
            self._state.engine.finish_updates()
        except torch.OutOfMemoryError as error:
            outcome = f"out of device memory: {str(error).splitlines()[0][:200]}"
        except MemoryBudgetError as error:
            outcome = f"out of host memory: {error}"
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        if outcome != RAN:
            self.close()
        return Attempt(batch, outcome, step_ms, peak)

    def close(self) -> None:
        """Give all memory back."""
        if self._state is not None:
            self._state.engine.close()
        self._state = self._step = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m lazytrain.recipes.largest_batch", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", required=True, help=f"a model directory, or one of: {', '.join(KNOWN_MODELS)}")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, help="rows of a chunk (default: all rows are one chunk)")
    parser.add_argument("--steps", type=int, default=2, help="steps with the largest batch (default: %(default)s)")
    parser.add_argument("--plan-seconds", type=float, default=PLAN_SECONDS, help="default: %(default)s")
    parser.add_argument("--gpu-memory", type=parse_size, help="hard limit of device memory, for example 24GiB")
    parser.add_argument("--host-memory", type=parse_size, help="host memory the plan may fill")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--floor", type=float, default=0.1, help="seconds per measurement of the profile")
    parser.add_argument("--problem", type=Path, help=f"a problem.json of {PROFILED_ROWS} rows instead of a profile")
    parser.add_argument("--out", type=Path, default=Path("runs/largest_batch"), help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
