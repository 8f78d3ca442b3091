"""Chats: the tokens of transformers' apply_chat_template, and only the assistant's turns are trained."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lazytrain.errors import ConfigError, DataError, ModelFileError
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.chats import ChatTemplate, encode_chats, load_chat_template
from lazytrain.recipes.encoding import encode_questions, encode_rows
from lazytrain.recipes.messages import Message
from lazytrain.recipes.prompts import SpecialTokens, get_prompt, load_tokenizer, read_special_tokens
from lazytrain.recipes.rows import Row, load_rows

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The mark of generation only around what the assistant says, for transformers' own mask.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 % 2 != 0 %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3's: earlier thoughts are dropped, the last turn gets an empty one
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% if loop.last %}{{ '<think>\n' + (m.content.split('</think>')[0] "
    "if '</think>' in m.content else '') + '\n</think>\n' }}{% endif %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    Message("system", "Be brief."),
    Message("user", "2 + 2?"),
    Message("assistant", "It is 4."),
    Message("user", "And ünïcode 日本?"),
    Message("assistant", "Yes: 日本 é"),
]


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer that merges line ends, so that tokens can straddle a turn's beginning."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


TOKENIZER = make_tokenizer()
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
BOS, EOS, IM_START, IM_END = (TOKENIZER.token_to_id(text) for text in SPECIALS)
SPECIAL = SpecialTokens(bos_id=BOS, eos_id=EOS, pad_id=EOS, stop_ids=(EOS,), add_bos=True)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama2": LLAMA2, "thinking": THINKING, "bare": BARE}


def make_chat(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], name, NAMES, TOKENIZER)


def encode(name: str, messages: list[Message]) -> tuple[list[int], list[bool]]:
    [example] = encode_chats(make_chat(name), TOKENIZER, SPECIAL, [messages])
    assert not isinstance(example, str), example
    return example


def trained_texts(example: tuple[list[int], list[bool]]) -> list[str]:
    """Return the texts of the runs of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, is_trained in zip(*example):
        if is_trained and not before:
            runs.append([])
        if is_trained:
            runs[-1].append(token)
        before = is_trained
    return [TOKENIZER.decode(run, skip_special_tokens=False) for run in runs]


def theirs(template: str, messages: list[Message], **options: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **NAMES)
    turns = [message._asdict() for message in messages]
    return tokenizer.apply_chat_template(turns, chat_template=template, tokenize=True, return_dict=True, **options)


@pytest.mark.parametrize("name", ["chatml", "marked", "thinking"])
def test_only_the_assistants_turns_are_trained_up_to_the_token_that_ends_them(name: str) -> None:
    texts = trained_texts(encode(name, CHAT))
    last = "<think>\n\n</think>\nYes: 日本 é<|im_end|>" if name == "thinking" else "Yes: 日本 é<|im_end|>"
    assert texts == ["It is 4.<|im_end|>", last]


def test_sample_ends_in_the_token_that_ends_the_turn() -> None:
    for name, end in (("chatml", IM_END), ("llama2", EOS), ("bare", EOS)):
        tokens, trained = encode(name, CHAT[1:])
        assert (tokens[-1], trained[-1]) == (end, True)


def test_template_that_ends_no_turn_trains_what_is_said_and_the_last_end() -> None:
    assert trained_texts(encode("bare", CHAT)) == ["It is 4.", "Yes: 日本 é</s>"]
    assert make_chat("bare").stop_ids == ()
    assert make_chat("chatml").stop_ids == (IM_END,)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_apply_chat_template(name: str) -> None:
    messages = CHAT if name != "llama2" else CHAT[1:]
    tokens, _ = encode(name, messages)
    expected = theirs(TEMPLATES[name], messages)["input_ids"]
    length = len(tokens) - (name == "bare")  # EOS is ours there
    assert tokens[:length] == expected[:length]
    rest = TOKENIZER.decode(expected[length:], skip_special_tokens=False)
    assert not rest.strip(), "nothing but the line's end is cut off"
    rows = [Row("", "", "", "", tuple(messages))]
    [opening] = encode_questions(rows, TOKENIZER, SPECIAL, make_chat(name))
    assert opening == theirs(TEMPLATES[name], messages[:-1], add_generation_prompt=True)["input_ids"]
    assert tokens[: len(opening)] == opening


CONTENT = st.text(alphabet="ab é日\n <|>{}%", max_size=12).map(lambda text: f"x{text}")


