"""AdamW's fused step: the same bits on every path, for every layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_states import make_grads, make_hyper, make_state8, make_state32, shift

from lazytrain.kernels import native
from lazytrain.kernels.adamw import (
    adamw8bit_update_into,
    adamw_update_into,
    derive_scalars,
    reference_adamw8bit_update_into,
    reference_adamw_update_into,
)
from lazytrain.kernels.master import join_master

SHAPES = [(0, 5), (3, 0), (1, 1), (3, 63), (2, 123), (1, 128), (5, 300), (2, 1024)]
KINDS = ["fp32", "32", "24"]
GRADS = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where Triton runs: interpreted on the CPU, or compiled."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    return "cpu" if request.param == "interpreter" else "cuda"


def check_paths(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, device: str, update8: Callable[..., None],
    update32: Callable[..., None],
) -> None:  # fmt: skip
    """Three steps by the reference and by the given functions: all tensors must stay equal, bit by bit."""
    rows, cols = shape
    w = make_grads(rows * cols, 99, torch.float32)
    names8, names32 = ["weights", "lo", "m_q", "m_scale", "v_q", "v_scale"], ["weights", "lo", "m", "v"]
    pairs = []
    for state in (make_state8(w, kind, cols), make_state32(w, kind)):
        pairs.append((state, [None if x is None else shift(x.to(device), i + 1) for i, x in enumerate(state)]))
    for step in (1, 2, 2**33 + 3):
        g = make_grads(rows * cols, step % 1000, dtype)
        options: dict[str, Any] = {"coef": 0.77, "hyper": make_hyper(step)}
        layout = {"rows": rows, "cols": cols, "first_group": 2**32 - 2}
        reference_adamw8bit_update_into(*pairs[0][0], g, **layout, **options)
        update8(*pairs[0][1], shift(g.to(device), 5), **layout, **options)
        reference_adamw_update_into(*pairs[1][0], g, **options)
        update32(*pairs[1][1], shift(g.to(device), 5), **options)
        for names, (truth, other) in zip((names8, names32), pairs):
            for name, a, b in zip(names, truth, other):
                assert (a is None and b is None) or torch.equal(a, b.cpu()), f"{name} at step {step}"


@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_update_matches_reference(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    check_paths(shape, kind, dtype, "cpu", adamw8bit_update_into, adamw_update_into)


@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_update_matches_reference(shape: tuple[int, int], kind: str, dtype: torch.dtype, device: str) -> None:
    from lazytrain.kernels.adamw_triton import adamw8bit_update_triton_into, adamw_update_triton_into

    check_paths(shape, kind, dtype, device, adamw8bit_update_triton_into, adamw_update_triton_into)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1000, 896), (777, 1000), (1, 128 * 70_000)])
def test_dispatch_on_cuda_matches_the_cpu(shape: tuple[int, int], kind: str) -> None:
    check_paths(shape, kind, torch.bfloat16, "cuda", adamw8bit_update_into, adamw_update_into)


@pytest.mark.gpu
def test_compiled_update_reaches_elements_over_2_to_31() -> None:
    size, tail = 2**31 + 1024, 1024
    w, g = make_grads(tail, 1, torch.float32), make_grads(tail, 2, torch.bfloat16)
    truth = make_state8(w, "32", tail)
    state = [torch.zeros(size if x.numel() == tail else size // 128, dtype=x.dtype, device="cuda") for x in truth]
    for x, small in zip(state, truth):
        x[-small.numel() :] = small.cuda()
    grads = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    grads[-tail:] = g.cuda()
    options = {"coef": 1.0, "hyper": make_hyper(1)}
    adamw8bit_update_into(*state, grads, rows=1, cols=size, first_group=0, **options)
    reference_adamw8bit_update_into(*truth, g, rows=1, cols=tail, first_group=2**31 // 128, **options)
    for x, small in zip(state, truth):
        assert torch.equal(x[-small.numel() :].cpu(), small)


@pytest.mark.parametrize("threads", ["1", "2", "3", "7"])
def test_threads_do_not_change_the_bits(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_THREADS", threads)
    shape = (2000, 300)  # 6000 groups: some tasks even on two threads
    assert 2 * native.MIN_TASK_GROUPS < 6000
    check_paths(shape, "24", torch.bfloat16, "cpu", adamw8bit_update_into, adamw_update_into)


def test_fallback_in_chunks_matches_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr("lazytrain.kernels.adamw.CHUNK", 512)
    for shape in [(0, 5), (3, 0), (7, 300), (3, 1000), (2, 1024), (1, 123)]:
        for kind in KINDS:
            check_paths(shape, kind, torch.bfloat16, "cpu", adamw8bit_update_into, adamw_update_into)


@pytest.mark.slow
def test_instruction_sets_give_the_same_bits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load()
    if library is None or "x86_64" not in native.describe_cpu():
        pytest.skip("needs a C++ compiler on x86-64")
    for level in ["x86-64", *(["x86-64-v3"] if " avx2 " in native.describe_cpu() else [])]:
        path = native.build(native.SOURCE, [f"-march={level}"], tmp_path)
        monkeypatch.setattr(native, "load", lambda path=path: native.open_library(path))
        for kind in KINDS:
            check_paths((50, 300), kind, torch.bfloat16, "cpu", adamw8bit_update_into, adamw_update_into)


def test_neighbours_may_share_a_call() -> None:
    sizes = [256, 1280, 128]
    w, g = make_grads(sum(sizes), 1, torch.float32), make_grads(sum(sizes), 2, torch.bfloat16)
    whole, parts = (make_state8(w, "24", sum(sizes)) for _ in range(2))
    options = {"coef": 1.0, "hyper": make_hyper(5)}
    adamw8bit_update_into(*whole, g, rows=1, cols=sum(sizes), first_group=3, **options)
    at = 0
    for size in sizes:
        wide, groups = slice(at, at + size), slice(at // 128, (at + size) // 128)
        part = [parts[i][groups if i in (3, 5) else wide] for i in range(6)]  # type: ignore[index]
        adamw8bit_update_into(*part, g[wide], rows=1, cols=size, first_group=3 + at // 128, **options)
        at += size
    for a, b in zip(whole, parts):
        assert torch.equal(a, b)


def test_split_master_follows_the_fp32_master() -> None:
    w = make_grads(600, 1, torch.float32)
    plain, split = make_state8(w, "fp32", 200), make_state8(w, "32", 200)
    for step in range(1, 20):
        g = make_grads(600, step, torch.bfloat16)
        for state in (plain, split):
            adamw8bit_update_into(*state, g, rows=3, cols=200, first_group=0, coef=0.5, hyper=make_hyper(step))
    assert torch.equal(join_master(split[0], split[1]), plain[0])


def test_wrong_arguments_are_named() -> None:
    state = make_state8(torch.zeros(256), "32", 128)
    g = torch.zeros(256)
    options: dict[str, Any] = {"rows": 2, "cols": 128, "first_group": 0, "coef": 1.0, "hyper": make_hyper(1)}
    with pytest.raises(ValueError, match=r"weights .* is torch\.float32, must be torch\.bfloat16"):
        adamw8bit_update_into(g, *state[1:], g, **options)
    with pytest.raises(ValueError, match="m_scale has 2 elements, must have 4"):
        adamw8bit_update_into(*state, g, **{**options, "cols": 64, "rows": 4})
    with pytest.raises(ValueError, match="grads is not contiguous"):
        adamw8bit_update_into(*state, torch.zeros(512)[::2], **options)
    with pytest.raises(ValueError, match="grads has 3 elements"):
        adamw8bit_update_into(*state, torch.zeros(3), **options)
    for bad, words in [({"step": 0}, "step is 0"), ({"beta2": 1.0}, "beta2 is 1.0"), ({"lr": -1.0}, "lr is -1.0")]:
        with pytest.raises(ValueError, match=words):
            derive_scalars(make_hyper(1)._replace(**bad), 1.0)
    with pytest.raises(ValueError, match="coef is nan"):
        derive_scalars(make_hyper(1), float("nan"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["native", "triton"])
def test_extreme_gradients_give_the_same_bits(path: str, kind: str, device: str) -> None:
    """Zeros of both signs, squares that vanish or are subnormal, and squares near the largest number."""
    from lazytrain.kernels.adamw_triton import adamw8bit_update_triton_into

    if path == "native" and device == "cuda":
        pytest.skip("the native operator runs on the CPU")
    gen = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.0, -0.0, 1e-38, 1e-25, 3e-23, 1e-20, 1e-12, 1.0, 1e12, 1e18])
    w = make_grads(7 * 256, 99, torch.float32)
    truth = make_state8(w, kind, 256)
    update, place = (adamw8bit_update_into, "cpu") if path == "native" else (adamw8bit_update_triton_into, device)
    other = [None if x is None else x.to(place) for x in make_state8(w, kind, 256)]
    for step in range(1, 6):
        rows = sizes[torch.randint(len(sizes), (7, 1), generator=gen)]  # one size a row, then all mixed in a row
        mixed = sizes[torch.randint(len(sizes), (7, 256), generator=gen)]
        g = torch.where(torch.rand(7, 1, generator=gen) < 0.5, rows, mixed) * torch.randn(7, 256, generator=gen)
        options: dict[str, Any] = {"rows": 7, "cols": 256, "first_group": 1, "coef": 1.0, "hyper": make_hyper(step)}
        reference_adamw8bit_update_into(*truth, g.flatten(), **options)
        update(*other, g.flatten().to(place), **options)
        for a, b in zip(truth, other):
            assert (a is None and b is None) or torch.equal(a, b.cpu()), f"step {step}"
            assert a is None or a.isfinite().all()
