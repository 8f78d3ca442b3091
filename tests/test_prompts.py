"""Prompts: the same tokens in training and evaluation, at most one BOS, exactly one EOS."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lazytrain.errors import ConfigError, ModelFileError
from lazytrain.recipes.prompts import (
    PROMPTS,
    SpecialTokens,
    build_prompt,
    decode_response,
    encode_examples,
    encode_prompts,
    get_prompt,
    load_tokenizer,
    read_special_tokens,
)

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
NAMES = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
QUESTIONS = ["What is 2+2?", f"{BOS}What is 2+2?", f"{BOS}{BOS} What is 2+2?", "{braces} {query}", "", "é ü\n\nend "]


def make_tokenizer(*, template: bool = False, metaspace: bool = False) -> Tokenizer:
    """Return a byte-level (or, as Llama 2's, a space-prepending) tokenizer without merges."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if metaspace:
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([prepend, replace])
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


def write_model_dir(path: Path, tokenizer: Tokenizer, **files: dict) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(path: Path) -> tuple[Tokenizer, SpecialTokens]:
    tokenizer = load_tokenizer(path)
    return tokenizer, read_special_tokens(path, tokenizer)


def special_tokens(*, add_bos: bool = True) -> SpecialTokens:
    return SpecialTokens(bos_id=1, eos_id=2, pad_id=0, stop_ids=(2,), add_bos=add_bos)


def test_metamath_prompt_is_that_of_its_evaluation() -> None:
    assert build_prompt(get_prompt("metamath"), "Q {x}") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nQ {x}\n\n### Response: Let's think step by step."
    )


def test_unknown_prompt_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--prompt alpaca: unknown; known are metamath, plain, chat"):
        get_prompt("alpaca")


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("metaspace", [True, False])
def test_training_and_evaluation_give_the_same_prompt_tokens(prompt, add_bos: bool, metaspace: bool) -> None:  # type: ignore[no-untyped-def]
    tokenizer, special = make_tokenizer(metaspace=metaspace), special_tokens(add_bos=add_bos)
    prompts = encode_prompts(tokenizer, special, prompt, QUESTIONS)
    for response in ("The answer is: 4", f"{BOS} 4", f"4{EOS}", f"4{EOS} {EOS}\n", ""):
        examples = encode_examples(tokenizer, special, prompt, QUESTIONS, [response] * len(QUESTIONS))
        for tokens, example in zip(prompts, examples):
            assert example.tokens[: example.prompt_tokens] == tokens
            assert tokens.count(1) == add_bos
            assert tokens[:1] == [1] or not add_bos
            assert example.tokens.count(1) == add_bos
            assert example.tokens.count(2) == 1
            assert example.tokens[-1] == 2


@given(st.text(), st.text())
@settings(deadline=None)
def test_any_text_keeps_its_prompt_tokens_and_its_response(query: str, response: str) -> None:
    tokenizer, special, prompt = make_tokenizer(), special_tokens(), get_prompt("metamath")
    [example] = encode_examples(tokenizer, special, prompt, [query], [response])
    assert example.tokens[: example.prompt_tokens] == encode_prompts(tokenizer, special, prompt, [query])[0]
    assert decode_response(tokenizer, special, example.tokens[example.prompt_tokens :]) == response.strip()


def test_separator_is_left_out_where_the_tokenizer_puts_a_space() -> None:
    prompt = get_prompt("metamath")
    for metaspace in (False, True):
        tokenizer = make_tokenizer(metaspace=metaspace)
        [example] = encode_examples(tokenizer, special_tokens(), prompt, ["q"], ["4"])
        response = [tokenizer.id_to_token(token) for token in example.tokens[example.prompt_tokens :]]
        assert response == ["▁" if metaspace else "Ġ", "4", EOS]


