"""Embed and head that are streamed: the same bits as resident ones, evaluation, checkpoints, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import STATES_ON_CPU, STATES_VISIT, run
from toys import ON_CPU, RESIDENT, STREAMED, make_batch, make_model, make_params, make_plan

from lazytrain import adamw8bit, make_train_step
from lazytrain.errors import PlanError
from lazytrain.saving import resume_state, save_state
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.trainer import TrainState, param_getter, read_params

KEPT = replace(STREAMED, grads="device")
ON_NVME = replace(STREAMED, states="nvme")
# Decisions of embed and head; those whose head is resident are for tied models, too.
ENDS: dict[str, tuple[UnitPlan, UnitPlan]] = {
    "both, device": (STREAMED, STREAMED),
    "both, device, grads kept": (KEPT, KEPT),
    "both, cpu": (ON_CPU, ON_CPU),
    "both, embed on cpu": (ON_CPU, KEPT),
    "both, head on cpu": (STREAMED, ON_CPU),
    "both, states on nvme": (ON_NVME, replace(ON_NVME, update="cpu")),
    "head, device": (RESIDENT, STREAMED),
    "head, cpu": (STATES_ON_CPU, ON_CPU),
    "embed, device": (STREAMED, STATES_VISIT),
    "embed, device, grads kept": (KEPT, RESIDENT),
    "embed, cpu": (ON_CPU, STATES_ON_CPU),
    "embed, states on nvme": (ON_NVME, RESIDENT),
}
CASES = [(name, tied) for name in ENDS for tied in (False, True) if not (tied and ENDS[name][1].is_streamed)]
BLOCKS = {"streamed": STREAMED, "resident": RESIDENT}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Return a working dtype, and by `tied` the losses and weights after four steps of the resident plan."""
    torch.set_num_threads(1)
    results = {}
    for tied in (False, True):
        model, path = make_model(tied=tied, streams_embed=True), tmp_path_factory.mktemp("s")
        results[tied] = run(model, adamw8bit(3e-3), make_plan(default=RESIDENT), path, dtype=request.param)[1:]
    return request.param, results


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("name", "tied"), CASES)
def test_streamed_edges_give_the_same_bits(name: str, tied: bool, blocks: str, baseline: tuple, tmp_path: Path) -> None:
    dtype, results = baseline
    plan = make_plan(default=BLOCKS[blocks], ends=ENDS[name])
    _, seen, params = run(make_model(tied=tied, streams_embed=True), adamw8bit(3e-3), plan, tmp_path, dtype=dtype)
    expected, expected_params = results[tied]
    assert seen == expected
    assert params.keys() == expected_params.keys()
    for key, value in params.items():
        assert torch.equal(value, expected_params[key]), key


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_evaluation_and_resume_change_nothing(name: str, tied: bool, baseline: tuple, tmp_path: Path) -> None:
    dtype, results = baseline
    model, plan = make_model(tied=tied, streams_embed=True), make_plan(ends=ENDS[name])
    step = make_train_step(model, adamw8bit(3e-3), plan, device="cpu", dtype=dtype, spill_dir=tmp_path / "spill")
    state: TrainState | None = step.init(make_params(model))
    for i, expected in enumerate(results[tied][0]):
        assert state is not None
        state, metrics = step(state, make_batch(i))
        assert (metrics.loss, metrics.grad_norm) == expected
        get, weights = param_getter(state), dict(read_params(state))
        for unit in (model.head, *model.units, model.embed, model.head):
            params = get(unit)
            assert params.keys() == unit.params.keys()
            for local, value in params.items():
                assert torch.equal(value, weights[unit.params[local].full_name]), (unit.name, local)
        if i == 1:
            save_state(state, tmp_path / "run", meta={})
            state.engine.close()
            state = resume_state(step, tmp_path / "run", meta={})
    assert state is not None
    for key, value in read_params(state):
        assert torch.equal(value, results[tied][1][key]), key


def test_a_skipped_step_leaves_streamed_edges_as_they_were(tmp_path: Path) -> None:
    """What was loaded ahead for the skipped update is not used by the next one."""
    for ends in ENDS.values():
        plain = make_model(tied=False, streams_embed=True)
        head = replace(plain.head, fn=lambda p, x, batch: plain.head.fn(p, x, batch) * batch["factor_b"].amax())  # noqa: B023
        model, results = replace(plain, head=head), []
        for with_bad in (False, True):
            step = make_train_step(model, adamw8bit(1e-3), make_plan(ends=ends), device="cpu", spill_dir=tmp_path)
            state = step.init(make_params(model))
            for i in range(3):
                batch = make_batch(i) | {"factor_b": torch.ones(8)}
                if with_bad and i == 1:
                    state, metrics = step(state, batch | {"factor_b": torch.full((8,), torch.inf)})
                    assert metrics.skipped
                state, _ = step(state, batch)
            results.append({name: value.clone() for name, value in read_params(state)})
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize(
    ("ends", "tied", "streams_embed", "message"),
    [
        ((RESIDENT, STREAMED), True, True, "tied head"),
        ((STREAMED, RESIDENT), False, False, "grads_into"),
        ((replace(STREAMED, weights="nvme"), RESIDENT), False, True, "embed.weights"),
        ((RESIDENT, replace(STREAMED, weights="nvme")), False, True, "head.weights"),
    ],
)
def test_edges_that_cannot_be_streamed_are_refused(
    ends: tuple[UnitPlan, UnitPlan], tied: bool, streams_embed: bool, message: str, tmp_path: Path
) -> None:
    plan: Plan = make_plan(ends=ends)
    with pytest.raises(PlanError, match=message):
        make_train_step(
            make_model(tied=tied, streams_embed=streams_embed), adamw8bit(1e-3), plan, device="cpu", spill_dir=tmp_path
        )
