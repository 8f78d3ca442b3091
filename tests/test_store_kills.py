"""Tiny runs killed with SIGKILL inside saves, write-backs, reads and steps end, resumed, with the same bits.

What a plan keeps on NVMe is linked into the checkpoints.

CI takes 18 points; `LAZYTRAIN_KILL_POINTS=200 pytest tests/test_store_kills.py` takes more (a few minutes).
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLASSES = {
    "spill write", "save write", "save rename or delete", "spill read", "step", "save sync", "metrics", "time",
    "save link",
}  # fmt: skip
KILLED = -9


@pytest.mark.slow
def test_killed_runs_end_with_the_bits_of_one_left_alone(tmp_path: Path) -> None:
    num_points = int(os.environ.get("LAZYTRAIN_KILL_POINTS", "18"))
    seed = os.environ.get("LAZYTRAIN_KILL_SEED", "0")
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "kill_driver.py"), str(tmp_path), seed, str(num_points)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120 + 10 * num_points)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    points = result["points"]
    assert len(points) == num_points
    assert (result["sums"], result["rows"]) == (24, 6)  # 18 weights, 6 units' states; 6 steps
    assert [point for point in points if not point["same"]] == [], done.stderr[-3000:]
    assert {code for point in points for code in point["codes"]} <= {KILLED, 0}
    # The points were reached (a time may come after the end, a second kill after the last event of its class).
    killed = Counter(point["kind"] for point in points if point["codes"][0] == KILLED)
    assert set(killed) | {"time"} == CLASSES
    assert sum(killed.values()) >= 0.8 * num_points
