"""The room on NVMe that the planner counts is what the store takes, and staging is of one chunk."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from test_profiler import make_profiler
from test_trainer import ON_NVME, PLANS, STREAMED, keep, make_plan
from toys import make_batch, make_model, make_params

from lazytrain import adamw8bit, make_train_step
from lazytrain.base import Model
from lazytrain.homes import spill_room
from lazytrain.solver.memory import _nvme_staging, account, align
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.solver.plan import make_plan as make_solver_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.toys import make_toy_problem
from lazytrain.store_slots import count_slots

ALL_THERE = replace(ON_NVME, **keep(99, "nvme"))
RUNS = {
    "all on nvme": PLANS["all on nvme"],
    "all on nvme, updated on cpu": PLANS["all on nvme, updated on cpu"],
    "states on nvme": PLANS["states on nvme"],
    "mixed": PLANS["mixed"],
    "states of embed and head there too": make_plan(default=ON_NVME, ends=UnitPlan(states="nvme")),
    "one block": make_plan(change=lambda i, unit: ON_NVME if i == 1 else STREAMED),
    "three chunks": make_plan(default=ALL_THERE, microbatches=3),
    "boundaries of three chunks": make_plan(default=replace(STREAMED, boundary="nvme"), microbatches=3),
}


def with_long_names(model: Model) -> Model:
    """Return the model with names in one block whose header is longer than the others' by some kilobytes."""
    block = model.blocks[1]
    params = {name: replace(spec, full_name=f"{'long' * 500}.{name}") for name, spec in block.params.items()}
    return replace(model, blocks=(model.blocks[0], replace(block, params=params), *model.blocks[2:]))


@cache
def measure(is_long: bool, num_microbatches: int) -> Problem:
    """Return the toy model's problem."""
    model = with_long_names(make_model()) if is_long else make_model()
    return make_profiler(model=model).problem(num_microbatches)


def clamp_points(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with points that the curves have; the executor takes the last one for those beyond."""
    points = [len(unit.points) - 1 for unit in problem.units]
    units = [replace(u, residual_point=min(u.residual_point, last)) for u, last in zip(plan.units, points, strict=True)]
    return make_solver_plan(problem, units, plan.prefetch_depth)


@pytest.mark.parametrize(("name", "is_long"), [*((name, False) for name in RUNS), ("mixed", True), ("one block", True)])
def test_a_run_takes_no_more_than_the_account(name: str, is_long: bool, tmp_path: Path) -> None:
    plan, optimizer = RUNS[name], adamw8bit(3e-3)
    model = with_long_names(make_model()) if is_long else make_model()
    step = make_train_step(model, optimizer, plan, device="cpu", dtype=torch.float32, spill_dir=tmp_path)
    state = step.init(make_params(model))
    for i in range(3):
        state, _ = step(state, make_batch(i, rows=8))
    state.engine.finish_updates()
    store, problem = state.engine.spill, measure(is_long, plan.num_microbatches)
    assert store is not None
    planned_bytes = account(problem, clamp_points(problem, plan)).nvme_bytes
    own_bytes, _ = spill_room(model, plan, optimizer.settings, torch.float32, None)
    assert own_bytes <= store.reserved_bytes <= planned_bytes


@pytest.mark.parametrize("name", RUNS)
def test_staging_of_weights_and_states_is_what_the_account_has(name: str, tmp_path: Path) -> None:
    plan = RUNS[name]
    step = make_train_step(make_model(), adamw8bit(3e-3), plan, device="cpu", dtype=torch.float32, spill_dir=tmp_path)
    state = step.init(make_params(make_model()))
    for i in range(3):
        state, _ = step(state, make_batch(i, rows=8))
    state.engine.finish_updates()
    problem = measure(False, plan.num_microbatches)
    kept = [replace(unit, residual_point=0, residuals="none", boundary="device") for unit in plan.units]
    taken = sum(buffer.numel() for buffer in state.engine.homes._staging.values())
    assert taken <= _nvme_staging(problem, make_solver_plan(problem, kept, plan.prefetch_depth))


def test_files_of_equal_blocks_are_as_large_however_long_their_names() -> None:
    """Else each length would need spare files of its own, which no planner could foresee from a block's costs."""
    model, plan = with_long_names(make_model()), RUNS["all on nvme"]
    one = RUNS["one block"]
    rooms = [spill_room(model, p, adamw8bit(3e-3).settings, torch.float32, None)[0] for p in (one, plan)]
    assert rooms[0] * (4 + 2) == rooms[1] * (1 + 2)


def random_units(problem: Problem, seed: int) -> list[UnitPlan]:
    there = [seed >> (u % 16) & 1 for u in range(len(problem.units))]
    return [UnitPlan(weights="nvme", states="nvme") if here else UnitPlan() for here in there]


@pytest.mark.parametrize("seed", range(40))
def test_weights_and_states_take_what_the_store_makes_for_them(seed: int) -> None:
    problem = make_toy_problem(seed, num_blocks=1 + seed % 9, allow_nvme=True)
    units = random_units(problem, 0b1011_0111_0101 * (seed + 3))
    plan = make_solver_plan(problem, units, 2)
    pairs = [(unit, size) for unit in problem.units for size in (unit.weight_bytes, unit.state_bytes)]
    there = [units[u // 2].weights == "nvme" for u in range(len(pairs))]
    sizes = [problem.file_head_bytes + align(size) for (_, size), here in zip(pairs, there, strict=True) if here]
    assert account(problem, plan).nvme_bytes == total_bytes(sizes)


def total_bytes(sizes: Sequence[int]) -> int:
    return sum(size * count for size, count in count_slots(sizes, 0).items())


def test_weights_and_states_of_28_blocks_have_two_spare_files_each() -> None:
    weights, states = 466 * 10**6, 700 * 10**6
    problem = make_toy_problem(1, num_blocks=28, allow_nvme=True)
    blocks = [replace(block, weight_bytes=weights, state_bytes=states) for block in problem.blocks]
    problem = replace(problem, blocks=tuple(blocks))
    units = [UnitPlan(), *[UnitPlan(weights="nvme", states="nvme")] * 28, UnitPlan()]
    heads = 60 * problem.file_head_bytes
    assert (
        account(problem, make_solver_plan(problem, units, 2)).nvme_bytes
        == 30 * (align(weights) + align(states)) + heads
    )


@pytest.mark.parametrize(
    "spilled", [{"boundary": "nvme"}, {"boundary": "nvme", "residuals": "nvme", "residual_point": 1}]
)
def test_what_is_spilled_is_staged_one_chunk_at_a_time(spilled: dict) -> None:
    """More chunks of the same size: as much staging, a file more for each."""
    problem = replace(make_toy_problem(2, num_blocks=3, num_points=2, allow_nvme=True), num_microbatches=1)
    units = [UnitPlan(), *[UnitPlan(**spilled)] * 3, UnitPlan()]
    one, five = (
        account(more, make_solver_plan(more, units, 2)) for more in (problem, replace(problem, num_microbatches=5))
    )
    chunks = [
        [align(b.boundary_bytes)] + [align(b.points[1].residual_bytes)] * (len(spilled) > 1) for b in problem.blocks
    ]
    staging = 2 * max(max(sizes) for sizes in chunks) + 2 * max(sum(sizes) for sizes in chunks)
    assert one.host_bytes == five.host_bytes == staging
    spare = 2 * max(max(sizes) for sizes in chunks)
    assert one.nvme_bytes == sum(map(sum, chunks)) + spare
    assert five.nvme_bytes == 5 * sum(map(sum, chunks)) + spare
