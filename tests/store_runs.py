"""A tiny run directory for tests of the store: two checkpoints, an exported model, a plan, metrics."""

import json
import os
from pathlib import Path

import torch
from test_trainer import PLANS
from toys import make_batch, make_model, make_params

from lazytrain import adamw8bit, cosine, make_train_step
from lazytrain.export import export_model, plan_export
from lazytrain.saving import count_shared, save_state
from lazytrain.tensorwriter import TensorSpec
from lazytrain.trainer import TrainStep, read_params

META = {"seed": 7}
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def make_step(plan: str, spill_dir: Path, *, run_dir: Path | None = None) -> TrainStep:
    """Return the step of the toy model; with `run_dir`, its checkpoints link what the plan keeps on NVMe."""
    optimizer = adamw8bit(cosine(3e-3, num_steps=16, num_warmup_steps=3))
    return make_train_step(
        make_model(),
        optimizer,
        PLANS[plan],
        device="cpu",
        dtype=torch.bfloat16,
        spill_dir=spill_dir,
        shared_checkpoints=None if run_dir is None else count_shared(run_dir, spill_dir),
    )


def make_run(run_dir: Path) -> Path:
    """Train three steps; save after the second and the third, export, record plan and metrics."""
    run_dir.mkdir()
    PLANS["mixed"].save(run_dir / "plan.json")
    step = make_step("mixed", run_dir.parent / "nvme")
    state = step.init(make_params(make_model()))
    with (run_dir / "metrics.jsonl").open("w") as metrics_file:
        while state.step < 3:
            state, metrics = step(state, make_batch(state.step))
            metrics_file.write(json.dumps(metrics._asdict()) + "\n")
            if state.step > 1:
                save_state(state, run_dir, meta=META)
    export_toy(run_dir / "model", {name: value.clone() for name, value in read_params(state)})
    return run_dir


def export_toy(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Export tensors in several shards, with one side file."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    side = directory.parent.parent / "generation_config.json"
    side.write_text('{"eos_token_id": 1}')
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    plan = plan_export(specs, max_shard_bytes=36_000)
    assert len(plan.shards) > 2
    export_model(directory, plan, tensors.items(), config=CONFIG, side_files=[side])
    return directory


def flip_bit(path: Path, position: int, bit: int) -> None:
    """Flip one bit of a file as a failing disk does: its times stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
