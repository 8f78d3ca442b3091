"""Measured problems, kept by a hash of everything that they depend on: machine, versions, model, shape, options.

A profile takes seconds to minutes, and measuring anew in every run makes plans irreproducible. An entry is a JSON file
that `Problem.from_dict` reads: it can be looked at, edited, carried to the planner's command, or removed.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from lazytrain.base import Batch, Model
from lazytrain.kernels.native import find_cache_folder
from lazytrain.optimizer import AdamWSettings
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.problem import Problem

LOG = logging.getLogger(__name__)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what times depend on, but for the load of the moment."""
    described: dict[str, Any] = {
        "code": _digest_of_code(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "host": platform.node(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": str(device.type),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}
    return described


def describe_work(model: Model, settings: AdamWSettings, batch: Batch) -> dict[str, Any]:
    """Return what is computed: the kinds of units and their shapes, the optimizer's states, the batch's shape."""
    units = [
        (unit.name, unit.kind, _name_of(unit.fn), [(n, list(s.shape)) for n, s in unit.params.items()])
        for unit in model.units
    ]
    states = {k: v for k, v in asdict(settings).items() if k in ("state_bits", "master_bits", "fp32_patterns")}
    shapes = {name: (list(value.shape), str(value.dtype)) for name, value in batch.items()}
    return {"units": units, "tied": dict(model.tied), "states": states, "batch": shapes}


def make_key(parts: Mapping[str, Any]) -> str:
    """Return the name of an entry: a hash of plain data."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class ProfileCache:
    """A directory of measured problems."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, key: str) -> Path:
        """Return where an entry lies, or would."""
        return self._directory / f"{key}.json"

    def load(self, key: str, limits: Mapping[str, int]) -> Problem | None:
        """Return an entry with the budgets of now; None where there is none, or one that can't be read (a log says)."""
        path = self.path(key)
        try:
            problem = Problem.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, PlannerError) as error:
            LOG.warning("%s can't be used, so it is measured again: %s", path, error)
            return None
        hardware = replace(
            problem.hardware,
            device_memory_bytes=limits["device"],
            host_memory_bytes=limits["host"],
            nvme_bytes=limits.get("nvme", 0),
        )
        return replace(problem, hardware=hardware)

    def save(self, key: str, problem: Problem) -> None:
        """Keep an entry, whole or not at all; a directory that can't be written is said in the log, no more."""
        partial = self._directory / f".{uuid.uuid4().hex}.tmp"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(problem.to_dict()) + "\n", encoding="utf-8")
            partial.replace(self.path(key))
        except OSError as error:
            LOG.warning("the profile is not kept: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def user_cache() -> ProfileCache:
    """Return the cache of this user, beside the built operator (LAZYTRAIN_CACHE, or the user's cache folder)."""
    return ProfileCache(find_cache_folder() / "profiles")


def _digest_of_code() -> str:
    """Return a hash of the package's own sources: a faster kernel is measured anew."""
    package = Path(__file__).parent
    files = sorted(
        [*package.glob("*.py"), *(f for end in ("py", "cpp", "h") for f in package.glob(f"kernels/*.{end}"))]
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _name_of(fn: Any) -> str:
    """Return a function's name and, of a partial one, what it is bound to."""
    inner = getattr(fn, "func", fn)
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    bound = [repr(value) for value in (*getattr(fn, "args", ()), *getattr(fn, "keywords", {}).values())]
    return f"{name}({', '.join(bound)})" if bound else name
