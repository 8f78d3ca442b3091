"""Exact match of a training state: greedy generation through the trainer's own weights, then scoring.

Texts are written as they are made, beside the file of samples. After a kill they are read again, if weights, problems
and settings are the same, and only the batches that are missing are generated. Beside finished samples lies what they
answer, so that a resumed run can tell whether the score before training is one of the same problems.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lazytrain.generation import generate
from lazytrain.progress import progress_bar
from lazytrain.recipes.encoding import encode_questions
from lazytrain.recipes.options import Options
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.prompts import decode_response
from lazytrain.recipes.scoring import Score, score, write_samples
from lazytrain.signals import GracefulStop
from lazytrain.trainer import TrainState, param_getter, read_params

_DIGEST_ELEMENTS = 1024  # of each end of a tensor: a step of training changes some of them


class _Stopped(Exception):
    """A signal came between two tokens."""


def evaluate(
    state: TrainState, job: Job, options: Options, label: str, samples_path: Path, stop: GracefulStop
) -> Score | None:
    """Answer the held-out problems and score the answers; write them to `samples_path`.

    Returns:
        None if there is nothing to evaluate or a signal asked to stop: after the running token, since a batch of a
        model that is streamed may take long. Whole batches are kept.
    """
    rows, size = job.held_out, options.eval_batch_size
    if not rows:
        return None
    engine = state.engine
    prompts = encode_questions(rows, job.tokenizer, job.special, job.prompt)
    made_file = TextsFile(
        samples_path.with_name(samples_path.name + ".texts"),
        header={
            "weights": digest_weights(state),
            **describe_task(job, prompts),
            "batch_size": size,
            "dtype": str(engine.dtype),
        },
    )
    texts = made_file.texts[: len(made_file.texts) // size * size]  # whole batches: others would be cut in other ones
    start_s, num_tokens = time.perf_counter(), 0
    rate: list[str] = []
    with progress_bar(f"exact match {label}", len(rows), unit="problems", initial=len(texts)) as bar:

        def follow(token: int) -> None:
            if stop.requested:
                raise _Stopped
            bar.advance(0, note=", ".join([*rate, f"token {token} of at most {job.settings.max_new_tokens}"]))

        for first in range(len(texts), len(rows), size):
            try:
                made = generate(
                    job.model,
                    job.config,
                    param_getter(state),
                    prompts[first : first + size],
                    max_new_tokens=job.settings.max_new_tokens,
                    stop_ids=job.special.stop_ids,
                    pad_id=job.special.pad_id,
                    batch_size=size,
                    device=engine.device,
                    dtype=engine.dtype,
                    progress=follow,
                )
            except _Stopped:
                return None
            texts += [decode_response(job.tokenizer, job.special, tokens) for tokens in made]
            made_file.write(texts)
            num_tokens += sum(map(len, made))
            rate = [f"{num_tokens / (time.perf_counter() - start_s):,.0f} tokens/s"]
            bar.advance(len(made), note=rate[0])
    result = score(rows, texts)
    task_path(samples_path).unlink(missing_ok=True)
    write_samples(samples_path, result.samples)
    task_path(samples_path).write_text(json.dumps(describe_task(job, prompts)) + "\n", encoding="utf-8")
    made_file.remove()
    return result


def recall(job: Job, samples_path: Path) -> Score | None:
    """Return the score that `evaluate` once wrote to `samples_path`; None if none, or of other problems or settings."""
    prompts = encode_questions(job.held_out, job.tokenizer, job.special, job.prompt)
    samples = _read_lines(samples_path)
    if not job.held_out or len(samples) != len(job.held_out):
        return None
    if _read_lines(task_path(samples_path)) != [describe_task(job, prompts)]:
        return None
    return score(job.held_out, [sample["text"] for sample in samples])


def describe_task(job: Job, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what is asked and how long an answer may be: two scores compare only where this is the same."""
    return {
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "stop_ids": list(job.special.stop_ids),
        "max_new_tokens": job.settings.max_new_tokens,
    }


def task_path(samples_path: Path) -> Path:
    """Return the file that says what finished samples answer."""
    return samples_path.with_name(samples_path.name + ".task")


def digest_weights(state: TrainState) -> str:
    """Return a digest of both ends of every working weight, to tell one training's weights from another's."""
    digest = hashlib.sha256()
    for name, value in read_params(state):
        flat = value.flatten()
        ends = torch.cat((flat[:_DIGEST_ELEMENTS], flat[-_DIGEST_ELEMENTS:])).cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(ends.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class TextsFile:
    """Generated texts behind a header, JSON lines; those of another header count for nothing."""

    def __init__(self, path: Path, *, header: dict[str, Any]) -> None:
        self.path, self._header = path, header
        self.texts: list[str] = []
        self._num_written = 0
        lines = _read_lines(path)
        if lines and lines[0] == header and all(isinstance(text, str) for text in lines[1:]):
            self.texts = lines[1:]

    def write(self, texts: Sequence[str]) -> None:
        """Append what is new in a growing list of texts."""
        if self._num_written == 0:  # anew, since the last line may be cut
            with self.path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(value) + "\n" for value in (self._header, *texts))
        else:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(text) + "\n" for text in texts[self._num_written :])
        self._num_written = len(texts)

    def remove(self) -> None:
        """Delete the file: all samples are written."""
        self.path.unlink(missing_ok=True)


def _read_lines(path: Path) -> list[Any]:
    """Return the whole lines of a file; a last one cut by a kill is left out."""
    if not path.is_file():
        return []
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values
