"""Rows to train on or to be judged by: MetaMathQA's, GSM8K's and Alpaca's fields, chats, others by flags.

A `Row` is in MetaMathQA's schema whatever it came from, and its response ends in "The answer is: X" where an answer can
be told from the file. Of a chat, `query` is what stands before its last turn, and `response` is that turn.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lazytrain.errors import DataError
from lazytrain.recipes.answers import is_number
from lazytrain.recipes.messages import MESSAGE_FIELDS, Message, read_messages
from lazytrain.recipes.records import SUFFIXES, Record, find_files, read_hub_records, read_records

QUERY_FIELDS = ("query", "question", "instruction")
RESPONSE_FIELDS = ("response", "answer", "output")
UNKNOWN_TYPE = "unknown"
ANSWER_MARK = "The answer is: "

_CALCULATION = re.compile(r"<<[-+*/().,=\d\s%$]*>>")
_GSM8K_ANSWER = re.compile(r"(?m)^####[ \t]*([^\n]*)")


class Row(NamedTuple):
    """One problem: `type` is "unknown" and `original_question` the query itself where the file has no such column.

    `messages` are all turns of a chat, the last one the assistant's; () where the row is none.
    """

    query: str
    response: str
    type: str
    original_question: str
    messages: tuple[Message, ...] = ()

    @property
    def num_answers(self) -> int:
        """Return the number of the assistant's turns."""
        return max(1, sum(message.role == "assistant" for message in self.messages))


class RowsReport(NamedTuple):
    """How many records were read and used, and why the others were not."""

    num_read: int
    num_used: int
    dropped: dict[str, int]

    def describe(self) -> str:
        """Return one line, for example "used 394,988 rows; dropped 12 of 395,000 (12 without a response)"."""
        num_dropped = sum(self.dropped.values())
        text = f"used {self.num_used:,} rows"
        if num_dropped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            text += f"; dropped {num_dropped:,} of {self.num_read:,} ({reasons})"
        return text


class Rows(NamedTuple):
    """The rows of a source, what was dropped of it, and its name."""

    rows: list[Row]
    report: RowsReport
    source: str


def load_rows(
    source: str | Path,
    *,
    split: str = "train",
    query_field: str | None = None,
    response_field: str | None = None,
    messages_field: str | None = None,
    limit: int | None = None,
    cache_fallback: Path | None = None,
) -> Rows:
    """Load rows from a file, a directory or the hub, and bring them to one schema.

    Args:
        source: a .json, .jsonl or .parquet file (JSON also gzipped), a directory of those, or a hub name
            "owner/name" or "owner/name:config".
        split: picks files of a directory, or the hub's split; a single file is read whole.
        query_field: the column of the question; several joined by commas are put together ("Body,Question").
            None = "query", "question" or "instruction" (with its "input", where there is one).
        response_field: the column of the answer. None = "response", "answer" or "output".
        messages_field: the column of a chat's turns, read instead of the two. None = "messages" or "conversations", for
            records without a column of the question.
        limit: stop after so many usable rows (at least 1); None = no limit.
        cache_fallback: the directory for the hub's cache if the usual one can't be written.

    Returns:
        Rows; records without a question or an answer (missing, null, blank) are dropped and counted in the report.

    Raises:
        DataError: a file that can't be read, a column that is not there (name it with --query-field or
            --response-field), or no usable row at all.
    """
    columns = _Columns(query=query_field, response=response_field, messages=messages_field)
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    num_read = 0
    for record in _iterate(source, split, cache_fallback):
        num_read += 1
        row = columns.read_row(record)
        if isinstance(row, Row):
            rows.append(row)
        else:
            dropped[row] += 1
        if len(rows) == limit:
            break
    columns.check_files()
    if not rows:
        raise DataError(f"{source}: no usable row in {num_read:,} records; limit is {limit}; give another file")
    return Rows(rows, RowsReport(num_read, len(rows), dict(dropped)), str(source))


def normalize_response(text: str) -> str:
    """Return a response without GSM8K's `<<48/2=24>>` marks and with "The answer is: N" at its end.

    "#### 1,080" becomes "#### 1080" and "The answer is: 1080" on the next line, as in MetaMathQA; a bare number N
    becomes "The answer is: N". Any other text is left alone.
    """
    text = _CALCULATION.sub("", text).strip()
    if ANSWER_MARK.strip() in text:
        return text
    marks = list(_GSM8K_ANSWER.finditer(text))
    if marks:
        answer = re.sub(r"(?<=\d),(?=\d)", "", marks[-1].group(1).strip())
        return f"{text[: marks[-1].start()]}#### {answer}\n{ANSWER_MARK}{answer}"
    return f"{ANSWER_MARK}{text}" if is_number(text) else text


