"""Clipping without a host synchronisation: the coefficient, and updates that read it where it lies."""

import math
from typing import Any

import pytest
import torch
from kernel_states import make_grads, make_hyper, make_state8, make_state32
from torch import Tensor, nn

from lazytrain.kernels import native
from lazytrain.kernels.adamw import adamw8bit_update_into, adamw_update_into
from lazytrain.kernels.clipping import clip_coefficient, coefficient_of
from lazytrain.kernels.norm import TILE, reference_square_total, square_total

SIZES = [1, 63, 1024, TILE + 5]
NORM_ERROR = 1e-6  # relative to the fp64 norm; worst seen 2e-8


def with_grads(*grads: Tensor) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g
    return params


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
def test_coefficient_is_that_of_clip_grad_norm(max_norm: float) -> None:
    grads = [make_grads(size, size, torch.float32) for size in SIZES]
    truth = torch.cat([g.double() for g in grads]).norm()
    clip = clip_coefficient(with_grads(*grads), max_norm)
    assert abs(clip.norm - truth) <= NORM_ERROR * truth
    clipped = with_grads(*[g.clone() for g in grads])
    nn.utils.clip_grad_norm_(clipped, max_norm)
    for g, p in zip(grads, clipped):  # torch sums in fp32
        torch.testing.assert_close(g * clip.coef, p.grad, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.999999, 1.0, 1.0000001, 3.7, 1e30])
def test_coefficient_is_computed_in_double_and_rounded_once(norm: float) -> None:
    """norm == max_norm is among the cases."""
    on_device = coefficient_of(torch.tensor(norm, dtype=torch.float64), 1.0)
    assert on_device == torch.tensor(min(1.0, 1.0 / (norm + 1e-6)), dtype=torch.float32)
    assert (on_device < 1.0) == (norm > 0.9999995)  # at norm == max_norm torch clips by a millionth, too


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_norm_that_is_not_finite_gives_no_coefficient(value: float) -> None:
    clip = clip_coefficient(with_grads(torch.ones(5), torch.tensor([1.0, value])), 1.0)
    assert not clip.norm.isfinite()
    assert clip.coef.isnan()


def test_squares_that_overflow_give_no_coefficient() -> None:
    assert clip_coefficient(with_grads(torch.full((4,), 1e30)), 1.0).coef.isnan()


def test_zero_and_missing_gradients_are_fine() -> None:
    for params in ([], [nn.Parameter(torch.ones(3))], with_grads(torch.zeros(7))):
        clip = clip_coefficient(params, 1.0)
        assert (clip.norm.item(), clip.coef.item()) == (0.0, 1.0)


def test_tied_parameters_count_once() -> None:
    (w,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_coefficient([w, w], math.inf).norm == 5.0


def test_strided_gradients_are_measured() -> None:
    g = make_grads(600, 1, torch.bfloat16).view(20, 30)
    assert torch.allclose(clip_coefficient(with_grads(g.T), 1.0).norm, g.double().norm(), rtol=NORM_ERROR)


def test_wrong_arguments_are_named() -> None:
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            clip_coefficient([], bad)
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        clip_coefficient(embedding.parameters(), 1.0)


@pytest.mark.parametrize("size", [0, 1, 5, 1024, 1025, 3000, 5000])
def test_square_total_matches_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazytrain.kernels.norm_triton import square_total_triton

    squares = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    truth = reference_square_total(squares)
    assert torch.equal(square_total(squares), truth)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch.equal(square_total_triton(squares.to(device)).cpu(), truth)
    monkeypatch.setattr(native, "load", lambda: None)
    assert torch.equal(square_total(squares), truth)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter computes what is not stored
@pytest.mark.parametrize("coef", [0.3, 1.0, 0.0, math.nan])
@pytest.mark.parametrize("kind", ["fp32", "32", "24"])
@pytest.mark.parametrize("path", ["dispatch", "triton"])
def test_coefficient_as_a_tensor_gives_the_bits_of_a_number(coef: float, kind: str, path: str) -> None:
    """A NaN there leaves everything as it was."""
    from lazytrain.kernels.adamw_triton import adamw8bit_update_triton_into, adamw_update_triton_into

    update8, update32 = (
        (adamw8bit_update_into, adamw_update_into)
        if path == "dispatch"
        else (adamw8bit_update_triton_into, adamw_update_triton_into)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w, options = make_grads(3 * 200, 9, torch.float32), {"rows": 3, "cols": 200, "first_group": 7}
    truths: list[Any] = [make_state8(w, kind, 200), make_state32(w, kind)]
    others = [[None if x is None else x.to(device) for x in state] for state in truths]
    tensor = torch.tensor(coef, dtype=torch.float32, device=device)
    for step in (1, 2):
        g, hyper = make_grads(600, step, torch.bfloat16), make_hyper(step)
        if not math.isnan(coef):
            adamw8bit_update_into(*truths[0], g, coef=coef, hyper=hyper, **options)
            adamw_update_into(*truths[1], g, coef=coef, hyper=hyper)
        update8(*others[0], g.to(device), coef=tensor, hyper=hyper, **options)
        update32(*others[1], g.to(device), coef=tensor, hyper=hyper)
    for truth, other in zip(truths, others):
        for a, b in zip(truth, other):
            assert (a is None and b is None) or torch.equal(a, b.cpu())


def test_coefficient_of_another_type_is_refused() -> None:
    state, g = make_state8(torch.zeros(128), "fp32", 128), torch.ones(128)
    with pytest.raises(ValueError, match=r"coef is torch\.float64"):
        adamw8bit_update_into(
            *state, g, rows=1, cols=128, first_group=0, coef=torch.ones((), dtype=torch.float64), hyper=make_hyper(1)
        )
