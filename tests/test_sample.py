"""The embedded sample: its schema, its arithmetic, and that nothing held out is known from training."""

import json
import re
from collections import Counter
from pathlib import Path
from string import Formatter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.recipes.answers import extract_answer
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.sample import (
    ASK_FOR_X,
    ASK_FOR_X_GIVEN_ANSWER,
    NUM_HELD_OUT,
    NUM_TRAIN,
    STORIES,
    TYPES,
    Row,
    apply_op,
    make_sample,
    write_sample,
)
from lazytrain.recipes.story import CONTAINERS, MAX_NUMBER, MEN, THINGS, WOMEN, Story

PARTS = {
    "a": r"\d+",
    "b": r"\d+",
    "c": r"\d+",
    "n": "|".join(MEN + WOMEN),
    "m": "|".join(MEN + WOMEN),
    "o": "|".join(THINGS),
    "g": "|".join(CONTAINERS),
    "p": "he|she",
    "P": "He|She",
    "q": "his|her",
}
# A whole line of arithmetic, and not the end of an equation with x such as "x + 8 - 5 = 26"
LINE = re.compile(r"(?<![-+*/(] )(?<![(\d])(\d+) ([-+*/]) (\d+) = (\d+)\b")
ANSWER = re.compile(r"\n#### (\d+)\nThe answer is: (\d+)$")
TAIL = re.compile(" " + re.escape(ASK_FOR_X_GIVEN_ANSWER).replace(re.escape("{r}"), r"(\d+)") + "$")


@pytest.fixture(scope="module")
def sample() -> tuple[list[Row], list[Row]]:
    return make_sample()


