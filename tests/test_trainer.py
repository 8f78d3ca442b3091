"""The functional trainer against plain PyTorch, and against itself under every kind of plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import (
    ON_CPU,
    RESIDENT,
    STREAMED,
    make_batch,
    make_model,
    make_params,
    make_plan,
    reference_loss,
)

from lazytrain import adamw, adamw8bit, make_train_step, train_step
from lazytrain.base import Model
from lazytrain.engine import split_batch
from lazytrain.errors import DataError, NonFiniteError, PlanError, StateConsumedError
from lazytrain.optimizer import Optimizer
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.trainer import TrainState, read_params

PARITY = 1e-5  # relative, in the 2-norm of a tensor's change (AdamW magnifies the rounding of single tiny gradients)
STATES_ON_CPU = replace(RESIDENT, states="host", update="cpu", grads="host")
STATES_VISIT = replace(RESIDENT, states="host")
ON_NVME = UnitPlan(weights="nvme", states="nvme", update="device", grads="host", boundary="nvme")


def keep(point: int, place: str) -> dict[str, object]:
    return {"residual_point": point, "residuals": place}


def mixed(i: int, unit: UnitPlan) -> UnitPlan:
    """Return a different decision for every block."""
    return (
        replace(unit, **keep(1, "host"), boundary="host"),
        RESIDENT,
        replace(ON_CPU, **keep(99, "device")),
        replace(unit, grads="device", boundary="nvme", **keep(99, "nvme")),
    )[i % 4]


PLANS: dict[str, Plan] = {
    "resident": make_plan(default=RESIDENT),
    "resident, keep all": make_plan(default=replace(RESIDENT, **keep(99, "device"))),
    "resident, states visit": make_plan(default=STATES_VISIT, ends=STATES_VISIT),
    "resident, updated on cpu": make_plan(default=STATES_ON_CPU, ends=STATES_ON_CPU),
    "streamed": make_plan(),
    "streamed, ring of 3": make_plan(depth=3),
    "streamed, ring larger than the model": make_plan(depth=9),
    "streamed, updated on cpu": make_plan(default=ON_CPU, ends=STATES_ON_CPU),
    "streamed, grads kept": make_plan(default=replace(STREAMED, grads="device")),
    "streamed, boundaries offloaded": make_plan(default=replace(STREAMED, boundary="host")),
    "streamed, boundaries computed again": make_plan(
        change=lambda i, unit: replace(unit, boundary="none" if i % 4 else "device")
    ),
    "updated on cpu, boundaries computed again, ring of 3": make_plan(
        default=ON_CPU, depth=3, change=lambda i, unit: (unit, replace(unit, boundary="none"))[i % 2]
    ),
    "residuals offloaded before a boundary that is computed again": make_plan(
        change=lambda i, unit: (
            replace(unit, **keep(99, "host")),
            replace(unit, boundary="none"),
            replace(unit, boundary="host"),
            replace(unit, **keep(1, "device")),
        )[i % 4]
    ),
    "streamed, residuals kept": make_plan(default=replace(STREAMED, **keep(1, "device"))),
    "streamed, residuals offloaded": make_plan(default=replace(STREAMED, **keep(99, "host"), boundary="host")),
    "all on nvme": make_plan(default=replace(ON_NVME, **keep(99, "nvme"))),
    "all on nvme, updated on cpu": make_plan(default=replace(ON_NVME, update="cpu")),
    "states on nvme": make_plan(default=replace(STREAMED, states="nvme")),
    "mixed": make_plan(change=mixed),
    "mixed, ring of 3": make_plan(change=mixed, depth=3, ends=STATES_VISIT),
}


def run(
    model: Model,
    optimizer: Optimizer,
    plan: Plan,
    tmp_path: Path,
    *,
    num_steps: int = 4,
    dtype: torch.dtype = torch.float32,
) -> tuple[TrainState, list[tuple[float, float]], dict[str, torch.Tensor]]:
    step = make_train_step(model, optimizer, plan, device="cpu", dtype=dtype, spill_dir=tmp_path)
    state = step.init(make_params(model))
    seen = []
    for i in range(num_steps):
        state, metrics = step(state, make_batch(i))
        seen.append((metrics.loss, metrics.grad_norm))
    return state, seen, {name: value.clone() for name, value in read_params(state)}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Return a working dtype, and losses and weights after four steps of the resident plan."""
    torch.set_num_threads(1)
    _, seen, params = run(
        make_model(), adamw8bit(3e-3), PLANS["resident"], tmp_path_factory.mktemp("s"), dtype=request.param
    )
    return request.param, seen, params


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_same_bits(name: str, baseline: tuple, tmp_path: Path) -> None:
    dtype, expected, expected_params = baseline
    _, seen, params = run(make_model(), adamw8bit(3e-3), PLANS[name], tmp_path, dtype=dtype)
    assert seen == expected
    assert params.keys() == expected_params.keys()
    for key, value in params.items():
        assert torch.equal(value, expected_params[key]), key


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_fp32_steps_equal_plain_pytorch(tied: bool, microbatches: int, tmp_path: Path) -> None:
    model = make_model(tied=tied)
    plan = make_plan(microbatches=microbatches)
    start = make_params(model)
    _, seen, params = run(model, adamw(3e-3, weight_decay=0.1, max_grad_norm=0.5), plan, tmp_path, num_steps=5)

    plain = {name: torch.nn.Parameter(value.clone()) for name, value in start.items() if name in params}
    adam = torch.optim.AdamW(plain.values(), lr=3e-3, weight_decay=0.1)
    for i, (loss, norm) in enumerate(seen):
        adam.zero_grad()
        batch = make_batch(i)
        expected_loss = 0.0
        for part in split_batch(batch, microbatches):  # plain accumulation; AdamW magnifies any other order of sums
            part_loss = reference_loss(model, plain, part) * model.count(part) / model.count(batch)
            part_loss.backward()
            expected_loss += part_loss.item()
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        adam.step()
        assert loss == pytest.approx(expected_loss, rel=PARITY)
        assert norm == pytest.approx(expected_norm.item(), rel=PARITY)
    for name, value in params.items():
        expected = plain[name].detach()
        assert (value - expected).norm() <= PARITY * (expected - start[name]).norm(), name


