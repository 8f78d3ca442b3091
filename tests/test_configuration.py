"""Which HF configurations are understood, which are refused, and that nothing else than ConfigError ever comes out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.configuration import load_config, load_stop_ids, parse_config
from lazytrain.errors import ConfigError
from lazytrain.rope import inverse_frequencies

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": None,
}
NUM_REAL_CONFIGS = 33
REFUSED = {"gemma", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "smollm3"}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TINY, **changes}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_family_sets_biases_and_norms(family: str) -> None:
    config = parse_config(tiny(family, attention_bias=True, mlp_bias=True))
    assert config.model_type == family
    assert config.qkv_bias == (family != "mistral")
    assert config.o_bias == (family in ("llama", "qwen3"))
    assert config.mlp_bias == (family == "llama")
    assert config.qk_norm == (family == "qwen3")


def test_config_is_frozen_and_hashable() -> None:
    config = parse_config(tiny("llama"))
    assert hash(config) == hash(parse_config(tiny("llama")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore[misc]


def test_head_dim_is_read_not_derived() -> None:
    sizes = {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert parse_config(tiny("qwen3", head_dim=128, **sizes)).head_dim == 128
    assert parse_config(tiny("qwen3", **sizes)).head_dim == 128, "Qwen3's class default"
    assert parse_config(tiny("llama", **sizes)).head_dim == 80
    assert parse_config(tiny("mistral", head_dim=None, **sizes)).head_dim == 80


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_spellings_agree(kind: str, place: str) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    outside = parse_config(tiny("llama", rope_theta=5e5, **{place: {kind: "llama3", **scaling}}))
    inside = parse_config(tiny("llama", rope_theta=1.5, **{place: {kind: "llama3", "rope_theta": 500000, **scaling}}))
    assert outside.rope == inside.rope
    assert outside.rope.theta == 5e5
    assert outside.rope.original_max_position_embeddings == 64


def test_yarn_fills_in_what_transformers_fills_in() -> None:
    rope = parse_config(tiny("qwen2", rope_scaling={"type": "yarn", "factor": 4.0})).rope
    assert rope.original_max_position_embeddings == 256
    assert rope.attention_factor == pytest.approx(1.1386294361119891)
    given_factor = {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}
    assert parse_config(tiny("qwen2", rope_scaling=given_factor)).rope.attention_factor == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 1},
    ],
)
def test_unsupported_rope_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope|partial_rotary|factor"):
        parse_config(tiny("llama", **bad))


def test_unused_sliding_window_is_ignored() -> None:
    for config in (
        parse_config(tiny("qwen2", sliding_window=8, use_sliding_window=False)),
        parse_config(tiny("qwen3", sliding_window=8)),
        parse_config(tiny("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3)),
        parse_config(tiny("qwen2", sliding_window=8, use_sliding_window=True, layer_types=["full_attention"] * 3)),
        parse_config(tiny("mistral", sliding_window=None)),
        parse_config(tiny("llama", sliding_window=8)),
    ):
        assert config.sliding_window is None
        config.check_sequence_length(10**6)


def test_sliding_window_in_force_limits_the_sequence() -> None:
    for config in (
        parse_config(tiny("mistral", sliding_window=8)),
        parse_config(tiny("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)),
        parse_config(tiny("qwen3", sliding_window=8, use_sliding_window=True, layer_types=["sliding_attention"] * 3)),
    ):
        config.check_sequence_length(8)
        with pytest.raises(ConfigError, match=r"9 tokens.*sliding_window of 8.*at most 8"):
            config.check_sequence_length(9)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"model_type": "gemma"}, "'gemma'.*llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "None.*llama, mistral, qwen2, qwen3"),
        ({"vision_config": {}}, "supported are the dense text models"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification.*head"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*4 bits.*bf16"),
        ({"quantization": {"group_size": 64}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu'.*'silu'"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"vocab_size": None}, "vocab_size is None.*whole number"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4.*divisor of num_attention_heads \(6\)"),
        ({"head_dim": 5}, "head_dim is 5.*even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'.*true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.*above 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'.*token id"),
    ],
)
def test_refusal_names_key_value_and_what_is_supported(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(tiny("qwen2", **bad) if "model_type" not in bad else {**TINY, **bad})


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        parse_config({"model_type": "llama", "vocab_size": 3})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "mscale", "truncate"]
CONFIG_KEYS = [*TINY, "model_type", "architectures", "head_dim", "layer_types", "use_sliding_window", "quantization"]
OTHER_KEYS = ["rope_scaling", "rope_parameters", "rope_theta", "eos_token_id", "hidden_act", "max_window_layers"]


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    top=st.dictionaries(st.sampled_from(CONFIG_KEYS + OTHER_KEYS), json_values, max_size=2),
    rope=st.dictionaries(st.sampled_from(ROPE_KEYS), json_values, max_size=2),
)
def test_any_json_parses_or_is_refused(family: str, kind: str, top: dict[str, Any], rope: dict[str, Any]) -> None:
    scaling = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **rope}
    try:
        config = parse_config({**tiny(family), "rope_scaling": scaling, **top})
    except ConfigError:
        return
    assert config.head_dim % 2 == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert inverse_frequencies(config.rope, config.head_dim, torch.device("cpu")).isfinite().all()


def test_load_config_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json can't be read \(No such file"):
        load_config(tmp_path)
    for text, words in (("<html>", "6 bytes.*no JSON"), ("[1]", "JSON list, not an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config(tmp_path)


def test_stop_ids_prefer_the_generation_config(tmp_path: Path) -> None:
    config = parse_config(tiny("llama", eos_token_id=2))
    assert load_stop_ids(tmp_path, config) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_stop_ids(tmp_path, config) == (7, 2)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_stop_ids(tmp_path, config) == (2,)


@pytest.mark.data
def test_every_real_config_parses_or_is_refused_clearly(shared_dir: Path) -> None:
    paths = sorted((shared_dir / "data" / "configs").rglob("config.json"))
    assert len(paths) >= NUM_REAL_CONFIGS
    for path in paths:
        data = json.loads(path.read_text())
        if data["model_type"] in REFUSED or "quantization" in data:
            with pytest.raises(ConfigError, match=r"supported are the dense text models of the families") as caught:
                load_config(path.parent)
            assert data["model_type"] in str(caught.value) or "quantized to 4 bits" in str(caught.value)
        else:
            config = load_config(path.parent)
            assert config.sliding_window is None, path
            assert config.head_dim in (64, 128), path
            assert config.eos_token_ids, path


@pytest.mark.data
def test_real_config_values(shared_dir: Path) -> None:
    configs = shared_dir / "data" / "configs"
    llama = load_config(configs / "Llama-3.2-3B")
    assert (llama.head_dim, llama.tie_word_embeddings, llama.rope.kind, llama.rope.factor) == (
        128,
        True,
        "llama3",
        32.0,
    )
    assert load_config(configs / "Devstral-Small-2507-24B").head_dim == 128
    assert load_config(configs / "Qwen2.5-1.5B-Instruct").rope.theta == 1e6
    assert load_stop_ids(configs / "Qwen2.5-0.5B-Instruct", load_config(configs / "Qwen2.5-0.5B-Instruct")) == (
        151645,
        151643,
    )
