"""The embedded default model: what is on the disk, that transformers loads it, and that its tokenizer loses nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

import lazytrain.recipes.default_model as default_model
from lazytrain.configuration import load_config
from lazytrain.errors import ModelFileError
from lazytrain.recipes.default_model import (
    END_TOKEN,
    FIXED_PHRASES,
    NUM_SHARDS,
    PAD_TOKEN,
    PIECES,
    DefaultRun,
    make_tokenizer,
    write_default_model,
)
from lazytrain.recipes.encoding import encode_rows
from lazytrain.recipes.prompts import get_prompt, load_tokenizer, read_special_tokens
from lazytrain.recipes.rows import Row
from lazytrain.recipes.sample import make_sample
from lazytrain.recipes.story import MAX_NUMBER
from lazytrain.shards import check_params, open_model_dir
from lazytrain.transformer import transformer_model

MAX_PARAMS = 3_000_000
SHARDS = [f"model-{i:05d}-of-{NUM_SHARDS:05d}.safetensors" for i in range(1, NUM_SHARDS + 1)]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(**row) for row in make_sample()[0]]


@pytest.fixture(scope="module")
def held_out() -> list[Row]:
    return [Row(**row) for row in make_sample()[1]]


@pytest.fixture(scope="module")
def model_path(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_default_model(tmp_path_factory.mktemp("default") / "base_model", rows, seed=0)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for shard in SHARDS:
        with safe_open(directory / shard, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def test_model_is_two_fp32_shards_with_an_index(model_path: Path) -> None:
    index = json.loads((model_path / "model.safetensors.index.json").read_text())
    weights = read_weights(model_path)
    assert NUM_SHARDS >= 2
    assert sorted(set(index["weight_map"].values())) == SHARDS
    assert set(index["weight_map"]) == set(weights)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert index["metadata"]["total_size"] == sum(4 * weight.numel() for weight in weights.values())
    assert 200_000 < sum(weight.numel() for weight in weights.values()) < MAX_PARAMS
    assert all(weight.isfinite().all() and weight.std() > 0 for weight in weights.values() if weight.ndim == 2)


def test_our_model_takes_the_directory_without_a_note(model_path: Path) -> None:
    assert not check_params(transformer_model(load_config(model_path)), open_model_dir(model_path))


def test_transformers_loads_model_and_tokenizer(model_path: Path, tokenizer: Tokenizer, held_out: list[Row]) -> None:
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(model_path, output_loading_info=True)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    auto = transformers.AutoTokenizer.from_pretrained(model_path)
    assert (auto.eos_token, auto.pad_token) == (END_TOKEN, PAD_TOKEN)
    assert auto.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    unseen = "Zanzibar déjà vu has 1234 🦜!\n\n\txylophone 5x x5"
    for text in (unseen, *(text for row in held_out for text in (row.query, row.response))):
        tokens = auto(text)["input_ids"]
        assert tokens == tokenizer.encode(text).ids
        assert auto.decode(tokens) == text
    assert model(torch.tensor([tokens])).logits.shape == (1, len(tokens), model.config.vocab_size)


def test_second_call_leaves_the_files_alone(rows: list[Row], tmp_path: Path) -> None:
    first = write_default_model(tmp_path / "model", rows[:123], seed=1)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in first.iterdir()}
    second = write_default_model(tmp_path / "model", rows[:123], seed=1)
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in second.iterdir()} == before


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(rows: list[Row], tmp_path: Path) -> None:
    paths = [write_default_model(tmp_path / str(i), rows[:63], seed=seed) for i, seed in enumerate((5, 5, 6))]
    same, again, _ = ([(path / shard).read_bytes() for shard in SHARDS] for path in paths)
    assert same == again
    weights, _, other = (read_weights(path) for path in paths)
    assert all(not torch.equal(weights[name], other[name]) for name in weights if weights[name].ndim == 2)
    assert len({(path / "tokenizer.json").read_bytes() for path in paths}) == 1


def test_directory_of_another_seed_is_replaced(rows: list[Row], tmp_path: Path) -> None:
    path = write_default_model(tmp_path / "model", rows[:63], seed=5)
    old = (path / SHARDS[0]).read_bytes()
    write_default_model(tmp_path / "model", rows[:63], seed=6)
    assert (path / SHARDS[0]).read_bytes() != old


def test_damaged_directory_is_refused_and_not_overwritten(rows: list[Row], tmp_path: Path) -> None:
    path = write_default_model(tmp_path / "model", rows[:63], seed=5)
    os.truncate(path / SHARDS[1], 100)
    with pytest.raises(ModelFileError, match="Choose another directory"):
        write_default_model(path, rows[:63], seed=5)
    assert (path / SHARDS[1]).stat().st_size == 100


def test_interrupted_write_leaves_nothing(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = default_model._draw_weights

    def stop(*arguments: object) -> object:
        for count, item in enumerate(draw(*arguments)):  # type: ignore[arg-type]
            if count == 7:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(default_model, "_draw_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        write_default_model(tmp_path / "model", rows[:63], seed=5)
    assert not (tmp_path / "model").exists()


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    "text", ["Zanzibar déjà vu  has 1234 🦜 x?\n\n\txylophone 5x x5", "don't $12.50 (3 + x) / 2", "\r\n ", ""]
)
def test_tokenizer_round_trips_unseen_words(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_numbers_and_fixed_phrases_are_one_token(tokenizer: Tokenizer) -> None:
    for number in range(2, MAX_NUMBER + 1):
        assert tokenizer.encode(f" {number}").tokens == [f" {number}"]
        assert len(tokenizer.encode(f"Tom has {number} apples.").ids) == 5
    for phrase in FIXED_PHRASES:
        assert len(tokenizer.encode(phrase).ids) == 1


def test_sample_is_divided_into_words_all_known_from_training(
    tokenizer: Tokenizer, rows: list[Row], held_out: list[Row]
) -> None:
    """No problem fails for its vocabulary, and no token is found inside of a longer word."""
    seen: set[str] = set()
    for row in rows:
        seen.update(PIECES.findall(row.query))
        seen.update(PIECES.findall(row.response))
    for row in held_out + rows[:2000]:
        for text in (row.query, row.response):
            tokens = tokenizer.encode(text).tokens
            assert tokens == PIECES.findall(text)
            assert seen.issuperset(tokens)


def test_small_vocabulary_keeps_the_most_frequent_words() -> None:
    tokenizer = make_tokenizer(["red red red blue blue green"], 260)
    assert tokenizer.get_vocab_size() == 260
    assert [len(tokenizer.encode(text).ids) for text in (" red", " blue", " green")] == [1, 1, 6]


def test_default_run_fits_its_rows(
    model_path: Path, tokenizer: Tokenizer, rows: list[Row], held_out: list[Row]
) -> None:
    run = DefaultRun()
    special = read_special_tokens(model_path, tokenizer)
    encoded = encode_rows(rows + held_out, tokenizer, special, get_prompt("plain"), max_tokens=run.max_tokens)
    assert len(encoded) == len(rows) + len(held_out)
    assert (encoded.lengths - encoded.prompt_lengths).max() <= run.max_new_tokens
    assert run.warmup_steps < run.steps
