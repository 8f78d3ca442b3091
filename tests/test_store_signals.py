"""SIGTERM and SIGINT in every phase of the recipe: exit code, the printed bound kept, exact resume.

CI takes most phases with one of the two signals (tests/test_metamathqa.py has both in a step);
`LAZYTRAIN_ALL_SIGNALS=1` takes all with both, and also runs again where nothing was saved.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CODES = {"SIGTERM": 143, "SIGINT": 130}
# Phase -> the checkpoints that are there after the signal (a save every second step of four).
NOTHING_YET = {"planning": [], "compile": [], "load": []}
SAVED = {
    "step": ["step_00000002"],
    "update": ["step_00000002"],
    "save": ["step_00000002"],
    "export": ["step_00000002", "step_00000004"],
    "evaluation": ["step_00000002", "step_00000004"],
}
PHASES = [*NOTHING_YET, *SAVED]
IN_CI = ("planning", "compile", "load", "update", "save", "evaluation")


@pytest.mark.slow
def test_a_signal_in_any_phase_ends_cleanly_and_the_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    names = list(CODES)
    cases = [(phase, names[i % 2]) for i, phase in enumerate(IN_CI)]
    if "LAZYTRAIN_ALL_SIGNALS" in os.environ:
        cases = [(phase, name) for phase in PHASES for name in names]
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "signal_driver.py"), str(tmp_path), *(f"{p}={n}" for p, n in cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 + 60 * len(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert len(results) == len(cases)
    for phase, name in cases:
        result = results[f"{phase}={name}"]
        log = result["log"]
        assert result["code"] == CODES[name], log
        assert log.count(f"{name}: stopping") == 1, log
        assert "Traceback" not in log
        assert result["steps"] == (NOTHING_YET | SAVED)[phase], log
        if result["ran_again"]:
            assert result["code_of_resume"] == 0
            assert result["resumed"] == (phase in SAVED)
            assert result["same"], (phase, name)
        assert result["waited_s"] >= 0  # the signal was sent
        if phase in SAVED:
            assert result["ran_again"]
            assert ("stopped in the evaluation after training" in log) == (phase in ("export", "evaluation")), log
            assert result["bound_s"] is not None, log
            assert result["waited_s"] < result["bound_s"] + 1, (phase, name)  # the bound is printed in whole seconds
        else:
            assert "nothing to save yet" in log
            assert result["waited_s"] < 10
