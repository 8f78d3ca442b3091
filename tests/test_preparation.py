"""A run's input: chats by the model's own template, a vocabulary larger than the tokenizer's, clear refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lazytrain.errors import ConfigError, DataError
from lazytrain.optimizer import adamw8bit
from lazytrain.recipes.default_model import END_TOKEN
from lazytrain.recipes.encoding import encode_questions
from lazytrain.recipes.metamathqa import choose_device
from lazytrain.recipes.options import parse_options
from lazytrain.recipes.preparation import Job, prepare
from lazytrain.saving import export_state
from lazytrain.trainer import make_train_step

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 + 3 = 5.\nThe answer is: 5"},
    {"role": "user", "content": "And 5 + 1?"},
    {"role": "assistant", "content": "5 + 1 = 6.\nThe answer is: 6"},
]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return the embedded job; its model directory gets a chat template."""
    out = tmp_path_factory.mktemp("embedded")
    job = prepare(parse_options(["--out", str(out)]), lambda line: None)
    (out / "base_model" / "chat_template.jinja").write_text(TEMPLATE)
    return job


def write_chats(path: Path, count: int) -> Path:
    chats = [[dict(turn, content=f"{turn['content']} {i}") for turn in CHAT] for i in range(count)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def prepare_chats(model_dir: Path, directory: Path, *arguments: str) -> tuple[Job, list[str]]:
    data = str(write_chats(directory / "chats.jsonl", 20))
    options = parse_options(["--model", str(model_dir), "--data", data, "--out", str(directory / "run"), *arguments])
    lines: list[str] = []
    return prepare(options, lines.append), lines


@pytest.mark.parametrize("packing", [False, True])
def test_chats_are_trained_and_evaluated_by_the_models_template(embedded: Job, tmp_path: Path, packing: bool) -> None:
    model_dir = embedded.model_dir.path
    flags = ("--prompt", "chat", "--batch-size", "4", *(["--packing"] if packing else []))
    job, lines = prepare_chats(model_dir, tmp_path, *flags)
    end = job.tokenizer.token_to_id(END_TOKEN)
    assert end in job.special.stop_ids
    batch = job.stream.batch(0)
    for line, samples in enumerate(job.stream.examples_at(0)):
        targets = batch["targets_bt"][line]
        assert (targets == end).sum() == 2 * len(samples), "both of a chat's answers end, and the end is trained"
        said = job.tokenizer.decode(targets[targets != -100].tolist(), skip_special_tokens=True)
        assert "What" not in said
        assert said.count("The answer is") == 2 * len(samples)
    row = job.held_out[0]
    [opening] = encode_questions([row], job.tokenizer, job.special, job.prompt)
    assert job.tokenizer.decode(opening).rstrip().endswith("assistant:")
    assert row.response.startswith("5 + 1 = 6.")
    assert any(line.startswith("data: 19 rows") for line in lines)


def test_chats_of_several_answers_are_counted_by_other_prompts(embedded: Job, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row is left of 19 \(19 of several turns, which need --prompt chat"):
        prepare_chats(embedded.model_dir.path, tmp_path)


def test_rows_without_a_target_or_too_long_are_told(embedded: Job, tmp_path: Path) -> None:
    _, lines = prepare_chats(embedded.model_dir.path, tmp_path, "--prompt", "chat", "--max-tokens", "40",
                             "--too-long", "truncate")  # fmt: skip
    assert any("cut 19 rows at 40 tokens" in line for line in lines)
    with pytest.raises(DataError, match=r"19 too long.*raise --max-tokens"):
        prepare_chats(embedded.model_dir.path, tmp_path, "--prompt", "chat", "--max-tokens", "40")


def test_eval_limit_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--eval-limit -1: below 0\. Give 0 for none"):
        prepare(replace(parse_options(["--out", str(tmp_path)]), eval_limit=-1), lambda line: None)


def test_vocabulary_larger_than_the_tokenizers_keeps_its_rows_when_saved(embedded: Job, tmp_path: Path) -> None:
    num_rows = embedded.config.vocab_size
    assert num_rows > embedded.tokenizer.get_vocab_size()
    step = make_train_step(embedded.model, adamw8bit(1e-3), device="cpu")
    state = step.init(embedded.model_dir.read)
    export_state(state, embedded.model_dir, tmp_path / "model")
    saved = {k: v for path in (tmp_path / "model").glob("*.safetensors") for k, v in load_file(path).items()}
    assert saved["model.embed_tokens.weight"].shape[0] == num_rows
    assert torch.equal(saved["model.embed_tokens.weight"], embedded.model_dir.read("model.embed_tokens.weight"))


@pytest.mark.parametrize(
    ("capability", "given", "dtype", "told"),
    [
        ((9, 0), None, torch.bfloat16, False),
        ((8, 0), None, torch.bfloat16, False),
        ((7, 5), None, torch.float32, True),
        ((7, 5), "bfloat16", torch.bfloat16, False),
        ((9, 0), "float32", torch.float32, False),
    ],
)
def test_bfloat16_is_the_default_where_the_gpu_has_it(
    capability: tuple[int, int], given: str | None, dtype: torch.dtype, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    flags = [] if given is None else ["--dtype", given]
    options = parse_options(["--model", "m", "--data", "d", *flags])
    lines: list[str] = []
    assert choose_device(options, lines.append) == (torch.device("cuda"), dtype)
    assert [line for line in lines if "capability 7.5 has no bfloat16" in line] == lines
    assert bool(lines) == told


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: torch finds no GPU"):
        choose_device(parse_options(["--device", "cuda"]), print)