def test_accumulation_gives_the_same_gradient(tmp_path: Path) -> None:
    model = make_model()
    norms = [run(model, adamw(1e-3), make_plan(microbatches=k), tmp_path, num_steps=3)[1] for k in (1, 4, 8)]
    for other in norms[1:]:
        assert other == [pytest.approx(pair, rel=PARITY) for pair in norms[0]]


def test_accumulation_of_ragged_microbatches_weighs_every_target_once(tmp_path: Path) -> None:
    model = make_model()
    batch = make_batch(0, rows=7)
    batch["targets_bt"][:5, 2:] = -100  # rows of very different lengths
    batch["targets_bt"][0, :] = -100  # and one without a target
    norms = []
    for k in (1, 4):
        step = make_train_step(model, adamw(1e-3), make_plan(microbatches=k), device="cpu")
        _, metrics = step(step.init(make_params(model)), batch)
        norms.append((metrics.loss, metrics.grad_norm))
    assert norms[1] == pytest.approx(norms[0], rel=PARITY)


def test_a_consumed_state_is_refused(tmp_path: Path) -> None:
    step = make_train_step(make_model(), adamw8bit(1e-3), device="cpu")
    first = step.init(make_params(make_model()))
    second, _ = train_step(first, make_batch())
    with pytest.raises(StateConsumedError, match="step 0"):
        train_step(first, make_batch())
    train_step(second, make_batch())


@pytest.mark.parametrize(
    "plan", ["resident", "streamed", "streamed, updated on cpu", "streamed, grads kept", "all on nvme"]
)
def test_a_norm_that_is_not_finite_skips_the_whole_step(plan: str, tmp_path: Path) -> None:
    model = make_model()
    bad = make_params(model)
    bad["blocks.2.up"][3, 3] = float("inf")
    step = make_train_step(model, adamw8bit(1e-3), PLANS[plan], device="cpu", spill_dir=tmp_path)
    state = step.init(bad)
    state, metrics = step(state, make_batch())
    assert metrics.skipped
    assert metrics.bad_unit is not None
    assert state.num_updates == 0
    for name, value in read_params(state):
        assert torch.equal(value, bad[name]), name


def test_resident_units_are_updated_when_the_step_returns() -> None:
    """Their gradients' memory is free for the next forward sweep, and the device has work while the host turns over."""
    model = make_model()
    step = make_train_step(model, adamw8bit(1e-3), PLANS["resident"], device="cpu")
    before = {name: value.clone() for name, value in make_params(model).items()}
    state, _ = step(step.init(make_params(model)), make_batch())
    for home in state.engine.homes.units:
        assert home.grads_device is None
        if home.has_params:
            assert home.weights_device is not None
            for name, value in home.layout.views(home.weights_device).items():
                assert not torch.equal(value, before[home.unit.params[name].full_name])


