"""Exact match over generated texts, and the file of samples that shows what was judged."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lazytrain.recipes.answers import DEFAULT_STOPS, answers_equal, cut_at_stop, extract_answer
from lazytrain.recipes.rows import Row

Verdict = Literal["correct", "wrong", "no_answer"]


class Sample(NamedTuple):
    """One judged text: what was asked, expected, written, and read out of it."""

    query: str
    expected: str
    text: str
    extracted: str | None
    verdict: Verdict
    type: str


class TypeScore(NamedTuple):
    """The counts of the rows of one type."""

    correct: int
    wrong: int
    no_answer: int

    @property
    def total(self) -> int:
        """Return the number of rows."""
        return self.correct + self.wrong + self.no_answer

    @property
    def exact_match(self) -> float:
        """Return the fraction of rows whose answer is correct; a row without an answer is not."""
        return self.correct / self.total if self.total else 0.0


class Score(NamedTuple):
    """The counts of all rows and of each type; `exact_match` = correct / total."""

    correct: int
    wrong: int
    no_answer: int
    total: int
    exact_match: float
    by_type: dict[str, TypeScore]
    samples: tuple[Sample, ...]

    def describe(self) -> str:
        """Return one line, for example "exact match 95.5% (191 of 200; 6 wrong, 3 without an answer)"."""
        return (
            f"exact match {self.exact_match:.1%} "
            f"({self.correct:,} of {self.total:,}; {self.wrong:,} wrong, {self.no_answer:,} without an answer)"
        )


def judge(row: Row, text: str, stops: Sequence[str] = DEFAULT_STOPS) -> Sample:
    """Return the verdict on one generated text.

    Where the row's own response marks no answer ("The answer is: X", "#### N", "\\boxed{X}"), the whole response is
    what is expected, and a text without a mark is taken whole too.
    """
    marked = extract_answer(row.response, stops=())
    extracted = extract_answer(text, stops)
    if marked is None and extracted is None:
        extracted = cut_at_stop(text, stops).strip() or None
    expected = row.response.strip() if marked is None else marked
    verdict: Verdict
    if extracted is None:
        verdict = "no_answer"
    else:
        verdict = "correct" if answers_equal(extracted, expected) else "wrong"
    return Sample(row.query, expected, text, extracted, verdict, row.type)


def score(rows: Sequence[Row], texts: Sequence[str], stops: Sequence[str] = DEFAULT_STOPS) -> Score:
    """Judge one generated text for each row and count the verdicts.

    Args:
        rows: the problems, with their true responses.
        texts: what the model wrote for each of them, in the same order.
        stops: a text counts up to the first of these.
    """
    assert len(rows) == len(texts), f"{len(rows)} rows, {len(texts)} texts"
    samples = tuple(judge(row, text, stops) for row, text in zip(rows, texts))
    by_type = {kind: _count([s for s in samples if s.type == kind]) for kind in sorted({s.type for s in samples})}
    counts = _count(samples)
    return Score(*counts, counts.total, counts.exact_match, by_type, samples)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write judged texts as JSON lines, one object for each; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for sample in samples:
            file.write(json.dumps(sample._asdict(), ensure_ascii=False) + "\n")
    os.replace(partial, path)


def _count(samples: Sequence[Sample]) -> TypeScore:
    verdicts = [sample.verdict for sample in samples]
    return TypeScore(verdicts.count("correct"), verdicts.count("wrong"), verdicts.count("no_answer"))
