"""Send the recipe a signal in each of its phases, resume it, compare with a run that was left alone; run as a program.

    python tests/signal_driver.py DIRECTORY PHASE=SIGNAL ...

Every run is a forked process that runs the recipe's `main` and signals itself at a chosen place. Prints JSON: per phase
the exit codes, what was printed, the seconds from the signal to the end, and whether metrics and weights are the same.
"""

import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lazytrain import durable, programs, store_saving
from lazytrain.lanes import Lanes
from lazytrain.recipes import evaluation, metamathqa
from lazytrain.recipes.default_model import write_default_model
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.sample import write_sample
from lazytrain.shards import ModelDir

SMALL = (
    "--device", "cpu", "--steps", "4", "--batch-size", "8", "--eval-limit", "6", "--eval-batch-size", "3",
    "--max-new-tokens", "6", "--save-every", "2", "--max-tokens", "96", "--prompt", "plain", "--no-eval-before",
    "--fresh-profile",
)  # fmt: skip
NUM_ROWS = 80
TIMES = ("step_s", "tokens_per_s", "padded_tokens_per_s", "model_tflops", "last_account")
BOUND = re.compile(r"saved within about (\d+) s")


class Trigger:
    """Signals this process once, at the `at`-th call of a function."""

    def __init__(self, number: signal.Signals, at: int, note: Path) -> None:
        self.number, self.left, self.note = number, at, note

    def wrap(self, real: Callable[..., Any], when: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if when(*args):
                self.left -= 1
                if self.left == 0:
                    self.note.write_text(str(time.monotonic()))
                    os.kill(os.getpid(), self.number)
            return real(*args, **options)

        return call


def is_span(name: str) -> Callable[..., bool]:
    return lambda lanes, queue, span, unit, *others: span == name


def place(phase: str) -> tuple[Any, str, Callable[..., bool], int]:
    """Return where a phase's signal is sent: object, function, condition, number of the call."""
    always = lambda *args: True  # noqa: E731
    return {
        "planning": (metamathqa, "choose_plan", always, 1),
        "compile": (programs, "make_programs", always, 1),
        "load": (ModelDir, "read", always, 9),
        "step": (Lanes, "span", is_span("backward"), 6),
        "update": (Lanes, "span", is_span("update"), 8),
        "save": (store_saving, "write_file", always, 1),
        "export": (durable, "publish", lambda staged, target, *others: target.name == "model", 1),
        "evaluation": (evaluation, "generate", always, 2),
    }[phase]


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process prints to a file, and afterwards to where it went before."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    before = [os.dup(1), os.dup(2)]
    for target in (1, 2):
        os.dup2(fd, target)
    yield
    sys.stdout.flush()
    for target, old in zip((1, 2), before):
        os.dup2(old, target)


def run(out: Path, arguments: tuple[str, ...], phase: str | None, number: signal.Signals) -> tuple[int, str, float]:
    """Run the recipe in a forked process; return its exit code, its output, and the seconds since the signal."""
    log, note = out.with_suffix(".log"), out.with_suffix(".sent")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            with output_to(log), pytest.MonkeyPatch.context() as patch:
                if phase is not None:
                    owner, name, when, at = place(phase)
                    patch.setattr(owner, name, Trigger(number, at, note).wrap(getattr(owner, name), when))
                code = metamathqa.main([*SMALL, *arguments, "--out", str(out)])
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end_s = time.monotonic()
    return code, log.read_text(), end_s - float(note.read_text()) if note.exists() else -1.0


def content(out: Path) -> tuple[list[Any], str]:
    """Return the metrics without times, and a digest of the exported weights."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((out / "model").glob("*.safetensors"))))
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows], weights.hexdigest()


def make_input(directory: Path) -> tuple[str, ...]:
    """Write a small model and few rows; return the options that name them."""
    paths = []
    for path in write_sample(directory / "sample"):
        paths.append(directory / path.name)
        lines = path.read_text().splitlines(keepends=True)[:NUM_ROWS]
        paths[-1].write_text("".join(lines))
    write_default_model(directory / "base", load_rows(paths[0]).rows, seed=0)
    return ("--model", str(directory / "base"), "--data", str(paths[0]), "--eval-data", str(paths[1]))


def main(directory: Path, cases: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    # Rough times are enough: a plan changes no bit.
    metamathqa.Profiler = functools.partial(metamathqa.Profiler, floor_s=0.001)
    files = make_input(directory)
    straight = directory / "straight"
    # Here and not in a forked process: what it imports and loads, all the others find.
    with output_to(directory / "warm.log"):
        assert metamathqa.main([*SMALL, *files, "--out", str(directory / "warm")]) == 0
    code, log, _ = run(straight, files, None, signal.SIGTERM)
    assert code == 0, log
    expected = content(straight)
    plan = (*files, "--plan", str(straight / "plan.json"))
    result: dict[str, Any] = {}
    for case in cases:
        phase, name = case.split("=")
        out = directory / phase / name
        out.parent.mkdir(exist_ok=True)
        arguments = files if phase == "planning" else plan
        code, log, waited_s = run(out, arguments, phase, signal.Signals[name])
        steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        # Where nothing was saved, a second run is the straight one; it is only taken with both signals.
        resumes = bool(steps) or "LAZYTRAIN_ALL_SIGNALS" in os.environ
        again, second_log = -1, ""
        if resumes:
            again, second_log, _ = run(out, (*plan, "--resume", "auto"), None, signal.SIGTERM)
        bound = BOUND.search(log)
        result[case] = {
            "code": code,
            "log": log,
            "waited_s": waited_s,
            "bound_s": float(bound[1]) if bound else None,
            "steps": steps,
            "ran_again": resumes,
            "resumed": "resumed at step" in second_log,
            "code_of_resume": again,
            "same": again == 0 and content(out) == expected,
        }
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