def to_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern of the texts that a template can become, with the names of its fields as groups."""
    pattern, seen = "", set()
    for text, name, _, _ in Formatter().parse(template):
        pattern += re.escape(text)
        if name:
            pattern += f"(?P={name})" if name in seen else f"(?P<{name}>{PARTS[name]})"
            seen.add(name)
    return re.compile(pattern + r"\Z")


def fields_of(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name]


ORIGINALS = [
    (story, to_pattern(f"{telling.statement} {telling.question}")) for story in STORIES for telling in story.tellings
]


def identify(original_question: str) -> tuple[str, tuple[int, ...]]:
    """Return story and numbers of an original question, read back from its text."""
    found = [(story, match) for story, pattern in ORIGINALS if (match := pattern.match(original_question))]
    assert len(found) == 1, original_question
    story, match = found[0]
    return story.name, tuple(int(match[letter]) for letter in "abc" if letter in match.groupdict())


def compute(story: Story, numbers: tuple[int, ...]) -> int:
    value = numbers[0]
    for op, number_idx, reverse in story.steps:
        value = apply_op(op, numbers[number_idx], value) if reverse else apply_op(op, value, numbers[number_idx])
    return value


def test_sample_has_the_promised_size_and_schema(sample: tuple[list[Row], list[Row]]) -> None:
    train, held_out = sample
    assert len(train) == NUM_TRAIN >= 2000
    assert len(held_out) == NUM_HELD_OUT >= 200
    for row in train + held_out:
        assert set(row) == {"query", "response", "type", "original_question"}
        assert all(isinstance(text, str) and text == text.strip() and "{" not in text for text in row.values())


def test_every_kind_of_rephrasing_has_its_share(sample: tuple[list[Row], list[Row]]) -> None:
    for rows in sample:
        counts = Counter(row["type"] for row in rows)
        assert set(counts) == set(TYPES)
        assert min(counts.values()) > 0.15 * len(rows)


def test_original_questions_come_in_several_rephrasings(sample: tuple[list[Row], list[Row]]) -> None:
    types: dict[str, set[str]] = {}
    for row in sample[0]:
        types.setdefault(row["original_question"], set()).add(row["type"])
    assert sum(len(kinds) == len(TYPES) for kinds in types.values()) > 0.9 * len(types)


def test_training_queries_are_distinct(sample: tuple[list[Row], list[Row]]) -> None:
    queries = [row["query"] for row in sample[0]]
    assert len(set(queries)) == len(queries)


def test_held_out_problems_are_in_training_in_no_wording(sample: tuple[list[Row], list[Row]]) -> None:
    """Not with other people or things, not as another telling of the same story, not with x in place of a number."""
    train, held_out = sample
    known = {identify(row["original_question"]) for row in train}
    held_out_problems = [identify(row["original_question"]) for row in held_out]
    assert len(set(held_out_problems)) == len(held_out)
    assert not known.intersection(held_out_problems)
    assert {name for name, _ in held_out_problems} == {story.name for story in STORIES}


def test_answers_solve_the_problem_that_is_asked(sample: tuple[list[Row], list[Row]]) -> None:
    """For x: putting the answer in its place gives the original question and, computed anew, the result told."""
    stories = {story.name: story for story in STORIES}
    for row in sample[0][:4000] + sample[1]:
        name, numbers = identify(row["original_question"])
        result = compute(stories[name], numbers)
        match = ANSWER.search(row["response"])
        assert match is not None
        assert match[1] == match[2] == extract_answer(row["response"])
        answer = match[1]
        if row["type"] in ("GSM_AnsAug", "GSM_Rephrased"):
            assert answer == str(result)
            assert (row["query"] == row["original_question"]) == (row["type"] == "GSM_AnsAug")
            continue
        restored = re.sub(r"\bx\b", answer, row["query"].removesuffix(" " + ASK_FOR_X))
        if row["type"] == "GSM_FOBAR":
            told = TAIL.search(row["query"])
            assert told is not None
            assert told[1] == str(result)
            assert re.sub(r"\bx\b", answer, row["query"][: told.start()]) == row["original_question"]
        else:
            assert str(result) in re.findall(r"\d+", restored)
            shared = restored[: restored[:-1].rindex(". ") + 1]
            assert row["original_question"].startswith(shared)


def test_lines_of_arithmetic_are_true_and_in_range(sample: tuple[list[Row], list[Row]]) -> None:
    num_steps = {story.name: len(story.steps) for story in STORIES}
    assert set(num_steps.values()) == {1, 2}
    for row in sample[0][:4000] + sample[1]:
        lines = LINE.findall(row["response"])
        assert len(lines) == num_steps[identify(row["original_question"])[0]], row["response"]
        for left, op, right, result in lines:
            assert apply_op(op, int(left), int(right)) == int(result)
            assert 2 <= int(result) <= MAX_NUMBER


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_every_wording_names_every_number_once(story: Story) -> None:
    letters = list("abc"[: 1 + max(step.number_idx for step in story.steps)])
    for telling in story.tellings:
        assert telling.closing.count("{r}") == 1
        assert not set("abc") & set(fields_of(telling.closing))
        for words in (f"{telling.statement} {telling.question}", *telling.rephrasings):
            assert sorted(set("abc") & set(fields_of(words))) == sorted(letters)
            assert all(fields_of(words).count(letter) == 1 for letter in letters), words
        assert not set("abc") & set(fields_of(telling.question))
        assert [text.count("{eq}") for text in telling.explanations] == [1] * len(story.steps)
        assert len(telling.rephrasings) >= 2


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_train=st.integers(0, 63), num_held_out=st.integers(0, 123))
def test_any_seed_and_size_keep_the_promise(seed: int, num_train: int, num_held_out: int) -> None:
    train, held_out = make_sample(seed, num_train, num_held_out)
    assert (len(train), len(held_out)) == (num_train, num_held_out)
    assert make_sample(seed, num_train, num_held_out) == (train, held_out)
    known = {identify(row["original_question"]) for row in train}
    assert not known.intersection(identify(row["original_question"]) for row in held_out)


def test_seeds_give_different_problems() -> None:
    assert make_sample(0, 40, 40) != make_sample(1, 40, 40)


def test_written_sample_is_read_back_in_full(tmp_path: Path, sample: tuple[list[Row], list[Row]]) -> None:
    paths = write_sample(tmp_path / "new" / "sample")
    assert [path.name for path in paths] == ["train.jsonl", "held_out.jsonl"]
    for path, rows in zip(paths, sample, strict=True):
        assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows
        loaded = load_rows(path)
        assert [row._asdict() for row in loaded.rows] == [row | {"messages": ()} for row in rows]
        assert not loaded.report.dropped
