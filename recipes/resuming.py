"""What must agree when a run is resumed, and what may change: every option has an entry.

A checkpoint holds weights and states, not what they are trained on: an option that changes the course of the training
must be the one that the run began with, under its own name or by what it selects.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lazytrain.recipes.encoding import DIGEST_LETTERS
from lazytrain.recipes.options import Options
from lazytrain.recipes.preparation import Job

ROWS = "digest of the training rows"
CONFIG = "digest of the model's config"
DTYPE = "dtype of the weights"

# Option -> what of a checkpoint must agree for it.
COMPARED: Mapping[str, tuple[str, ...]] = {
    "model": (CONFIG, ROWS),  # its weights are in the checkpoint; the directory may have been moved
    "data": (ROWS,),
    "eval_data": (ROWS,),  # problems that are in it are dropped from the training
    "query_field": (ROWS,),
    "response_field": (ROWS,),
    "messages_field": (ROWS,),
    "prompt": ("prompt", ROWS),
    "max_tokens": ("max_tokens", ROWS),  # also the length of packed lines
    "too_long": ("too_long", ROWS),
    "seed": ("seed",),
    "steps": ("num_steps",),
    "epochs": ("num_steps",),
    "batch_size": ("batch_size",),
    "accumulate": ("batch_size",),  # a step's rows are the product of both
    "packing": ("packing",),
    "group_by_length": ("group_by_length",),
    "lr": ("lr",),
    "warmup_steps": ("num_warmup_steps",),
    "weight_decay": ("weight_decay",),
    "max_grad_norm": ("max_grad_norm",),
    "master_bits": ("master_bits",),
    "dtype": (DTYPE,),
}
# The problems and answers that are measured: a score before training of others is left out of the result.
SCORED = frozenset({"eval_limit", "max_new_tokens"})
# Where and how something is computed, kept, told or stopped. A plan never changes the result; chunks, compilation and
# the size of generated batches only change how sums are rounded.
FREE = frozenset(
    {
        *("out", "resume", "save_every", "print_config", "dry_run", "plan_only", "tensorboard", "wandb"),
        *("device", "gpu_memory", "host_memory", "spill_dir", "plan", "plan_seconds", "fresh_profile"),
        *("microbatches", "compile", "exact", "eval_before", "eval_batch_size"),
    }
)


def run_meta(options: Options, job: Job) -> dict[str, Any]:
    """Return what a checkpoint records and a resumed run must have; the dtype is recorded with the weights."""
    settings, encoded = job.settings, job.stream.encoded
    config = json.dumps(dataclasses.asdict(job.config), sort_keys=True, default=str)
    return {
        "seed": options.seed,
        "prompt": settings.prompt,
        "max_tokens": settings.max_tokens,
        "too_long": options.too_long,
        "batch_size": settings.batch_size,
        "num_steps": job.num_steps,
        "packing": options.packing,
        "group_by_length": options.group_by_length,
        "num_rows": len(encoded),
        "num_tokens": encoded.report.num_tokens,
        "lr": settings.lr,
        "num_warmup_steps": job.num_warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "betas": list(settings.betas),
        "master_bits": options.master_bits,
        ROWS: encoded.digest,
        CONFIG: hashlib.sha256(config.encode()).hexdigest()[:DIGEST_LETTERS],
    }
