"""Steps of the trainer: packed or not, whole or accumulated, in batches of 1 or 8 rows, one course of training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lazytrain.configuration import parse_config
from lazytrain.optimizer import adamw
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.encoding import Encoded, EncodeReport
from lazytrain.recipes.options import parse_options
from lazytrain.recipes.preparation import Job, prepare
from lazytrain.standard_plans import resident_plan
from lazytrain.trainer import make_train_step, read_params
from lazytrain.transformer import random_params, transformer_model

METRIC_TOLERANCE = 3e-6  # relative, of loss and gradient norm over 3 steps in fp32; worst seen 3e-7
WEIGHT_TOLERANCE = 2e-6  # where three steps move a weight by up to 3e-2; worst seen 2e-7
SIZES = [(3, 9), (1, 2), (0, 5), (7, 20), (2, 2), (4, 11), (1, 1), (5, 6)]
CONFIG = parse_config({
    "model_type": "qwen2", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
})  # fmt: skip


def make_encoded() -> Encoded:
    """Return eight samples, one of which has a gap in what is trained."""
    lengths = np.array([prompt + max(response, 2 - prompt) for prompt, response in SIZES])
    tokens = np.random.default_rng(0).integers(0, 67, lengths.sum()).astype(np.int32)
    trained = np.ones(len(tokens), dtype=np.bool_)
    trained[lengths[:3].sum() + 12 : lengths[:3].sum() + 17] = False
    return Encoded(
        tokens=tokens,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array([prompt for prompt, _ in SIZES], dtype=np.int32),
        pad_id=0,
        report=EncodeReport(len(SIZES), len(SIZES), 0, {}, 64, {}, 0, 0),
        trained=trained,
    )


def train(num_microbatches: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Take three steps over all samples; return losses and norms, and the weights."""
    model = transformer_model(CONFIG)
    drawn = dict(random_params(model, 0, torch.float32, std=0.3))
    optimizer = adamw(1e-2, eps=0.1, max_grad_norm=0.5)  # a large eps: AdamW would magnify any other order of sums
    plan = resident_plan(len(model.blocks), num_microbatches=num_microbatches)
    step = make_train_step(model, optimizer, plan, device="cpu")
    state = step.init(lambda name: drawn[name])
    stream = BatchStream(make_encoded(), **options)
    assert stream.steps_per_epoch == 1, "every step has all samples"
    seen = []
    for index in range(3):
        state, metrics = step(state, stream.batch(index))
        assert metrics.num_target_tokens == stream.count_tokens(index).target_tokens == 50
        seen += [metrics.loss, metrics.grad_norm]
    return seen, {name: value.clone() for name, value in read_params(state)}


@pytest.fixture(scope="module")
def whole() -> tuple[list[float], dict[str, Tensor]]:
    """Return the course of a whole batch of 8 padded lines."""
    return train(1, batch_size=8, seq_tokens=32)


@pytest.mark.parametrize(
    ("num_microbatches", "options"),
    [
        (4, {"batch_size": 8, "seq_tokens": 32}),  # 2 rows, accumulated 4 times
        (8, {"batch_size": 8, "seq_tokens": 32}),  # 1 row, accumulated 8 times
        (1, {"batch_size": 8, "group_by_length": False}),
        (1, {"batch_size": 2, "seq_tokens": 40, "packing": True}),
        (2, {"batch_size": 2, "seq_tokens": 40, "packing": True}),
        (4, {"batch_size": 4, "seq_tokens": 40, "packing": True}),  # lines without a sample
        (1, {"batch_size": 1, "seq_tokens": 80, "packing": True}),
    ],
)
def test_packing_and_accumulation_give_the_course_of_the_whole_batch(
    whole: tuple[list[float], dict[str, Tensor]], num_microbatches: int, options: dict[str, Any]
) -> None:
    seen, weights = train(num_microbatches, **options)
    assert seen == pytest.approx(whole[0], rel=METRIC_TOLERANCE)
    for name, expected in whole[1].items():
        assert (weights[name] - expected).abs().max() <= WEIGHT_TOLERANCE, name


def prepare_job(directory: Path, *arguments: str) -> tuple[Job, list[str]]:
    lines: list[str] = []
    return prepare(parse_options(["--out", str(directory), *arguments]), lines.append), lines


def test_accumulated_batches_are_one_batch_that_is_as_large(tmp_path: Path) -> None:
    job, lines = prepare_job(tmp_path, "--batch-size", "8")
    for batch_size, accumulate in ((1, 8), (2, 4)):
        other, other_lines = prepare_job(tmp_path, "--batch-size", str(batch_size), "--accumulate", str(accumulate))
        assert other.settings == job.settings
        assert other_lines == lines
        for step in (0, 5, job.stream.steps_per_epoch + 1):
            ours, expected = other.stream.batch(step), job.stream.batch(step)
            assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_padding_is_told_apart_and_less_with_grouping_or_packing(tmp_path: Path) -> None:
    told = {}
    for flag in ("--no-group-by-length", "--group-by-length", "--packing"):
        job, lines = prepare_job(tmp_path, flag)
        counts = job.stream.epoch_counts
        told[flag] = counts.padding_tokens
        [line] = [line for line in lines if line.startswith("batches: ")]
        assert f"{counts.real_tokens:,} real tokens and {counts.padding_tokens:,} of padding" in line
    assert job.stream.shapes == [(64, 96)], "packed lines are of --max-tokens"
    assert told["--packing"] < told["--group-by-length"] < told["--no-group-by-length"]
