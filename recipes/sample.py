"""The embedded sample: problems in MetaMathQA's schema, written by a generator with a seed.

Every original question is asked in four ways, as in the real set: answered as it stands (`GSM_AnsAug`), in other words
(`GSM_Rephrased`), with one number replaced by x and the result told (`GSM_SV`), and with x and the answer appended
(`GSM_FOBAR`). Held-out problems share neither story nor numbers with any training problem: a story told with the same
numbers but other people and things counts as the same problem.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

from lazytrain.recipes.one_step_stories import ONE_STEP_STORIES
from lazytrain.recipes.story import CONTAINERS, MEN, THINGS, WOMEN, Step, Story, Telling
from lazytrain.recipes.two_step_stories import TWO_STEP_STORIES

Row = dict[str, str]

STORIES = (*ONE_STEP_STORIES, *TWO_STEP_STORIES)
TYPES = ("GSM_AnsAug", "GSM_Rephrased", "GSM_SV", "GSM_FOBAR")
NUM_TRAIN = 16_000
NUM_HELD_OUT = 240

ASK_FOR_X = "What is the value of unknown variable x?"
ASK_FOR_X_GIVEN_ANSWER = "If we know the answer to the above question is {r}, what is the value of unknown variable x?"
ENDING = "\n#### {answer}\nThe answer is: {answer}"

_INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}


class Problem(NamedTuple):
    """A story with its numbers and words; `values` are the results before and after each step."""

    story: Story
    telling: Telling
    numbers: tuple[int, ...]
    values: tuple[int, ...]
    words: dict[str, str]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Return what makes two problems the same: the story and its numbers."""
        return self.story.name, self.numbers

    @property
    def result(self) -> int:
        """Return the answer of the original question."""
        return self.values[-1]


