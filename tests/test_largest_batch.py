"""The recipe that runs the largest batch: the search, how it ends at the edge, and what it says of failures."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lazytrain.errors import MemoryBudgetError
from lazytrain.optimizer import adamw8bit
from lazytrain.recipes.largest_batch import RAN, Attempt, Runner, find_edge, main
from lazytrain.recipes.random_model import load_shape
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.growth import add_chunks, grow_chunk
from lazytrain.solver.hardware import PRESETS
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.standard_plans import streaming_plan
from lazytrain.trainer import TrainStep, make_train_step
from lazytrain.transformer import transformer_model

CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False},
}
SEQ = 16
PAGE = "out of device memory"


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path / "shape"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [(), ("--microbatch", "8")])
def test_the_largest_batch_runs_and_the_planner_refuses_the_next_one(
    chunk: tuple[str, ...], shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    limits = ("--gpu-memory", "4MiB", "--host-memory", "12MiB")
    flags = ("--device", "cpu", "--seq", str(SEQ), "--floor", "0.01", "--plan-seconds", "1", "--out", str(out))
    assert main(["--model", str(shape), *flags, *limits, *chunk]) == 0, capsys.readouterr().err
    report = json.loads((out / "largest_batch.json").read_text(encoding="utf-8"))
    largest = report["largest"]
    assert 1 <= largest["batch"] <= largest["bound"]
    assert max(largest["strategies"].values()) <= largest["batch"]
    assert "nothing fits" in report["refusal"]
    # Nothing limits the allocator of a CPU: the next batch runs, and the report says so.
    assert [a["batch"] for a in report["attempts"]] == [largest["batch"], largest["batch"] + 1]
    assert [a["outcome"] for a in report["attempts"]] == [RAN, RAN]
    plan = Plan.load(out / "plan.json")
    assert plan.num_microbatches == (largest["batch"] if chunk else 1)
    if chunk:
        return
    # The problem that was written gives the same answer without a profile.
    problem = ("--problem", str(out / "problem.json"), "--steps", "1")
    assert main(["--model", str(shape), *flags, *limits, *chunk, *problem]) == 0
    again = json.loads((out / "largest_batch.json").read_text(encoding="utf-8"))
    assert again["largest"] == largest


def test_a_problem_of_other_rows_is_refused(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = problem_from_config(CONFIG, PRESETS["cpu"], batch=3, seq=SEQ, microbatch=3)
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_dict()), encoding="utf-8")
    flags = ("--device", "cpu", "--seq", str(SEQ), "--out", str(tmp_path / "out"))
    assert main(["--model", str(shape), *flags, "--problem", str(tmp_path / "problem.json")]) == 2
    assert "is of 48 tokens; needed are 8 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--microbatch", "0"), "--microbatch is 0; it must lie between 1"),
        (("--microbatch", "-1"), "--microbatch is -1; it must lie between 1"),
        (("--seq", "0"), "--seq is 0; it must lie between 1"),
        (("--steps", "0"), "--steps is 0; it must lie between 1"),
        (("--problem", "broken.json"), "broken.json can't be read as a problem: "),
        (("--problem", "none.json"), "none.json can't be read as a problem: "),
        (("--problem", "empty.json"), "empty.json: problem lacks the field "),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: tuple[str, ...],
    text: str,
    shape: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{bad", encoding="utf-8")
    Path("empty.json").write_text("{}", encoding="utf-8")
    assert main(["--model", str(shape), "--device", "cpu", "--out", "out", *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {text}")
    assert told.count("\n") == 1


def make_attempt(limit_bytes: int, *, base: int = 100, row: int = 10) -> Callable[[int, int], Attempt]:
    def attempt(batch: int, num_steps: int) -> Attempt:
        peak = base + row * batch
        return Attempt(batch, RAN if peak <= limit_bytes else PAGE, 1.0, min(peak, limit_bytes))

    return attempt


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [
        (1100, [(100, RAN), (101, PAGE)]),
        (1135, [(100, RAN), (101, RAN), (104, PAGE)]),  # room for 103
        (1099, [(100, PAGE), (96, RAN)]),
        (700, [(100, PAGE), (96, PAGE), (93, PAGE), (90, PAGE)]),
    ],
)
def test_the_edge_is_looked_for_past_the_plan_or_below(limit_bytes: int, expected: list[tuple[int, str]]) -> None:
    found = find_edge(make_attempt(limit_bytes), 100, num_steps=2, limit_bytes=limit_bytes)
    assert [(a.batch, a.outcome) for a in found] == expected


def test_without_a_limit_one_more_is_all_that_is_tried() -> None:
    found = find_edge(make_attempt(10**9), 5, num_steps=2, limit_bytes=None)
    assert [a.batch for a in found] == [5, 6]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "out of device memory: CUDA out"),
        (MemoryBudgetError("No 3 GiB of host memory"), "out of host memory: No 3 GiB"),
    ],
)
def test_a_step_out_of_memory_is_an_outcome_and_the_next_attempt_starts_anew(
    error: Exception, outcome: str, shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_shape(str(shape))
    model = transformer_model(config)

    def make_step(plan: Plan) -> TrainStep:
        return make_train_step(model, adamw8bit(1e-3), plan, device="cpu", dtype=torch.bfloat16)

    runner = Runner(make_step, streaming_plan(4), config, rows=2, seq=SEQ)
    assert runner.attempt(1, 1).outcome == RAN
    with monkeypatch.context() as broken:
        broken.setattr(TrainStep, "__call__", lambda self, state, batch: (_ for _ in ()).throw(error))
        failed = runner.attempt(2, 1)
    assert failed.outcome.startswith(outcome)
    assert "more" not in failed.outcome
    again = runner.attempt(3, 2)
    runner.close()
    assert again.outcome == RAN
    assert again.step_ms is not None


def test_costs_of_more_rows_and_of_more_chunks_are_those_of_the_larger_batch() -> None:
    def make(batch: int, rows: int) -> Problem:
        return problem_from_config(KNOWN_MODELS["qwen2.5-3b"], PRESETS["h200"], batch=batch, seq=1024, microbatch=rows)

    small, large, chunks = make(8, 8), make(48, 48), make(48, 8)
    grown, cut = grow_chunk(small, 6.0), add_chunks(small, 6)
    for block, expected in zip(grown.blocks, large.blocks, strict=True):
        assert block.boundary_bytes == expected.boundary_bytes
        for ours, theirs in zip(block.points, expected.points, strict=True):
            assert ours.residual_bytes == pytest.approx(theirs.residual_bytes, rel=1e-6)
            assert ours.workspace_bytes == pytest.approx(theirs.workspace_bytes, rel=1e-6)
    assert grown.tokens_per_step == large.tokens_per_step
    quiet = tuple(replace(point, quiet_forward_ms=point.forward_ms / 2) for point in small.blocks[0].points)
    slowed = replace(small, blocks=(replace(small.blocks[0], points=quiet), *small.blocks[1:]))
    for point in grow_chunk(slowed, 6.0).blocks[0].points:
        assert point.quiet_forward_ms == pytest.approx(point.forward_ms / 2)
    assert cut == replace(chunks, train_flops=cut.train_flops)
    assert cut.train_flops == pytest.approx(chunks.train_flops)
