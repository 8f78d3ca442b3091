"""Exact match of a training state: greedy generation through the trainer's own weights, then scoring."""

from pathlib import Path

from lazytrain.generation import generate
from lazytrain.progress import progress_bar
from lazytrain.recipes.options import Options
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.prompts import decode_response, encode_prompts
from lazytrain.recipes.scoring import Score, score, write_samples
from lazytrain.signals import GracefulStop
from lazytrain.trainer import TrainState, param_getter


def evaluate(
    state: TrainState, job: Job, options: Options, label: str, samples_path: Path, stop: GracefulStop
) -> Score | None:
    """Answer the held-out problems and score the answers; write them to `samples_path`.

    Returns:
        None if there is nothing to evaluate or a signal asked to stop.
    """
    rows, texts = job.held_out, []
    if not rows:
        return None
    engine = state.engine
    with progress_bar(f"exact match {label}", len(rows), unit="problems") as bar:
        for first in range(0, len(rows), options.eval_batch_size):
            if stop.requested:
                return None
            queries = [row.query for row in rows[first : first + options.eval_batch_size]]
            made = generate(
                job.model,
                job.config,
                param_getter(state),
                encode_prompts(job.tokenizer, job.special, job.prompt, queries),
                max_new_tokens=job.settings.max_new_tokens,
                stop_ids=job.special.stop_ids,
                pad_id=job.special.pad_id,
                batch_size=options.eval_batch_size,
                device=engine.device,
                dtype=engine.dtype,
            )
            texts += [decode_response(job.tokenizer, job.special, tokens) for tokens in made]
            bar.advance(len(made))
    result = score(rows, texts)
    write_samples(samples_path, result.samples)
    return result
