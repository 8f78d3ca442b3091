"""The same bits in every run on a GPU: attention's backward adds in any order there unless told otherwise.

Measured on an H200: without this dq of cuDNN's and flash attention's backward differs between runs; with it every case
repeats, for 2.5% of a block's time (12% where samples are packed).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# cuBLAS reads this when its first handle is made; it also keeps torch from refusing matrix products below.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Compute repeatably inside; the global settings are put back behind. Does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    filling: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filling = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        filling.fill_uninitialized_memory = was_filling
