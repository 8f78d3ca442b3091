"""The model against transformers: logits, gradients, names; packing, padding, fresh weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.func import vjp
from transformers import AutoConfig, AutoModelForCausalLM

from lazytrain.base import IGNORE_INDEX, Model, Params, Unit
from lazytrain.configuration import ModelConfig, load_config, parse_config
from lazytrain.transformer import forward_logits, random_params, transformer_model

LOGITS_TOLERANCE = 1e-5  # fp32, logits of size 1 to 10; worst seen 3e-6
GRADS_TOLERANCE = 1e-5  # relative to the largest element of a tensor's gradient; worst seen 2e-6

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": None,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_llama3": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama_wide_heads": {"model_type": "llama", "head_dim": 16, "num_key_value_heads": 6},
    "mistral": {"model_type": "mistral", "head_dim": 6},
    "mistral_linear": {
        "model_type": "mistral",
        "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 500.0},
    },
    "mistral_window": {"model_type": "mistral", "sliding_window": 17, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "head_dim": None, "hidden_size": 48},
    "qwen2_tied_yarn": {
        "model_type": "qwen2",
        "head_dim": None,
        "hidden_size": 48,
        "tie_word_embeddings": True,
        "rope_scaling": YARN,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 3},
    "qwen3_tied_biases": {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
    "qwen3_yarn": {"model_type": "qwen3", "rope_scaling": YARN, "rope_theta": 1e6, "num_key_value_heads": 1},
}


@dataclasses.dataclass
class Pair:
    """Our model and that of transformers, with the same weights (norms and biases random too)."""

    config: ModelConfig
    model: Model
    params: dict[str, Tensor]
    theirs: Any

    def get_params(self, unit: Unit) -> Params:
        return {name: self.params[spec.full_name] for name, spec in unit.params.items()}


def make_pair(variant: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Pair:
    data = {**SIZES, **VARIANTS[variant]}
    data = {key: value for key, value in data.items() if key != "head_dim" or value is not None}
    config = parse_config(data)
    their_config = AutoConfig.for_model(**{**data, "use_cache": False})
    their_config._attn_implementation = attention
    # Not .to(dtype), which would round the rotary frequencies too.
    theirs = AutoModelForCausalLM.from_config(their_config, dtype=dtype).train(False)
    generator = torch.Generator().manual_seed(len(variant))
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            noise = torch.randn(param.shape, generator=generator) * 0.3
            param.copy_(1 + noise if "norm" in name else noise)
    return Pair(config, transformer_model(config), dict(theirs.state_dict()), theirs)


def make_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers(variant: str) -> None:
    pair = make_pair(variant)
    tokens_bt = make_tokens(2, 17)
    ours = forward_logits(pair.model, pair.get_params, {"tokens_bt": tokens_bt})
    theirs = pair.theirs(tokens_bt).logits
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_bf16_logits_have_the_bits_of_transformers(variant: str) -> None:
    pair = make_pair(variant, torch.bfloat16, "sdpa")
    tokens_bt = make_tokens(2, 17)
    ours = forward_logits(pair.model, pair.get_params, {"tokens_bt": tokens_bt})
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, pair.theirs(tokens_bt).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_those_of_transformers(variant: str) -> None:
    pair = make_pair(variant)
    ours = {spec.full_name: spec.shape for unit in pair.model.units for spec in unit.params.values()}
    theirs = {name: tuple(param.shape) for name, param in pair.theirs.named_parameters()}
    assert ours == theirs
    assert pair.model.num_params == sum(param.numel() for param in pair.theirs.parameters())


def test_qwen3_shapes_follow_head_dim() -> None:
    config = parse_config(
        {**SIZES, "model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128}
    )
    specs = transformer_model(config).blocks[0].params
    assert specs["self_attn.q_proj.weight"].shape == (4096, 2560)
    assert specs["self_attn.k_proj.weight"].shape == (256, 2560)
    assert specs["self_attn.o_proj.weight"].shape == (2560, 4096)
    assert specs["self_attn.q_norm.weight"].shape == (128,)


def sweep_grads(pair: Pair, batch: dict[str, Tensor], scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Walk the units forward and backward as a trainer does."""
    model, get = pair.model, pair.get_params
    boundary = [model.embed.fn(get(model.embed), batch)]
    ctx = model.context(batch, torch.float32)
    for unit in model.blocks:
        boundary.append(unit.fn(get(unit), boundary[-1], ctx))
    assert model.head.grads_into is not None
    assert model.embed.grads_into is not None
    sums = {spec.full_name: torch.zeros(spec.shape) for u in (model.embed, model.head) for spec in u.params.values()}
    head_sums, embed_sums = (
        {name: sums[spec.full_name] for name, spec in unit.params.items()} for unit in (model.head, model.embed)
    )
    loss, dx = model.head.grads_into(get(model.head), boundary.pop(), batch, scale, head_sums)
    grads = dict(sums)
    for unit in reversed(model.blocks):
        _, pull = vjp(lambda params, x, fn=unit.fn: fn(params, x, ctx), get(unit), boundary.pop())
        block_grads, dx = pull(dx)
        grads.update({unit.params[name].full_name: grad for name, grad in block_grads.items()})
    model.embed.grads_into(get(model.embed), batch, dx, embed_sums)
    return loss, grads