def apply_op(op: str, left: int, right: int) -> int:
    """Return `left op right`; a division leaves no remainder."""
    if op == "/":
        assert left % right == 0
        return left // right
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def make_sample(
    seed: int = 0, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT
) -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows, each with `query`, `response`, `type` and `original_question`.

    Example:
        >>> train, held_out = make_sample(num_train=8, num_held_out=4)
        >>> len(train), sorted(train[0])
        (8, ['original_question', 'query', 'response', 'type'])
    """
    rng = Random(seed)
    held_out: list[Row] = []
    held_out_keys = set()
    while len(held_out) < num_held_out:
        problem = _draw_problem(rng, STORIES[len(held_out) % len(STORIES)])
        if problem.key not in held_out_keys:
            held_out_keys.add(problem.key)
            held_out.append(_make_row(rng, problem, TYPES[len(held_out) // len(STORIES) % len(TYPES)]))
    train: list[Row] = []
    queries = set()
    while len(train) < num_train:
        problem = _draw_problem(rng, rng.choice(STORIES))
        if problem.key in held_out_keys:
            continue
        for kind in TYPES:
            row = _make_row(rng, problem, kind)
            if row["query"] not in queries and len(train) < num_train:
                queries.add(row["query"])
                train.append(row)
    return train, held_out


def write_sample(directory: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl` into a directory and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, rows in zip(paths, make_sample(seed), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def _draw_problem(rng: Random, story: Story) -> Problem:
    numbers = story.draw(rng)
    values = [numbers[0]]
    for step in story.steps:
        values.append(_take_step(step, values[-1], numbers))
    man, woman = rng.choice(MEN), rng.choice(WOMEN)
    if rng.random() < 0.5:
        people = {"n": man, "m": woman, "p": "he", "P": "He", "q": "his"}
    else:
        people = {"n": woman, "m": man, "p": "she", "P": "She", "q": "her"}
    words = people | {"o": rng.choice(THINGS), "g": rng.choice(CONTAINERS)}
    return Problem(story, rng.choice(story.tellings), numbers, tuple(values), words)


def _make_row(rng: Random, problem: Problem, kind: str) -> Row:
    telling, words = problem.telling, problem.words
    known = words | {letter: str(number) for letter, number in zip("abc", problem.numbers)} | {"r": str(problem.result)}
    original_question = f"{telling.statement} {telling.question}".format_map(known)
    if kind in ("GSM_AnsAug", "GSM_Rephrased"):
        query = original_question if kind == "GSM_AnsAug" else rng.choice(telling.rephrasings).format_map(known)
        lines, answer = _explain(problem), problem.result
    else:
        unknown = rng.choice(problem.story.unknowns)
        if kind == "GSM_SV":
            query = f"{telling.statement} {telling.closing} {ASK_FOR_X}"
        else:
            query = f"{telling.statement} {telling.question} {ASK_FOR_X_GIVEN_ANSWER}"
        query = query.format_map(known | {"abc"[unknown]: "x"})
        lines, answer = _solve(problem, unknown), problem.numbers[unknown]
    return {
        "query": query,
        "response": "\n".join(lines) + ENDING.format(answer=answer),
        "type": kind,
        "original_question": original_question,
    }


def _explain(problem: Problem) -> list[str]:
    """Return one sentence for each step, with its line of arithmetic."""
    lines = []
    values = zip(problem.values, problem.values[1:])
    for step, (value, result), text in zip(problem.story.steps, values, problem.telling.explanations):
        equation = f"{_write(step, str(value), str(problem.numbers[step.number_idx]))} = {result}"
        lines.append(text.format_map(problem.words | {"eq": equation}))
    return lines


def _solve(problem: Problem, unknown: int) -> list[str]:
    """Return the lines that find number `unknown`: steps before it, the equation, its steps undone from the result."""
    numbers, steps = problem.numbers, problem.story.steps
    first = next((i for i, step in enumerate(steps) if step.number_idx == unknown), 0)
    value, lines = problem.values[first], []
    for i in range(first):
        known = _write(steps[i], str(problem.values[i]), str(numbers[steps[i].number_idx]))
        lines.append(f"First {known} = {problem.values[i + 1]}.")
    sides = ["x" if unknown == 0 else str(value)]
    for step in steps[first:]:
        number = "x" if step.number_idx == unknown else str(numbers[step.number_idx])
        sides.append(_write(step, sides[-1], number))
    lines.append(f"{sides[-1]} = {problem.result}.")
    for i in reversed(range(first + (unknown != 0), len(steps))):
        undone = _undo_value(steps[i], numbers[steps[i].number_idx], problem.values[i + 1])
        lines.append(f"{sides[i - first]} = {undone}.")
    if unknown != 0:
        lines.append(f"x = {_undo_number(steps[first], value, problem.values[first + 1])}.")
    return lines


def _take_step(step: Step, value: int, numbers: Iterable[int]) -> int:
    number = tuple(numbers)[step.number_idx]
    return apply_op(step.op, number, value) if step.reverse else apply_op(step.op, value, number)


def _write(step: Step, value: str, number: str) -> str:
    """Return the text of one step; a sum in a product's place gets brackets."""
    if step.op in "*/" and " " in value:
        value = f"({value})"
    return f"{number} {step.op} {value}" if step.reverse else f"{value} {step.op} {number}"


def _undo_value(step: Step, number: int, result: int) -> str:
    """Return the arithmetic that gives the value before a step."""
    if step.reverse:
        return f"{number} - {result} = {number - result}"
    op = _INVERSE[step.op]
    return f"{result} {op} {number} = {apply_op(op, result, number)}"


def _undo_number(step: Step, value: int, result: int) -> str:
    """Return the arithmetic that gives the number of a step from the values before and after it."""
    if step.reverse:
        return f"{result} + {value} = {result + value}"
    if step.op in "-/":
        return f"{value} {step.op} {result} = {apply_op(step.op, value, result)}"
    op = _INVERSE[step.op]
    return f"{result} {op} {value} = {apply_op(op, result, value)}"
