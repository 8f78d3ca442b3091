"""Chats out of files: both schemas, what has no answer is dropped and counted, errors name file, line and flag."""

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.errors import DataError
from lazytrain.recipes.messages import Message
from lazytrain.recipes.rows import Row, load_rows

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": " A "}


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path: Path, *turns: list[dict], **options: Any) -> list[Row]:
    return load_rows(write(path / "a.jsonl", *({"messages": chat} for chat in turns)), **options).rows


def test_messages_become_a_row_with_all_turns(tmp_path: Path) -> None:
    [row] = load(
        tmp_path, [{"role": "system", "content": "S"}, USER, ANSWER, USER, {"role": "user", "content": "left"}]
    )
    turns = (Message("system", "S"), Message("user", "Q"), Message("assistant", " A "))
    assert row == Row("S\n\nQ", "A", "unknown", "S\n\nQ", turns)
    assert row.num_answers == 1
    [row] = load(tmp_path, [USER, ANSWER, USER, ANSWER])
    assert row.num_answers == 2


def test_sharegpt_conversations_become_the_same_row(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": " A "}]
    path = write(tmp_path / "b.jsonl", {"conversations": turns, "type": "share"})
    [row] = load_rows(path).rows
    assert row == load(tmp_path, [USER, ANSWER])[0]._replace(type="share")


def test_content_in_parts_is_put_together(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Q1 "}, {"type": "text", "text": "Q2"}]
    [row] = load(tmp_path, [{"role": "user", "content": parts}, ANSWER])
    assert row.query == "Q1 Q2"


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([USER], "without a turn of the assistant"),
        ([], "without a turn of the assistant"),
        ([ANSWER], "that the assistant begins"),
        ([USER, {"role": "assistant", "content": " \n"}], "without a response"),
        ([USER, {"role": "tool", "content": "x"}, ANSWER], "with a turn of role 'tool'"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "with a turn that is no text"),
        ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "with a turn that is no text"),
    ],
)
def test_chat_that_cannot_be_used_is_dropped_and_counted(tmp_path: Path, turns: list[dict], reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": turns}, {"messages": [USER, ANSWER]})
    rows, report, _ = load_rows(path)
    assert len(rows) == 1
    assert report.dropped == {reason: 1}


def test_columns_of_a_question_come_before_those_of_a_chat_unless_a_flag_says_so(tmp_path: Path) -> None:
    record = {"question": "Q1", "answer": "A1", "messages": [USER, ANSWER], "talk": [USER, ANSWER]}
    path = write(tmp_path / "a.jsonl", record)
    assert load_rows(path).rows == [Row("Q1", "A1", "unknown", "Q1")]
    for name in ("messages", "talk"):
        assert load_rows(path, messages_field=name).rows[0].query == "Q"
    assert load_rows(path, query_field="question").rows[0].query == "Q1"


def test_column_that_is_no_chat_names_line_column_and_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, {"messages": "text"})
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: column 'messages' holds a str.*--messages-field"):
        load_rows(path)
    with pytest.raises(DataError, match=r"a\.jsonl: no column 'talk'; its columns are 'messages'.*--messages-field"):
        load_rows(path, messages_field="talk")
    write(path, {"messages": [USER]}, {"messages": []})
    with pytest.raises(DataError, match=r"a\.jsonl: not one of 2 records has a chat with an answer.*--messages-field"):
        load_rows(path)
