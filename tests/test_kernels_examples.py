"""The examples in the docstrings of the kernels' public functions say what really happens."""

import doctest
import importlib

import pytest
import torch

EXAMPLES = ["adam8bit", "adamw", "clipping", "codec", "cross_entropy", "hyper", "master", "norm", "torch_adamw"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples_are_right(name: str) -> None:
    module = importlib.import_module(f"lazytrain.kernels.{name}")
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted >= 1
    assert results.failed == 0
