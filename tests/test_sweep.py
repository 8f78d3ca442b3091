"""What a step computes and moves is what its plan says, counted exactly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import ON_NVME, keep
from torch.utils.flop_counter import FlopCounterMode
from toys import FF, ON_CPU, RESIDENT, STREAMED, D, T, make_batch, make_model, make_params, make_plan

from lazytrain import adamw8bit, make_train_step
from lazytrain.base import Context, Params
from lazytrain.errors import PlanError
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.store_units import packed_bytes
from lazytrain.trainer import param_getter

NUM_BLOCKS, ROWS = 4, 8
KEPT = replace(STREAMED, grads="device")
FORWARD_MATMUL_FLOPS = 2 * ROWS * T * D * FF  # one of a block's two


def count_flops(plan: Plan, tmp_path: Path) -> int:
    step = make_train_step(make_model(NUM_BLOCKS), adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path)
    state, _ = step(step.init(make_params(make_model(NUM_BLOCKS))), make_batch(0, rows=ROWS))
    with FlopCounterMode(display=False) as counter:
        step(state, make_batch(1, rows=ROWS))
    return counter.get_total_flops()


def count_bytes(plan: Plan, tmp_path: Path) -> tuple[dict[str, int], object]:
    step = make_train_step(make_model(NUM_BLOCKS), adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path)
    state = step.init(make_params(make_model(NUM_BLOCKS)))
    for i in range(2):
        state, _ = step(state, make_batch(i, rows=ROWS))
    state.engine.finish_updates()
    before = dict(state.engine.lanes.bytes_moved)
    state, _ = step(state, make_batch(2, rows=ROWS))
    state.engine.finish_updates()
    moved = {queue: count - before.get(queue, 0) for queue, count in state.engine.lanes.bytes_moved.items()}
    return moved, state.engine.homes.units[1].layout


def test_recompute_costs_the_forward_matmuls_that_backward_needs(tmp_path: Path) -> None:
    kept = count_flops(make_plan(default=replace(RESIDENT, **keep(99, "device"))), tmp_path)
    # Backward needs the first product's output again, not the second's.
    assert count_flops(make_plan(default=RESIDENT), tmp_path) == kept + NUM_BLOCKS * FORWARD_MATMUL_FLOPS
    half = make_plan(change=lambda i, unit: replace(unit, **keep(99, "host")) if i % 2 else unit)
    assert count_flops(half, tmp_path) == kept + NUM_BLOCKS // 2 * FORWARD_MATMUL_FLOPS


@pytest.mark.parametrize("microbatches", [1, 4])
def test_microbatches_cost_no_flops_and_no_weight_traffic(microbatches: int, tmp_path: Path) -> None:
    plan = make_plan(microbatches=microbatches)
    assert count_flops(plan, tmp_path) == count_flops(make_plan(), tmp_path)
    assert count_bytes(plan, tmp_path)[0] == count_bytes(make_plan(), tmp_path)[0]


def test_a_resident_plan_moves_nothing(tmp_path: Path) -> None:
    moved, _ = count_bytes(make_plan(default=replace(RESIDENT, **keep(99, "device"))), tmp_path)
    assert not any(moved.values())


def test_updates_on_the_cpu_move_grads_out_and_weights_in(tmp_path: Path) -> None:
    moved, layout = count_bytes(make_plan(default=ON_CPU, depth=2), tmp_path)
    assert moved["d2h"] == NUM_BLOCKS * layout.weight_bytes  # grads
    assert moved["h2d"] == (NUM_BLOCKS + NUM_BLOCKS - 2) * layout.weight_bytes  # forward, backward less the ring


@pytest.mark.parametrize(
    ("ends", "tied", "loads", "stores"),
    [
        ((STREAMED, STREAMED), False, ("embed weights states grads", "head weights states grads"), None),
        ((ON_CPU, ON_CPU), False, ("embed weights", "head weights"), ("embed grads", "head grads")),
        ((ON_CPU, KEPT), False, ("embed weights", "head weights states"), ("embed grads", "head weights states")),
        ((RESIDENT, KEPT), False, ("head states",), ("head weights states",)),  # nobody takes the slot from it
        ((STREAMED, RESIDENT), True, ("embed states grads",), ("embed weights states grads",)),
        ((ON_CPU, RESIDENT), True, ("embed weights",), ("embed grads",)),
    ],
)
def test_edges_move_what_their_slot_lacks(
    ends: tuple[UnitPlan, UnitPlan], tied: bool, loads: tuple[str, ...], stores: tuple[str, ...] | None
) -> None:
    model = make_model(NUM_BLOCKS, tied=tied, streams_embed=True)
    step = make_train_step(model, adamw8bit(1e-3), make_plan(default=RESIDENT, ends=ends), device="cpu")
    state = step.init(make_params(model))
    for i in range(2):
        state, _ = step(state, make_batch(i))
    homes, counts = state.engine.homes.units, state.engine.lanes.bytes_moved
    before = dict(counts)
    state, _ = step(state, make_batch(2))

    def count(lines: tuple[str, ...]) -> int:
        total = 0
        for unit, *names in (line.split() for line in lines):
            layout = homes[0 if unit == "embed" else -1].layout
            total += sum(layout.state_bytes if name == "states" else layout.weight_bytes for name in names)
        return total

    assert counts["h2d"] - before.get("h2d", 0) == count(loads)
    assert counts["d2h"] - before.get("d2h", 0) == count(loads if stores is None else stores)


def test_a_streamed_embed_comes_before_the_norm_once_the_head_has_left() -> None:
    model = make_model(NUM_BLOCKS, tied=False, streams_embed=True)
    step = make_train_step(model, adamw8bit(1e-3), make_plan(default=RESIDENT, ends=STREAMED), device="cpu")
    state = step.init(make_params(model))
    for i in range(2):
        state, _ = step(state, make_batch(i))
    names = [(span.name, span.unit) for span in state.engine.read_step()]
    after = names[names.index(("embed backward", "embed")) + 1 :]
    loads = [(f"load {what}", "embed") for what in ("weights", "states", "grads")]
    assert [name for name in after if name[0].startswith("load")] == loads
    assert names.index(("load weights", "head")) > names.index(("embed", "embed"))


def test_boundaries_and_residuals_go_out_and_come_back(tmp_path: Path) -> None:
    bare, _ = count_bytes(make_plan(), tmp_path)
    boundary, _ = count_bytes(make_plan(default=replace(STREAMED, boundary="host")), tmp_path)
    extra = NUM_BLOCKS * ROWS * T * D * torch.float32.itemsize
    assert boundary["d2h"] - bare["d2h"] == extra
    assert boundary["h2d"] - bare["h2d"] == extra
    spilled, _ = count_bytes(make_plan(default=replace(STREAMED, boundary="nvme")), tmp_path)
    assert spilled["nvme_write"] == spilled["nvme_read"] == extra
    residuals, _ = count_bytes(make_plan(default=replace(STREAMED, **keep(99, "host"))), tmp_path)
    assert residuals["d2h"] - bare["d2h"] == residuals["h2d"] - bare["h2d"] > extra


def test_nvme_is_written_once_a_step_and_read_for_each_use(tmp_path: Path) -> None:
    plan = make_plan(default=replace(ON_NVME, boundary="device"), depth=2)
    moved, layout = count_bytes(plan, tmp_path)
    assert moved["nvme_write"] == NUM_BLOCKS * (packed_bytes(layout) + layout.state_bytes)  # weights without padding
    assert moved["d2h"] == NUM_BLOCKS * (2 * layout.weight_bytes + layout.state_bytes)  # and grads, which stay in RAM


def test_first_loads_of_the_next_step_are_queued_before_the_norm_is_known() -> None:
    model = make_model(NUM_BLOCKS)
    step = make_train_step(model, adamw8bit(1e-3), make_plan(depth=2), device="cpu")
    state = step.init(make_params(model))
    for i in range(2):
        state, _ = step(state, make_batch(i, rows=ROWS))
    spans = state.engine.read_step()
    names = [(span.name, span.unit) for span in spans]
    after = names[names.index(("embed backward", "embed")) + 1 :]
    loads = [name for name in after if name[0].startswith("load")]
    # Two blocks are still in their slots: states and grads come to the two update buffers.
    assert loads == [
        ("load states", "blocks.0"),
        ("load grads", "blocks.0"),
        ("load states", "blocks.1"),
        ("load grads", "blocks.1"),
    ]


def test_a_unit_that_the_cpu_updates_is_not_loaded_ahead() -> None:
    model = make_model(NUM_BLOCKS)
    plan = make_plan(change=lambda i, unit: ON_CPU if i == 1 else unit)
    step = make_train_step(model, adamw8bit(1e-3), plan, device="cpu")
    state = step.init(make_params(model))
    for i in range(2):
        state, _ = step(state, make_batch(i, rows=ROWS))
    names = [(span.name, span.unit) for span in state.engine.read_step()]
    after = names[names.index(("embed backward", "embed")) + 1 :]
    assert [name for name in after if name[0].startswith("load")] == [
        ("load states", "blocks.0"),
        ("load grads", "blocks.0"),
    ]


def test_nothing_is_recorded_between_steps() -> None:
    model = make_model(NUM_BLOCKS)
    step = make_train_step(model, adamw8bit(1e-3), make_plan(depth=2), device="cpu")
    state, _ = step(step.init(make_params(model)), make_batch(0, rows=ROWS))
    get = param_getter(state)
    before = len(state.engine.lanes._spans)
    for _ in range(3):
        for unit in model.blocks:
            get(unit)
    assert len(state.engine.lanes._spans) == before
    for i in (1, 2):
        state, metrics = step(state, make_batch(i, rows=ROWS))
    assert metrics.last_account is not None
    assert sum(metrics.last_account[1:]) == pytest.approx(metrics.last_account.step_ms)


def test_boundaries_computed_again_cost_a_forward_and_their_weights_loads(tmp_path: Path) -> None:
    again = make_plan(default=ON_CPU, change=lambda i, unit: replace(unit, boundary="none" if i else "device"))
    flops = count_flops(make_plan(default=ON_CPU), tmp_path)
    assert count_flops(again, tmp_path) == flops + (NUM_BLOCKS - 1) * 2 * FORWARD_MATMUL_FLOPS
    moved, layout = count_bytes(again, tmp_path)
    # Forward 0 1 2 3; again 0 1 2, then backward 3 2 1 0, where 2 is still in the ring.
    assert moved["h2d"] == (NUM_BLOCKS + 6) * layout.weight_bytes
    assert moved["d2h"] == NUM_BLOCKS * layout.weight_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({0: {"boundary": "none"}}, "block 0 .* first block"),
        ({2: {"boundary": "none", **keep(1, "device")}}, "block 2 .* residuals"),
        ({1: {"boundary": "host"}, 3: {"boundary": "none"}, 2: {"boundary": "none"}}, "block 2 .* block 1, .* device"),
    ],
)
def test_a_boundary_that_is_lost_is_refused(changes: dict[int, dict[str, object]], reason: str) -> None:
    plan = make_plan(change=lambda i, unit: replace(unit, **changes.get(i, {})))
    with pytest.raises(PlanError, match=reason):
        make_train_step(make_model(NUM_BLOCKS), adamw8bit(1e-3), plan, device="cpu")


def test_each_microbatch_has_the_residual_points_of_its_own_shape(tmp_path: Path) -> None:
    """One row takes an operation more here, so that its curve is longer."""
    plain = make_model(NUM_BLOCKS)

    def fn(params: Params, x_btd: torch.Tensor, ctx: Context) -> torch.Tensor:
        y_btd = plain.blocks[0].fn(params, x_btd, ctx)
        return torch.sigmoid(torch.tanh(y_btd) * y_btd) if len(x_btd) == 1 else y_btd

    model = replace(plain, blocks=tuple(replace(unit, fn=fn) for unit in plain.blocks))
    results = []
    for default in (STREAMED, replace(STREAMED, **keep(99, "host")), replace(STREAMED, **keep(99, "device"))):
        plan = make_plan(default=default, microbatches=2)
        step = make_train_step(model, adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path)
        state = step.init(make_params(model))
        for i in range(2):
            state, metrics = step(state, make_batch(i, rows=3))
        results.append((metrics.loss, metrics.grad_norm))
    assert results[0] == results[1] == results[2]