def _iterate(source: str | Path, split: str, cache_fallback: Path | None) -> Iterator[Record]:
    path = Path(source).expanduser()
    if path.exists():
        for file in find_files(path, split):
            yield from read_records(file, split)
        return
    name = str(source)
    if name.endswith(SUFFIXES) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise DataError(f"{name}: no such file or directory, and no hub name (owner/name) either")
    yield from read_hub_records(name, split, cache_fallback)


@dataclass
class _FileCount:
    columns: dict[str, None] = field(default_factory=dict)  # an ordered set
    num_used: int = 0
    num_read: int = 0


class _Columns:
    """Reads rows out of records and remembers, per file, what was found, for errors that name file, column and flag."""

    def __init__(self, query: str | None, response: str | None, messages: str | None) -> None:
        self.query_names = QUERY_FIELDS if query is None else (query,)
        self.response_names = RESPONSE_FIELDS if response is None else (response,)
        self.message_names = MESSAGE_FIELDS if messages is None else (messages,)
        self.reads_chats_first = messages is not None
        self.reads_chats = self.reads_chats_first or query is None
        self.files: dict[str, _FileCount] = {}

    def read_row(self, record: Record) -> Row | str:
        """Return the row, or the reason why there is none."""
        count = self.files.setdefault(record.file, _FileCount())
        count.num_read += 1
        count.columns.update(dict.fromkeys(record.fields))
        chat = self._find_chat(record)
        if chat is not None:
            messages = read_messages(record, chat, "--messages-field")
            if isinstance(messages, str):
                return messages
            count.num_used += 1
            return _chat_row(messages, record)
        if self.reads_chats_first:
            return "without a chat"
        query = _read_text(record, self.query_names, "--query-field")
        if not query:
            return "without a question"
        more = record.fields.get("input")
        if self.query_names is QUERY_FIELDS and query == record.fields.get("instruction") and isinstance(more, str):
            query = f"{query}\n{more}".strip()
        response = _read_text(record, self.response_names, "--response-field")
        if not response:
            return "without a response"
        kind, original = record.fields.get("type"), record.fields.get("original_question")
        count.num_used += 1
        return Row(
            query=query,
            response=normalize_response(response),
            type=kind if isinstance(kind, str) and kind else UNKNOWN_TYPE,
            original_question=original.strip() if isinstance(original, str) and original.strip() else query,
        )

    def _find_chat(self, record: Record) -> str | None:
        """Return the column of turns, if the record is to be read as a chat."""
        if not self.reads_chats or (
            not self.reads_chats_first and any(record.fields.get(name) is not None for name in self.query_names)
        ):
            return None
        return next((name for name in self.message_names if record.fields.get(name) is not None), None)

    def check_files(self) -> None:
        """Raise a DataError for the first file of which no record could be used."""
        for file, count in self.files.items():
            if count.num_used:
                continue
            found = ", ".join(repr(name) for name in list(count.columns)[:12])
            chats = [name for name in self.message_names if name in count.columns]
            if self.reads_chats_first and not chats:
                wanted = repr(self.message_names[0])
                raise DataError(f"{file}: no column {wanted}; its columns are {found}; name one with --messages-field")
            if chats and self.reads_chats:
                raise DataError(
                    f"{file}: not one of {count.num_read:,} records has a chat with an answer in column {chats[0]!r}; "
                    "name another with --messages-field, or columns with --query-field and --response-field"
                )
            for names, flag in ((self.query_names, "--query-field"), (self.response_names, "--response-field")):
                parts = [part for name in names for part in _split_names(name)]
                wanted = " or ".join(repr(name) for name in names)
                if not any(part in count.columns for part in parts):
                    raise DataError(f"{file}: no column {wanted}; its columns are {found}; name one with {flag}")
            present = [name for name in self.response_names if name in count.columns] or list(self.response_names)
            raise DataError(
                f"{file}: not one of {count.num_read:,} records has both a question and a response "
                f"(column {present[0]!r} is null or blank); name other columns with --query-field and --response-field"
            )


def _chat_row(messages: tuple[Message, ...], record: Record) -> Row:
    query = "\n\n".join(message.content.strip() for message in messages[:-1])
    kind = record.fields.get("type")
    kind = kind if isinstance(kind, str) and kind else UNKNOWN_TYPE
    return Row(query, messages[-1].content.strip(), kind, query, messages)


def _split_names(name: str) -> list[str]:
    return [part.strip() for part in name.split(",")]


def _read_text(record: Record, names: Sequence[str], flag: str) -> str:
    name = next((name for name in names if record.fields.get(name) is not None), names[0])
    if name in record.fields:
        return _to_text(record, name, record.fields[name], flag)
    texts = [_to_text(record, part, record.fields.get(part), flag) for part in _split_names(name)]
    return " ".join(texts) if all(texts) else ""


def _to_text(record: Record, name: str, value: Any, flag: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str | int | float):
        return str(value).strip()
    raise DataError(
        f"{record.file}: {record.place}: column {name!r} holds a {type(value).__name__}, not a text or a number; "
        f"name another with {flag}"
    )
