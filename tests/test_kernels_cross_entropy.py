"""Chunked linear cross entropy: right, and differentiable under autograd and torch.func alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lazytrain.kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_grads,
    reference_cross_entropy_into,
    reference_linear_cross_entropy,
)

LOSS_ERROR = 1e-6  # fp32 against fp64, relative; worst seen 9e-8
GRAD_ERROR = 2e-6  # fp32 against fp64, relative to the largest value; worst seen 8e-7, torch's own 7e-7
SURE_ERROR = 2e-7  # absolute, beside logits of 40; worst seen 3e-8
BF16_ERROR = 1e-2  # relative to the largest value: logits and dlogits are rounded to bf16; worst seen 5.4e-3
SHAPES = [(1, 1, 1), (5, 3, 2), (63, 16, 123), (37, 8, 1003)]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where Triton runs: interpreted on the CPU, or compiled."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    return "cpu" if request.param == "interpreter" else "cuda"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the operator runs."""
    return request.param


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the CPU's chunks through the Triton kernel too."""
    from lazytrain.kernels import cross_entropy
    from lazytrain.kernels.cross_entropy_triton import cross_entropy_triton_into

    def run(logits_cv: Tensor, targets_c: Tensor, losses_c: Tensor, scale: float, ignore_index: int) -> None:
        cross_entropy_triton_into(logits_cv, targets_c, losses_c, scale=scale, ignore_index=ignore_index)

    monkeypatch.setattr(cross_entropy, "_cross_entropy_into", run)