def test_response_ends_at_any_stop() -> None:
    tokenizer = make_tokenizer()
    special = SpecialTokens(bos_id=1, eos_id=2, pad_id=0, stop_ids=(0, 2), add_bos=True)
    ids = tokenizer.encode(" 4 é", add_special_tokens=False).ids
    assert decode_response(tokenizer, special, [*ids, 0, *ids, 2]) == "4 é"
    assert decode_response(tokenizer, special, [1, *ids]) == "4 é"
    assert decode_response(tokenizer, special, [2, *ids]) == ""


def test_special_tokens_come_from_the_tokenizer_first(tmp_path: Path) -> None:
    by_content = {name: {"content": text, "special": True} for name, text in NAMES.items()}
    for names in (NAMES, by_content):
        generation = {"eos_token_id": [2, 0], "pad_token_id": 7}
        path = write_model_dir(
            tmp_path, make_tokenizer(), tokenizer_config=names, config={"eos_token_id": 9}, generation_config=generation
        )
        special = load(path)[1]
        assert special == SpecialTokens(bos_id=1, eos_id=2, pad_id=0, stop_ids=(0, 2, 9), add_bos=False)


def test_special_tokens_fall_back_to_ids_and_padding_to_eos(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path, make_tokenizer(), config={"bos_token_id": None, "eos_token_id": [2, 0]})
    assert load(path)[1] == SpecialTokens(bos_id=None, eos_id=2, pad_id=2, stop_ids=(0, 2), add_bos=False)


@pytest.mark.parametrize(
    ("flag", "template", "expected"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_bos_is_added_where_the_tokenizer_would(
    tmp_path: Path, flag: bool | None, template: bool, expected: bool
) -> None:
    config = NAMES | ({} if flag is None else {"add_bos_token": flag})
    tokenizer, special = load(write_model_dir(tmp_path, make_tokenizer(template=template), tokenizer_config=config))
    assert special.add_bos is expected
    [tokens] = encode_prompts(tokenizer, special, get_prompt("plain"), [f"{BOS}q"])
    assert tokens.count(1) == expected


def test_no_end_of_sequence_token_is_an_error(tmp_path: Path) -> None:
    config = {"eos_token_id": 99_999}
    path = write_model_dir(tmp_path, make_tokenizer(), tokenizer_config={"eos_token": "<gone>"}, config=config)
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*tokenizer_config\.json.*add one"):
        load(path)


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer, special = load(write_model_dir(tmp_path, tokenizer, tokenizer_config=NAMES))
    [tokens] = encode_prompts(tokenizer, special, get_prompt("plain"), ["12345678"])
    assert len(tokens) == 9


@pytest.mark.parametrize("content", [None, "", '{"version": "1.0", "mod', "<html>"])
def test_missing_or_cut_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: (missing|not a tokenizer)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_cut_config_is_named(tmp_path: Path, content: str) -> None:
    write_model_dir(tmp_path, make_tokenizer())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"generation_config\.json: "):
        load(tmp_path)


@pytest.mark.data
def test_real_models_name_their_special_tokens(shared_dir: Path) -> None:
    _, qwen = load(shared_dir / "data/tokenizers/Qwen2.5")
    assert qwen == SpecialTokens(bos_id=None, eos_id=151645, pad_id=151643, stop_ids=(151645,), add_bos=False)
    _, stories = load(shared_dir / "data/models/stories260K")
    assert stories == SpecialTokens(bos_id=1, eos_id=2, pad_id=2, stop_ids=(1, 2), add_bos=True)


@pytest.mark.data
def test_real_tokenizers_give_back_the_response(shared_dir: Path) -> None:
    for name in ("tokenizers/Qwen2.5", "models/stories260K"):
        tokenizer, special = load(shared_dir / "data" / name)
        response = "Natalia sold 48/2 = 24 clips.\nThe answer is: 72"
        [example] = encode_examples(tokenizer, special, get_prompt("metamath"), ["How many clips?"], [response])
        assert decode_response(tokenizer, special, example.tokens[example.prompt_tokens :]) == response
        assert example.tokens.count(special.eos_id) == 1
