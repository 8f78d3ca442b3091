"""What a story of the embedded sample is, and how its numbers are drawn.

A story is a chain of arithmetic: `value = numbers[0]`, then `value = value op numbers[number_idx]` for each step. Its
tellings are the words around it, in which {a} {b} {c} are the numbers (or "x"), {r} the result, {n} and {m} two people,
{p} {P} {q} the pronouns of the first ("she", "She", "her"), {o} things, {g} containers, and {eq} one line of the chain
such as "7 + 5 = 12".

Every number, results between the steps included, is at least 2 (so every noun is plural) and at most `MAX_NUMBER`.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

MAX_NUMBER = 30
SMALL_NUMBERS = (2, 9)
FACTORS = (2, 9)

MEN = ("Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Jack", "Luis", "Noah", "Ravi")
WOMEN = ("Anna", "Mia", "Lucy", "Zoe", "Ruth", "Emma", "Nina", "Sara", "Kim", "Ivy")
THINGS = (
    "apples",
    "books",
    "marbles",
    "stickers",
    "pencils",
    "cookies",
    "shells",
    "stamps",
    "toys",
    "cards",
    "balloons",
    "muffins",
)
CONTAINERS = ("boxes", "bags", "baskets", "packs", "jars", "crates")


class Step(NamedTuple):
    """One operation of a chain: `value op numbers[number_idx]`, or the other way round where `reverse`."""

    op: str
    number_idx: int
    reverse: bool = False


class Telling(NamedTuple):
    """The words of a problem.

    `statement` and `question` make the original question; `closing` tells the result instead of asking for it;
    `rephrasings` are the whole problem in other words; `explanations` has one sentence for each step.
    """

    statement: str
    question: str
    closing: str
    rephrasings: tuple[str, ...]
    explanations: tuple[str, ...]


class Story(NamedTuple):
    """A kind of problem. `unknowns` are the positions of the numbers that can be asked for, given the result."""

    name: str
    steps: tuple[Step, ...]
    unknowns: tuple[int, ...]
    draw: Callable[[Random], tuple[int, ...]]
    tellings: tuple[Telling, ...]


def draw_add(rng: Random) -> tuple[int, ...]:
    """Return numbers for a + b."""
    small = rng.randint(*SMALL_NUMBERS)
    return rng.randint(2, MAX_NUMBER - small), small


def draw_subtract(rng: Random) -> tuple[int, ...]:
    """Return numbers for a - b."""
    rest, small = draw_add(rng)
    return rest + small, small


def draw_differ(rng: Random) -> tuple[int, ...]:
    """Return numbers for a - b, both sides drawn as a sum."""
    rest, small = draw_add(rng)
    return rest + small, rest


def draw_multiply(rng: Random) -> tuple[int, ...]:
    """Return numbers for a * b."""
    left = rng.randint(*FACTORS)
    return left, rng.randint(2, min(FACTORS[1], MAX_NUMBER // left))


def draw_divide(rng: Random) -> tuple[int, ...]:
    """Return numbers for a / b without remainder."""
    left, right = draw_multiply(rng)
    return left * right, right


def draw_add_subtract(rng: Random) -> tuple[int, ...]:
    """Return numbers for a + b - c."""
    a, b = draw_add(rng)
    return a, b, rng.randint(2, min(SMALL_NUMBERS[1], a + b - 2))


def draw_subtract_add(rng: Random) -> tuple[int, ...]:
    """Return numbers for a - b + c."""
    a, b = draw_subtract(rng)
    return a, b, rng.randint(2, min(SMALL_NUMBERS[1], MAX_NUMBER - a + b))


def draw_add_add(rng: Random) -> tuple[int, ...]:
    """Return numbers for a + b + c."""
    b, c = rng.randint(*SMALL_NUMBERS), rng.randint(*SMALL_NUMBERS)
    return rng.randint(2, MAX_NUMBER - b - c), b, c


def draw_add_self(rng: Random) -> tuple[int, ...]:
    """Return numbers for a + b + a."""
    small = rng.randint(*SMALL_NUMBERS)
    return rng.randint(2, (MAX_NUMBER - small) // 2), small


def draw_multiply_add(rng: Random) -> tuple[int, ...]:
    """Return numbers for a * b + c."""
    a, b = draw_multiply(rng)
    room = MAX_NUMBER - a * b
    return (a, b, rng.randint(2, min(SMALL_NUMBERS[1], room))) if room >= 2 else draw_multiply_add(rng)


def draw_multiply_subtract(rng: Random) -> tuple[int, ...]:
    """Return numbers for a * b - c."""
    a, b = draw_multiply(rng)
    return (a, b, rng.randint(2, min(SMALL_NUMBERS[1], a * b - 2)))


def draw_multiply_change(rng: Random) -> tuple[int, ...]:
    """Return numbers for c - a * b."""
    a, b, change = draw_multiply_add(rng)
    return a, b, a * b + change


def draw_subtract_divide(rng: Random) -> tuple[int, ...]:
    """Return numbers for (a - b) / c."""
    a, b, c = draw_multiply_add(rng)
    return a * b + c, c, b


def draw_divide_add(rng: Random) -> tuple[int, ...]:
    """Return numbers for a / b + c."""
    a, b = draw_divide(rng)
    return a, b, rng.randint(*SMALL_NUMBERS)