@pytest.mark.parametrize("variant", ["llama", "llama_biases", "mistral", "qwen2_tied_yarn", "qwen3_tied_biases"])
@pytest.mark.parametrize("with_index", [False, True])
def test_gradients_equal_transformers_and_autograd(variant: str, with_index: bool) -> None:
    pair = make_pair(variant)
    tokens_bt = make_tokens(3, 13)
    targets_bt = torch.cat((tokens_bt[:, 1:], torch.full((3, 1), IGNORE_INDEX)), 1)
    targets_bt[1, :5] = IGNORE_INDEX
    batch = {"tokens_bt": tokens_bt, "targets_bt": targets_bt}
    if with_index:
        batch["target_index_n"] = (targets_bt.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)

    loss = F.cross_entropy(pair.theirs(tokens_bt).logits.flatten(0, 1), targets_bt.flatten(), reduction="sum")
    (loss / 31).backward()
    our_loss, grads = sweep_grads(pair, batch, 1 / 31)

    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    theirs = {name: param.grad for name, param in pair.theirs.named_parameters()}
    assert set(grads) == set(theirs)
    for name, grad in theirs.items():
        error = (grads[name] - grad).abs().max() / grad.abs().max()
        assert error < GRADS_TOLERANCE, (name, float(error))


@torch.no_grad()
def test_packed_samples_have_the_logits_of_each_alone() -> None:
    pair = make_pair("qwen2_tied_yarn")
    samples = [make_tokens(1, length) for length in (5, 1, 7)]
    batch = {
        "tokens_bt": torch.cat([*samples, torch.zeros(1, 3, dtype=torch.int64)], 1),
        "positions_bt": torch.cat([torch.arange(length) for length in (5, 1, 7, 3)])[None],
        "segments_bt": torch.tensor([[1] * 5 + [2] + [3] * 7 + [0] * 3]),
    }
    packed = forward_logits(pair.model, pair.get_params, batch)
    assert packed.isfinite().all()
    for sample_1t, ours in zip(samples, packed.split((5, 1, 7, 3), 1)):
        alone = forward_logits(pair.model, pair.get_params, {"tokens_bt": sample_1t})
        torch.testing.assert_close(ours, alone, rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE)


@torch.no_grad()
def test_right_padding_changes_no_logit() -> None:
    pair = make_pair("qwen3")
    tokens_bt = make_tokens(2, 9)
    padded_bt = torch.cat((tokens_bt, torch.full((2, 4), 66)), 1)
    ours, alone = (forward_logits(pair.model, pair.get_params, {"tokens_bt": x}) for x in (padded_bt, tokens_bt))
    torch.testing.assert_close(ours[:, :9], alone, rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE)


@torch.no_grad()
def test_positions_shift_only_the_rotary_tables() -> None:
    pair = make_pair("llama")
    tokens_bt = make_tokens(1, 6)
    shifted = {"tokens_bt": tokens_bt, "positions_bt": torch.arange(6)[None] + 40}
    ours, plain = (forward_logits(pair.model, pair.get_params, batch) for batch in (shifted, {"tokens_bt": tokens_bt}))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    uneven = {"tokens_bt": tokens_bt, "positions_bt": torch.arange(6)[None] * 2}
    assert (forward_logits(pair.model, pair.get_params, uneven) - plain).abs().max() > 0.01


def test_units_of_a_kind_share_code() -> None:
    model = make_pair("qwen3").model
    assert len({id(unit.fn) for unit in model.blocks}) == 1
    assert len({tuple((name, spec.shape) for name, spec in unit.params.items()) for unit in model.blocks}) == 1
    assert [unit.kind for unit in model.units] == ["embed", "block", "block", "block", "head"]


def test_tied_head_is_the_embed() -> None:
    model = make_pair("llama_tied").model
    assert model.tied == {"lm_head.weight": "embed_tokens.weight"}
    assert model.head.params["lm_head.weight"].full_name == "model.embed_tokens.weight"
    assert make_pair("llama").model.tied == {}


def test_random_params_are_hf_initial_weights() -> None:
    config = parse_config({**SIZES, "model_type": "qwen2", "hidden_size": 48, "tie_word_embeddings": True})
    model = transformer_model(config)
    drawn = list(random_params(model, 7, torch.float32, std=config.initializer_range))
    params = dict(drawn)
    assert len(params) == len(drawn), "tied tensors once"
    assert set(params) == {spec.full_name for unit in model.units for spec in unit.params.values()}
    assert (params["model.norm.weight"] == 1).all()
    assert not params["model.layers.2.self_attn.k_proj.bias"].any()
    assert params["model.embed_tokens.weight"].std() == pytest.approx(0.3, rel=0.05)
    assert params["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.3, rel=0.05)
    again = dict(random_params(model, 7, torch.bfloat16, std=config.initializer_range))
    assert all(torch.equal(again[name], tensor.bfloat16()) for name, tensor in params.items())
    other = dict(random_params(model, 8, torch.float32))
    assert not torch.equal(other["model.embed_tokens.weight"], params["model.embed_tokens.weight"])


@pytest.mark.data
@torch.no_grad()
def test_stories260k_has_the_logits_of_transformers(shared_dir: Path) -> None:
    model_dir = shared_dir / "data" / "models" / "stories260K"
    model, params = transformer_model(load_config(model_dir)), load_file(model_dir / "model.safetensors")
    tokens_bt = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(0))
    ours = forward_logits(
        model,
        lambda unit: {name: params[spec.full_name] for name, spec in unit.params.items()},
        {"tokens_bt": tokens_bt},
    )
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(tokens_bt).logits
    torch.testing.assert_close(ours, theirs, rtol=LOGITS_TOLERANCE, atol=2 * LOGITS_TOLERANCE)
