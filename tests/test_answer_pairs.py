r"""From a generated text and the right answer to a verdict: what a reader of `samples.jsonl` would say, too.

The right answer stands in the row as "The answer is: X". `=` correct, `!` wrong, `-` no answer found.
"""

import pytest

from lazytrain.recipes.rows import Row
from lazytrain.recipes.scoring import judge

VERDICTS = {"=": "correct", "!": "wrong", "-": "no_answer"}
PAIRS = [
    # whole numbers, separators, a period at the end
    ("The answer is: 72", "72", "="),
    ("The answer is: 72.", "72", "="),
    ("The answer is: 1,234,567", "1234567", "="),
    ("The answer is: 1234567", "1,234,567", "="),
    (r"The answer is: 10{,}000", "10000", "="),
    (r"The answer is: 10\,000", "10,000", "="),
    ("The answer is: 1 000 000", "1000000", "="),
    ("The answer is: 1 2", "12", "!"),
    ("The answer is: 1 0000", "10000", "!"),
    ("The answer is: 1 000/2", "1000", "!"),
    ("The answer is: 12,34", "1234", "!"),
    ("The answer is: 73", "72", "!"),
    # decimals are exact
    ("The answer is: 7.0", "7", "="),
    ("The answer is: .5", "0.5", "="),
    ("The answer is: 0.333", "1/3", "!"),
    ("The answer is: 2.4", "2", "!"),
    # negative numbers
    ("The answer is: -5", "-5", "="),
    ("The answer is: −5", "-5", "="),
    ("The answer is: 5", "-5", "!"),
    ("The answer is: -$1,234.50", "-1234.5", "="),
    # fractions and mixed numbers
    ("The answer is: 3/4", "0.75", "="),
    ("The answer is: 6/8", "3/4", "="),
    (r"The answer is: $\frac{3}{4}$", "0.75", "="),
    (r"The answer is: \dfrac{3}{4}", "3/4", "="),
    (r"The answer is: \tfrac34", "3/4", "="),
    (r"The answer is: -\frac{3}{4}", r"\frac{-3}{4}", "="),
    ("The answer is: 2 3/4", "2.75", "="),
    (r"The answer is: 2\frac{3}{4}", "11/4", "="),
    ("The answer is: 1½ cups", "1.5", "="),
    ("The answer is: 3/0", "3", "!"),
    # percent: the sign is dropped as in MetaMath's and GSM8K's evaluations, so 50% is 50
    ("The answer is: 50%", "50", "="),
    (r"The answer is: 50\%", "50%", "="),
    ("The answer is: 50 percent", "50%", "="),
    ("The answer is: 0.5", "50%", "!"),
    # money
    ("The answer is: $29.00", "29", "="),
    (r"The answer is: \$29", "29", "="),
    ("The answer is: 29 dollars", "$29", "="),
    ("The answer is: $1.5 million", "1,500,000", "="),
    ("The answer is: $29.50", "29", "!"),
    # units
    ("The answer is: 72 clips, altogether.", "72", "="),
    ("The answer is: 5cm", "5", "="),
    (r"The answer is: 5\text{ cm}^2", "5", "="),
    ("The answer is: 60 km/h", "60", "="),
    (r"The answer is: 90^\circ", "90", "="),
    ("The answer is: 3 hours 20 minutes", "3", "!"),
    # scientific notation
    ("The answer is: 1e3", "1000", "="),
    ("The answer is: 3.2e-5", "0.000032", "="),
    (r"The answer is: 1.2 \times 10^{5}", "120000", "="),
    (r"The answer is: 1.2 \times 10^4", "120000", "!"),
    # boxed LaTeX
    (r"So we get $\boxed{42}$.", "42", "="),
    (r"So we get $\boxed{\frac{\sqrt{3}}{2}}$.", r"\frac{\sqrt{3}}{2}", "="),
    (r"So we get \boxed{\text{Friday}}.", "friday", "="),
    (r"So we get \boxed{\left(1, \frac{1}{2}\right)}.", "(1, 0.5)", "="),
    (r"The answer is: $\boxed{7}$.", "7", "="),
    (r"First \boxed{1}, then \boxed{2}.", "2", "="),
    (r"So we get \boxed{\frac{1}{2}", "0.5", "-"),  # cut by the limit of new tokens
    # text and formulas
    (r"The answer is: \text{Monday}", "Friday", "!"),
    ("The answer is: (C)", "C", "="),
    (r"The answer is: 2\sqrt{3}", r"2\sqrt3", "="),
    (r"The answer is: 2\sqrt{3}", "2", "!"),
    ("The answer is: x = 5", "5", "="),
    ("The answer is: 2x", "2", "!"),
    # which mark wins: "The answer is:" before "####" before a box before "the answer is"; of one kind the last
    ("#### 7\nThe answer is: 8", "8", "="),
    ("#### 7\nThe answer is: 8", "7", "!"),
    ("#### 72", "72", "="),
    ("#### $1,080", "1080", "="),
    (r"The answer is 120 \boxed{5}" "\n#### 120", "120", "="),
    (r"The answer is 4, I think. No: \boxed{5}", "5", "="),
    ("The answer is: 5. No, wrong.\nThe answer is: 7", "7", "="),
    ("**The answer is:** 7", "7", "="),
    ("The answer is:\n\n7", "7", "="),
    ("The final answer is: 7", "7", "="),
    ("the answer is 7.", "7", "="),
    # a next question is no part of the answer
    ("The answer is: 7\n\nQuestion: 1 + 1?\nThe answer is: 2", "7", "="),
    ("The answer is: 7\n\n### Instruction:\nAdd.\n\n### Response: The answer is: 2", "7", "="),
    ("The answer is: 7<|im_end|>\nThe answer is: 2", "7", "="),
    # none
    ("", "7", "-"),
    ("So he has 7.", "7", "-"),
    ("The answer is:", "7", "-"),
    ("### 7", "7", "-"),
    ("#### Step 1", "1", "-"),
]


@pytest.mark.parametrize(("text", "gold", "verdict"), PAIRS)
def test_text_is_judged_by_value(text: str, gold: str, verdict: str) -> None:
    steps = "Tom has 3, then 4.\n"
    assert judge(Row("Q", f"{steps}The answer is: {gold}", "GSM", "Q"), steps + text).verdict == VERDICTS[verdict]


def test_there_are_enough_pairs_of_each_verdict() -> None:
    counts = {sign: sum(pair[2] == sign for pair in PAIRS) for sign in VERDICTS}
    assert len(set(PAIRS)) == len(PAIRS) >= 60
    assert min(counts.values()) >= 6
