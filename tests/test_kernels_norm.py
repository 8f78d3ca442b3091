"""The sum of squares: right, and the same bits on every path."""

import ctypes

import pytest
import torch
from torch import Tensor

from lazytrain.kernels import native
from lazytrain.kernels.norm import (
    MIN_TASK_TILES,
    TILE,
    add_into,
    reference_square_sum,
    square_sum,
    square_sum_into,
)

SIZES = [0, 1, 63, 123, 1024, TILE, TILE + 1, 3 * TILE - 5, MIN_TASK_TILES * TILE + 7]
NORM_ERROR = 9 * 2**-24  # relative, of the root, by definition; worst seen 7.5e-8
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where Triton runs: interpreted on the CPU, or compiled."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    return "cpu" if request.param == "interpreter" else "cuda"


def make_grads(size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    gen = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=gen) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_square_sum_is_right(size: int, dtype: torch.dtype, scale: float) -> None:
    x = make_grads(size, dtype, scale)
    truth = x.double().square().sum().sqrt()
    assert abs(square_sum(x).sqrt() - truth) <= NORM_ERROR * truth


@pytest.mark.parametrize("value", [1.0001, 1 / 3, 0.7071068, 3.1415927])
def test_rounding_that_is_the_same_everywhere_stays_bounded(value: float) -> None:
    x = torch.full((2 * TILE,), value)
    truth = x.double().square().sum().sqrt()
    assert abs(square_sum(x).sqrt() - truth) <= NORM_ERROR * truth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_native_square_sum_matches_reference(size: int, dtype: torch.dtype) -> None:
    x = make_grads(size + 3, dtype)[3:]  # a view that is aligned to its element only
    assert torch.equal(square_sum(x), reference_square_sum(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 123, 1024, TILE, TILE + 1])
def test_triton_square_sum_matches_reference(size: int, dtype: torch.dtype, device: str) -> None:
    from lazytrain.kernels.norm_triton import sum_triton_into

    x = make_grads(size, dtype)
    slots = torch.full((3,), float("nan"), dtype=torch.float64, device=device)
    sum_triton_into(None, x.to(device), None, slots[1])
    assert torch.equal(slots[1].cpu(), reference_square_sum(x))
    assert slots.isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("threads", ["1", "2", "3", "7"])
def test_threads_do_not_change_the_bits(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_grads(40 * TILE + 77, torch.bfloat16)
    monkeypatch.setenv("LAZYTRAIN_THREADS", threads)
    assert torch.equal(square_sum(x), reference_square_sum(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_goes_through(value: float) -> None:
    x = torch.ones(5000)
    x[4321] = value
    total = square_sum(x)
    assert not total.isfinite()


def test_slot_of_a_larger_tensor_is_written() -> None:
    slots = torch.zeros(2, 2, dtype=torch.float64)
    square_sum_into(torch.ones(7, 3), slots[1, 0])
    assert slots.tolist() == [[0.0, 0.0], [21.0, 0.0]]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="x is not contiguous"):
        square_sum(torch.zeros(4, 3).T)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        square_sum(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"out is torch\.float32"):
        square_sum_into(torch.zeros(4), torch.zeros(()))


def test_offsets_over_2_to_31_reach_the_last_elements() -> None:
    """The operator's pointers are shifted so that only the last tile's elements exist."""
    library = native.load()
    if library is None:
        pytest.skip("no C++ compiler")
    x = make_grads(1000, torch.float32)
    tile = 2**31 // TILE + 3
    begin = tile * TILE
    value = ctypes.c_double()
    shifted = ctypes.addressof(value) - 8 * tile
    library.lt_square_tiles(0, x.data_ptr() - 4 * begin, begin + 1000, tile, tile + 1, shifted)
    assert value.value == reference_square_sum(x).item()


PAIRS = [(a, b) for a in DTYPES for b in (*DTYPES, None)]


def add_reference(out_dtype: torch.dtype, x: Tensor, y: Tensor | None) -> Tensor:
    return (x if y is None else x.float() + y.float()).to(out_dtype)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("x_dtype", "y_dtype"), PAIRS)
@pytest.mark.parametrize("size", [5, TILE + 3])
def test_sums_of_gradients_are_torchs_and_carry_their_squares(
    size: int, x_dtype: torch.dtype, y_dtype: torch.dtype | None, out_dtype: torch.dtype, device: str
) -> None:
    from lazytrain.kernels.norm_triton import sum_triton_into

    x = make_grads(size, x_dtype)
    y = None if y_dtype is None else make_grads(size + 1, y_dtype)[:size]
    truth = add_reference(out_dtype, x, y)
    out, square = torch.empty(size, dtype=out_dtype), torch.zeros((), dtype=torch.float64)
    add_into(out, x, y, square=square)
    assert torch.equal(out, truth)
    assert torch.equal(square, reference_square_sum(truth))
    there = torch.empty(size, dtype=out_dtype, device=device), torch.zeros((), dtype=torch.float64, device=device)
    sum_triton_into(there[0], x.to(device), None if y is None else y.to(device), there[1])
    assert torch.equal(there[0].cpu(), truth)
    assert torch.equal(there[1].cpu(), square)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_may_overwrite_its_input(dtype: torch.dtype, device: str) -> None:
    x, y = make_grads(3000, dtype).to(device), make_grads(3001, torch.bfloat16)[:3000].to(device)
    truth = add_reference(dtype, x.cpu(), y.cpu())
    add_into(x, x, y)
    assert torch.equal(x.cpu(), truth)


def test_rounding_meets_ties_infinity_and_nan(device: str) -> None:
    from lazytrain.kernels.norm_triton import sum_triton_into

    values = [1.00390625, 1.01171875, -1.00390625, 3.4e38, -3.4e38, float("inf"), float("nan"), 1e-40, -0.0]
    x = torch.tensor(values)
    out = torch.empty(len(values), dtype=torch.bfloat16, device=device)
    sum_triton_into(out, x.to(device), None, None)
    assert torch.equal(out.cpu().view(torch.int16)[:6], x.bfloat16().view(torch.int16)[:6])
    assert out[6].isnan()
    assert torch.equal(out.cpu().view(torch.int16)[7:], x.bfloat16().view(torch.int16)[7:])


@pytest.mark.gpu
def test_compiled_square_sum_over_2_to_31_elements() -> None:
    x = torch.zeros(2**31 + 70_001, dtype=torch.bfloat16, device="cuda")
    x[:3] = 2.0
    x[2**31 :] = 1.0
    assert square_sum(x).item() == 12.0 + 70_001


@pytest.mark.gpu
def test_dispatch_on_cuda_matches_reference() -> None:
    x = make_grads(3 * TILE + 5, torch.bfloat16)
    assert torch.equal(square_sum(x.cuda()).cpu(), reference_square_sum(x))
