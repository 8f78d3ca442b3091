"""The simulator keeps the executor's contract: what starts before a step's norm is known, and what waits for it."""

from dataclasses import replace

import pytest

from lazytrain.solver.machine import Event
from lazytrain.solver.plan import UnitPlan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate
from lazytrain.solver.toys import make_toy_problem

RESIDENT = UnitPlan()
VISITING = UnitPlan(weights="host", states="host", grads="device")
WITH_GRADS = replace(VISITING, grads="host")
ON_CPU = replace(WITH_GRADS, update="cpu")
ON_NVME = replace(VISITING, weights="nvme", states="nvme")


def play(problem: Problem, *blocks: UnitPlan) -> tuple[Event, ...]:
    return simulate(problem, make_plan(problem, [RESIDENT, *blocks, RESIDENT], 2)).timeline


def loaded_early(events: tuple[Event, ...]) -> list[str]:
    """Return the units whose states are loaded before the norm: such a load is issued behind the last backward."""
    last_backward = max(i for i, event in enumerate(events) if event.name == "embed backward")
    return [event.unit for event in events[last_backward:] if event.name == "load states"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((VISITING, VISITING, VISITING, VISITING), ["block.0", "block.1"]),  # two update buffers
        ((RESIDENT, VISITING, RESIDENT, WITH_GRADS), ["block.1", "block.3"]),
        ((VISITING, ON_CPU, VISITING, VISITING), ["block.0"]),
        ((ON_CPU, VISITING, VISITING, VISITING), []),
        ((VISITING, ON_NVME, VISITING, VISITING), ["block.0"]),
        ((RESIDENT, RESIDENT, RESIDENT, RESIDENT), []),
    ],
)
def test_states_of_the_first_device_updates_come_before_the_norm(
    blocks: tuple[UnitPlan, ...], expected: list[str]
) -> None:
    problem = make_toy_problem(1, num_blocks=4, allow_nvme=True)
    events = play(problem, *blocks)
    assert loaded_early(events) == expected
    visiting = sum(block.moves_states for block in blocks)
    assert sum(event.name == "load states" for event in events) == visiting, "each is loaded once a step"


def test_the_head_starts_when_dram_has_moved_what_the_sweep_moves() -> None:
    problem = make_toy_problem(1, num_blocks=4)
    problem = replace(problem, hardware=replace(problem.hardware, dram_gbs=2.0))
    events = play(problem, WITH_GRADS, RESIDENT, ON_CPU, replace(RESIDENT, boundary="host"))
    first, _, third, last = problem.blocks
    first_bytes = 2 * first.weight_bytes + 2 * first.state_bytes + first.grad_bytes  # both ways, but grads
    moved = first_bytes + third.weight_bytes + problem.num_microbatches * last.boundary_bytes
    moved -= first.weight_bytes  # which stay in their slot from backward
    (head,) = (event for event in events if event.name == "head")
    assert head.start_ms == pytest.approx(moved / 2e6 + third.cpu_update_ms), "DRAM is busy all of an update"


@pytest.mark.parametrize(("update_ms", "named"), [(5e3, "cpu"), (1e-3, "host memory")])
def test_dram_is_named_where_copies_keep_it_busy_and_the_cpu_where_updates_do(update_ms: float, named: str) -> None:
    problem = make_toy_problem(1, num_blocks=4)
    rate = 1e6 if named == "cpu" else 0.1
    blocks = tuple(replace(block, cpu_update_ms=update_ms) for block in problem.blocks)
    problem = replace(problem, blocks=blocks, hardware=replace(problem.hardware, dram_gbs=rate))
    plan = make_plan(problem, [RESIDENT, ON_CPU, ON_CPU, ON_CPU, ON_CPU, RESIDENT], 2)
    assert simulate(problem, plan).bound_by.startswith(f"{named} (")


def test_updates_wait_for_the_norm_and_early_grads_for_their_store() -> None:
    problem = make_toy_problem(1, num_blocks=4)
    events = play(problem, WITH_GRADS, WITH_GRADS, VISITING, ON_CPU)
    assert all(event.start_ms >= 0 for event in events if event.name == "update")
    stored = {event.unit: event.end_ms for event in events if event.name == "store grads"}
    early = {event.unit: event for event in events if event.name == "load grads"}
    for unit in ("block.0", "block.1"):
        assert early[unit].start_ms >= stored[unit]
