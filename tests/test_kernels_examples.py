"""The examples in the docstrings of the kernels' public functions say what really happens."""

import doctest
import importlib

import pytest
import torch


@pytest.mark.parametrize("name", ["adamw", "codec", "cross_entropy", "hyper", "master", "norm"])
def test_docstring_examples_are_right(name: str) -> None:
    module = importlib.import_module(f"lazytrain.kernels.{name}")
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted >= 1
    assert results.failed == 0
