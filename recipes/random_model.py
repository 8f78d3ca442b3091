"""Random weights and tokens of a real model's shape, for benchmarks."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.configuration import ModelConfig, load_config, parse_config
from lazytrain.errors import ConfigError
from lazytrain.homes import UnitHome
from lazytrain.solver.models import KNOWN_MODELS

POOL_NUMEL = 1 << 24
FAMILY_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}


def load_shape(model: str) -> ModelConfig:
    """Return the architecture of a known model's name or of a model directory.

    Raises:
        ConfigError: it is neither; names what is known.
    """
    if model.lower() in KNOWN_MODELS:
        return parse_config({**FAMILY_DEFAULTS, **KNOWN_MODELS[model.lower()]})
    if not Path(model).exists():
        raise ConfigError(f"--model {model!r} is neither a directory nor one of {', '.join(KNOWN_MODELS)}.")
    return load_config(Path(model))


def random_batch(config: ModelConfig, rows: int, length: int, *, seed: int) -> dict[str, Tensor]:
    """Return random tokens, every one but the last a target's input; int64 (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    return {"tokens_bt": ids[:, :-1].contiguous(), "targets_bt": ids[:, 1:].contiguous()}


def make_fill() -> Callable[[UnitHome, Tensor, Tensor], None]:
    """Return a function that writes a unit's initial slabs: norms 1, biases 0, the rest from one normal pool."""
    pool = torch.randn(POOL_NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02

    def fill(home: UnitHome, weights: Tensor, state: Tensor) -> None:
        own = pool.to(weights.dtype).roll(home.index * 997)
        state.zero_()
        weights.zero_()
        for place in home.layout.places:
            target = weights[place.offset : place.offset + place.numel]
            if place.name.endswith("norm.weight"):
                target.fill_(1.0)
            elif not place.name.endswith(".bias"):
                for piece in target.split(POOL_NUMEL):
                    piece.copy_(own[: piece.numel()])

    return fill
