"""The simulator keeps the executor's contract: what starts before a step's norm is known, and what waits for it."""

from dataclasses import replace

import pytest

from lazytrain.solver.machine import Event
from lazytrain.solver.plan import UnitPlan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import copy_ms
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
    events = play(problem, ON_CPU, WITH_GRADS, RESIDENT, replace(RESIDENT, boundary="host"))
    first, second, _, last = problem.blocks
    second_bytes = 2 * second.weight_bytes + 2 * second.state_bytes + second.grad_bytes  # both ways, but grads
    moved = second_bytes + first.weight_bytes + problem.num_microbatches * last.boundary_bytes
    moved -= second.weight_bytes  # which stay in their slot from backward
    (head,) = (event for event in events if event.name == "head")
    assert head.start_ms == pytest.approx(moved / 2e6 + first.cpu_update_ms), "DRAM is busy all of an update"


def test_updates_on_the_cpu_are_slower_by_what_was_copied_by_then() -> None:
    problem = make_toy_problem(1, num_blocks=4)
    slow = tuple(replace(block, cpu_update_ms=200.0) for block in problem.blocks)
    problem = replace(problem, blocks=slow, hardware=replace(problem.hardware, dram_gbs=0.5 * problem.hardware.h2d_gbs))
    events = play(problem, ON_CPU, WITH_GRADS, ON_CPU, ON_CPU)
    loads = {event.unit: event.start_ms for event in reversed(events) if event.name == "load weights"}
    forwards = {event.unit: event.start_ms for event in events if event.name == "forward"}
    first, second, third, _ = problem.blocks
    moved = first.weight_bytes
    assert loads["block.0"] == pytest.approx(200.0), "nothing yet"
    moved += second.weight_bytes + 2 * second.state_bytes + second.grad_bytes  # weights only home
    per_byte_ms = 1 / (0.5e6 * problem.hardware.h2d_gbs)
    assert loads["block.2"] == pytest.approx(400.0 + moved * per_byte_ms)
    assert loads["block.3"] == pytest.approx(600.0 + (moved + third.weight_bytes) * per_byte_ms)
    assert forwards["block.3"] > loads["block.3"]


def test_a_head_that_the_cpu_updates_last_is_loaded_behind_its_slowed_update() -> None:
    problem = make_toy_problem(1, num_blocks=4)
    slow = [replace(unit, cpu_update_ms=200.0) for unit in (*problem.blocks, problem.head)]
    hardware = replace(problem.hardware, dram_gbs=4 * problem.hardware.h2d_gbs)
    problem = replace(problem, blocks=tuple(slow[:-1]), head=slow[-1], hardware=hardware)
    on_cpu = make_plan(problem, [RESIDENT, ON_CPU, ON_CPU, ON_CPU, ON_CPU, replace(ON_CPU, weights="device")], 2)
    events = simulate(problem, on_cpu).timeline
    updated = [unit for unit in problem.units[1:] if unit.num_params]
    moved = sum(unit.weight_bytes for unit in updated)
    updates_ms = sum(unit.cpu_update_ms for unit in updated)
    begins_ms = next(event.start_ms for event in events if event.name == "update" and event.queue == "cpu")
    slowed_ms = moved / (4e6 * problem.hardware.h2d_gbs) + updates_ms
    loaded_ms = copy_ms(problem, problem.head.weight_bytes, to_device=True)
    (head,) = (event for event in events if event.name == "head")
    assert begins_ms == 0.0
    assert head.start_ms == pytest.approx(
        slowed_ms + loaded_ms - problem.head.weight_bytes / (4e6 * problem.hardware.h2d_gbs)
    )


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
