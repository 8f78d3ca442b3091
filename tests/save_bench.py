"""Measure what a save costs with and without links, for a model of about 110M parameters; run as a program.

    python tests/save_bench.py DIRECTORY

Between two saves lies a step of one short row, so that all blobs on NVMe are new. From the third save on an older
checkpoint is deleted, and so the new one is read back from the disk. Takes about 3.5 GB.
"""

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from toys import RESIDENT, STREAMED, make_plan

from lazytrain import adamw8bit, make_train_step
from lazytrain.configuration import parse_config
from lazytrain.saving import count_shared, save_state
from lazytrain.transformer import random_params, transformer_model

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
PLANS = {
    "states on NVMe": make_plan(12, default=replace(STREAMED, states="nvme"), ends=replace(RESIDENT, states="nvme")),
    "weights and states on NVMe": make_plan(
        12, default=replace(STREAMED, states="nvme", weights="nvme"), ends=replace(RESIDENT, states="nvme")
    ),
}
NUM_SAVES = 5


def measure(directory: Path, plan: str, links: bool) -> None:
    """Print the seconds and the bytes of a few saves."""
    run_dir, spill_dir = directory / "run", directory / "nvme"
    model = transformer_model(parse_config(CONFIG))
    step = make_train_step(
        model,
        adamw8bit(1e-4),
        PLANS[plan],
        device="cpu",
        dtype=torch.bfloat16,
        spill_dir=spill_dir,
        shared_checkpoints=count_shared(run_dir, spill_dir) if links else None,
    )
    state = step.init(dict(random_params(model, 0, torch.bfloat16)))
    written = [0]
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        written[0] += len(data)
        return real(fd, data, offset)

    rows = []
    for number in range(NUM_SAVES):
        tokens_bt = torch.randint(0, 32000, (1, 16), generator=torch.Generator().manual_seed(number))
        state, _ = step(state, {"tokens_bt": tokens_bt, "targets_bt": tokens_bt.roll(-1, 1)})
        state.engine.finish_updates()
        written[0], os.pwrite = 0, pwrite
        start_s = time.perf_counter()
        path = save_state(state, run_dir, meta={})
        rows.append((time.perf_counter() - start_s, written[0]))
        os.pwrite = real
    size = sum(file.stat().st_size for file in path.iterdir())
    seconds = " ".join(f"{s:.2f}" for s, _ in rows)
    how = "linked" if links else "copied"
    print(
        f"{plan}, {how}: {model.num_params / 1e6:.0f}M parameters, checkpoint {size / 1e6:.0f} MB, "
        f"written {rows[-1][1] / 1e6:.1f} MB a save, saves {seconds} s",
        flush=True,
    )
    state.engine.spill.close()
    shutil.rmtree(run_dir)


if __name__ == "__main__":
    for plan in PLANS:
        for links in (False, True, False, True):
            measure(Path(sys.argv[1]), plan, links)
