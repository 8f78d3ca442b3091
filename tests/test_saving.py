"""Checkpoints of the trainer: exact resume under any placement, refusal of foreign ones, exported models."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from store_runs import CONFIG
from test_trainer import PLANS
from toys import make_batch, make_model, make_params

from lazytrain import adamw, adamw8bit, cosine, make_train_step
from lazytrain.configuration import parse_config
from lazytrain.errors import CheckpointError
from lazytrain.export import read_texts
from lazytrain.homes import Homes
from lazytrain.saving import export_state, resume_state, save_state
from lazytrain.shards import INDEX, open_model_dir
from lazytrain.store_units import state_tensors
from lazytrain.tensorfile import TensorFile
from lazytrain.trainer import TrainState, TrainStep, read_params
from lazytrain.transformer import forward_logits, random_params, transformer_model

META = {"seed": 7}


def make_step(plan: str, tmp_path: Path, dtype: torch.dtype) -> TrainStep:
    optimizer = adamw8bit(cosine(3e-3, num_steps=16, num_warmup_steps=3))
    return make_train_step(make_model(), optimizer, PLANS[plan], device="cpu", dtype=dtype, spill_dir=tmp_path / "nvme")


def advance(step: TrainStep, state: TrainState, until: int) -> tuple[TrainState, list[tuple]]:
    seen = []
    while state.step < until:
        state, metrics = step(state, make_batch(state.step))
        seen.append((metrics.step, metrics.loss, metrics.grad_norm, metrics.lr))
    return state, seen


def snapshot(state: TrainState) -> dict[str, torch.Tensor]:
    params = {name: value.clone() for name, value in read_params(state)}
    homes = state.engine.homes
    for home in homes.units:
        if home.has_params:
            params[f"{home.unit.name} state"] = homes.state_slab(home).clone()
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("resident", "resident"),
        ("streamed", "streamed, updated on cpu"),
        ("streamed, updated on cpu", "mixed"),
        ("all on nvme", "resident, states visit"),
        ("mixed", "all on nvme"),
    ],
)
def test_resume_gives_the_bits_of_an_uninterrupted_run(
    first: str, second: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    step = make_step("resident", tmp_path, dtype)
    state, expected = advance(step, step.init(make_params(make_model())), 16)
    expected_slabs = snapshot(state)

    step = make_step(first, tmp_path, dtype)
    state, seen = advance(step, step.init(make_params(make_model())), 8)
    save_state(state, tmp_path / "run", meta=META)
    step = make_step(second, tmp_path, dtype)
    resumed = resume_state(step, tmp_path / "run", meta=META)
    assert resumed is not None
    state, rest = advance(step, resumed, 16)
    assert seen + rest == expected
    slabs = snapshot(state)
    assert slabs.keys() == expected_slabs.keys()
    for name, value in slabs.items():
        assert torch.equal(value, expected_slabs[name]), name


def test_training_goes_on_unchanged_after_a_save(tmp_path: Path) -> None:
    step = make_step("streamed", tmp_path, torch.float32)
    _, expected = advance(step, step.init(make_params(make_model())), 6)
    state, seen = advance(step, step.init(make_params(make_model())), 3)
    save_state(state, tmp_path / "run", meta=META)
    assert seen + advance(step, state, 6)[1] == expected


def test_resume_without_a_checkpoint_returns_none(tmp_path: Path) -> None:
    assert resume_state(make_step("resident", tmp_path, torch.float32), tmp_path, meta=META) is None


def test_resume_names_the_option_that_differs(tmp_path: Path) -> None:
    step = make_step("resident", tmp_path, torch.float32)
    save_state(step.init(make_params(make_model())), tmp_path, meta=META)
    with pytest.raises(CheckpointError, match="seed = 7, this run has 8"):
        resume_state(step, tmp_path, meta={"seed": 8})
    with pytest.raises(CheckpointError, match="bfloat16"):
        resume_state(make_step("resident", tmp_path, torch.bfloat16), tmp_path, meta=META)
    other = make_train_step(make_model(), adamw(1e-3), PLANS["resident"], device="cpu")
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        resume_state(other, tmp_path, meta=META)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_checkpoint_holds_weights_and_states_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """The weights are the upper half of the master: no byte of the state is stored twice."""
    step = make_step("streamed", tmp_path, dtype)
    state = step.init(make_params(make_model()))
    path = save_state(state, tmp_path / "run", meta=META)
    layouts = [home.layout for home in state.engine.homes.units if home.has_params]
    weight_bytes = sum(place.numel for layout in layouts for place in layout.places) * dtype.itemsize
    state_bytes = sum(
        view.numel() * view.element_size()
        for layout in layouts
        for _, view in state_tensors(layout, torch.empty(layout.state_bytes, dtype=torch.uint8, device="meta"))
    )
    stored = {
        suffix: sum(file.stat().st_size - TensorFile(file).header_bytes for file in path.glob(f"*{suffix}"))
        for suffix in (".safetensors", ".states")
    }
    assert stored == {".safetensors": weight_bytes, ".states": state_bytes}
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"]["total_size"] == weight_bytes
    assert index["weight_map"].keys() == make_params(make_model()).keys()


def test_a_save_holds_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a save takes from NVMe is one unit's weights or states, never two."""
    step = make_step("all on nvme", tmp_path, torch.bfloat16)
    state = step.init(make_params(make_model()))
    alive: list[weakref.ref[torch.Tensor]] = []
    real = Homes._read_target

    def read(*args: Any) -> torch.Tensor:
        assert not any(ref() is not None for ref in alive), "an older slab is still held"
        slab = real(*args)
        alive.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(Homes, "_read_target", read)
    save_state(state, tmp_path / "run", meta=META)
    assert len(alive) == 8


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_exported_models_and_checkpoints_have_equal_logits_in_transformers(tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = CONFIG | {"tie_word_embeddings": tied}
    model = transformer_model(parse_config(config))
    params = dict(random_params(model, 0, torch.float32))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    save_file(params, base / "model.safetensors", metadata={"format": "pt"})

    step = make_train_step(model, adamw8bit(1e-3), device="cpu")
    state = step.init(open_model_dir(base).read)
    tokens_bt = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(0))
    state, _ = step(state, {"tokens_bt": tokens_bt, "targets_bt": tokens_bt.roll(-1, 1)})
    out = export_state(state, open_model_dir(base), tmp_path / "out")

    trained = {name: value.clone() for name, value in read_params(state)}
    assert any(not torch.equal(trained[name], params[name]) for name in trained)
    embed = trained["model.embed_tokens.weight"]

    def get(unit):
        return {name: trained.get(spec.full_name, embed) for name, spec in unit.params.items()}

    ours = forward_logits(model, get, {"tokens_bt": tokens_bt})
    texts = read_texts(open_model_dir(base), torch.float32)
    saved = save_state(state, tmp_path / "run", meta=META, texts=texts)
    for path in (out, saved):
        loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        theirs = loaded(tokens_bt).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
