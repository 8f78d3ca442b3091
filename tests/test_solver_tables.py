"""The recipe that prints the planner's tables; and what the tables brought to light."""

from dataclasses import replace
from itertools import product

import pytest

from lazytrain.recipes import planner_tables
from lazytrain.solver.capacity import find_largest_batch
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.hardware import PRESETS
from lazytrain.solver.memory import GIB, Accountant
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.plan import UnitPlan, make_plan
from lazytrain.solver.problem import Problem

SMALL = "qwen2.5-0.5b"
SETTINGS = {
    "NUM_BLOCKS": (3,),
    "NUM_SEEDS": 2,
    "SOLVED_CASES": (("h200", 1),),
    "GAINS_MODELS": (SMALL,),
    "GAINS_MACHINES": ("h200",),
    "GAINS_BATCHES": (1,),
    "BATCH_MODELS": (SMALL,),
    "BATCH_DEVICE_BYTES": 4 * GIB,
    "WHICH_MACHINES": ("h200",),
    "WHICH_HOSTS_GIB": (8,),
    "WHICH_BATCH": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("table", sorted(planner_tables.TABLES))
def test_a_table_is_markdown(table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setattr(planner_tables, name, value)
    assert planner_tables.main([table, "--time-limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert set(lines[1]) == set("|- ")
    assert len({line.count("|") for line in lines}) == 1
    assert not any("nan" in line for line in lines)


def test_rows_of_another_name_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_tables.main(["which-models", "--only", "nothing"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_the_largest_batch_shares_boundaries_out_over_device_and_host() -> None:
    """14B, 24 GiB, one chunk: the host lacks 0.3 GiB for 29 rows, and the device has 5 GiB to spare."""
    hardware = replace(PRESETS["h200"], device_memory_bytes=24 * GIB)

    def make(batch: int, _: int) -> Problem:
        return problem_from_config(KNOWN_MODELS["qwen2.5-14b"], hardware, batch=batch, seq=1024, microbatch=batch)

    problem = make(29, 1)
    streamed = UnitPlan(weights="host", states="host", update="cpu", grads="host", boundary="host")
    on_device, edges = (
        replace(streamed, boundary="device"),
        [UnitPlan(), replace(streamed, weights="device", boundary="device")],
    )
    plans = [
        make_plan(problem, [embed, *[on_device] * 2, *[streamed] * 46, head], 2)
        for embed, head in product(edges, edges)
    ]
    assert any(map(Accountant(problem).fits, plans)), "a plan that fits"
    assert find_largest_batch(make).batch >= 29
