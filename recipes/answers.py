"""Find the answer in a text and compare two answers by value.

The practice of MetaMath's and GSM8K's evaluations, with these choices:

- The text is cut at the first stop; then the last "The answer is: X" counts, else the last "#### X", else the last
  "\\boxed{X}", else the last "the answer is X".
- Numbers are compared exactly, as fractions: 3/4 is 0.75, 0.333 is not 1/3, and nothing is rounded to whole numbers.
- Currency signs, the percent sign and units are dropped, as both practices do: 50% is 50, and is not 0.5.
- What is not a number (sqrt{5}, (1, 2), Friday) is compared as text, without spaces and LaTeX's decoration.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

DEFAULT_STOPS = (
    "### Instruction",
    "### Response",
    "Instruction:",
    "Response:",
    "Question:",
    "USER:",
    "ASSISTANT:",
    "\nQ:",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "</s>",
)
MAX_CHARS = 500  # a longer answer is compared as it stands: no answer to a problem has this length

_COLON = re.compile(r"(?i)the (?:final )?answer is ?:")
_HASHES = re.compile(r"####(?= ?[-+$\\]*\.?\d)")
_NO_COLON = re.compile(r"(?i)the (?:final )?answer is\b")
_SPACED = re.compile(r"(?<![\w.,/])(?<!\d )\d{1,3}(?: \d{3})+(?![\w,/]| [\d/\\])")  # 1 000 000
_SENTENCE_END = re.compile(r"(?<=\d)\.\s+(?=[A-Z])")

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_FRAC = rf"\\frac ?\{{ ?(?P<over>-?{_DECIMAL}) ?\}} ?\{{ ?(?P<under>-?{_DECIMAL}) ?\}}"
_NUMBER = re.compile(
    rf"(?P<sign>[-+] ?)?(?:(?P<mixed>\d+(?: (?=\d)| ?(?=\\frac)))?"
    rf"(?:{_FRAC}|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL}))|(?P<plain>{_DECIMAL}))"
)
_POWER_OF_TEN = re.compile(
    r" ?(?:\\times|\\cdot|[*x]) ?10 ?\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3}))|[eE]([-+]?\d{1,3})"
)
_LARGE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# Units may follow a number at once (5cm) or after a space (5 cm, 72 clips). A lone letter is a variable unless it is a
# unit's sign.
_UNIT_EXPONENT = re.compile(r"(?<=[a-zA-Z]) ?\^ ?(?:\{ ?[23] ?\}|[23])(?!\d)")
_ATTACHED_UNITS = re.compile(r"(?i)cm|mm|km|kg|mg|ml|ft|lb|lbs|oz|mph|am|pm|st|nd|rd|th|min|hr|hrs|kmh|sec")
_LETTER_UNITS = "aAImgshlLCFVWNJ"
_NOT_UNITS = re.compile(r"(?i)and|or|to|plus|minus|times|over|out|by|of|divided|squared|cubed|factorial|mod")
_NOT_LEADS = re.compile(
    r"(?i)negative|minus|plus|not|no|less|more|greater|fewer|least|most|between|sqrt|root|log|ln|sin|cos|"
    r"tan|pi|base|over|under|above|below"
)
_LEAD = re.compile(r"[A-Za-z][A-Za-z' ,]{0,60}")
_REST = re.compile(r"[A-Za-z ,.;:!?'\"()/_-]*")

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname) ?\{([^{}]*)\}")
_CHARACTERS = str.maketrans(dict(zip("−–—\u00a0\u202f", "---  "))) | str.maketrans(
    {"×": "\\times", "·": "\\cdot", "π": "\\pi", "∞": "\\infty", "√": "\\sqrt", "²": "^2", "³": "^3"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
)
_SIMPLIFICATIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[!,;:()\[\]]", ""),
        (r"(?<!\\)\\ |~", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
        (r"(\\frac ?\{[^{}]*\}) ?(\d)", r"\1{\2}"),
        (r"(?<![a-zA-Z\\])sqrt", r"\\sqrt"),
        (r"\\sqrt ?(\w)", r"\\sqrt{\1}"),
        (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
        (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\circ|\\degree|°", " "),
        (r"\\?[$%]|\bUS(?=\$)|[£€¢]", " "),
        (r"\s+", " "),
    )
)


class _Number(NamedTuple):
    value: Fraction
    lead: str


def extract_answer(text: str, stops: Sequence[str] = DEFAULT_STOPS) -> str | None:
    """Return the answer that a text gives, or None where it gives none.

    Args:
        text: what a model wrote, or a response of the data.
        stops: the text counts up to the first of these (it may go on to a next question with another answer).

    Example:
        >>> extract_answer("48 + 24 = 72.\\nThe answer is: 72 clips, altogether.\\n\\nQuestion: The answer is: 5")
        '72 clips, altogether'
    """
    text = cut_at_stop(text, stops)
    found = (_find_after(_COLON, text), _find_after(_HASHES, text), _unbox(text), _find_after(_NO_COLON, text))
    return next((answer for part in found if part and (answer := _clean(part))), None)


def answers_equal(a: str, b: str) -> bool:
    """Return whether two answers have the same value (see the head of this file).

    Example:
        >>> answers_equal("$1,234.50.", "1234.5"), answers_equal("3/4", "0.75"), answers_equal("50%", "0.5")
        (True, True, False)
    """
    if max(len(a), len(b)) > MAX_CHARS:
        return a.split() == b.split()
    a, b = _simplify(a), _simplify(b)
    if _scalars_equal(a, b):
        return True
    parts_a, parts_b = _split_tuple(a), _split_tuple(b)
    return len(parts_a) == len(parts_b) > 1 and all(_scalars_equal(x, y) for x, y in zip(parts_a, parts_b))


def is_number(text: str) -> bool:
    """Return whether a text is a number and nothing else, but for currency, percent and units."""
    if len(text) > MAX_CHARS:
        return False
    number = _parse_number(_simplify(text))
    return number is not None and not number.lead


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first of the stops."""
    return text[: min((position for stop in stops if (position := text.find(stop)) >= 0), default=len(text))]


