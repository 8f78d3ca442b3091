"""Gradients of looked-up rows: the bits of a dense fp32 sum that is rounded once, some columns at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toys import make_batch, make_model, make_params

from lazytrain import adamw8bit, make_train_step, read_params, row_sums
from lazytrain.row_sums import add_rows_into, sum_rows_into


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the sums are."""
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width", "sizes"), [(9, 13, (500,)), (4000, 300, (700, 900)), (5, 8, (1, 1, 1))])
def test_sum_of_rows_has_the_bits_of_the_dense_sum(
    num_rows: int,
    width: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_sums, "PIECE_BYTES", 4000 * 4 * 128)  # four pieces of the second case
    generator = torch.Generator().manual_seed(num_rows)
    rows = [torch.randint(0, num_rows - 1, (n,), generator=generator).to(device) for n in sizes]
    cotangents = [torch.randn(n, width, generator=generator).to(device, dtype) for n in sizes]
    dense = torch.zeros(num_rows, width, device=device)
    for index, dx in zip(rows, cotangents):
        add_rows_into(dense, index, dx.float())
    found = torch.full((num_rows, width), torch.nan, dtype=dtype, device=device)
    sum_rows_into(found, rows, cotangents)
    assert torch.equal(found, dense.to(dtype))
    assert not found[num_rows - 1].any(), "a row that was never used"


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_has_the_same_bits_with_and_without_rows(num_microbatches: int) -> None:
    plain = make_model(tied=False, streams_embed=True)
    calls: list[Tensor] = []

    def rows(batch: dict[str, Tensor]) -> Tensor:
        calls.append(batch["tokens_bt"])
        return batch["tokens_bt"].reshape(-1)

    results = []
    for model in (plain, replace(plain, embed=replace(plain.embed, rows=rows))):
        step = make_train_step(model, adamw8bit(1e-3), device="cpu")
        step = replace(step, plan=replace(step.plan, num_microbatches=num_microbatches))
        state = step.init(make_params(model))
        for i in range(3):
            state, metrics = step(state, make_batch(i, rows=2, time=8))
        results.append((metrics.grad_norm, {name: value.clone() for name, value in read_params(state)}))
    assert len(calls) == 3 * num_microbatches
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
