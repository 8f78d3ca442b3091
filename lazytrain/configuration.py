"""From an HF `config.json` to a frozen, checked `ModelConfig`: four dense families, everything else is refused.

Defaults of keys that a file leaves out are those of the family's class in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain.errors import ConfigError
from lazytrain.fields import Fields, read_object

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
SUPPORTED = f"supported are the dense text models of the families {', '.join(FAMILIES)}, not quantized"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its kind and the numbers that kind uses (see rope.py for the formulas)."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder, in HF's names where HF has one.

    Attributes:
        head_dim: read, never derived where the file states it (Qwen3: 32 heads of 128 in a width of 2560).
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: an RMS norm over head_dim on queries and keys (Qwen3).
        sliding_window: tokens a position may look back, itself included; None where no layer uses a window.
        initializer_range: standard deviation of fresh weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def check_sequence_length(self, num_tokens: int) -> None:
        """Refuse sequences in which a sliding window would hide a token.

        Args:
            num_tokens: the longest sequence of a run, prompt and generated tokens together.
        Raises:
            ConfigError: the window is shorter; use sequences of at most `sliding_window` tokens.
        """
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            raise ConfigError(
                f"sliding window attention is not supported: sequences of {num_tokens} tokens exceed this "
                f"{self.model_type} model's sliding_window of {self.sliding_window}. Use sequences of at most "
                f"{self.sliding_window} tokens (up to there the window hides nothing)."
            )


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check `config.json` of a model directory.

    Raises:
        ConfigError: the file is missing, is no JSON object, or describes a model that is not supported.
    """
    path = Path(model_dir) / "config.json"
    return parse_config(read_object(path), source=str(path))


def load_stop_ids(model_dir: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the token ids that end a generated text: those of `generation_config.json`, else those of the config."""
    path = Path(model_dir) / "generation_config.json"
    if not path.is_file():
        return config.eos_token_ids
    fields = Fields(read_object(path), str(path))
    return fields.token_ids("eos_token_id") or config.eos_token_ids


def parse_config(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Check a parsed `config.json` and return the architecture.

    Args:
        data: the JSON object.
        source: named in errors, for example the file's path.
    Raises:
        ConfigError: an unsupported or contradictory model; the text names the key, its value and what is supported.
    Example:
        >>> parse_config({"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
        ...               "num_hidden_layers": 1, "num_attention_heads": 2}).head_dim
        4
    """
    fields = Fields(data, source)
    family = _check_supported(fields)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    default_head_dim = 128 if family == "qwen3" and "head_dim" not in data else hidden_size // num_heads
    max_positions = fields.count("max_position_embeddings", MAX_POSITIONS[family])
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    config = ModelConfig(
        model_type=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.count("num_key_value_heads", _default_kv_heads(fields, family, num_heads)),
        head_dim=fields.count("head_dim", default_head_dim),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        rope=_parse_rope(fields, max_positions),
        max_position_embeddings=max_positions,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        sliding_window=_window_in_force(fields, family),
        initializer_range=fields.number("initializer_range", 0.02),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if config.head_dim % 2:
        raise fields.error("head_dim", "even, as rotary embeddings turn pairs")
    return config


def _check_supported(fields: Fields) -> str:
    """Return the family, or refuse: other families, other heads, quantized weights, other activations."""
    data, source = fields.data, fields.source
    model_type = data.get("model_type")
    architectures = fields.names("architectures")
    if model_type not in FAMILIES or "text_config" in data or "vision_config" in data:
        named = ", ".join(architectures) or "no architecture"
        raise ConfigError(f"{source}: model_type {model_type!r} ({named}) is not supported: {SUPPORTED}.")
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        named = ", ".join(architectures)
        raise ConfigError(f"{source}: {named} has no language model head (...ForCausalLM): {SUPPORTED}.")
    for key in ("quantization_config", "quantization"):
        if data.get(key):
            bits = data[key].get("bits") if isinstance(data[key], Mapping) else None
            width = f" to {bits} bits" if bits else ""
            raise ConfigError(
                f"{source}: {key} says that the weights are quantized{width}: {SUPPORTED}. "
                "Use the bf16, fp16 or fp32 weights that this model was made from."
            )
    if data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{source}: hidden_act {data['hidden_act']!r}: the supported activation is 'silu'.")
    assert isinstance(model_type, str)
    return model_type


def _default_kv_heads(fields: Fields, family: str, num_heads: int) -> int:
    """Return what transformers takes where the key is absent; an explicit null means one per query head."""
    if "num_key_value_heads" in fields.data:
        return num_heads
    return {"llama": num_heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]


def _window_in_force(fields: Fields, family: str) -> int | None:
    """Return the sliding window if any layer uses one. Qwen's is off unless `use_sliding_window` says otherwise."""
    if family == "llama":
        return None
    layer_types = fields.names("layer_types")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(f"{fields.source}: layer_types holds {', '.join(unknown)}: supported is full_attention.")
    window = fields.optional_count("sliding_window", 4096)
    if family == "mistral" or window is None:
        return window
    if not fields.flag("use_sliding_window", False):
        return None
    if layer_types:
        return window if "sliding_attention" in layer_types else None
    return window if fields.count("max_window_layers", 28, least=0) < fields.count("num_hidden_layers") else None


def _parse_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Read the older spelling (`rope_theta`, `rope_scaling`) or the newer one (`rope_parameters`)."""
    key = "rope_scaling" if fields.data.get("rope_scaling") else "rope_parameters"
    inner = fields.data.get(key) or {}
    if not isinstance(inner, Mapping):
        raise fields.error(key, "an object or null")
    rope = Fields(inner, f"{fields.source}: {key}")
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in inner.values()):
        supported = ", ".join(ROPE_KINDS)
        raise ConfigError(f"{rope.source}: rope_type {kind!r} (keys {', '.join(inner)}): supported are {supported}.")
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{rope.source}: partial_rotary_factor other than 1: rotary embeddings turn the whole head.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise ConfigError(f"{rope.source}: rope_theta is {theta}; it must be above 1, such as 10000.")
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=rope.number("factor"))
    original = fields.count(
        "original_max_position_embeddings", rope.count("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"greater than low_freq_factor ({low})")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=rope.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rope.number("factor", max_positions / original)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Return the factor on cos and sin where the file states none (YaRN, section 3.4; DeepSeek's mscale variant)."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.data.get("mscale") and rope.data.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
