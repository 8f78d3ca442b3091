"""Fine-tune all the weights of a large language model on one GPU that is too small for it.

The public names load on first use, so that the planner (`lazytrain.solver`) needs no torch.
"""

import os
from importlib import import_module
from typing import Any

# OpenMP threads that spin at a barrier, while another program has their core, made a CPU step up to ten times slower
# on two cores. Read when torch is first imported; a value that the user set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Device memory comes in pages, so that it does not fragment. Read at the first allocation on a GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

__version__ = "0.1.0"

_WHERE = {
    "Adam8bit": "kernels.adam8bit",
    "Model": "base",
    "Unit": "base",
    "ParamSpec": "base",
    "StepMetrics": "base",
    "LazyTrainError": "errors",
    "Optimizer": "optimizer",
    "adamw": "optimizer",
    "adamw8bit": "optimizer",
    "choose_plan": "planning",
    "default_limits": "planning",
    "ProgramCache": "programs",
    "constant": "schedules",
    "cosine": "schedules",
    "linear": "schedules",
    "resident_plan": "standard_plans",
    "streaming_plan": "standard_plans",
    "TrainState": "trainer",
    "make_train_step": "trainer",
    "read_params": "trainer",
    "train_step": "trainer",
    "unit_params": "trainer",
    "block_model": "blocks",
    "block_from_module": "blocks",
    "blocks_from_modules": "blocks",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lazytrain' has no attribute {name!r}")
    return getattr(import_module(f"lazytrain.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
