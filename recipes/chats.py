"""The model's own chat template: chats as text, and which of their tokens are trained.

    text       <|im_start|>user\\n Q <|im_end|>\\n <|im_start|>assistant\\n A <|im_end|> \\n ...
    trained                                                             ^ ^^^^^^^^^^     in every turn of the assistant

The whole text is encoded at once, as transformers does it, so that its tokens are those of `apply_chat_template`. A
turn of the assistant is trained from where generation would begin (behind what the template adds for
`add_generation_prompt`) up to the token that ends the turn. Nothing stands behind the last such token in a sample.

A template is a program out of a model's directory: it runs in jinja2's immutable sandbox. It is told one date for
ever, so that a row has the same tokens on every day.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from lazytrain.errors import ConfigError, ModelFileError
from lazytrain.recipes.messages import Message
from lazytrain.recipes.prompts import SpecialTokens, read_json, strip_prefix

TEMPLATE_DATE = date(2024, 7, 26)  # that which Llama's templates fall back to
_REMEDY = "use --prompt metamath or plain, or put a chat_template.jinja into the model's directory"
_PROBE = (Message("user", "Q"),)
Span = tuple[int, int]


class ChatExample(NamedTuple):
    """One encoded chat, and which of its tokens are trained; the last one is."""

    tokens: list[int]
    trained: list[bool]


class _Refused(Exception):
    """What is wrong with one chat: a reason to count it under."""


class ChatTemplate:
    """A compiled template and the texts that it puts around turns.

    Args:
        source: jinja.
        origin: where it comes from, for errors.
        names: bos_token, eos_token and the like, as the template may use them.
        tokenizer: its added tokens are what can end a turn.

    Raises:
        ConfigError: jinja2 is not installed.
        ModelFileError: the template is no jinja, or can't put a question and an answer into text.
    """

    def __init__(self, source: str, origin: str, names: dict[str, str], tokenizer: Tokenizer) -> None:
        self.name, self.origin, self._names, self._tokenizer = "chat", origin, names, tokenizer
        self._template = _compile(source, origin)
        added = sorted((token.content for token in tokenizer.get_added_tokens_decoder().values()), key=len)
        self._end = re.compile(rf"\s*({'|'.join(map(re.escape, reversed(added))) or '(?!)'})")
        try:
            self._header = self._find_header()
            text, [(_, end)] = self.locate([*_PROBE, Message("assistant", "A")])
        except _Refused as error:
            raise ModelFileError(f"{origin}: no question and answer can be put into it ({error}); {_REMEDY}") from error
        ends = [found[1] for found in self._end.finditer(text) if found.end() == end]
        self.end_id: int | None = tokenizer.token_to_id(ends[0]) if ends else None

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        """Return a chat as text; `opens_answer` as `add_generation_prompt` of transformers.

        Raises:
            _Refused: the template raises.
        """
        turns = [message._asdict() for message in messages]
        try:
            # Absent tools are None for transformers, and templates ask for just that.
            options: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": opens_answer}
            return str(self._template.render(messages=turns, **options, **self._names))
        except Exception as error:  # a template may fail in any way that Python can
            raise _Refused(f"that the chat template refuses ({' '.join(str(error).split())[:120]})") from error

    def locate(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return a chat as text and the part of it that is trained in each turn of the assistant.

        Raises:
            _Refused: the template raises, or its text does not hold the turns as they are.
        """
        text = self.render(messages)
        pieces = self._split(messages)
        spans = None if pieces is None else self._match(text, pieces, messages)
        return text, spans if spans is not None else self._by_prefixes(text, messages)

    def _split(self, messages: Sequence[Message]) -> list[str] | None:
        """Return what stands around the contents of the assistant's turns."""
        marks = [f"@@lazytrain-{index}@@" for index in range(len(messages))]
        marked = [m._replace(content=mark) if m.role == "assistant" else m for m, mark in zip(messages, marks)]
        rest, pieces = self.render(marked), []
        for message, mark in zip(messages, marks):
            if message.role == "assistant":
                if rest.count(mark) != 1:
                    return None
                piece, _, rest = rest.partition(mark)
                pieces.append(piece)
        return [*pieces, rest]

    def _match(self, text: str, pieces: list[str], messages: Sequence[Message]) -> list[Span] | None:
        contents = [message.content for message in messages if message.role == "assistant"]
        spans, place = [], 0
        if not text.startswith(pieces[0]):
            return None
        for before, after, content in zip(pieces, pieces[1:], contents):
            place += len(before)
            written = next(
                (c for c in (content, content.strip()) if text.startswith(f"{c}{after}", place)),
                None,
            )
            if written is None:
                return None
            opened = before.rfind(self._header) if self._header else -1
            start = place if opened < 0 else place - len(before) + opened + len(self._header)
            place += len(written)
            found = self._end.match(text, place)
            spans.append((start, place if found is None else found.end()))
        return spans if place + len(pieces[-1]) == len(text) else None

    def _by_prefixes(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Find the turns of a template that changes contents, if what it wrote so far stays as turns are added."""
        spans = []
        for index, message in enumerate(messages):
            if message.role == "assistant":
                before = self.render(messages[:index], opens_answer=True)
                whole = self.render(messages[: index + 1])
                if not (text.startswith(whole) and whole.startswith(before) and len(whole) > len(before)):
                    raise _Refused("with turns that the chat template rewrites")
                ends = [found.end() for found in self._end.finditer(whole, len(before))]
                spans.append((len(before), ends[-1] if ends else len(whole)))
        return spans

    def _find_header(self) -> str:
        closed, opened = self.render(_PROBE), self.render(_PROBE, opens_answer=True)
        return opened[len(closed) :] if opened.startswith(closed) else ""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the token that ends a turn of the assistant, where it is one token."""
        return () if self.end_id is None else (self.end_id,)


def load_chat_template(model_dir: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a model directory: chat_template.jinja, else that of tokenizer_config.json.

    Raises:
        ConfigError: there is none, or jinja2 is not installed.
        ModelFileError: a file can't be read.
    """
    config = read_json(model_dir / "tokenizer_config.json")
    names = {key: _text_of(value) for key, value in config.items() if key.endswith("_token")}
    known = {key: text for key, text in names.items() if text is not None}
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path), known, tokenizer)
    for path in (model_dir / "tokenizer_config.json", model_dir / "chat_template.json"):
        source = read_json(path).get("chat_template")
        if isinstance(source, list):  # several by name
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        if isinstance(source, str):
            return ChatTemplate(source, f"{path}: chat_template", known, tokenizer)
    raise ConfigError(f"--prompt chat: {model_dir} has no chat template; {_REMEDY}")


def encode_chats(
    chat: ChatTemplate, tokenizer: Tokenizer, special: SpecialTokens, chats: Sequence[Sequence[Message]]
) -> list[ChatExample | str]:
    """Return chats as samples, or for one that can't be the reason why not."""
    located = [_locate(chat, _clean(messages, tokenizer, special)) for messages in chats]
    encodings = iter(tokenizer.encode_batch([item[0] for item in located if item[1]], add_special_tokens=False))
    examples: list[ChatExample | str] = []
    for reason, spans in located:
        if not spans:
            examples.append(reason)
            continue
        encoding = next(encodings)
        trained = list(_mark(encoding.offsets, spans))
        length = max((i + 1 for i, is_trained in enumerate(trained) if is_trained), default=0)
        tokens, trained = encoding.ids[:length], trained[:length]
        if tokens and tokens[-1] not in {special.eos_id, *special.stop_ids, *chat.stop_ids}:
            tokens.append(special.eos_id)  # a template that ends no turn
            trained.append(True)
        examples.append(ChatExample(tokens, trained))
    return examples


def encode_openings(
    chat: ChatTemplate, tokenizer: Tokenizer, special: SpecialTokens, chats: Sequence[Sequence[Message]]
) -> list[list[int]]:
    """Return the tokens that the assistant's next turn begins behind.

    Raises:
        ConfigError: the template refuses one of the chats.
    """
    try:
        texts = [chat.render(_clean(messages, tokenizer, special), opens_answer=True) for messages in chats]
    except _Refused as error:
        raise ConfigError(f"{chat.origin}: a chat to be evaluated is one {error}; {_REMEDY}") from error
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _locate(chat: ChatTemplate, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Return text and spans, or the reason why not and no span."""
    try:
        return chat.locate(messages)
    except _Refused as error:
        return str(error), []


def _clean(messages: Sequence[Message], tokenizer: Tokenizer, special: SpecialTokens) -> list[Message]:
    """Drop a BOS that stands in the first turn: the template begins with one where there shall be one."""
    bos = None if special.bos_id is None else tokenizer.id_to_token(special.bos_id)
    return [messages[0]._replace(content=strip_prefix(messages[0].content, bos)), *messages[1:]]


def _mark(offsets: Sequence[Span], spans: Sequence[Span]) -> Iterator[bool]:
    """Yield for each token whether it holds a character of a span; both are in rising order."""
    index = 0
    for start, end in offsets:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        yield index < len(spans) and end > spans[index][0] and end > start


def _text_of(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _compile(source: str, origin: str) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            "--prompt chat needs jinja2: pip install jinja2, or use --prompt metamath or plain"
        ) from error

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for transformers; here it only shows its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            parser.stream.skip(1)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(f"{origin}, line {error.lineno}: not a jinja template ({error.message})") from error
