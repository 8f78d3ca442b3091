"""Encoding rows: what has no target or is too long is dropped, counted and reported."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lazytrain.errors import DataError
from lazytrain.recipes.answers import extract_answer
from lazytrain.recipes.encoding import encode_rows
from lazytrain.recipes.prompts import (
    Prompt,
    SpecialTokens,
    decode_response,
    encode_prompts,
    get_prompt,
    load_tokenizer,
    read_special_tokens,
)
from lazytrain.recipes.rows import Row, load_rows

EOS = 1
BARE = Prompt(name="bare", template="{query}", separator="")
SPECIAL = SpecialTokens(bos_id=None, eos_id=EOS, pad_id=EOS, stop_ids=(EOS,), add_bos=False)  # C31: pad is EOS


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of words: "a" "b" ... separated by spaces, one token each."""
    words = ["<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def make_rows(*sizes: tuple[int, int]) -> list[Row]:
    """Return rows of so many prompt tokens and response tokens."""
    return [Row("p " * prompt, "r " * response, "unknown", "") for prompt, response in sizes]


def encode(rows: list[Row], **options):  # type: ignore[no-untyped-def]
    return encode_rows(rows, make_tokenizer(), SPECIAL, BARE, **options)


def test_samples_are_prompt_response_and_one_end() -> None:
    encoded = encode([Row("a b", "c d e", "", ""), Row("f", "g", "", "")], max_tokens=100)
    assert [encoded.example(i) for i in range(len(encoded))] == [([2, 3, 4, 5, 6, EOS], 2), ([7, 8, EOS], 1)]
    assert encoded.lengths.tolist() == [6, 3]
    assert encoded.report[:3] == (2, 2, 0)
    assert (encoded.report.num_tokens, encoded.report.num_targets) == (9, 6)


def test_prompt_that_fills_the_length_is_dropped_counted_and_reported() -> None:
    encoded = encode(make_rows((8, 2), (9, 1), (7, 0), (7, 1), (3, 4)), max_tokens=8, too_long="truncate")
    assert encoded.lengths.tolist() == [8, 8, 8]
    assert encoded.report.dropped == {"with a prompt that fills the whole length": 2}
    assert encoded.report.num_truncated == 1  # (7, 1): one token of the response is left of two
    assert encoded.report.num_targets == 1 + 1 + 5
    assert encoded.report.describe().startswith(
        "dropped 2 of 5 rows (2 with a prompt that fills the whole length; the limit is 8 tokens); "
        "cut 1 rows at 8 tokens; 3 rows, 24 tokens, 7 targets; lengths before that up to 50%: 9, 90%: 11,"
    )


def test_long_row_is_dropped_or_cut() -> None:
    rows = make_rows((2, 4), (2, 5), (2, 6))
    dropped = encode(rows, max_tokens=7)
    assert dropped.lengths.tolist() == [7]
    assert dropped.report.dropped == {"too long": 2}
    assert dropped.report.length_percentiles == {50: 8, 90: 9, 99: 9, 100: 9}, "of all rows, to choose a limit by"
    cut = encode(rows, max_tokens=7, too_long="truncate")
    assert cut.lengths.tolist() == [7, 7, 7]
    assert cut.report.dropped == {}
    ends = [cut.example(i).tokens[-1] for i in range(3)]
    assert [token == EOS for token in ends] == [True, False, False]  # only what is whole ends in EOS


def test_row_without_prompt_and_response_has_no_target() -> None:
    encoded = encode(make_rows((0, 0), (0, 1)), max_tokens=8)
    assert encoded.lengths.tolist() == [2]
    assert encoded.report.num_targets == 1


@pytest.mark.parametrize(
    ("rows", "text"), [(make_rows((8, 2)) * 3, "3 with a prompt that fills"), ([], "no rows given")]
)
def test_nothing_left_is_an_error(rows: list[Row], text: str) -> None:
    with pytest.raises(DataError, match=rf"no row is left of {len(rows)} \({text}.*raise --max-tokens"):
        encode(rows, max_tokens=8)


def test_token_without_a_row_in_the_embedding_is_an_error() -> None:
    rows = [Row("a", "z", "", "")]
    assert len(encode(rows, max_tokens=8, vocab_size=28)) == 1
    with pytest.raises(DataError, match=r"token 27 \('z'\), but the model's embedding has 27 rows"):
        encode(rows, max_tokens=8, vocab_size=27)


def test_many_rows_keep_their_order() -> None:
    rows = make_rows(*((1 + i % 5, 1 + i % 7) for i in range(2500)))
    encoded = encode(rows, max_tokens=100)
    assert encoded.lengths.tolist() == [3 + i % 5 + i % 7 for i in range(2500)]
    assert encoded.offsets[-1] == len(encoded.tokens) == encoded.report.num_tokens
    assert encoded.report.length_percentiles == {
        q: int(np.percentile(encoded.lengths, q, method="higher")) for q in (50, 90, 99, 100)
    }


@pytest.mark.data
def test_all_gsm8k_rows_encode_with_qwen(shared_dir: Path) -> None:
    model_dir = shared_dir / "data/tokenizers/Qwen2.5"
    tokenizer, prompt = load_tokenizer(model_dir), get_prompt("metamath")
    special = read_special_tokens(model_dir, tokenizer)
    rows = load_rows(shared_dir / "data/metamath_format/gsm8k_train.metamath.jsonl").rows
    encoded = encode_rows(rows, tokenizer, special, prompt, max_tokens=512, vocab_size=151936)
    assert len(encoded) == 7473
    assert encoded.report.dropped == {}
    assert (np.diff(encoded.offsets) - encoded.prompt_lengths).min() > 5
    for index in range(0, 7473, 500):
        tokens, prompt_tokens = encoded.example(index)
        assert tokens[:prompt_tokens] == encode_prompts(tokenizer, special, prompt, [rows[index].query])[0]
        text = decode_response(tokenizer, special, tokens[prompt_tokens:])
        assert text == rows[index].response
        assert extract_answer(text) is not None
    short = encode_rows(rows[:500], tokenizer, special, prompt, max_tokens=100)
    assert sum(short.report.dropped.values()) + len(short) == 500
    assert short.report.describe().startswith("dropped ")