def make_inputs(n: int, d: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(n * v)
    h, w = torch.randn(n, d, generator=gen), torch.randn(v, d, generator=gen) * 2 / d**0.5
    targets = torch.randint(0, v, (n,), generator=gen)
    targets[1::4] = -100
    return h.to(dtype), w.to(dtype), targets


def worst_error(a: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to the truth's largest value."""
    return ((a.double() - truth.double()).abs().max() / truth.double().abs().max().clamp_min(1e-30)).item()


def check_parity(n: int, d: int, v: int, chunk: int, place: str) -> None:
    h, w, targets = (x.to(place) for x in make_inputs(n, d, v))
    options: dict[str, Any] = {"scale": 0.25}
    truth_h, truth_w = h.double().requires_grad_(), w.double().requires_grad_()
    logits = truth_h @ truth_w.T
    truth = 0.25 * torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    truth.backward()
    loss, dh, dw = linear_cross_entropy_grads(h, w, targets, chunk=chunk, **options)
    assert loss.dtype == torch.float32
    assert worst_error(loss * 0.25, truth.detach()) <= LOSS_ERROR
    for name, ours, exact in [("dh", dh, truth_h.grad), ("dw", dw, truth_w.grad)]:
        assert exact is not None
        assert worst_error(ours, exact) <= GRAD_ERROR, name
    plain = reference_linear_cross_entropy(h, w, targets, **options)
    assert worst_error(linear_cross_entropy(h, w, targets, chunk=chunk, **options), plain) <= LOSS_ERROR


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_grads_match_torch(shape: tuple[int, int, int], chunk: int, place: str) -> None:
    check_parity(*shape, chunk, place)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_triton_loss_and_grads_match_torch(shape: tuple[int, int, int], device: str, in_triton: None) -> None:
    check_parity(*shape, 16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_cols", [1, 31, 300, 5000])
def test_triton_kernel_matches_reference(num_cols: int, dtype: torch.dtype, device: str) -> None:
    from lazytrain.kernels.cross_entropy_triton import cross_entropy_triton_into

    gen = torch.Generator().manual_seed(0)
    truth = (torch.randn(5, num_cols, generator=gen) * 8).to(dtype)
    targets = torch.randint(0, num_cols, (5,), generator=gen)
    targets[2] = -100
    slab = torch.full((5, num_cols + 3), float("nan"), dtype=dtype, device=device)  # rows with a gap between them
    logits, losses, truth_losses = slab[:, :num_cols], torch.empty(5, device=device), torch.empty(5)
    logits.copy_(truth)
    reference_cross_entropy_into(truth, targets, truth_losses, scale=0.5)
    cross_entropy_triton_into(logits, targets.to(device), losses, scale=0.5)
    assert torch.allclose(losses.cpu(), truth_losses, rtol=1e-6, atol=4e-6)
    # the interpreter cuts bf16 where the GPU rounds
    tolerance = 2**-24 if dtype == torch.float32 else 2**-7
    assert torch.allclose(logits.cpu().float(), truth.float(), rtol=max(tolerance, 2e-6), atol=1e-7)
    assert slab[:, num_cols:].isnan().all()


@pytest.mark.parametrize("chunk", [16, 100])
def test_bf16_stays_near_fp32(chunk: int, place: str) -> None:
    h, w, targets = (x.to(place) for x in make_inputs(64, 32, 200, torch.bfloat16))
    loss, dh, dw = linear_cross_entropy_grads(h, w, targets, scale=1 / 64, chunk=chunk)
    true_loss, true_dh, true_dw = linear_cross_entropy_grads(h.float(), w.float(), targets, scale=1 / 64, chunk=100)
    assert (dh.dtype, dw.dtype, loss.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    for ours, truth in [(loss, true_loss), (dh, true_dh), (dw, true_dw)]:
        assert worst_error(ours, truth) <= BF16_ERROR


@pytest.mark.parametrize("chunk", [7, 1000])
def test_autograd_and_func_give_the_same_gradients(chunk: int, place: str) -> None:
    """C61."""
    h, w, targets = (x.to(place) for x in make_inputs(37, 8, 100))

    def loss_of(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, scale=0.5, chunk=chunk)

    leaf_h, leaf_w = h.clone().requires_grad_(), w.clone().requires_grad_()
    loss_of(leaf_h, leaf_w).backward()
    by_grad = torch.func.grad(loss_of, (0, 1))(h, w)
    loss, pull = torch.func.vjp(loss_of, h, w)
    by_vjp = pull(torch.ones_like(loss))
    _, *direct = linear_cross_entropy_grads(h, w, targets, scale=0.5, chunk=chunk)
    for results in zip((leaf_h.grad, leaf_w.grad), by_grad, by_vjp, direct):
        assert all(torch.equal(results[0], x) for x in results[1:])  # type: ignore[arg-type]
    assert torch.equal(loss, loss_of(h, w))
    assert torch.equal(torch.func.grad(lambda h: 3 * loss_of(h, w))(h), 3 * by_grad[0])
    assert torch.equal(torch.func.vjp(lambda w: loss_of(h, w), w)[1](torch.tensor(2.0, device=place))[0], 2 * direct[1])


def test_second_derivative_is_refused() -> None:
    h, w, targets = make_inputs(5, 3, 4)

    def loss_of(h: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, scale=1.0, chunk=2)

    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.grad(lambda h: torch.func.grad(loss_of)(h).sum())(h)
    leaf = h.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("n", [0, 6])
def test_no_targets_give_exact_zeros(n: int, place: str) -> None:
    h, w, _ = (x.to(place) for x in make_inputs(n, 4, 9))
    targets = torch.full((n,), -100, device=place)
    for chunk in (4, 100):
        loss, dh, dw = linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=chunk)
        assert loss.item() == 0.0
        assert (dh.shape, dw.shape) == (h.shape, w.shape)
        assert not dh.any()
        assert not dw.any()
        assert linear_cross_entropy(h, w, targets, scale=1.0, chunk=chunk).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_grad_w_is_added_into_a_buffer(dtype: torch.dtype, into: torch.dtype, place: str) -> None:
    h, w, targets = (x.to(place) for x in make_inputs(40, 8, 50, dtype))
    _, _, dw = linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=1000)
    buffer = torch.ones(50, 8, dtype=into, device=place)
    _, _, out = linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=16, grad_w_into=buffer)
    assert out is buffer
    exact = GRAD_ERROR if dtype == into == torch.float32 else BF16_ERROR
    assert worst_error(buffer.float() - 1, dw.float()) <= 2 * exact


def test_products_in_slabs_add_up(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from lazytrain.kernels import cross_entropy

    h, w, targets = (x.to(place) for x in make_inputs(40, 8, 50, torch.bfloat16))
    whole = linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=16)[2]
    monkeypatch.setattr(cross_entropy, "SLAB_BYTES", 7 * 4 * 8)
    assert worst_error(linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=16)[2], whole) <= 2**-8


