"""Measure whole training steps of a model's shape on this machine: random weights, random tokens, any plan.

    python -m lazytrain.recipes.bench --model qwen2.5-3b --batch 32 --gpu-memory 24GiB
    python -m lazytrain.recipes.bench --model DIR --batch 8 --plans solved,cpu-update,device-update,recompute_all

profile -> for every plan: solve or take it, place, warm up, measure -> what each step's time went to, beside predicted

A plan is `solved`, `cpu-update` or `device-update` (solved with all updates forced there), `states-on-nvme` or
`all-on-nvme` (what all blocks have of that lies in --spill-dir), `fixed-interval-N` (see solver/fixed_interval.py), the
name of a heuristic that the planner lists, or a plan.json. Model TFLOP/s are 6 x parameters x tokens/s, tied parameters
counted once. A problem.json gets the rates and the room of this machine's disk, and --host-memory.
"""

import argparse
import gc
import hashlib
import json
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lazytrain.account import Account, account_step
from lazytrain.base import Model
from lazytrain.configuration import ModelConfig
from lazytrain.lanes import Span
from lazytrain.optimizer import adamw8bit
from lazytrain.planning import Planned, default_limits, default_microbatches
from lazytrain.profiler import Profiler
from lazytrain.programs import COMPILED_BUDGETS, ProgramCache
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.bench_disk import Disk, bound_step, measure_disk, with_disk
from lazytrain.recipes.bench_plans import choose_plan
from lazytrain.recipes.bench_result import Measured
from lazytrain.recipes.failures import make_directory
from lazytrain.recipes.kernel_time import KernelTime, product_tflops, profile_kernels
from lazytrain.recipes.measuring import check_counts, limit_device, run_to_exit_code
from lazytrain.recipes.pictures import draw_step
from lazytrain.recipes.random_model import load_shape, make_fill, random_batch
from lazytrain.slabs import resident_host_bytes
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.explanation import format_baselines, format_plan, format_prediction
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.problem import Problem
from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.simulator import Simulation, simulate
from lazytrain.solver.sizes import parse_size
from lazytrain.solver.traces import write_spans
from lazytrain.trainer import TrainState, TrainStep, make_train_step
from lazytrain.transformer import transformer_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 2 after one line that says what was wrong."""
    options = _parse(arguments)
    return run_to_exit_code(lambda: run(options, lambda line: print(line, flush=True)))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[Measured]:
    """Profile once, then measure every plan; write `bench.json`, plans, traces and pictures to `options.out`."""
    check_counts(options, {"batch": 1, "seq": 1, "microbatches": 1, "steps": 1, "warmup": 0})
    device = limit_device(options)
    config = load_shape(options.model)
    model = transformer_model(config)
    make_directory(options.out, "--out")
    if options.spill_dir is not None:
        make_directory(options.spill_dir, "--spill-dir")
    compile = device.type == "cuda" if options.compile is None else options.compile
    programs = ProgramCache(compile=compile, exact=options.exact, budgets=COMPILED_BUDGETS if compile else ())
    profiler = Profiler(
        model=model,
        settings=adamw8bit(1e-5, master_bits=options.master_bits).settings,
        batch=random_batch(config, options.batch, options.seq, seed=0),
        device=device,
        dtype=torch.bfloat16,
        programs=programs,
        limits=default_limits(
            device, gpu_memory=options.gpu_memory, host_memory=options.host_memory, spill_dir=options.spill_dir
        ),
        name=options.model,
        spill_dir=options.spill_dir,
        floor_s=options.floor,
    )
    start_s = time.perf_counter()
    if options.problem is not None:
        problem = Problem.load(options.problem)
        if options.host_memory is not None:
            problem = replace(problem, hardware=replace(problem.hardware, host_memory_bytes=options.host_memory))
        profiler.compile(problem.num_microbatches, say)  # so that no step's time or memory includes it
    else:
        count = options.microbatches or default_microbatches(profiler.batch, device)
        problem = profiler.problem(count, say)
        say(f"compiled and profiled in {time.perf_counter() - start_s:.1f} s")
    disk = None
    if options.spill_dir is not None:
        disk = measure_disk(options.spill_dir)
        say(disk.describe())
        problem = with_disk(problem, disk, profiler.limits["nvme"])
    (options.out / "problem.json").write_text(json.dumps(problem.to_dict()) + "\n", encoding="utf-8")
    results = []
    for name in () if options.profile_only else options.plans.split(","):
        chosen = choose_plan(name, problem, time_limit_s=options.plan_seconds)
        if chosen is None:
            say(f"{name}: {explain_infeasible(problem) if name == 'solved' else 'does not fit, left out'}")
            continue
        say(format_plan(chosen.problem, chosen.plan))
        say(format_prediction(chosen.problem, chosen.plan))
        if name == "solved":
            assert chosen.plan.predicted is not None
            say(format_baselines(chosen.result.baselines, chosen.plan.predicted.step_ms))
        results.append(_measure(name, chosen, model, config, programs, device, disk, options, say))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    product = product_tflops(device)
    say(
        f"8192 x 8192 x 8192 product in bf16, after the steps: {product:.0f} TFLOP/s" if product else "no product timed"
    )
    rows = [{**r.to_dict(), "product_tflops": product} for r in results]
    (options.out / "bench.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return results


def _measure(
    name: str,
    planned: Planned,
    model: Model,
    config: ModelConfig,
    programs: ProgramCache,
    device: torch.device,
    disk: Disk | None,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Measured:
    step = make_train_step(
        model,
        adamw8bit(1e-5, master_bits=options.master_bits),
        planned.plan,
        device=device,
        dtype=torch.bfloat16,
        programs=programs,
        spill_dir=options.spill_dir,
    )
    host, start_s = HostUse(), time.perf_counter()
    state = step.restore(make_fill(), step=0, num_updates=0, seed=0, progress=host.look)
    startup_s = time.perf_counter() - start_s
    say(f"{name}: placed {model.num_params / 1e9:.2f}e9 parameters in {startup_s:.1f} s")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = _take_steps(step, state, config, options, host, say)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if options.kernels and device.type == "cuda":
        batch = random_batch(config, options.batch, options.seq, seed=0)
        kernels = profile_kernels(lambda: [step(step(taken.state, batch)[0], batch)])
        say(f"  GPU busy {kernels.busy_share:.1%} of two steps; " + _list_kernels(kernels))
    simulation = simulate(planned.problem, planned.plan)
    result = _summarize(name, planned, model, taken, simulation, disk, peak, host.peak_bytes, startup_s)
    _write(options.out, name, planned, simulation, taken.spans, result)
    for line in result.describe():
        say(line)
    state.engine.close()
    return result


class HostUse:
    """The most host memory that was in use beyond that at the start, at the moments when someone looked."""

    def __init__(self) -> None:
        self._before_bytes, self.peak_bytes = resident_host_bytes(), 0

    def look(self, what: str = "") -> None:
        """Note what is in use now."""
        self.peak_bytes = max(self.peak_bytes, resident_host_bytes() - self._before_bytes)


class Taken(NamedTuple):
    """The measured steps: an account each, all losses (warm-up too), the last one's spans, queue -> bytes a step.

    `num_refills`: warm-up too, and `num_steady_refills`, of the measured steps alone; None without a GPU.
    """

    state: TrainState
    accounts: Sequence[Account]
    losses: Sequence[float]
    spans: Sequence[Span]
    moved: dict[str, float]
    num_refills: int | None
    num_steady_refills: int | None


def _take_steps(
    step: TrainStep,
    state: TrainState,
    config: ModelConfig,
    options: argparse.Namespace,
    host: HostUse,
    say: Callable[[str], None],
) -> Taken:
    batches = [random_batch(config, options.batch, options.seq, seed=i) for i in range(2)]
    lanes, accounts, losses = state.engine.lanes, list[Account](), []
    before, cold_refills = lanes.bytes_moved.copy(), _count_refills(lanes.device)
    warm_refills = cold_refills
    for i in range(options.warmup + options.steps):
        if i == options.warmup:
            before, warm_refills = lanes.bytes_moved.copy(), _count_refills(lanes.device)
        state, metrics = step(state, batches[i % 2])
        host.look()
        losses.append(metrics.loss)
        if metrics.last_account is not None and i > options.warmup:
            accounts.append(metrics.last_account)
        if i <= options.warmup or (i + 1) % 10 == 0:
            say(f"  step {i}: loss {metrics.loss:.4f}, norm {metrics.grad_norm:.3f}, {metrics.step_s * 1e3:.1f} ms")
    moved = {queue: (count - before[queue]) / options.steps for queue, count in lanes.bytes_moved.items()}
    spans = state.engine.read_step()
    accounts.append(account_step(lanes.read_step()[0], spans))
    refills = _count_refills(lanes.device)
    steady = _difference(refills, warm_refills)
    return Taken(state, accounts, losses, spans, moved, _difference(refills, cold_refills), steady)


def _count_refills(device: torch.device) -> int | None:
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else None


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def _list_kernels(kernels: KernelTime, count: int = 12) -> str:
    return "; ".join(f"{ms:.1f} ms {name[:60]}" for name, ms in kernels.by_name[:count])


def _summarize(
    name: str,
    planned: Planned,
    model: Model,
    taken: Taken,
    simulation: Simulation,
    disk: Disk | None,
    peak: int | None,
    host_bytes: int,
    startup_s: float,
) -> Measured:
    mean = Account(*(statistics.fmean(values) for values in zip(*taken.accounts, strict=True)))
    tokens, losses = planned.problem.tokens_per_step, taken.losses
    device_bytes = simulation.device_peak_bytes
    return Measured(
        plan=name,
        step_ms=mean.step_ms,
        predicted_ms=simulation.step_ms,
        tokens_per_s=tokens / mean.step_ms * 1e3,
        tflops=6 * model.num_params * tokens / mean.step_ms / 1e9,
        device_peak_bytes=peak,
        predicted_device_bytes=device_bytes,
        host_bytes=host_bytes,
        predicted_host_bytes=simulation.host_bytes + (device_bytes if planned.problem.device_is_host else 0),
        startup_s=startup_s,
        num_refills=taken.num_refills,
        num_steady_refills=taken.num_steady_refills,
        account=mean,
        disk=bound_step(disk, simulation, step_ms=mean.step_ms, moved=taken.moved, spans=taken.spans) if disk else None,
        step_ms_each=tuple(account.step_ms for account in taken.accounts),
        losses_digest=hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest()[:16],
    )


def _write(
    out: Path, name: str, planned: Planned, simulation: Simulation, spans: Sequence[Span], result: Measured
) -> None:
    label = Path(name).stem if name.endswith(".json") else name
    planned.plan.save(out / f"plan-{label}.json")
    write_spans(out / f"trace-{label}.json", spans, title=f"{label}, measured")
    draw_step(
        out / f"step-{label}.png",
        simulation.timeline,
        spans,
        predicted_ms=result.predicted_ms,
        measured_ms=result.step_ms,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="lazytrain bench", description=(__doc__ or "").split("\n\n")[0])
    known: dict[str, Any] = {"help": f"a model directory, or one of: {', '.join(KNOWN_MODELS)}"}
    parser.add_argument("--model", required=True, **known)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, help="chunks a step is cut in (default: the planner's)")
    parser.add_argument("--plans", default="solved", help="comma-separated, see above (default: %(default)s)")
    parser.add_argument(
        "--plan-seconds", type=float, default=PLAN_SECONDS, help="time for each search (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps measured (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default: %(default)s)")
    parser.add_argument("--gpu-memory", type=parse_size, help="hard limit of device memory, for example 24GiB")
    parser.add_argument("--host-memory", type=parse_size, help="host memory the plan may fill")
    parser.add_argument("--spill-dir", type=Path, help="a directory on NVMe that the plan may use")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--master-bits", type=int, choices=(24, 32), default=32, help="default: %(default)s")
    parser.add_argument("--exact", action="store_true", help="the same bits under any plan also when compiled")
    parser.add_argument("--kernels", action="store_true", help="profile two more steps kernel by kernel")
    parser.add_argument("--floor", type=float, default=0.3, help="seconds per measurement of the profile")
    parser.add_argument("--profile-only", action="store_true", help="profile, write problem.json and stop")
    parser.add_argument("--problem", type=Path, help="a problem.json instead of a profile")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
