"""Shared set-up. The Triton interpreter must be chosen before anything imports triton."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest

SHARED = Path(os.environ.get("LAZYTRAIN_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Not `in item.keywords`: those hold the names of the folders too, and a checkout may lie in one named "data".
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("data") and not SHARED.is_dir():
            item.add_marker(pytest.mark.skip(reason="needs the folder ../shared with real data and models"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder of real data and models (tests that use it carry the marker `data`)."""
    return SHARED
