"""How the recipes that measure a random model begin and end: counts, the device and its limit, the exit code."""

import argparse
import sys
from collections.abc import Callable, Mapping

import torch

from lazytrain.errors import LazyTrainError
from lazytrain.recipes.failures import describe_error
from lazytrain.solver.costs import MAX_TOKENS
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.problem import check_number


def run_to_exit_code(run: Callable[[], object]) -> int:
    """Run a recipe; return 0, or 2 after one line that says what was wrong."""
    try:
        run()
    except (LazyTrainError, PlannerError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 2
    return 0


def check_counts(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Check options that are counts; None = not given.

    Args:
        least: option -> the least that it may be.

    Raises:
        PlannerError: names the option and its value.
    """
    for name, low in least.items():
        if (value := getattr(options, name)) is not None:
            check_number(value, f"--{name}", low=low, high=MAX_TOKENS, integer=True)


def limit_device(options: argparse.Namespace) -> torch.device:
    """Return the device of --device, a GPU if there is one; --gpu-memory becomes a hard limit of its allocator."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and options.gpu_memory is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory / total))
    return device
