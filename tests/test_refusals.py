"""A run that is refused for lack of memory names tier, need and remedy; the remedy, applied, runs: on every tier."""

import math
import re
from pathlib import Path

import pytest
import torch

from lazytrain import adamw8bit, make_train_step
from lazytrain.configuration import parse_config
from lazytrain.errors import MemoryBudgetError
from lazytrain.planning import Planned, choose_plan
from lazytrain.profiler import Profiler
from lazytrain.programs import ProgramCache
from lazytrain.recipes.random_model import make_fill, random_batch
from lazytrain.transformer import transformer_model

CONFIG = parse_config(
    {
        **{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": False},
    }
)
MIB, GIB = 1 << 20, 1 << 30
ROOMY = 4 * GIB


def plan_within(limits: dict[str, int], spill_dir: Path | None) -> Planned:
    profiler = Profiler(
        model=transformer_model(CONFIG),
        settings=adamw8bit(1e-3).settings,
        batch=random_batch(CONFIG, 2, 64, seed=0),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        programs=ProgramCache(),
        limits=limits,
        spill_dir=spill_dir,
        floor_s=0.001,
    )
    return choose_plan(profiler, time_limit_s=2.0)


def take_a_step(plan: Planned, spill_dir: Path | None) -> float:
    step = make_train_step(
        transformer_model(CONFIG),
        adamw8bit(1e-3),
        plan.plan,
        device="cpu",
        dtype=torch.bfloat16,
        spill_dir=spill_dir,
    )
    state = step.restore(make_fill(), step=0, num_updates=0, seed=0)
    state, metrics = step(state, random_batch(CONFIG, 2, 64, seed=0))
    state.engine.finish_updates()
    state.engine.close()
    return metrics.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "limits"),
    [
        ("device", {"device": 1 * MIB, "host": ROOMY}),
        ("host", {"device": 14 * MIB, "host": 16 * MIB}),
        ("nvme", {"device": 14 * MIB, "host": 24 * MIB, "nvme": 21 * MIB // 2}),
    ],
)
def test_a_refused_run_runs_with_the_memory_that_it_was_told_to_be_given(
    tier: str, limits: dict[str, int], tmp_path: Path
) -> None:
    spill_dir = tmp_path if "nvme" in limits else None
    with pytest.raises(MemoryBudgetError, match="nothing fits") as refused:
        plan_within(limits, spill_dir)
    text = str(refused.value)
    asked = dict(re.findall(r"([\d.]+) GiB more (\w+) memory", text.split("To make it fit")[1]))
    needs = {name.lower(): float(size) for size, name in asked.items()}
    assert tier in needs, text
    more = {name: limits[name] + math.ceil(needs.get(name, 0.0) * GIB) for name in limits}
    planned = plan_within(more, spill_dir)
    assert math.isfinite(take_a_step(planned, spill_dir))


@pytest.mark.slow
def test_a_refused_run_runs_once_nvme_is_allowed(tmp_path: Path) -> None:
    limits = {"device": 14 * MIB, "host": 26 * MIB}
    with pytest.raises(MemoryBudgetError, match="allow NVMe"):
        plan_within(limits, None)
    planned = plan_within({**limits, "nvme": GIB}, tmp_path)
    assert any(unit.uses_nvme for unit in planned.plan.units)
    assert math.isfinite(take_a_step(planned, tmp_path))