def _find_after(marker: re.Pattern[str], text: str) -> str | None:
    end = -1
    for match in marker.finditer(text):
        end = match.end()
    return None if end < 0 else _take_line(text[end:])


def _take_line(text: str) -> str:
    """Return the first line that is not blank, or as many lines as its braces and LaTeX environments need to close."""
    lines = text.lstrip()[: 4 * MAX_CHARS].split("\n")
    taken = ""
    for line in lines:
        taken += line
        if taken.count("{") <= taken.count("}") and taken.count("\\begin") <= taken.count("\\end"):
            return taken
        taken += " "
    return lines[0]


def _unbox(text: str) -> str | None:
    """Return what the last \\boxed or \\fbox holds; its braces are counted, so they may be nested."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed").lstrip(" ")
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position]
    return None


def _clean(answer: str) -> str:
    """Return an answer without markup around it, without the next sentence and without a period at its end."""
    boxed = _unbox(answer)
    answer = (answer if boxed is None else boxed).strip(" \t\r:*`")
    answer = _SENTENCE_END.split(answer, maxsplit=1)[0].rstrip(" .*`")
    if len(answer) > 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip(" .")
    return answer


def _simplify(answer: str) -> str:
    simple = _WRAPPER.sub(r" \1 ", answer.translate(_CHARACTERS))
    for pattern, replacement in _SIMPLIFICATIONS:
        simple = pattern.sub(replacement, simple)
    simple = _SPACED.sub(lambda found: found[0].replace(" ", ""), simple).strip().rstrip(" .")
    name, equals, value = simple.partition("=")
    if equals and "=" not in value and len(name.strip()) <= 2:  # x = 5
        simple = value.strip()
    inner = re.fullmatch(r"\((-?\w+)\)", simple)  # (C)
    return (inner.group(1) if inner else simple) or answer.strip()


def _parse_number(simple: str) -> _Number | None:
    match = _NUMBER.search(simple)
    if match is None:
        return None
    lead, rest = simple[: match.start()], simple[match.end() :]
    if lead and not _is_lead(lead, match["sign"] or ""):
        return None
    value = _read_value(match)
    power = _POWER_OF_TEN.match(rest)
    if power:
        value = value and value * Fraction(10) ** int(next(filter(None, power.groups())))
        rest = rest[power.end() :]
    words = re.findall("[a-z]+", rest.lower()) or [""]
    if value is None or not _is_unit(rest):
        return None
    return _Number(value * _LARGE.get(words[0], 1), lead.strip(" =:,").casefold())


def _read_value(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["over"] or match["top"] or match["plain"], match["under"] or match["bottom"] or "1"
    numerator, denominator = Fraction(top.replace(",", "")), Fraction(bottom.replace(",", ""))
    if denominator == 0:
        return None
    value = int(match["mixed"] or 0) + numerator / denominator
    return -value if (match["sign"] or "").startswith("-") else value


def _is_lead(lead: str, sign: str) -> bool:
    """Return whether the text before a number only introduces it ("about 5", "the total is 5", not "x - 5")."""
    text = lead.rstrip(" =:")
    words = re.findall("[A-Za-z]+", text.replace("'", ""))
    return (
        lead[-1] in " =:"
        and not sign.endswith(" ")
        and _LEAD.fullmatch(text) is not None
        and not any(_NOT_LEADS.fullmatch(word) or (len(word) == 1 and word not in "aAI") for word in words)
    )


def _is_unit(rest: str) -> bool:
    """Return whether the text after a number leaves its value alone ("72 clips, altogether", not "2x")."""
    rest = _UNIT_EXPONENT.sub("", rest).replace("'", "")
    words = re.findall("[A-Za-z]+", rest)
    if not words:
        return not rest.strip(' .,;?"')
    if rest[0].isalpha() and not _ATTACHED_UNITS.fullmatch(words[0]):
        return False
    return (
        _REST.fullmatch(rest) is not None
        and re.match(r"[:(]|[ ]?-(?![A-Za-z]{2})", rest) is None
        and not _NOT_UNITS.fullmatch(words[0])
        and "half" not in (word.lower() for word in words)
        and all(len(word) > 1 or word in _LETTER_UNITS for word in words)
    )


def _scalars_equal(a: str, b: str) -> bool:
    number_a, number_b = _parse_number(a), _parse_number(b)
    if number_a is None or number_b is None:
        return _canonicalize(a) == _canonicalize(b)
    same_lead = not number_a.lead or not number_b.lead or number_a.lead == number_b.lead
    return same_lead and number_a.value == number_b.value


def _canonicalize(simple: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,}", simple):
        simple = simple.casefold()
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", simple)  # 1 2 is not 12
    text = re.sub(r"(?:\\cdot|\*)(?=[\\A-Za-z(])", "", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    return re.sub(r"(?<!\d)\.(?=\d)", "0.", text)


def _split_tuple(simple: str) -> list[str]:
    """Return the elements of (1, 2), [1, 2) or 1, 2, with the brackets as elements; a number is one element."""
    if _parse_number(simple) is not None:
        return [simple]
    ends = []
    if simple[:1] in ("(", "[") and simple[-1:] in (")", "]"):
        ends, simple = [simple[0], simple[-1]], simple[1:-1]
    parts, depth = [""], 0
    for character in simple:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [*(part.strip() for part in parts), *ends]
