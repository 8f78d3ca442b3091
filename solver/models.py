"""From an HF `config.json` to the shapes that the planner needs; and the shapes of a few known models.

Four dense families are planned for: llama, mistral, qwen2 and qwen3. Everything else is refused.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain.solver.errors import PlannerError
from lazytrain.solver.problem import MAX_BLOCKS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED = f"supported are dense text models of the families {', '.join(FAMILIES)}, not quantized"
MAX_SIZE = 1 << 24  # of any dimension
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_KNOWN: dict[str, tuple[str, tuple[int | bool, ...]]] = {
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 64, 151936, True)),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 128, 151936, True)),
    "qwen2.5-3b": ("qwen2", (2048, 11008, 36, 16, 2, 128, 151936, True)),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 128, 152064, False)),
    "qwen2.5-14b": ("qwen2", (5120, 13824, 48, 40, 8, 128, 152064, False)),
    "qwen2.5-32b": ("qwen2", (5120, 27648, 64, 40, 8, 128, 152064, False)),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, True)),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, False)),
    "llama-3-8b": ("llama", (4096, 14336, 32, 32, 8, 128, 128256, False)),
}
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: {"model_type": family, **dict(zip(_FIELDS, shape, strict=True))} for name, (family, shape) in _KNOWN.items()
}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """A decoder's sizes in HF's names. `sliding_window` is None where no layer looks back a limited distance."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None


def load_shapes(model: str) -> tuple[str, Shapes]:
    """Return (name, shapes) of a known name, a `config.json` or a directory that holds one.

    Raises:
        PlannerError: the name is unknown (the nearest is suggested), the file is missing or broken, or the model is not
            supported.
    """
    if model.lower() in KNOWN_MODELS:
        return model.lower(), parse_shapes(KNOWN_MODELS[model.lower()], source=model)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(model.lower(), KNOWN_MODELS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise PlannerError(f"{model!r} is neither a file nor a known model; {hint} are {', '.join(KNOWN_MODELS)}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlannerError(f"{path} can't be read as JSON: {error}") from error
    return path.resolve().parent.name, parse_shapes(data, source=str(path))


def parse_shapes(data: object, source: str = "config.json") -> Shapes:
    """Check a parsed `config.json` and return its sizes; `head_dim` is read where the file states it.

    Args:
        source: named in errors.

    Raises:
        PlannerError: an unsupported or contradictory model; the text names the key and its value.
    """
    if not isinstance(data, Mapping):
        raise PlannerError(f"{source} holds {type(data).__name__}; it must be a JSON object")
    family = _check_supported(data, source)
    hidden, num_heads = _size(data, "hidden_size", source), _size(data, "num_attention_heads", source)
    bias = family in ("llama", "qwen3") and bool(data.get("attention_bias", False))
    shapes = Shapes(
        model_type=family,
        vocab_size=_size(data, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_size(data, "intermediate_size", source),
        num_hidden_layers=_size(data, "num_hidden_layers", source, high=MAX_BLOCKS),
        num_attention_heads=num_heads,
        num_key_value_heads=_size(data, "num_key_value_heads", source, _default_kv_heads(data, family, num_heads)),
        head_dim=_size(data, "head_dim", source, 128 if family == "qwen3" else hidden // num_heads),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family == "llama" and bool(data.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=_window_in_force(data, family, source),
    )
    if num_heads % shapes.num_key_value_heads:
        raise PlannerError(
            f"{source}: num_key_value_heads is {shapes.num_key_value_heads}; it must divide "
            f"num_attention_heads ({num_heads})"
        )
    return shapes


def _check_supported(data: Mapping[str, Any], source: str) -> str:
    family = data.get("model_type")
    if family not in FAMILIES or "text_config" in data or "vision_config" in data:
        raise PlannerError(f"{source}: model_type {family!r} is not supported; {SUPPORTED}")
    for key in ("quantization_config", "quantization"):
        if data.get(key):
            raise PlannerError(f"{source}: {key} says that the weights are quantized; {SUPPORTED}")
    if any(isinstance(data.get(key), int) and data[key] > 1 for key in ("num_experts", "num_local_experts")):
        raise PlannerError(f"{source}: a mixture of experts is not supported; {SUPPORTED}")
    assert isinstance(family, str)
    return family


def _size(data: Mapping[str, Any], key: str, source: str, default: int | None = None, high: int = MAX_SIZE) -> int:
    value = data.get(key)
    if value is None:
        value = default
    if value is None:
        raise PlannerError(f"{source} lacks {key!r}; a whole config.json of a supported model has it")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise PlannerError(f"{source}: {key} is {value!r}; it must be a whole number from 1 to {high}")
    return value


def _default_kv_heads(data: Mapping[str, Any], family: str, num_heads: int) -> int:
    """Return what transformers takes where the key is absent; an explicit null means one per query head."""
    if "num_key_value_heads" in data:
        return num_heads
    return {"llama": num_heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]


def _window_in_force(data: Mapping[str, Any], family: str, source: str) -> int | None:
    """Return the sliding window if any layer uses one; Qwen's is off unless `use_sliding_window` says otherwise."""
    if family == "llama" or (family != "mistral" and not data.get("use_sliding_window", False)):
        return None
    if data.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    window = _size(data, "sliding_window", source, DEFAULT_WINDOW)
    if family == "mistral":
        return window
    if data.get("layer_types"):
        return window if "sliding_attention" in data["layer_types"] else None
    first = data.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    return window if isinstance(first, int) and first < data.get("num_hidden_layers", 0) else None
