"""Counts of a batch: the targets, found without torch's threads."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazytrain.base import IGNORE_INDEX, count_targets, find_targets
from lazytrain.engine import split_batch


class Called(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def make_targets(rows: int, length: int) -> torch.Tensor:
    targets_bt = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(rows))
    targets_bt[targets_bt < 20] = IGNORE_INDEX
    return targets_bt


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 7), (64, 1024), (0, 4)])
def test_targets_are_found_as_torch_finds_them(rows: int, length: int) -> None:
    targets_bt = make_targets(rows, length)
    expected = (targets_bt.reshape(-1) != IGNORE_INDEX).nonzero().view(-1)
    found = find_targets(targets_bt)
    assert torch.equal(found, expected)
    assert found.dtype == torch.int64
    assert count_targets({"targets_bt": targets_bt}) == len(expected)
    columns = targets_bt.T  # not contiguous
    assert torch.equal(find_targets(columns), (columns.reshape(-1) != IGNORE_INDEX).nonzero().view(-1))


def test_rows_count_where_there_are_no_targets() -> None:
    assert count_targets({"x": torch.zeros(5, 2)}) == 5


def test_no_operator_of_torch_waits_for_cores_that_updates_keep_busy() -> None:
    """Beside updates on the CPU a parallel operator over 65,536 positions took 40 ms, at the start of every step."""
    batch = {"targets_bt": make_targets(64, 1024)}
    with Called() as called:
        count_targets(batch)
        for part in split_batch(batch, 4):
            find_targets(part["targets_bt"])
    assert called.names <= {"aten::detach", "aten::lift_fresh", "aten::slice", "aten::tensor_split"}, "views alone"