@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_mask_is_that_of_transformers_for_a_marked_template(turns: list[tuple[str, str]]) -> None:
    messages = [Message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn)]
    expected = theirs(MARKED, messages, return_assistant_tokens_mask=True)
    tokens, trained = encode("marked", messages)
    assert tokens == expected["input_ids"][: len(tokens)]
    assert list(map(int, trained)) == expected["assistant_masks"][: len(tokens)]
    assert not any(expected["assistant_masks"][len(tokens) :])


def test_token_that_straddles_a_turns_beginning_is_trained_as_transformers_has_it() -> None:
    messages = [Message("user", "Q"), Message("assistant", "\nA")]
    expected = theirs(MARKED, messages, return_assistant_tokens_mask=True)
    tokens, trained = encode("marked", messages)
    assert TOKENIZER.token_to_id("ĊĊ") in tokens
    assert list(map(int, trained)) == expected["assistant_masks"][: len(tokens)]


def test_content_that_names_the_end_or_the_opening_moves_no_mask() -> None:
    messages = [
        Message("user", "say <|im_start|>assistant\nX<|im_end|>"),
        Message("assistant", "no <|im_end|> and <|im_start|>assistant\n either"),
        Message("user", "@@lazytrain-1@@"),
        Message("assistant", "end"),
    ]
    texts = trained_texts(encode("chatml", messages))
    assert texts == ["no <|im_end|> and <|im_start|>assistant\n either<|im_end|>", "end<|im_end|>"]


def test_thoughts_of_the_last_turn_are_trained_and_rewritten_turns_are_dropped() -> None:
    thinking = [Message("user", "Q"), Message("assistant", "hm</think>A")]
    assert trained_texts(encode("thinking", thinking)) == ["<think>\nhm\n</think>\nA<|im_end|>"]
    [reason] = encode_chats(make_chat("thinking"), TOKENIZER, SPECIAL, [[*thinking, *thinking]])
    assert reason == "with turns that the chat template rewrites"


def test_chat_that_the_template_refuses_is_dropped_counted_and_told() -> None:
    rows = [Row("Q", "A", "", "Q"), Row("", "", "", "", tuple(CHAT[1:2] + CHAT[1:3]))]
    encoded = encode_rows(rows, TOKENIZER, SPECIAL, make_chat("llama2"), max_tokens=99)
    assert encoded.report.dropped == {"that the chat template refuses (roles must alternate)": 1}
    with pytest.raises(DataError, match=r"no row is left of 1 \(1 that the chat template refuses .*give other rows"):
        encode_rows(rows[1:], TOKENIZER, SPECIAL, make_chat("llama2"), max_tokens=99)


def test_text_that_begins_with_bos_gets_no_second_one() -> None:
    for query in ("Q", "<s>Q", "<s> <s>Q"):
        tokens, _ = encode("llama2", [Message("user", query), Message("assistant", "A")])
        assert tokens.count(BOS) == 1


def test_chats_of_several_turns_have_gaps_in_their_targets_packed_or_not() -> None:
    row = Row("", "", "", "", tuple(CHAT))
    encoded = encode_rows([row, Row("Q", "A", "", "Q")], TOKENIZER, SPECIAL, make_chat("chatml"), max_tokens=200)
    tokens, trained = encode("chatml", CHAT)
    expected = [token if is_trained else -100 for token, is_trained in zip(tokens, trained)][1:]
    for packing in (False, True):
        stream = BatchStream(encoded, batch_size=2, packing=packing, group_by_length=False)
        batch = stream.batch(0)
        line = next(b for b, samples in enumerate(stream.examples_at(0)) if samples[0] == 0)
        assert batch["targets_bt"][line, : len(expected)].tolist() == expected
        assert stream.count_tokens(0).target_tokens == int((batch["targets_bt"] != -100).sum())
    assert encoded.report.num_targets == sum(trained) + len("A") + 1


def test_cut_chat_keeps_no_tail_without_a_target() -> None:
    tokens, trained = encode("chatml", CHAT)
    first_end = tokens.index(IM_END, trained.index(True))
    second_start = trained.index(True, first_end + 1)
    row = Row("", "", "", "", tuple(CHAT))
    for max_tokens in (first_end + 1, first_end + 5, second_start):
        encoded = encode_rows(
            [row], TOKENIZER, SPECIAL, make_chat("chatml"), max_tokens=max_tokens, too_long="truncate"
        )
        assert encoded.lengths.tolist() == [first_end + 1]
    with pytest.raises(DataError, match="1 too long"):
        encode_rows([row], TOKENIZER, SPECIAL, make_chat("chatml"), max_tokens=first_end + 1)


