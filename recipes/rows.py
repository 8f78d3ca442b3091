"""Rows to train on or to be judged by: MetaMathQA's and GSM8K's fields, others by flags.

A `Row` is in MetaMathQA's schema whatever it came from, and its response ends in "The answer is: X" where an answer can
be told from the file.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from lazytrain.errors import DataError
from lazytrain.recipes.answers import is_number
from lazytrain.recipes.records import SUFFIXES, Record, find_files, read_hub_records, read_records

QUERY_FIELDS = ("query", "question", "instruction")
RESPONSE_FIELDS = ("response", "answer", "output")
UNKNOWN_TYPE = "unknown"
ANSWER_MARK = "The answer is: "

_CALCULATION = re.compile(r"<<[-+*/().,=\d\s%$]*>>")
_GSM8K_ANSWER = re.compile(r"(?m)^####[ \t]*([^\n]*)")


class Row(NamedTuple):
    """One problem: `type` is "unknown" and `original_question` the query itself where the file has no such column."""

    query: str
    response: str
    type: str
    original_question: str


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


class Split(NamedTuple):
    """Rows to train on and rows held out; `num_dropped` rows were in neither, so that no problem is in both."""

    train: list[Row]
    held_out: list[Row]
    num_dropped: int


def load_rows(
    source: str | Path,
    *,
    split: str = "train",
    query_field: str | None = None,
    response_field: str | None = None,
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
        limit: stop after so many usable rows (at least 1); None = no limit.
        cache_fallback: the directory for the hub's cache if the usual one can't be written.

    Returns:
        Rows; records without a question or an answer (missing, null, blank) are dropped and counted in the report.

    Raises:
        DataError: a file that can't be read, a column that is not there (name it with --query-field or
            --response-field), or no usable row at all.
    """
    columns = _Columns(query=query_field, response=response_field)
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


def drop_overlap(train: Sequence[Row], held_out: Sequence[Row]) -> tuple[list[Row], int]:
    """Return the training rows that share no problem with the held-out ones, and how many others there were.

    Two rows share a problem if the query or the original question of one is that of the other, whatever the case and
    the spaces.
    """
    taken = {key for row in held_out for key in _problem_keys(row)}
    kept = [row for row in train if not taken.intersection(_problem_keys(row))]
    return kept, len(train) - len(kept)


def split_rows(rows: Sequence[Row], num_held_out: int, seed: int) -> Split:
    """Hold out `num_held_out` rows at random, so that no problem is on both sides.

    All rephrasings of one original question go to the same side; rows that would be left over are dropped and counted.

    Raises:
        DataError: fewer rows than are to be held out, or nothing left to train on.
    """
    if not 0 < num_held_out < len(rows):
        raise DataError(f"can't hold out {num_held_out:,} of {len(rows):,} rows; hold out fewer, or give more data")
    rng = Random(seed)
    order = sorted(range(len(rows)), key=lambda _: rng.random())
    groups: dict[str, list[Row]] = {}
    for index in order:
        groups.setdefault(_fold(rows[index].original_question), []).append(rows[index])
    held_out: list[Row] = []
    for group in groups.values():
        if len(held_out) >= num_held_out:
            break
        held_out.extend(group)
    held_out = held_out[:num_held_out]
    train, num_shared = drop_overlap(rows, held_out)  # the held-out rows themselves are among those dropped
    if not train:
        raise DataError(
            f"all {len(rows):,} rows share their problems with the {num_held_out:,} held out; hold out fewer"
        )
    return Split(train, held_out, num_shared - len(held_out))


def _problem_keys(row: Row) -> set[str]:
    return {_fold(row.query), _fold(row.original_question)}


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


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

    def __init__(self, query: str | None, response: str | None) -> None:
        self.query_names = QUERY_FIELDS if query is None else (query,)
        self.response_names = RESPONSE_FIELDS if response is None else (response,)
        self.files: dict[str, _FileCount] = {}

    def read_row(self, record: Record) -> Row | str:
        """Return the row, or the reason why there is none."""
        count = self.files.setdefault(record.file, _FileCount())
        count.num_read += 1
        count.columns.update(dict.fromkeys(record.fields))
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

    def check_files(self) -> None:
        """Raise a DataError for the first file of which no record could be used."""
        for file, count in self.files.items():
            if count.num_used:
                continue
            for names, flag in ((self.query_names, "--query-field"), (self.response_names, "--response-field")):
                parts = [part for name in names for part in _split_names(name)]
                wanted = " or ".join(repr(name) for name in names)
                if not any(part in count.columns for part in parts):
                    found = ", ".join(repr(name) for name in list(count.columns)[:12])
                    raise DataError(f"{file}: no column {wanted}; its columns are {found}; name one with {flag}")
            present = [name for name in self.response_names if name in count.columns] or list(self.response_names)
            raise DataError(
                f"{file}: not one of {count.num_read:,} records has both a question and a response "
                f"(column {present[0]!r} is null or blank); name other columns with --query-field and --response-field"
            )


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
