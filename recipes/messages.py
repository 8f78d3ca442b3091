"""Chats out of records: `messages` (role, content) and ShareGPT's `conversations` (from, value)."""

from typing import Any, NamedTuple

from lazytrain.errors import DataError
from lazytrain.recipes.records import Record

MESSAGE_FIELDS = ("messages", "conversations")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}


class Message(NamedTuple):
    """One turn: `role` is "system", "user" or "assistant"."""

    role: str
    content: str


def read_messages(record: Record, name: str, flag: str) -> tuple[Message, ...] | str:
    """Return a chat up to its last turn of the assistant, or the reason why there is none.

    Turns are {"role", "content"} or {"from", "value"}; a content may be a list of parts that are texts.

    Raises:
        DataError: the column holds no list of turns.
    """
    turns = record.fields[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(
            f"{record.file}: {record.place}: column {name!r} holds a {type(turns).__name__} that is no list of turns "
            f'({{"role": ..., "content": ...}} or {{"from": ..., "value": ...}}); name another with {flag}'
        )
    messages = []
    for turn in turns:
        given = turn.get("role") or turn.get("from")
        role = _ROLES.get(given.lower()) if isinstance(given, str) else None
        content = _read_content(turn["content"] if turn.get("content") is not None else turn.get("value"))
        if role is None:
            return f"with a turn of role {given!r}"
        if content is None:
            return "with a turn that is no text"
        messages.append(Message(role, content))
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        return "without a turn of the assistant"
    if messages[0].role == "assistant":
        return "that the assistant begins"
    if not messages[-1].content.strip():
        return "without a response"
    return tuple(messages)


def _read_content(value: Any) -> str | None:
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return value if isinstance(value, str) else None
