"""Fine-tune all weights of a model on math problems, then measure exact match.

    lazytrain train                                 the embedded default, a few minutes
    lazytrain train --model DIR --data FILE         your model, your rows

prepare -> profile and plan -> train -> checkpoint, model directory -> exact match -> report, measured beside predicted
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from lazytrain.errors import ConfigError, LazyTrainError
from lazytrain.export import check_target, read_texts
from lazytrain.homes import spill_room
from lazytrain.locking import RunLock
from lazytrain.optimizer import Optimizer, adamw8bit
from lazytrain.planning import Planned, choose_plan, default_limits, plan_from_file
from lazytrain.profile_cache import user_cache
from lazytrain.profiler import Profiler
from lazytrain.programs import COMPILED_BUDGETS, ProgramCache
from lazytrain.recipes.effective import effective_config, effective_values
from lazytrain.recipes.evaluation import evaluate, recall, task_path
from lazytrain.recipes.failures import describe_error, make_directory
from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.outcome import describe_plan, describe_room, measure_tiers, write_outcome
from lazytrain.recipes.preparation import Job, largest_batch, prepare
from lazytrain.recipes.resuming import run_meta
from lazytrain.recipes.scoring import Score
from lazytrain.recipes.software_checks import BFLOAT16_CAPABILITY
from lazytrain.recipes.trackers import check_trackers, open_trackers
from lazytrain.recipes.training import start, train
from lazytrain.saving import NUM_KEPT, check_resumable, count_shared, export_state, plan_state_export, save_state
from lazytrain.schedules import cosine
from lazytrain.signals import GracefulStop
from lazytrain.slabs import resident_host_bytes
from lazytrain.solver.errors import PlannerError
from lazytrain.trainer import TrainState, make_train_step

SLOW_DISK_BYTES_S = 0.5e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the process's exit code."""
    try:
        options = parse_options(arguments)
        if options.print_config:
            print(effective_config(options), end="")
            return 0
        check_trackers(options)
        bound = Bound()
        if options.dry_run:
            with GracefulStop(bound.seconds) as stop, stop.at_once():
                print(try_run(options, lambda line: print(line, file=sys.stderr, flush=True)), end="")
            return stop.exit_code
        make_directory(options.out, "--out")
        if options.spill_dir is not None:
            make_directory(options.spill_dir, "--spill-dir")
        with RunLock(options.out), GracefulStop(bound.seconds) as stop:
            run(options, stop, bound)
        return stop.exit_code
    except (LazyTrainError, PlannerError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 2


@dataclass(kw_only=True)
class Bound:
    """How long a signal may have to wait until the state is saved: the running step, another, and the checkpoint."""

    step_s: float | None = None
    checkpoint_bytes: int = 0

    def seconds(self) -> float | None:
        """Return the bound, or None where no step was planned yet."""
        return None if self.step_s is None else 2 * self.step_s + self.checkpoint_bytes / SLOW_DISK_BYTES_S + 1.0


class Setup(NamedTuple):
    """What stands when the plan does."""

    job: Job
    device: torch.device
    dtype: torch.dtype
    optimizer: Optimizer
    programs: ProgramCache
    planned: Planned


def run(options: Options, stop: GracefulStop, bound: Bound) -> None:
    """Do all stages of the run in order; a signal ends it between two of them, or between two steps."""
    say = print_line
    with stop.at_once():
        setup = set_up(options, say)
        job, device, planned = setup.job, setup.device, setup.planned
        planned.plan.save(options.out / "plan.json")
        (options.out / "options.toml").write_text(effective_config(options), encoding="utf-8")
        if options.plan_only:
            return
        shared = None
        if options.spill_dir is not None:
            resumes = options.resume is not None
            shared = count_shared(options.out, options.spill_dir, meta=run_meta(options, job), resumes=resumes)
        step = make_train_step(
            job.model,
            setup.optimizer,
            planned.plan,
            device=device,
            dtype=setup.dtype,
            spill_dir=options.spill_dir,
            shared_checkpoints=shared,
            programs=setup.programs,
        )
        room = spill_room(job.model, planned.plan, setup.optimizer.settings, setup.dtype, shared)
        for line in describe_room(*room, shared):
            say(line)
        texts = read_texts(job.model_dir, setup.dtype)
        before_bytes = resident_host_bytes()
        state = start(options, job, step, say)
    bound.step_s = planned.plan.predicted.step_ms / 1e3 if planned.plan.predicted else None
    bound.checkpoint_bytes = sum(unit.weight_bytes + unit.state_bytes for unit in planned.problem.units)
    with open_trackers(options, first_step=state.step, config=effective_values(options)) as trackers:
        before = score_before(state, job, options, stop, say)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        engine = state.engine
        state, spans = train(
            options,
            job,
            step,
            state,
            stop,
            trackers,
            measure_memory=lambda: measure_tiers(planned, engine, device, before_bytes),
            texts=texts,
        )
        tiers = measure_tiers(planned, engine, device, before_bytes)
        save_state(state, options.out, meta=run_meta(options, job), texts=texts)
        if stop.requested:
            say(f"stopped at step {state.step}: the checkpoint is complete, --resume auto goes on from it")
            return
        export_state(state, job.model_dir, options.out / "model")
        after = evaluate(state, job, options, "after training", options.out / "samples.jsonl", stop)
        if stop.requested and after is None:
            say("stopped in the evaluation after training: the model is complete, --resume auto goes on from it")
        scores = {name: score for name, score in (("before", before), ("after", after)) if score is not None}
        trackers.log(state.step, {f"exact_match/{name}": score.exact_match for name, score in scores.items()})
    write_outcome(options.out, planned, spans, scores, tiers, say)


def try_run(options: Options, say: Callable[[str], None]) -> str:
    """Do everything up to the plan and return it as JSON; write nothing (what has to be a file is a temporary one)."""
    if options.spill_dir is not None and not options.spill_dir.is_dir():
        raise ConfigError(f"--dry-run makes no directory, and --spill-dir {options.spill_dir} is none. Make it first.")
    check_target(options.out / "model", options.model)
    with tempfile.TemporaryDirectory(prefix="lazytrain-dry-run-") as scratch:
        planned = set_up(replace(options, out=Path(scratch)), say).planned
        path = Path(scratch) / "plan.json"
        planned.plan.save(path)
        return path.read_text(encoding="utf-8")


def set_up(options: Options, say: Callable[[str], None]) -> Setup:
    """Read model and data, check where the model will be written, profile and plan."""
    job = prepare(options, say)
    device, dtype = choose_device(options, say)
    if options.resume is not None:
        check_resumable(options.out, run_meta(options, job), dtype)
    plan_state_export(job.model, job.model_dir, options.out / "model", dtype)
    optimizer = make_optimizer(options, job)
    programs = make_programs(options, device)
    planned = make_plan(options, job, optimizer, device, dtype, programs, say)
    for line in describe_plan(planned, job):
        say(line)
    return Setup(job, device, dtype, optimizer, programs, planned)


def choose_device(options: Options, say: Callable[[str], None]) -> tuple[torch.device, torch.dtype]:
    """Return where to compute and the dtype of the working weights; tell of a GPU without bfloat16 in hardware.

    Raises:
        ConfigError: --device cuda where torch finds no GPU.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; lazytrain doctor says why. Or give --device cpu.")
    default = "float32"
    if device.type == "cuda" and options.model is not None:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= BFLOAT16_CAPABILITY:
            default = "bfloat16"
        elif options.dtype is None:
            say(f"dtype: float32, since a GPU of capability {major}.{minor} has no bfloat16 in hardware (8.0 and up)")
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
    if options.spill_dir is not None:
        options.spill_dir.mkdir(parents=True, exist_ok=True)
    limits = default_limits(
        device,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory,
        spill_dir=options.spill_dir,
        shared_checkpoints=NUM_KEPT,
    )
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
        cache=None if options.fresh_profile else user_cache(),
    )
    if options.plan is not None:
        planned = plan_from_file(options.plan, profiler)
    else:
        planned = choose_plan(
            profiler, num_microbatches=options.microbatches, time_limit_s=options.plan_seconds, report=say
        )
    say(f"profile and plan: {time.perf_counter() - start_s:.1f} s")
    return planned


def score_before(
    state: TrainState, job: Job, options: Options, stop: GracefulStop, say: Callable[[str], None]
) -> Score | None:
    """Return the exact match before training: measured at step 0 if that is wanted, else what was measured then."""
    path = options.out / "samples_before.jsonl"
    if state.step > 0:
        score = recall(job, path)
        if score is None and task_path(path).exists():
            say(f"the score before training is left out: {path} has other problems, or answers of another length")
        return score
    if options.eval_before if options.eval_before is not None else options.model is not None:
        return evaluate(state, job, options, "before training", path, stop)
    task_path(path).unlink(missing_ok=True)  # of an earlier run in this directory
    return None


def print_line(line: str) -> None:
    """Print one line of report at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
