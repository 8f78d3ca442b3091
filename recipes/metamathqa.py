"""Fine-tune all weights of a model on math problems, then measure exact match.

    python -m lazytrain.recipes.metamathqa                                 the embedded default, a few minutes
    python -m lazytrain.recipes.metamathqa --model DIR --data FILE         your model, your rows

prepare -> profile and plan -> train -> checkpoint, model directory -> exact match -> picture, measured beside predicted
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytrain.errors import LazyTrainError
from lazytrain.lanes import Span
from lazytrain.locking import RunLock
from lazytrain.optimizer import Optimizer, adamw8bit
from lazytrain.planning import Planned, choose_plan, default_limits, plan_from_file
from lazytrain.profiler import Profiler
from lazytrain.programs import ProgramCache
from lazytrain.progress import progress_bar
from lazytrain.recipes.evaluation import evaluate
from lazytrain.recipes.metrics import MetricsFile, describe_metrics
from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.outcome import describe_plan, write_outcome
from lazytrain.recipes.preparation import Job, largest_batch, prepare
from lazytrain.saving import export_state, plan_state_export, resume_state, save_state
from lazytrain.schedules import cosine
from lazytrain.signals import GracefulStop
from lazytrain.solver.errors import PlannerError
from lazytrain.trainer import TrainState, TrainStep, make_train_step

# Every point of the residual curve is compiled on its own while profiling.
COMPILED_BUDGETS = (0.3, 0.6, 1.0)
SLOW_DISK_BYTES_S = 0.5e9
TRACED_STEP = 4  # of this process: late enough for caches to be warm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the process's exit code."""
    try:
        options = parse_options(arguments)
        options.out.mkdir(parents=True, exist_ok=True)
        bound = Bound()
        with RunLock(options.out), GracefulStop(bound.seconds) as stop:
            run(options, stop, bound)
        return stop.exit_code
    except (LazyTrainError, PlannerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@dataclass(kw_only=True)
class Bound:
    """How long a signal may have to wait until the state is saved: the running step, another, and the checkpoint."""

    step_s: float | None = None
    checkpoint_bytes: int = 0

    def seconds(self) -> float | None:
        """Return the bound, or None where no step was planned yet."""
        return None if self.step_s is None else 2 * self.step_s + self.checkpoint_bytes / SLOW_DISK_BYTES_S + 1.0


def run(options: Options, stop: GracefulStop, bound: Bound) -> None:
    """Do all stages of the run in order; a signal ends it between two of them, or between two steps."""
    say = print_line
    with stop.at_once():
        job = prepare(options, say)
        device, dtype = choose_device(options)
        plan_state_export(job.model, job.model_dir, options.out / "model", dtype)
        optimizer = make_optimizer(options, job)
        programs = make_programs(options, device)
        planned = make_plan(options, job, optimizer, device, dtype, programs, say)
        for line in describe_plan(planned, job):
            say(line)
        planned.plan.save(options.out / "plan.json")
        if options.plan_only:
            return
        step = make_train_step(
            job.model,
            optimizer,
            planned.plan,
            device=device,
            dtype=dtype,
            spill_dir=options.spill_dir,
            programs=programs,
        )
        state = start(options, job, step, say)
    bound.step_s = planned.plan.predicted.step_ms / 1e3 if planned.plan.predicted else None
    bound.checkpoint_bytes = sum(unit.weight_bytes + unit.state_bytes for unit in planned.problem.units)
    before = None
    if (options.eval_before if options.eval_before is not None else options.model is not None) and state.step == 0:
        before = evaluate(state, job, options, "before training", options.out / "samples_before.jsonl", stop)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state, spans = train(options, job, step, state, stop)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    save_state(state, options.out, meta=run_meta(options, job))
    if stop.requested:
        say(f"stopped at step {state.step}: the checkpoint is complete, --resume auto goes on from it")
        return
    export_state(state, job.model_dir, options.out / "model")
    after = evaluate(state, job, options, "after training", options.out / "samples.jsonl", stop)
    write_outcome(options.out, planned, spans, before, after, peak, say)


def choose_device(options: Options) -> tuple[torch.device, torch.dtype]:
    """Return where to compute and the dtype of the working weights."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    default = "bfloat16" if device.type == "cuda" and options.model is not None else "float32"
    return device, getattr(torch, options.dtype or default)


def make_programs(options: Options, device: torch.device) -> ProgramCache:
    """Return the cache of block programs: compiled by default on a GPU, for a real model."""
    compile = options.compile
    if compile is None:
        compile = device.type == "cuda" and options.model is not None
    if not compile:
        return ProgramCache()
    return ProgramCache(compile=True, exact=options.exact, budgets=COMPILED_BUDGETS)


def make_optimizer(options: Options, job: Job) -> Optimizer:
    """Return AdamW with 8-bit states and a cosine schedule over the run."""
    settings = job.settings
    return adamw8bit(
        cosine(settings.lr, num_steps=job.num_steps, num_warmup_steps=job.num_warmup_steps, final_fraction=0.05),
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        max_grad_norm=options.max_grad_norm,
        master_bits=options.master_bits,
    )


def make_plan(
    options: Options,
    job: Job,
    optimizer: Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    programs: ProgramCache,
    say: Callable[[str], None],
) -> Planned:
    """Profile this machine with this model, then solve for a plan; or read the plan that the user names."""
    limits = default_limits(device, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
    start_s = time.perf_counter()
    profiler = Profiler(
        model=job.model,
        settings=optimizer.settings,
        batch=largest_batch(job.stream),
        device=device,
        dtype=dtype,
        programs=programs,
        limits=limits,
        name=str(options.model or "embedded default"),
        spill_dir=options.spill_dir,
    )
    if options.plan is not None:
        planned = plan_from_file(options.plan, profiler)
    else:
        planned = choose_plan(profiler, num_microbatches=options.microbatches, report=say)
    say(f"profile and plan: {time.perf_counter() - start_s:.1f} s")
    return planned


def start(options: Options, job: Job, step: TrainStep, say: Callable[[str], None]) -> TrainState:
    """Return the state to go on from: the newest valid checkpoint with --resume, else the model's weights."""
    with progress_bar("loading", len(job.model.units), unit="units") as bar:
        if options.resume is not None:
            resumed = resume_state(step, options.out, meta=run_meta(options, job), progress=lambda name: bar.advance())
            if resumed is not None:
                say(f"resumed at step {resumed.step} of {job.num_steps}")
                return resumed
            say("no checkpoint to resume: starting from the model's weights")
        return step.init(job.model_dir.read, seed=options.seed, progress=lambda name: bar.advance())


def run_meta(options: Options, job: Job) -> dict[str, Any]:
    """Return what must agree for a checkpoint to be resumed: everything that shapes the course of the training."""
    return {
        "seed": options.seed,
        "batch_size": job.settings.batch_size,
        "num_steps": job.num_steps,
        "packing": options.packing,
        "num_rows": len(job.stream.encoded),
        "num_tokens": job.stream.encoded.report.num_tokens,
        "lr": job.settings.lr,
        "num_warmup_steps": job.num_warmup_steps,
        "weight_decay": job.settings.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "betas": list(job.settings.betas),
    }


def train(
    options: Options, job: Job, step: TrainStep, state: TrainState, stop: GracefulStop
) -> tuple[TrainState, tuple[Span, ...]]:
    """Take the remaining steps; return the last state and the trace of one step."""
    spans: tuple[Span, ...] = ()
    first = state.step
    with (
        MetricsFile(options.out / "metrics.jsonl", first_step=first) as metrics_file,
        progress_bar("training", job.num_steps, unit="steps", initial=first) as bar,
    ):
        while state.step < job.num_steps and not stop.requested:
            traced = state.step == min(first + TRACED_STEP, job.num_steps - 1)
            counts = job.stream.count_tokens(state.step)
            batch = job.stream.batch(state.step)
            state, metrics = step(state, batch)
            if traced:
                spans = state.engine.read_step()
            metrics_file.write(metrics, counts, batch)
            if metrics.skipped:
                bar.write(f"step {metrics.step}: gradient norm {metrics.grad_norm} in {metrics.bad_unit}: step skipped")
            bar.advance(note=describe_metrics(metrics, counts))
            if options.save_every and state.step % options.save_every == 0 and state.step < job.num_steps:
                save_state(state, options.out, meta=run_meta(options, job))
    return state, spans


def print_line(line: str) -> None:
    """Print one line of report at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
