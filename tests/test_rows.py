"""Rows: one schema out of many, every dropped row counted, no problem on both sides of a split."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.errors import DataError
from lazytrain.recipes.answers import extract_answer, is_number
from lazytrain.recipes.rows import Row, load_rows, normalize_response
from lazytrain.recipes.splits import drop_overlap, split_rows

METAMATH = {"query": "Q1", "response": "R1\nThe answer is: 1", "type": "GSM_Rephrased", "original_question": "O1"}


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_row(query: str, original: str | None = None) -> Row:
    return Row(query, "The answer is: 1", "unknown", query if original is None else original)


def test_metamath_fields_are_taken_as_they_are(tmp_path: Path) -> None:
    assert load_rows(write(tmp_path / "a.jsonl", [METAMATH])).rows == [Row(**METAMATH)]


def test_gsm8k_marks_are_removed_and_the_answer_is_named(tmp_path: Path) -> None:
    answer = "Half is 48/2 = <<48/2=24>>24 clips.\nIn all <<48+24=72>>72.\n#### 1,072"
    rows = load_rows(write(tmp_path / "a.jsonl", [{"question": " How many? ", "answer": answer}])).rows
    response = "Half is 48/2 = 24 clips.\nIn all 72.\n#### 1072\nThe answer is: 1072"
    assert rows == [Row("How many?", response, "unknown", "How many?")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80000", "The answer is: 80000"),
        ("$1,080", "The answer is: $1,080"),
        ("Paris is a city.", "Paris is a city."),
        ("cout << x << y;", "cout << x << y;"),
        ("a\n#### 5\nThe answer is: 5", "a\n#### 5\nThe answer is: 5"),
        ("a\n####5 ", "a\n#### 5\nThe answer is: 5"),
    ],
)
def test_response_is_normalized(text: str, expected: str) -> None:
    assert normalize_response(text) == expected
    assert normalize_response(expected) == expected


def test_ragged_files_are_used_dropped_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"query": "Q1", "response": "R1"}, {"query": "Q2", "response": None}])
    write(
        tmp_path / "b.jsonl",
        [
            METAMATH | {"extra": [1, {"a": 2}]},
            METAMATH | {"type": None, "original_question": " "},
            {"response": "R"},
            {"query": "Q", "response": " \n"},
        ],
    )
    rows, report, source = load_rows(tmp_path)
    assert [row.type for row in rows] == ["unknown", "GSM_Rephrased", "unknown"]
    assert [row.original_question for row in rows] == ["Q1", "O1", "Q1"]
    assert (report.num_read, report.num_used) == (6, 3)
    assert report.dropped == {"without a response": 2, "without a question": 1}
    assert report.describe() == "used 3 rows; dropped 3 of 6 (2 without a response, 1 without a question)"
    assert source == str(tmp_path)


def test_unknown_column_error_names_file_columns_and_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"Body": "B", "answer": "1"}])
    with pytest.raises(
        DataError, match=r"a\.jsonl: no column 'query' or .*its columns are 'Body', 'answer'.*--query-field"
    ):
        load_rows(path)
    with pytest.raises(DataError, match=r"a\.jsonl: no column 'solution'.*--response-field"):
        load_rows(path, query_field="Body", response_field="solution")


def test_null_column_error_names_file_column_and_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "Q", "response": None}] * 3)
    with pytest.raises(
        DataError, match=r"a\.jsonl: not one of 3 records .*column 'response' is null.*--response-field"
    ):
        load_rows(path)


def test_one_bad_file_of_a_directory_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [METAMATH])
    write(tmp_path / "b.jsonl", [{"text": "T"}])
    with pytest.raises(DataError, match=r"b\.jsonl: no column 'query'"):
        load_rows(tmp_path)


def test_column_of_objects_error_names_line_column_and_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [METAMATH, METAMATH | {"response": {"text": "R"}}])
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: column 'response' holds a dict.*--response-field"):
        load_rows(path)


def test_flags_join_columns_and_read_numbers_and_lists_of_one(tmp_path: Path) -> None:
    svamp = write(tmp_path / "svamp.jsonl", [{"Body": "Dan had $ 3", "Question": "How much?", "Answer": 51.0}])
    assert load_rows(svamp, query_field="Body,Question", response_field="Answer").rows == [
        Row("Dan had $ 3 How much?", "The answer is: 51", "unknown", "Dan had $ 3 How much?")
    ]
    arith = write(tmp_path / "arith.jsonl", [{"sQuestion": " Q ", "lSolutions": [2.5]}])
    rows = load_rows(arith, query_field="sQuestion", response_field="lSolutions").rows
    assert [(row.query, row.response) for row in rows] == [("Q", "The answer is: 2.5")]


def test_instruction_takes_its_input_along(tmp_path: Path) -> None:
    records = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Go", "input": "", "output": "x"},
    ]
    assert [row.query for row in load_rows(write(tmp_path / "a.jsonl", records)).rows] == ["Add.\n1 and 2", "Go"]


def test_limit_stops_after_usable_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [METAMATH | {"response": None}, METAMATH, METAMATH])
    path.write_text(path.read_text() + "cut {")
    assert load_rows(path, limit=2).report.num_read == 3


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/missing/dir", "missing", "a/b/c"])
def test_missing_local_source_is_not_looked_up_on_the_hub(source: str) -> None:
    with pytest.raises(DataError, match=re.escape(source) + ".*no such file or directory"):
        load_rows(source)


def test_drop_overlap_removes_shared_problems_and_counts_them() -> None:
    held_out = [make_row("What is  2+2?"), make_row("Rephrased", original="Original B")]
    train = [
        make_row("what is 2+2? "),  # the same but for case and spaces
        make_row("original b"),  # what a held-out row was made from
        make_row("Backward", original="What is 2+2?"),  # made from a held-out row
        make_row("rephrased", original="C"),
        make_row("D"),
    ]
    assert drop_overlap(train, held_out) == ([train[4]], 4)


@given(st.lists(st.integers(0, 6), min_size=9, max_size=40), st.integers(1, 3), st.integers(-5, 2**70))
@settings(deadline=None)
def test_split_shares_no_problem_and_loses_no_row(groups: list[int], num_held_out: int, seed: int) -> None:
    rows = [make_row(f"query {i}", original=f"original {group}") for i, group in enumerate([*groups, 7, 8, 9])]
    train, held_out, num_dropped = split_rows(rows, num_held_out, seed)
    assert len(held_out) == num_held_out
    assert len(train) + len(held_out) + num_dropped == len(rows)
    assert not {r.original_question for r in train} & {r.original_question for r in held_out}
    assert split_rows(rows, num_held_out, seed) == (train, held_out, num_dropped)


def test_split_depends_on_the_seed() -> None:
    rows = [make_row(f"query {i}") for i in range(100)]
    assert split_rows(rows, 10, seed=0).held_out != split_rows(rows, 10, seed=1).held_out


def test_split_that_is_impossible_is_refused() -> None:
    rows = [make_row("q") for _ in range(5)]
    with pytest.raises(DataError, match="can't hold out 5 of 5 rows"):
        split_rows(rows, 5, seed=0)
    with pytest.raises(DataError, match="all 5 rows share their problems"):
        split_rows(rows, 2, seed=0)


@pytest.mark.data
def test_gsm8k_becomes_its_metamath_format(shared_dir: Path) -> None:
    ours = load_rows(shared_dir / "data/gsm8k/train.jsonl").rows
    theirs = load_rows(shared_dir / "data/metamath_format/gsm8k_train.metamath.jsonl")
    assert theirs.report.describe() == "used 7,473 rows"
    assert [row[:2] for row in ours] == [row[:2] for row in theirs.rows]
    assert {row.type for row in theirs.rows} == {"GSM_Original"}


@pytest.mark.data
def test_genuine_metamathqa_rows_are_read(shared_dir: Path) -> None:
    rows = load_rows(shared_dir / "data/metamath_format/real_MetaMathQA_samples.jsonl").rows
    assert [row.type for row in rows] == ["MATH_AnsAug", "GSM_Rephrased"]
    assert [extract_answer(row.response) for row in rows] == [r"\sqrt{5}", "752"]
    assert rows[1].query != rows[1].original_question


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "query_field", "response_field", "num_rows"),
    [
        ("svamp/SVAMP.json", "Body,Question", "Answer", 1000),
        ("MultiArith/MultiArith.json", "sQuestion", "lSolutions", 600),
        ("metamath/GSM8K_Backward.jsonl", None, None, 1270),
    ],
)
def test_other_real_sets_are_read_by_flags(
    shared_dir: Path, name: str, query_field: str | None, response_field: str | None, num_rows: int
) -> None:
    rows = load_rows(shared_dir / "data" / name, query_field=query_field, response_field=response_field).rows
    answers = [extract_answer(row.response) for row in rows]
    assert len(answers) == num_rows
    assert all(answer is not None and is_number(answer) for answer in answers)


@pytest.mark.data
def test_backward_problems_overlap_the_test_set_they_were_made_from(shared_dir: Path) -> None:
    backward = load_rows(shared_dir / "data/metamath/GSM8K_Backward.jsonl").rows
    test = load_rows(shared_dir / "data/gsm8k", split="test").rows
    train = load_rows(shared_dir / "data/gsm8k", split="train").rows
    assert len(test) == 1319
    assert drop_overlap(train, test)[1] == 0
    assert drop_overlap(backward, test)[1] > 1000
