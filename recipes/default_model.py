"""The embedded default: a tiny Qwen2 type model with random weights, its tokenizer, and the run that trains it."""

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from lazytrain.base import Model
from lazytrain.configuration import parse_config
from lazytrain.errors import ModelFileError
from lazytrain.export import export_model, plan_export
from lazytrain.recipes.rows import Row
from lazytrain.shards import INDEX, open_model_dir
from lazytrain.tensorwriter import TensorSpec
from lazytrain.transformer import transformer_model

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
FIXED_PHRASES = (
    "\nThe answer is:",
    " What is the value of unknown variable x?",
    " If we know the answer to the above question is",
    ", what is the value of unknown variable x?",
)
# A whole number, a word, or a sign (with the line's end behind it), each with the space before it.
PIECES = re.compile("|".join((*map(re.escape, FIXED_PHRASES), r" ?\d+", r" ?[^\W\d]+", r" ?[^\w\s]+\n?", r"\s+")))
NUM_SHARDS = 2
SHARD_ROOM = 1.2  # above an equal share, since tensors do not split evenly
MAX_VOCAB = 4096
VOCAB_MULTIPLE = 64
WEIGHT_STD, EMBED_STD = 0.08, 0.3


@dataclass(frozen=True, kw_only=True)
class DefaultRun:
    """The embedded run's numbers; BENCHMARKS.md has the exact match that they give."""

    batch_size: int = 64
    steps: int = 1000
    lr: float = 3e-3
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_tokens: int = 96
    max_new_tokens: int = 48


def write_default_model(directory: Path, rows: Sequence[Row], *, seed: int) -> Path:
    """Write the embedded model, once: a second call with the same rows and seed leaves the directory as it is.

    An HF directory of Qwen2 type: config, generation config, a tokenizer made from `rows`, and random fp32 weights in
    two safetensors shards with an index. It appears whole or not at all.
    """
    if _is_written(directory, seed):
        return directory
    tokenizer = make_tokenizer((text for row in rows for text in (row.query, row.response)), MAX_VOCAB)
    config = _make_config(tokenizer)
    model = transformer_model(parse_config(config))
    specs = [
        TensorSpec(spec.full_name, torch.float32, spec.shape)
        for unit in model.units
        for name, spec in unit.params.items()
        if not (unit is model.head and name in model.tied)
    ]
    total_bytes = sum(spec.num_bytes for spec in specs)
    plan = plan_export(specs, max_shard_bytes=math.ceil(SHARD_ROOM * total_bytes / NUM_SHARDS))
    with tempfile.TemporaryDirectory() as scratch:
        sides = _write_side_files(Path(scratch), tokenizer, config)
        return export_model(
            directory,
            plan,
            _draw_weights(model, seed),
            config=config,
            side_files=sides,
            metadata={"seed": str(seed)},
        )


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a word-level tokenizer of the most frequent pieces of `texts`; any other text falls back to bytes.

    A number is one token, so that a step of arithmetic is one look-up for the model. The pieces are added tokens to a
    byte-level BPE without merges: transformers 5 builds the tokenizer of any Qwen2 type model anew, with Qwen2's own
    division into words, and only added tokens survive that.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(PIECES.findall(text))
    alphabet = [PAD_TOKEN, END_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [
        piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if piece not in alphabet
    ]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD_TOKEN, END_TOKEN])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words[: vocab_size - len(alphabet)]])
    return tokenizer


def _is_written(directory: Path, seed: int) -> bool:
    index = directory / INDEX
    if not index.is_file():
        return False
    try:
        open_model_dir(directory)
        return json.loads(index.read_text(encoding="utf-8"))["metadata"].get("seed") == str(seed)
    except (ModelFileError, ValueError, KeyError):
        return False


def _make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end_id, pad_id = tokenizer.token_to_id(END_TOKEN), tokenizer.token_to_id(PAD_TOKEN)
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": math.ceil(tokenizer.get_vocab_size() / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": WEIGHT_STD,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }


def _write_side_files(directory: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> list[Path]:
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    paths = [directory / name for name in names]
    tokenizer.save(str(paths[0]))
    special = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN, "clean_up_tokenization_spaces": False}
    special |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
    ids = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    for path, content in zip(paths[1:], (special, ids), strict=True):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return paths


def _draw_weights(model: Model, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (full name, weight): norms 1, biases 0, matrices normal, smaller where they add to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    into_residual = 1 / math.sqrt(2 * len(model.blocks))
    for unit in model.units:
        for name, spec in unit.params.items():
            if unit is model.head and name in model.tied:
                continue
            if len(spec.shape) == 1:
                value = torch.zeros(spec.shape) if name.endswith("bias") else torch.ones(spec.shape)
            else:
                std = EMBED_STD if unit is model.embed else WEIGHT_STD
                std *= into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                value = torch.randn(spec.shape, generator=generator) * std
            yield spec.full_name, value
