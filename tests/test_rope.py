"""Rotary frequencies and tables against transformers, for every kind."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lazytrain.configuration import parse_config
from lazytrain.rope import inverse_frequencies, rotary_tables, rotate

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 1e6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "yarn_untruncated": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "truncate": False,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "rope_theta": 1e6,
        }
    },
    "yarn_mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 1024,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        }
    },
    "yarn_given_factor": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.5,
        }
    },
}


def reference(kind: str) -> LlamaRotaryEmbedding:
    data = {**SHAPE, **KINDS[kind]}
    return LlamaRotaryEmbedding(AutoConfig.for_model(data.pop("model_type"), **data))


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers_bit_for_bit(kind: str) -> None:
    config = parse_config({**SHAPE, **KINDS[kind]})
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim, CPU), reference(kind).inv_freq)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_equal_transformers_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    config = parse_config({**SHAPE, **KINDS[kind]})
    positions_bt = torch.tensor([[0, 1, 2, 63, 1023, 4095], [5, 0, 0, 1, 257, 258]])
    tables = rotary_tables(config.rope, config.head_dim, positions_bt, dtype)
    for ours, theirs in zip(tables, reference(kind)(torch.empty(1, dtype=dtype), positions_bt)):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_scaled_kinds_differ_from_the_default() -> None:
    tables = {}
    for kind, changes in KINDS.items():
        config = parse_config({**SHAPE, **changes})
        tables[kind] = rotary_tables(config.rope, config.head_dim, torch.arange(50)[None], torch.float32)[0]
    for kind in set(KINDS) - {"default"}:
        assert not torch.equal(tables[kind], tables["default"]), kind


def test_rotate_equals_transformers() -> None:
    config = parse_config({**SHAPE, **KINDS["theta"]})
    q_bhtk, k_bhtk = torch.randn(2, 3, 7, 128), torch.randn(2, 1, 7, 128)
    cos_btk, sin_btk = rotary_tables(config.rope, 128, torch.arange(7)[None], torch.float32)
    expected = apply_rotary_pos_emb(q_bhtk, k_bhtk, cos_btk, sin_btk)
    assert torch.equal(rotate(q_bhtk, cos_btk, sin_btk), expected[0])
    assert torch.equal(rotate(k_bhtk, cos_btk, sin_btk), expected[1])


def test_products_depend_on_the_distance_only() -> None:
    config = parse_config(SHAPE)
    q, k = torch.randn(1, 1, 1, 128, dtype=torch.float64), torch.randn(1, 1, 1, 128, dtype=torch.float64)

    def product(q_position: int, k_position: int) -> float:
        tables = [
            rotary_tables(config.rope, 128, torch.tensor([[position]]), torch.float64)
            for position in (q_position, k_position)
        ]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert product(12, 5) == pytest.approx(product(107, 100), abs=1e-4)
    assert product(12, 5) != pytest.approx(product(12, 6), abs=1e-2)