def test_a_step_that_was_interrupted_leaves_no_state_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some units are updated by then, others not."""
    model = make_model()
    plan = make_plan(change=lambda i, unit: RESIDENT if i % 2 else unit)
    step = make_train_step(model, adamw8bit(1e-3), plan, device="cpu")
    state = step.init(make_params(model))
    for i in range(2):
        state, _ = step(state, make_batch(i))

    def interrupt(*parts: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lazytrain.engine.account_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(state, make_batch(2))
    for use in (lambda: step(state, make_batch(2)), lambda: list(read_params(state))):
        with pytest.raises(StateConsumedError, match="interrupted step 2"):
            use()


@pytest.mark.parametrize("plan", ["resident", "streamed"])
def test_a_skipped_step_in_between_changes_nothing(plan: str, tmp_path: Path) -> None:
    """What was loaded for the skipped update is not used by the next one."""
    plain = make_model()
    scaled = replace(plain.head, fn=lambda p, x, batch: plain.head.fn(p, x, batch) * batch["factor_b"].amax())
    model = replace(plain, head=scaled)
    results = []
    for with_bad in (False, True):
        step = make_train_step(model, adamw8bit(1e-3), PLANS[plan], device="cpu", spill_dir=tmp_path)
        state = step.init(make_params(model))
        for i in range(4):
            batch = make_batch(i) | {"factor_b": torch.ones(len(make_batch(i)["tokens_bt"]))}
            if with_bad and i == 2:
                state, metrics = step(state, batch | {"factor_b": torch.full_like(batch["factor_b"], torch.inf)})
                assert metrics.skipped
            state, metrics = step(state, batch)
            assert not metrics.skipped
        results.append({name: value.clone() for name, value in read_params(state)})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_error_if_nonfinite_raises_and_leaves_the_state_usable() -> None:
    model = make_model()
    bad = make_params(model)
    bad["blocks.0.up"][0, 0] = float("nan")
    step = make_train_step(model, adamw8bit(1e-3, error_if_nonfinite=True), device="cpu")
    state = step.init(bad)
    with pytest.raises(NonFiniteError, match="step 0"):
        step(state, make_batch())
    assert {name for name, _ in read_params(state)} == set(bad)


def test_clipping_scales_one_huge_microbatch_once(tmp_path: Path) -> None:
    model = make_model()
    _, seen, params = run(model, adamw(1e-2, max_grad_norm=1e-3), make_plan(microbatches=4), tmp_path, num_steps=1)
    _, _, whole = run(model, adamw(1e-2, max_grad_norm=1e-3), make_plan(), tmp_path, num_steps=1)
    assert seen[0][1] > 1e-3
    for name, value in params.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


def test_a_batch_without_targets_is_an_error() -> None:
    step = make_train_step(make_model(), adamw8bit(1e-3), device="cpu")
    batch = make_batch()
    batch["targets_bt"].fill_(-100)
    with pytest.raises(DataError, match="no position"):
        step(step.init(make_params(make_model())), batch)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="3 blocks"):
        make_train_step(make_model(4), adamw8bit(1e-3), make_plan(3), device="cpu")
    with pytest.raises(PlanError, match="spill_dir"):
        make_train_step(make_model(4), adamw8bit(1e-3), PLANS["all on nvme"], device="cpu")


def test_bytes_copied_are_what_the_plan_says(tmp_path: Path) -> None:
    model, plan = make_model(4), make_plan(4, depth=2)
    step = make_train_step(model, adamw8bit(1e-3), plan, device="cpu")
    state = step.init(make_params(model))
    state, _ = step(state, make_batch(0))
    state, _ = step(state, make_batch(1))
    lanes = state.engine.lanes
    before = dict(lanes.bytes_moved)
    state, _ = step(state, make_batch(2))
    block = state.engine.homes.units[1].layout
    weights, states = block.weight_bytes, block.state_bytes
    # Forward: blocks 0 and 1 are still in their slots, 2 and 3 are loaded; backward: 3 and 2 are in theirs.
    loads = 2 * weights + 2 * weights
    assert lanes.bytes_moved["h2d"] - before["h2d"] == loads + 4 * (states + weights)  # states and grads for the update
    assert lanes.bytes_moved["d2h"] - before["d2h"] == 4 * (weights + states) + 4 * weights  # updated, and grads
