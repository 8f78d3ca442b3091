"""Look at this machine and say what a run would miss, with a remedy for each finding.

    lazytrain doctor [DIR]        DIR: where runs and spill files would go

OK: fine. WARN: a run works, slower or with less than it could have. FAIL: a run will not work, and the exit code is 1.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.findings import FAIL, OK, WARN, Finding
from lazytrain.recipes.host_checks import check_cpu, check_disk, check_host_memory, check_memlock, check_shared_memory
from lazytrain.recipes.software_checks import (
    check_compiler,
    check_driver,
    check_gpu,
    check_python,
    check_scip,
    check_torch,
    check_triton,
)

MIB = 2**20


class Check(NamedTuple):
    """A name, and a function that yields what it finds."""

    name: str
    find: Callable[[], Iterator[Finding]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 0, or 1 if a run would not work."""
    parser = OneLineParser(
        prog="lazytrain doctor",
        description="Look at this machine: what a run would miss, and what to do about it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path(), help="where runs and spill files go (default: here)"
    )
    parser.add_argument("--size", type=int, default=256, help="MiB to test the disk with, 0 = not (default: 256)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    if not 0 <= options.size <= 2**20:
        parser.error(f"--size is {options.size}; give MiB from 0 to {2**20}")
    findings = []
    for finding in examine(list_checks(options.directory, options.size * MIB)):
        findings.append(finding)
        if not options.json:
            print(format_finding(finding), flush=True)
    is_fit = all(finding.status != FAIL for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_fit, "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        print(summarize(findings))
    return 0 if is_fit else 1


def list_checks(directory: Path, test_bytes: int) -> list[Check]:
    """Return all checks, in the order in which they are told."""
    return [
        Check("Python", check_python),
        Check("torch", check_torch),
        Check("GPU", check_gpu),
        Check("driver", check_driver),
        Check("Triton", check_triton),
        Check("C++ compiler", check_compiler),
        Check("SCIP", check_scip),
        Check("CPU", check_cpu),
        Check("host memory", check_host_memory),
        Check("locked memory", check_memlock),
        Check("/dev/shm", check_shared_memory),
        Check("disk", lambda: check_disk(directory, test_bytes)),
    ]


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield what the checks find. One that breaks down is itself a finding: the others still run."""
    for check in checks:
        try:
            yield from check.find()
        except Exception as error:
            text = f"can't be checked: {type(error).__name__}: {' '.join(str(error).split())}"
            yield Finding(check.name, WARN, text, "check it by hand; the other findings stand")


def format_finding(finding: Finding) -> str:
    """Return one line, and the remedy on a second one."""
    line = f"{finding.status:<4} {finding.name}: {finding.text}"
    return f"{line}\n     -> {finding.remedy}" if finding.remedy else line


def summarize(findings: Sequence[Finding]) -> str:
    """Return the last line: how many of each kind."""
    counts = {status: sum(finding.status == status for finding in findings) for status in (OK, WARN, FAIL)}
    verdict = "a run would not work here" if counts[FAIL] else "a run will work here"
    return f"{verdict}: {counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL"


if __name__ == "__main__":
    sys.exit(main())
