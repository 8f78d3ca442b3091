"""Answers: what is read out of a text, and which of two are the same by value."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.recipes.answers import answers_equal, cut_at_stop, extract_answer, is_number

EQUAL = [
    # C40 and what is near it
    ("72 clips, altogether", "72"),
    ("$29.00", "29"),
    ("$1,234.50.", "1234.5"),
    ("50%", "50"),
    (r"50\%", "50 percent"),
    ("3/4", "0.75"),
    (r"\frac{1}{2}", "0.5"),
    (r"\text{Friday}", "Friday"),
    # whole numbers and decimals
    ("1,000,000", "1000000"),
    ("1{,}234", "1,234"),
    (r"10\,000", "10000"),
    (r"10,\!000", "10000"),
    ("007", "7"),
    ("7.", "7.0"),
    (".5", "0.50"),
    ("0", "-0"),
    ("+5", "5"),
    ("1e3", "1000"),
    (r"1.2 \times 10^{5}", "120,000"),
    (r"3 \cdot 10^{-2}", "0.03"),
    ("5 million", "5,000,000"),
    # signs and money
    ("-5", "−5"),
    ("- $5", "-5"),
    ("-$5.00", "$-5"),
    (r"\$29", "US$29"),
    ("€5", "£5"),
    ("29 dollars", "$29"),
    # fractions
    ("-3/4", r"-\frac{3}{4}"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"\dfrac{10}{4}", "2.5"),
    (r"\tfrac12", "1/2"),
    (r"\frac1{2}", r"\frac{1}2"),
    ("1 1/2", "1.5"),
    (r"1\frac{1}{2}", "3/2"),
    (r"-1 \frac{1}{2}", "-1.5"),
    ("½", "0.5"),
    ("1½ cups", "3/2"),
    ("6/3", "2"),
    # units and words around the number
    ("5cm", "5 cm"),
    (r"5\text{ cm}^2", "5"),
    ("5 m/s", "5"),
    ("$5/day", "5 dollars per day"),
    (r"90^\circ", "90°"),
    ("3rd", "3"),
    ("12-inch", "12"),
    ("72 (clips)", "72"),
    ("x = 5", "5"),
    ("about 72", "72"),
    ("He has 72 clips", "72"),
    ("the total is -72", "-72"),
    # text
    ("Friday", "friday"),
    (r"\mathrm{No} solution", "no solution"),
    ("(C)", r"\text{C}"),
    (r"\sqrt5", r"\sqrt{5}"),
    ("2√3", r"2\sqrt{3}"),
    ("2*sqrt(3)", r"2 \cdot \sqrt{3}"),
    ("x^{2}+1", "x^2 + 1"),
    ("2pi", r"2\pi"),
    (r"\left(1, 2\right)", "(1,2)"),
    ("(1, 0.5)", r"(1,\frac{1}{2})"),
    ("1, 2, 3", "1,2,3.0"),
    (r"[0,\infty)", r"[0, \infty)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]

UNEQUAL = [
    ("5", "6"),
    ("5", "-5"),
    ("50%", "0.5"),
    ("0.333", "1/3"),
    ("2.4", "2"),
    ("72", "72.001"),
    ("1,234", "1.234"),
    ("12,34", "1234"),
    ("1,2", "12"),
    ("1,000", "1,0"),
    ("1/2/3", "1/2"),
    ("3/0", "3"),
    ("0/0", "0"),
    ("2x", "2"),
    ("5 x", "5"),
    ("2i", "2"),
    (r"2\pi", "2"),
    ("2pi", "2"),
    (r"2\sqrt{3}", "2"),
    ("sqrt 2", "2"),
    ("10^3", "10"),
    ("5!", "5"),
    ("f(5)", "5"),
    ("x5", "5"),
    ("x - 5", "-5"),
    ("5 - 3", "5"),
    ("5-x", "5"),
    ("5 squared", "5"),
    ("5 or 6", "5"),
    ("3 and a half", "3"),
    ("3 hours 20 minutes", "3"),
    ("5:30", "5"),
    ("minus 5", "5"),
    ("negative 5", "5"),
    ("less than 5", "5"),
    ("5 million", "5"),
    ("Plan 9", "Step 9"),
    ("Friday", "Monday"),
    ("A", "a"),
    ("A", "B"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "(1,2,3)"),
    ("$", "%"),
    ("", "0"),
]

Q = "Tom has 3. He buys 4.\n"
TEXTS = [
    (Q + "The answer is: 7", "7"),
    (Q + "The answer is: 7.", "7"),
    (Q + "the answer is 7.", "7"),
    (Q + "**The answer is:** $7$.", "7"),
    (Q + "The answer is:\n\n7\nDone.", "7"),
    (Q + "The answer is: 7. Tom is happy.", "7"),
    (Q + "The answer is: 5. No, wrong.\nThe answer is: 7", "7"),
    (Q + "#### 7\nThe answer is: 8", "8"),
    (Q + "#### 7", "7"),
    (Q + "The answer is 15 gallons * 8 pints / gallon = 120 pints\n#### 120", "120"),
    (Q + "The final answer is: 7", "7"),
    (Q + "#### $1,234.50", "$1,234.50"),
    (Q + "#### -7\nThe answer is:", "-7"),  # cut by the limit of new tokens
    (Q + r"So it is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    (Q + r"First \boxed{1}, then \boxed{\text{Friday}}.", r"\text{Friday}"),
    (Q + r"So $\boxed 7$", "7"),
    (Q + r"The answer is: $\boxed{7}$", "7"),
    (Q + "The answer is: \\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # C41: a next question with another answer
    (Q + "The answer is: 7\n\nQuestion: 1 + 1?\nThe answer is: 2", "7"),
    (Q + "The answer is: 7\n\n### Instruction:\nAdd.\n\n### Response: The answer is: 2", "7"),
    (Q + "The answer is: 7<|im_end|>\nThe answer is: 2", "7"),
    ("Question: " + Q + "The answer is: 7", None),
    # C42: no answer
    (Q + "So he has 7.", None),
    (Q + "### 7", None),
    (Q + "#### Step 1", None),
    (Q + r"\boxed{\frac{1}{2}", None),
    (Q + "The answer is:", None),
    ("", None),
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_answers_of_one_value_are_equal(a: str, b: str) -> None:
    assert answers_equal(a, b)
    assert answers_equal(b, a)


@pytest.mark.parametrize(("a", "b"), UNEQUAL)
def test_answers_of_two_values_are_not_equal(a: str, b: str) -> None:
    assert not answers_equal(a, b)
    assert not answers_equal(b, a)


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_answer_is_extracted(text: str, expected: str | None) -> None:
    assert extract_answer(text) == expected


def test_stops_are_the_callers() -> None:
    text = "The answer is: 7 STOP The answer is: 8"
    assert extract_answer(text, stops=["END", "STOP"]) == "7"
    assert extract_answer(text, stops=[]) == "8"
    assert cut_at_stop("a STOP b END", ["END", "STOP"]) == "a "


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$1,080", True), ("-3/4", True), ("about 5", False), ("Paris", False), ("", False), ("4" * 5000, False)],
)
def test_is_number(text: str, expected: bool) -> None:
    assert is_number(text) is expected


ANSWER_TEXT = st.text(alphabet="0123456789+-−.,/ ()[]{}\\$%^=eExfracsqtbodinm½\n", max_size=40) | st.text(max_size=40)


@given(ANSWER_TEXT, ANSWER_TEXT)
@settings(deadline=None)
def test_equality_is_reflexive_and_symmetric_for_any_text(a: str, b: str) -> None:
    assert answers_equal(a, a)
    assert answers_equal(a, b) == answers_equal(b, a)


@given(ANSWER_TEXT)
@settings(deadline=None)
def test_any_text_after_the_marker_equals_itself_when_extracted(text: str) -> None:
    extracted = extract_answer(f"So.\nThe answer is: {text}", stops=())
    assert extracted is None or extracted
    assert extract_answer(text) is None or "boxed" in text or "answer" in text.lower() or "####" in text


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{:,}", "${:,}.", "{}.00", "{} apples", "{}%", "{}/1", "x = {}"])
)
@settings(deadline=None)
def test_written_forms_of_a_number_are_equal_and_differ_from_the_next(number: int, form: str) -> None:
    written = form.format(number)
    assert extract_answer(f"The answer is: {written}") is not None
    assert answers_equal(extract_answer(f"The answer is: {written}") or "", str(number))
    assert not answers_equal(written, str(number + 1))


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
@settings(deadline=None)
def test_fractions_are_compared_exactly(a: Fraction, b: Fraction) -> None:
    frac = rf"\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert answers_equal(frac, f"{a.numerator}/{a.denominator}")
    assert answers_equal(frac, f"{b.numerator}/{b.denominator}") == (a == b)


@pytest.mark.parametrize(
    "piece", ["(", "1,", "1", " ", "\\frac{", "{", "\\boxed{", "The answer is: ", "####1", "x ", "\n", "1 1/"]
)
def test_long_texts_cost_linear_time(piece: str) -> None:
    start = time.process_time()
    text = piece * (200_000 // len(piece))
    extract_answer(text)
    extract_answer("The answer is: " + text)
    answers_equal(text, text + "1")
    answers_equal(text[:500], text[1:500])
    assert time.process_time() - start < 5.0  # milliseconds; a quadratic search takes minutes


@pytest.mark.data
@pytest.mark.parametrize("name", ["train", "test"])
def test_every_gsm8k_answer_is_extracted(shared_dir: Path, name: str) -> None:
    lines = (shared_dir / f"data/gsm8k/{name}.jsonl").read_text().splitlines()
    for line in lines:
        response = json.loads(line)["answer"]
        gold = int(response.split("####")[1].replace(",", ""))
        answer = extract_answer(response)
        assert answer is not None
        assert answers_equal(answer, str(gold))
        assert not answers_equal(answer, str(gold + 1))
