"""What the doctor finds."""

from typing import NamedTuple

OK, WARN, FAIL = "OK", "WARN", "FAIL"


class Finding(NamedTuple):
    """One fact about a machine; `remedy` is one line, empty where nothing is to be done."""

    name: str
    status: str
    text: str
    remedy: str = ""
