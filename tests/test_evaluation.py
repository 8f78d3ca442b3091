"""Evaluation: killed and gone on with, it has the result of one that was never killed; nothing stale is taken."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.optimizer import adamw8bit
from lazytrain.progress import progress_bar
from lazytrain.recipes import evaluation
from lazytrain.recipes.evaluation import TextsFile, digest_weights, evaluate
from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.preparation import Job, prepare
from lazytrain.recipes.scoring import Score
from lazytrain.signals import GracefulStop
from lazytrain.trainer import TrainState, make_train_step

NUM_ROWS, SIZE = 7, 2
Calls = list[int]


class Bench:
    """A small model to be evaluated, and the sizes of the batches that were generated."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = ("--out", str(directory), "--eval-limit", str(NUM_ROWS), "--eval-batch-size", str(SIZE))
        self.options: Options = parse_options([*arguments, "--max-new-tokens", "5"])
        self.lines: list[str] = []
        self.job: Job = prepare(self.options, self.lines.append)
        self.out = directory / "samples.jsonl"
        self.calls: Calls = []
        self.fails_at: int | None = None
        self._generate: Callable[..., Any] = evaluation.generate
        monkeypatch.setattr(evaluation, "generate", self.generate)

    def generate(self, *args: Any, **options: Any) -> list[list[int]]:
        if len(self.calls) == self.fails_at:
            raise KeyboardInterrupt
        self.calls.append(len(args[3]))
        made: list[list[int]] = self._generate(*args, **options)
        return made

    def state(self, *, shift: float = 0.0) -> TrainState:
        step = make_train_step(self.job.model, adamw8bit(1e-3), device="cpu")
        return step.init(lambda name: self.job.model_dir.read(name) + shift * (name == "model.norm.weight"))

    def run(self, *, fails_at: int | None = None, **options: Any) -> Score | None:
        self.calls.clear()
        self.fails_at = fails_at
        state = self.state(shift=options.pop("shift", 0.0))
        with GracefulStop(lambda: None) as stop:
            return evaluate(state, self.job, dataclasses.replace(self.options, **options), "now", self.out, stop)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Bench(tmp_path_factory.mktemp("run"), monkeypatch)


@pytest.fixture
def killed(bench: Bench) -> Bench:
    """Return a bench whose evaluation died in its third batch."""
    with pytest.raises(KeyboardInterrupt):
        bench.run(fails_at=2)
    return bench


def test_killed_evaluation_goes_on_and_has_the_same_samples(bench: Bench) -> None:
    whole = bench.run()
    assert bench.calls == [2, 2, 2, 1]
    expected = bench.out.read_bytes()
    bench.out.unlink()
    with pytest.raises(KeyboardInterrupt):
        bench.run(fails_at=2)
    assert not bench.out.exists()
    assert bench.run() == whole
    assert bench.calls == [2, 1]
    assert bench.out.read_bytes() == expected
    assert not list(bench.out.parent.glob("*.texts"))


def test_killed_twice_it_still_goes_on(killed: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        killed.run(fails_at=1)
    assert killed.calls == [2]
    killed.run()
    assert killed.calls == [1]


def test_line_cut_by_the_kill_is_made_again(killed: Bench) -> None:
    path = killed.out.with_name("samples.jsonl.texts")
    path.write_bytes(path.read_bytes()[:-3])
    killed.run()
    assert killed.calls == [2, 2, 1]


@pytest.mark.parametrize("change", [{"shift": 0.5}, {"eval_batch_size": 3}])
def test_texts_of_other_weights_or_settings_are_made_again(killed: Bench, change: dict[str, Any]) -> None:
    killed.run(**change)
    assert sum(killed.calls) == NUM_ROWS


def test_file_of_something_else_is_no_trouble(bench: Bench) -> None:
    path = bench.out.with_name("samples.jsonl.texts")
    for content in (b"", b"[1]\n", b"\xff\xfe", b"null\n7\n"):
        path.write_bytes(content)
        bench.run()
        assert sum(bench.calls) == NUM_ROWS


def test_request_to_stop_ends_a_batch_after_the_running_token_and_keeps_whole_batches(bench: Bench) -> None:
    num_looks_of_third = 0

    class Stop:
        @property
        def requested(self) -> bool:
            nonlocal num_looks_of_third
            num_looks_of_third += len(bench.calls) == 3
            return num_looks_of_third == 2

    bench.calls.clear()
    assert evaluate(bench.state(), bench.job, bench.options, "now", bench.out, Stop()) is None  # type: ignore[arg-type]
    assert (bench.calls, num_looks_of_third) == ([2, 2, 2], 2)
    bench.run()
    assert bench.calls == [2, 1]


def test_lines_tell_tokens_and_speed(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "progress_bar", functools.partial(progress_bar, interval_s=0.0))
    bench.run()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("exact match now")]
    assert lines[0].endswith("0/7 problems, 0 problems/s, ETA ?, token 1 of at most 5")
    assert re.search(r"2/7 problems, .* problems/s, ETA \w+, [\d,]+ tokens/s, token 2 of at most 5$", lines[7])
    assert re.search(r"7/7 problems, .* problems/s, ETA 0s, [\d,]+ tokens/s$", lines[-1])


def test_digest_tells_weights_apart(bench: Bench) -> None:
    assert digest_weights(bench.state()) == digest_weights(bench.state())
    assert digest_weights(bench.state()) != digest_weights(bench.state(shift=1e-3))


def test_subset_is_drawn_by_the_seed_and_told(bench: Bench) -> None:
    assert f"evaluation: {NUM_ROWS} of 240 held-out rows, a sample drawn by --seed 0" in bench.lines
    held_out = [json.loads(line) for line in (bench.options.out / "sample/held_out.jsonl").read_text().splitlines()]
    queries = [row.query for row in bench.job.held_out]
    assert queries != [row["query"] for row in held_out[:NUM_ROWS]]
    places = [[row["query"] for row in held_out].index(query) for query in queries]
    assert places == sorted(places)


def test_texts_file_round_trips_any_text(tmp_path: Path) -> None:
    texts = ["a\nb", "\u2028\x85", "\ud800", ""]
    for first in range(1, 4):
        file = TextsFile(tmp_path / "t", header={"a": 1})
        file.write(texts[:first])
        file.write(texts)
        assert TextsFile(tmp_path / "t", header={"a": 1}).texts == texts
    assert TextsFile(tmp_path / "t", header={"a": 2}).texts == []
