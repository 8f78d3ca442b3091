"""Exact match: three verdicts, counted apart, for each type, and a file that shows them."""

import json
from pathlib import Path

import pytest

from lazytrain.recipes.rows import Row
from lazytrain.recipes.scoring import TypeScore, judge, score, write_samples

CASES = [  # type, response, text, extracted, verdict
    ("GSM", "#### 72\nThe answer is: 72", "The answer is: 72 clips, altogether.", "72 clips, altogether", "correct"),
    ("GSM", "The answer is: 72", "The answer is: 71", "71", "wrong"),
    ("GSM", "The answer is: 72", "So it is 72.", None, "no_answer"),
    ("GSM", "The answer is: 72", "", None, "no_answer"),
    ("GSM", "The answer is: 72", "The answer is: 72\n\nQuestion: 1+1?\nThe answer is: 2", "72", "correct"),
    ("MATH", r"So \boxed{\sqrt{5}}.", r"The answer is: $\sqrt5$", r"\sqrt5", "correct"),
    ("MATH", r"The answer is: \text{Friday}", "The answer is: friday", "friday", "correct"),
    # a response without a mark is expected as a whole
    ("PLAIN", "Paris", " paris \n", "paris", "correct"),
    ("PLAIN", "Paris", "The answer is: Paris", "Paris", "correct"),
    ("PLAIN", "Paris", "Rome", "Rome", "wrong"),
    ("PLAIN", "Paris", " \n", None, "no_answer"),
]
ROWS = [Row(f"Q{i}", case[1], case[0], f"Q{i}") for i, case in enumerate(CASES)]
TEXTS = [case[2] for case in CASES]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_text_is_judged(index: int) -> None:
    sample = judge(ROWS[index], TEXTS[index])
    assert (sample.extracted, sample.verdict) == CASES[index][3:]
    assert (sample.query, sample.type, sample.text) == (f"Q{index}", CASES[index][0], TEXTS[index])


def test_score_counts_wrong_apart_from_no_answer_and_by_type() -> None:
    result = score(ROWS, TEXTS)
    assert result[:5] == (6, 2, 3, 11, 6 / 11)
    assert result.by_type == {"GSM": TypeScore(2, 1, 2), "MATH": TypeScore(2, 0, 0), "PLAIN": TypeScore(2, 1, 1)}
    assert [kind.exact_match for kind in result.by_type.values()] == [0.4, 1.0, 0.5]
    assert result.describe() == "exact match 54.5% (6 of 11; 2 wrong, 3 without an answer)"


def test_score_of_nothing_is_zero() -> None:
    assert score([], [])[:6] == (0, 0, 0, 0, 0.0, {})


def test_stops_are_the_callers() -> None:
    assert judge(ROWS[0], "The answer is: 72 END The answer is: 1", stops=["END"]).verdict == "correct"


def test_samples_are_written_one_object_a_line(tmp_path: Path) -> None:
    rows = [*ROWS, Row("line\nbreak \u2028 é", "The answer is: 1", "GSM", "")]
    result = score(rows, [*TEXTS, "lone surrogate \ud800\nThe answer is: 1"])
    path = tmp_path / "samples.jsonl"
    path.write_text("old")
    write_samples(path, result.samples)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["verdict"] for line in lines] == [sample.verdict for sample in result.samples]
    assert list(lines[0]) == ["query", "expected", "text", "extracted", "verdict", "type"]
    assert lines[0]["expected"] == "72"
    assert lines[2]["extracted"] is None
    assert lines[-1]["query"] == "line\nbreak \u2028 é"
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


def test_samples_that_cannot_be_written_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("old")
    sample = judge(ROWS[0], TEXTS[0])._replace(text=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_samples(path, [sample])
    assert path.read_text() == "old"


@pytest.mark.data
def test_gold_responses_score_full_marks(shared_dir: Path) -> None:
    from lazytrain.recipes.rows import load_rows

    rows = load_rows(shared_dir / "data/gsm8k/test.jsonl").rows
    assert score(rows, [row.response for row in rows]).exact_match == 1.0
    assert score(rows, [rows[0].response] * len(rows)).exact_match < 0.05
