"""The steps of a run: from its newest checkpoint, or the model, to the last one."""

from collections.abc import Callable, Mapping, Sequence

from lazytrain.checkpoint import count_checkpoints
from lazytrain.lanes import Span
from lazytrain.progress import progress_bar
from lazytrain.recipes.metrics import MetricsFile, count_skipped, describe_metrics
from lazytrain.recipes.options import Options
from lazytrain.recipes.outcome import Tier, describe_use
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.resuming import run_meta
from lazytrain.recipes.trackers import Trackers
from lazytrain.saving import resume_state, save_state
from lazytrain.signals import GracefulStop
from lazytrain.trainer import TrainState, TrainStep

TRACED_STEP = 4  # of this process: late enough for caches to be warm


def start(options: Options, job: Job, step: TrainStep, say: Callable[[str], None]) -> TrainState:
    """Return the state to go on from: the newest valid checkpoint with --resume, else the model's weights."""
    with progress_bar("loading", len(job.model.units), unit="units") as bar:
        if options.resume is not None:
            resumed = resume_state(step, options.out, meta=run_meta(options, job), progress=lambda name: bar.advance())
            if resumed is not None:
                say(f"resumed at step {resumed.step} of {job.num_steps}")
                return resumed
            say("no checkpoint to resume: starting from the model's weights")
        elif num_left := count_checkpoints(options.out, run_meta(options, job)):
            say(
                f"starting anew: the checkpoints in {options.out} ({num_left}) are kept until this run comes to their "
                "steps; --resume auto would go on from the newest"
            )
        return step.init(job.model_dir.read, seed=options.seed, progress=lambda name: bar.advance())


def train(
    options: Options,
    job: Job,
    step: TrainStep,
    state: TrainState,
    stop: GracefulStop,
    trackers: Trackers,
    *,
    measure_memory: Callable[[], Sequence[Tier]],
    texts: Mapping[str, bytes],
) -> tuple[TrainState, tuple[Span, ...]]:
    """Take the remaining steps; return the last state and the trace of one step.

    Args:
        texts: what makes a checkpoint a model directory (`read_texts`).
    """
    spans: tuple[Span, ...] = ()
    first, num_params, num_skipped = state.step, job.model.num_params, 0
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
            trackers.log_row(metrics_file.write(metrics, counts, batch, num_params=num_params))
            if metrics.skipped:
                bar.write(f"step {metrics.step}: gradient norm {metrics.grad_norm} in {metrics.bad_unit}: step skipped")
            num_skipped = count_skipped(num_skipped, metrics)
            note = describe_metrics(metrics, counts, num_params=num_params)
            bar.advance(note=f"{note}; memory: {describe_use(measure_memory())}")
            if options.save_every and state.step % options.save_every == 0 and state.step < job.num_steps:
                metrics_file.sync()
                save_state(state, options.out, meta=run_meta(options, job), texts=texts)
    return state, spans