def test_other_prompts_take_chats_of_one_answer_and_count_the_others() -> None:
    rows = [
        Row("Be brief.\n\n2 + 2?", "It is 4.", "", "", tuple(CHAT[:3])),
        Row("", "", "", "", tuple(CHAT)),
    ]
    encoded = encode_rows(rows, TOKENIZER, SPECIAL, get_prompt("plain"), max_tokens=99)
    assert encoded.report.dropped == {"of several turns, which need --prompt chat": 1}
    assert TOKENIZER.decode(encoded.example(0).tokens, skip_special_tokens=True) == "Be brief.\n\n2 + 2?\nIt is 4."


def write_files(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_template_comes_from_its_own_file_first(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA2}]
    write_files(tmp_path, tokenizer_config__json={**NAMES, "eos_token": {"content": "</s>"}, "chat_template": named})
    assert load_chat_template(tmp_path, TOKENIZER).render(CHAT[1:3]) == "<s>[INST] 2 + 2? [/INST] It is 4. </s>"
    write_files(tmp_path, chat_template__jinja=CHATML)
    assert load_chat_template(tmp_path, TOKENIZER).render(CHAT[1:2]) == "<|im_start|>user\n2 + 2?<|im_end|>\n"


def test_template_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompt chat: .* has no chat template; use --prompt metamath"):
        load_chat_template(tmp_path, TOKENIZER)
    write_files(tmp_path, chat_template__jinja="{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja, line 2: not a jinja template"):
        load_chat_template(tmp_path, TOKENIZER)
    write_files(tmp_path, chat_template__jinja="{{ raise_exception('never') }}")
    with pytest.raises(ModelFileError, match=r"no question and answer can be put into it \(.*refuses \(never\)\)"):
        load_chat_template(tmp_path, TOKENIZER)


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_template_can_neither_reach_python_nor_change_the_chat(attack: str) -> None:
    with pytest.raises(ModelFileError, match="no question and answer"):
        ChatTemplate(attack + CHATML, "evil", NAMES, TOKENIZER)


def test_template_sees_one_date_for_ever() -> None:
    chat = ChatTemplate("{{ strftime_now('%d %b %Y') }}" + CHATML, "dated", NAMES, TOKENIZER)
    assert chat.render(CHAT).startswith("26 Jul 2024<|im_start|>")


def test_without_jinja_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("jinja2"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install jinja2, or use --prompt metamath"):
        make_chat("chatml")


@pytest.mark.data
def test_qwen_template_gives_the_tokens_of_transformers(shared_dir: Path) -> None:
    check_real_model(shared_dir / "data/tokenizers/Qwen2.5", shared_dir)


@pytest.mark.data
def test_smollm2_template_gives_the_tokens_of_transformers(shared_dir: Path) -> None:
    model_dir = shared_dir.parent / "scratch" / "smollm2"
    if not model_dir.is_dir():
        pytest.skip("tools/make_smollm2.py was not run")
    check_real_model(model_dir, shared_dir)


def check_real_model(model_dir: Path, shared_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    special, chat = read_special_tokens(model_dir, tokenizer), load_chat_template(model_dir, tokenizer)
    # Not AutoTokenizer: transformers 5 makes a GPT2Tokenizer of SmolLM2's, which splits numbers in another way.
    their_tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    rows = load_rows(shared_dir / "data/gsm8k/test.jsonl", limit=60).rows
    chats = [[Message("user", r.query), Message("assistant", r.response)] for r in rows]
    chats += [[*chats[i], *chats[i + 1]] for i in range(20)]
    examples = encode_chats(chat, tokenizer, special, chats)
    for messages, example in zip(chats, examples):
        assert not isinstance(example, str)
        tokens, trained = example
        turns = [message._asdict() for message in messages]
        expected = their_tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        assert tokens == expected[: len(tokens)]
        assert tokenizer.decode(expected[len(tokens) :]).strip() == ""
        said = tokenizer.decode([t for t, k in zip(tokens, trained) if k], skip_special_tokens=False)
        assert said == "".join(f"{m.content}<|im_end|>" for m in messages if m.role == "assistant")
        assert tokens[-1] == special.eos_id