def test_no_chunk_holds_all_logits() -> None:
    """The largest matrix product's result has one chunk of rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    h, w, targets = make_inputs(256, 4, 1000)
    with Largest() as seen:
        linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=8)
    assert seen.numel == 8 * 1000


def test_large_logits_do_not_overflow(place: str) -> None:
    h = torch.tensor([[100.0], [-100.0]], device=place)
    w = torch.tensor([[90.0], [-90.0], [0.0]], device=place)
    targets = torch.tensor([0, 0], device=place)
    loss, dh, dw = linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=1)
    assert loss.item() == 18000.0
    assert dh.isfinite().all()
    assert dw.isfinite().all()


def test_loss_of_a_sure_answer_keeps_its_digits(place: str) -> None:
    """A loss far below the logits must not drown in their rounding."""
    h, w = torch.tensor([[1.0]], device=place), torch.tensor([[40.0], [30.0]], device=place)
    targets = torch.tensor([0], device=place)
    truth = torch.log1p(torch.tensor(-10.0, dtype=torch.float64).exp())
    loss = linear_cross_entropy(h, w, targets, scale=1.0, chunk=1)
    assert abs(loss.double().cpu() - truth) <= SURE_ERROR


def test_non_contiguous_inputs_are_taken(place: str) -> None:
    h, w, targets = (x.to(place) for x in make_inputs(10, 6, 9))
    strided_h, strided_w = h.T.contiguous().T, torch.cat([w, w], 1)[:, :6]
    ours = linear_cross_entropy_grads(strided_h, strided_w, targets.repeat_interleave(2)[::2], scale=1.0, chunk=4)
    for a, b in zip(ours, linear_cross_entropy_grads(h, w, targets, scale=1.0, chunk=4)):
        assert worst_error(a, b) <= GRAD_ERROR


def test_wrong_arguments_are_named() -> None:
    h, w, targets = make_inputs(4, 3, 5)
    good: dict[str, Any] = {"scale": 1.0, "chunk": 2}
    cases: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = [
        ((h, w[:, :2], targets), good, r"h must be \(n, d\)"),
        ((h, w, targets[:3]), good, r"targets must be int64 \(4,\)"),
        ((h, w, targets.int()), good, "targets must be int64"),
        ((h, w.bfloat16(), targets), good, "must both be fp32 or both be bf16"),
        ((h, w, targets), {**good, "chunk": 0}, "chunk is 0"),
        ((h, w, targets + 4), good, "w has rows 0..4 only"),
        ((h, w, targets), {**good, "grad_w_into": torch.zeros(3, 5).T}, "must be contiguous"),
    ]
    for inputs, options, words in cases:
        with pytest.raises(ValueError, match=words):
            linear_cross_entropy_grads(*inputs, **options)


@pytest.mark.parametrize("bad", [9, -1])
def test_unknown_target_in_the_kernel_makes_the_loss_nan(bad: int, device: str) -> None:
    from lazytrain.kernels.cross_entropy_triton import cross_entropy_triton_into

    logits, losses = torch.zeros(2, 9, device=device), torch.zeros(2, device=device)
    cross_entropy_triton_into(logits, torch.tensor([1, bad], device=device), losses, scale=1.0)
    assert losses.isnan().tolist() == [False, True]


@pytest.mark.gpu
def test_compiled_chunk_over_2_to_31_logits() -> None:
    num_rows, num_cols = 16_384, 152_064
    logits = torch.zeros(num_rows, num_cols, dtype=torch.bfloat16, device="cuda")
    logits[-1, 7] = 20.0
    targets = torch.full((num_rows,), 7, device="cuda")
    losses = torch.empty(num_rows, device="cuda")
    from lazytrain.kernels.cross_entropy_triton import cross_entropy_triton_into

    cross_entropy_triton_into(logits, targets, losses, scale=1.0)
    truth = torch.nn.functional.cross_entropy
    row = torch.zeros(2, num_cols, dtype=torch.float64)  # fp32 loses the second loss: 20.0003 - 20
    row[1, 7] = 20.0
    expected = truth(row, torch.tensor([7, 7]), reduction="none")
    assert torch.allclose(losses[[0, -1]].cpu().double(), expected, rtol=1e-5, atol=4e-6)
    assert torch.allclose(logits[-2, 8].float().cpu(), torch.tensor(1 / num_cols), rtol=1e-2)
