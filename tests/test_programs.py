"""Block programs: equal bits at every point, what residuals are and cost, refusals and ways back."""

import functools
import logging
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sample_blocks import (
    FF,
    D,
    Sample,
    concatenate,
    module_sample,
    plain_autograd,
    tanh_sample,
    transformer_sample,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vjp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lazytrain import compilation
from lazytrain.base import Context, Params, ParamSpec
from lazytrain.errors import ConfigError
from lazytrain.layout import make_layout
from lazytrain.programs import BlockPrograms, ProgramCache, make_programs

FP32, BF16 = torch.float32, torch.bfloat16
# torch.func differentiates through silu's gradient too, by other operators: fp32 4e-7, bf16 8e-3 were the worst.
VJP_TOLERANCE = {FP32: 2e-6, BF16: 2e-2}
COMPILED_TOLERANCE = 1e-5

SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "transformer": transformer_sample,
    "masked transformer": lambda dtype: transformer_sample(dtype, masked=True),
    "transformer with expanded heads": lambda dtype: transformer_sample(dtype, expand=True),
    "masked transformer with expanded heads": lambda dtype: transformer_sample(dtype, masked=True, expand=True),
    "tanh": tanh_sample,
    "module": module_sample,
    "stack": lambda dtype: stack_sample(),
}
NAMES = [name for name in SAMPLES if name != "stack"]
every_sample = pytest.mark.parametrize("name", NAMES)
both_dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)


def programs_of(sample: Sample, **options: Any) -> BlockPrograms:
    return make_programs(sample.fn, sample.params, sample.x, sample.ctx, flatten=concatenate, **options)


@functools.cache
def known(name: str, dtype: torch.dtype = FP32) -> tuple[Sample, BlockPrograms]:
    sample = SAMPLES[name](dtype)
    return sample, programs_of(sample)


def run(programs: BlockPrograms, point: int, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    y, residuals = programs.forward_keep(point, sample.params, sample.x, sample.ctx)
    return y, *programs.backward(point, sample.params, sample.x, sample.ctx, residuals, sample.dy)


def storages(tensors: Any) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tree_leaves(tensors)]


@every_sample
@both_dtypes
def test_every_point_gives_the_bits_of_plain_autograd(name: str, dtype: torch.dtype) -> None:
    sample, programs = known(name, dtype)
    expected = plain_autograd(sample)
    assert len(programs.points) >= 2
    assert torch.equal(programs.forward(sample.params, sample.x, sample.ctx), expected[0])
    for point in programs.points:
        for what, value, target in zip(("y", "grads", "dx"), run(programs, point.index, sample), expected):
            assert value.dtype == target.dtype
            assert torch.equal(value, target), f"{what} at point {point}"


@every_sample
@both_dtypes
def test_programs_agree_with_torch_func(name: str, dtype: torch.dtype) -> None:
    sample, programs = known(name, dtype)
    y, pull = vjp(lambda p, x: sample.fn(p, x, sample.ctx), sample.params, sample.x)
    grads, dx = pull(sample.dy)
    for value, target in zip(run(programs, 0, sample), (y, concatenate(grads), dx)):
        error = (value - target).float().norm() / target.float().norm()
        assert error <= VJP_TOLERANCE[dtype]


@every_sample
@both_dtypes
def test_residuals_share_no_storage_and_look_as_announced(name: str, dtype: torch.dtype) -> None:
    sample, programs = known(name, dtype)
    taken = storages((sample.params, sample.x, sample.ctx))
    for point in programs.points:
        _, residuals = programs.forward_keep(point.index, sample.params, sample.x, sample.ctx)
        own = storages(residuals)
        assert len(set(own)) == len(own)
        assert not set(own) & set(taken)
        seen = [(tuple(r.shape), r.stride(), r.dtype) for r in residuals]
        assert seen == [tuple(spec) for spec in point.specs]
        assert sum(r.untyped_storage().nbytes() for r in residuals) == point.residual_bytes


@every_sample
def test_points_begin_with_nothing_and_keep_ever_more(name: str) -> None:
    points = known(name)[1].points
    sizes = [point.residual_bytes for point in points]
    assert points[0].specs == ()
    assert sizes[0] == 0
    assert sizes == sorted(set(sizes))
    assert [point.index for point in points] == list(range(len(points)))


def test_residuals_may_travel() -> None:
    sample, programs = known("transformer", BF16)
    last = len(programs.points) - 1
    _, residuals = programs.forward_keep(last, sample.params, sample.x, sample.ctx)
    moved = []
    for residual in residuals:
        slab = torch.empty(residual.numel(), dtype=residual.dtype).as_strided(residual.shape, residual.stride())
        moved.append(slab.copy_(residual))
    flat, dx = programs.backward(last, sample.params, sample.x, sample.ctx, moved, sample.dy)
    assert torch.equal(flat, plain_autograd(sample)[1])
    assert torch.equal(dx, plain_autograd(sample)[2])


def test_grads_are_new_and_nothing_tracks_gradients() -> None:
    sample, programs = known("transformer")
    for point in programs.points:
        y, flat, dx = run(programs, point.index, sample)
        assert not any(t.requires_grad or t.grad_fn for t in (y, flat, dx))
        assert not set(storages(flat)) & set(storages((y, dx, *sample[1:])))


def test_arguments_without_contiguous_memory_are_accepted() -> None:
    sample = transformer_sample()
    sample = sample._replace(x=sample.x.transpose(0, 1).contiguous().transpose(0, 1), dy=sample.dy.mT.contiguous().mT)
    programs = programs_of(sample)
    for value, target in zip(run(programs, 0, sample), plain_autograd(sample)):
        torch.testing.assert_close(value, target)


# --- costs ---


def count_flops(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def linear_stack(params: Params, x: Tensor, ctx: Context) -> Tensor:
    return F.relu(F.relu(x @ params["first"]) @ params["second"]) @ params["third"]


def stack_sample() -> Sample:
    widths = {"first": (13, 17), "second": (17, 5), "third": (5, 13)}
    params = {name: torch.randn(shape) for name, shape in widths.items()}
    return Sample(linear_stack, params, torch.randn(7, 13), {}, torch.randn(7, 13))


@pytest.mark.parametrize("name", ["stack", *NAMES])
def test_keep_all_costs_forward_and_backward_alone(name: str) -> None:
    sample, programs = known(name)
    last = len(programs.points) - 1
    assert count_flops(lambda: run(programs, last, sample)) == count_flops(lambda: plain_autograd(sample))


def test_keep_all_costs_three_forwards_of_matrix_products() -> None:
    sample, programs = known("stack")
    forward = count_flops(lambda: programs.forward(sample.params, sample.x, sample.ctx))
    assert forward == 2 * 7 * (13 * 17 + 17 * 5 + 5 * 13)
    assert count_flops(lambda: run(programs, len(programs.points) - 1, sample)) == 3 * forward


@pytest.mark.parametrize("name", ["stack", "transformer"])
def test_recompute_costs_a_second_forward_without_its_last_product(name: str) -> None:
    sample, programs = known(name)
    num_rows = sample.x.shape[:-1].numel()
    last_product = 2 * num_rows * (5 * 13 if name == "stack" else FF * D)
    forward = count_flops(lambda: programs.forward(sample.params, sample.x, sample.ctx))
    once = count_flops(lambda: plain_autograd(sample))
    assert count_flops(lambda: run(programs, 0, sample)) == once + forward - last_product


def test_points_between_trade_bytes_for_flops() -> None:
    sample, programs = known("transformer")
    costs = [count_flops(lambda p=p: run(programs, p.index, sample)) for p in programs.points]  # type: ignore[misc]
    assert costs[-1] < costs[0]
    assert all(costs[-1] <= cost <= costs[0] for cost in costs)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.total = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._known |= {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._known:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now, self.total = self.now + num_bytes, self.total + num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def chain_sample() -> Sample:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x

    params = {f"w{i}": torch.randn(3, 3) for i in range(6)}
    return Sample(fn, params, torch.randn(1000, 3), {}, torch.randn(1000, 3))


def test_intermediates_are_released_at_their_last_use() -> None:
    sample = chain_sample()
    programs = programs_of(sample)
    with LiveBytes() as live:
        y = programs.forward(sample.params, sample.x, sample.ctx)
    one = y.untyped_storage().nbytes()
    assert (live.now, live.peak, live.total) == (one, 2 * one, 12 * one)


def test_a_list_of_residuals_is_emptied_and_released_on_the_way() -> None:
    sample = chain_sample()
    programs = programs_of(sample)
    last = len(programs.points) - 1
    peaks = []
    for container in (tuple, list):
        with LiveBytes() as live:
            y, kept = programs.forward_keep(last, sample.params, sample.x, sample.ctx)
            residuals = container(kept)
            num_bytes = sum(r.nbytes for r in residuals)
            del kept, y
            assert live.now == num_bytes
            flat, dx = programs.backward(last, sample.params, sample.x, sample.ctx, residuals, sample.dy)
            left = 0 if container is list else num_bytes
            assert live.now == left + flat.nbytes + dx.nbytes
            assert len(residuals) == len(programs.points[last].specs) * (container is tuple)
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0] - num_bytes / len(sample.params)  # the oldest of what the tuple still holds


# --- examples, odd blocks ---


def test_nothing_is_computed_on_examples() -> None:
    real = transformer_sample()
    with FakeTensorMode():
        fake = [{n: torch.empty(t.shape) for n, t in part.items()} for part in (real.params, real.ctx)]
        x = torch.empty(real.x.shape)
    meta = [{n: t.to("meta") for n, t in part.items()} for part in (real.params, real.ctx)]
    from_fake = make_programs(real.fn, fake[0], x, fake[1], flatten=concatenate, budgets=())
    from_meta = make_programs(
        real.fn, meta[0], real.x.to("meta"), meta[1], flatten=concatenate, budgets=(), device=torch.device("cpu")
    )
    nan = real._replace(x=torch.full_like(real.x, torch.nan))
    for programs in (from_fake, from_meta, programs_of(nan, budgets=())):
        for value, target in zip(run(programs, 1, real), plain_autograd(real)):
            assert torch.equal(value, target)


def odd_block(fn: Callable[[Params, Tensor, Context], Any], x: Tensor | None = None) -> Sample:
    params = {"w": torch.randn(3, 3), "unused": torch.randn(2)}
    x = torch.randn(4, 3) if x is None else x
    return Sample(fn, params, x, {}, torch.randn(4, 3))


def test_identity_block_passes_x_and_dy_through() -> None:
    sample = odd_block(lambda p, x, ctx: x)
    y, flat, dx = run(programs_of(sample), 0, sample)
    assert torch.equal(y, sample.x)
    assert torch.equal(dx, sample.dy)
    assert torch.equal(flat, torch.zeros(11))


def test_unused_parameters_and_x_get_zeros() -> None:
    sample = odd_block(lambda p, x, ctx: p["w"][:1].expand(4, 3) * 2)
    _, flat, dx = run(programs_of(sample), 0, sample)
    assert torch.equal(flat[:3], 2 * sample.dy.sum(0))
    assert torch.equal(flat[3:], torch.zeros(8))
    assert torch.equal(dx, torch.zeros(4, 3))


def test_x_of_integers_has_no_gradient() -> None:
    sample = odd_block(lambda p, x, ctx: p["w"][x], torch.tensor([0, 2, 2, 1]))
    programs = programs_of(sample)
    for point in programs.points:
        _, flat, dx = run(programs, point.index, sample)
        assert dx.numel() == 0
        assert torch.equal(flat[:9].view(3, 3), torch.zeros(3, 3).index_add_(0, sample.x, sample.dy))


def test_block_without_parameters_has_empty_grads() -> None:
    sample = odd_block(lambda p, x, ctx: x.sin())._replace(params={})
    _, flat, dx = run(programs_of(sample), 0, sample)
    assert flat.numel() == 0
    assert torch.equal(dx, sample.dy * sample.x.cos())


def test_tensors_that_a_block_closes_over_are_constants() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0])
    sample = odd_block(lambda p, x, ctx: (x @ p["w"]).tanh() * scale)
    programs = programs_of(sample)
    for point in programs.points:
        for value, target in zip(run(programs, point.index, sample), plain_autograd(sample)):
            assert torch.equal(value, target)


def test_what_x_has_no_part_in_is_no_residual() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return (x @ params["w"].double().exp().float()) * torch.where(ctx["mask"], 0.5, 2.0)

    sample = odd_block(fn)._replace(ctx={"mask": torch.rand(4, 3) > 0.5})
    programs = programs_of(sample)
    assert [point.residual_bytes for point in programs.points] == [0]
    for value, target in zip(run(programs, 0, sample), plain_autograd(sample)):
        assert torch.equal(value, target)


# --- refusals and ways back ---


@pytest.mark.parametrize(
    "write",
    [
        lambda p, x, ctx: x.mul_(2) @ p["w"],
        lambda p, x, ctx: x.flatten(0).mul_(2).view(4, 3) @ p["w"],
        lambda p, x, ctx: x @ p["w"] + p["unused"].fill_(1).sum(),
        lambda p, x, ctx: x @ p["w"] * ctx["count"].add_(1),
    ],
    ids=["x", "view of x", "parameter", "ctx"],
)
def test_block_that_writes_into_its_arguments_is_refused(write: Callable[[Params, Tensor, Context], Tensor]) -> None:
    sample = odd_block(write)._replace(ctx={"count": torch.zeros(1)})
    with pytest.raises(ConfigError, match="writes into"):
        programs_of(sample)
    assert sample.ctx["count"] == 0


def test_block_that_writes_into_what_it_closes_over_is_refused() -> None:
    count = torch.zeros(1)
    with pytest.raises(ConfigError, match="writes into"):
        programs_of(odd_block(lambda p, x, ctx: x @ p["w"] * count.add_(1)))


def test_writing_into_intermediates_is_no_matter() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        y = x @ params["w"]
        y[:, 1:].mul_(2)
        y[0] = x[0]
        return y.add_(1).relu_()

    sample = odd_block(fn)
    programs = programs_of(sample)
    for point in programs.points:
        for value, target in zip(run(programs, point.index, sample), plain_autograd(sample)):
            assert torch.equal(value, target)


def test_block_that_returns_a_tuple_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned a tuple"):
        programs_of(odd_block(lambda p, x, ctx: (x, x)))


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.1), torch.rand_like, lambda x: x.clone().normal_()],
    ids=["dropout", "rand", "in place"],
)
@pytest.mark.parametrize("traceable", [True, False])
def test_random_block_is_refused(draw: Callable[[Tensor], Tensor], traceable: bool) -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        if not traceable and x.sum() > 1e9:
            return x
        return x @ params["w"] + draw(x)

    sample = odd_block(fn)
    with pytest.raises(ConfigError, match=r"draws random numbers.*dropout"):
        programs_of(sample).forward(sample.params, sample.x, sample.ctx)


def test_attention_with_dropout_is_refused() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with pytest.raises(ConfigError, match="draws random numbers"):
        programs_of(odd_block(fn, torch.randn(1, 2, 4, 8)))


def test_control_flow_on_values_recomputes_all_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return torch.tanh(x @ params["w"]) if x.sum() > 0 else F.silu(x @ params["w"])

    sample = odd_block(fn)
    with caplog.at_level(logging.WARNING):
        programs = programs_of(sample)
        for sign in (1, -1):
            there = sample._replace(x=sample.x.abs() * sign)
            for value, target in zip(run(programs, 0, there), plain_autograd(there)):
                assert torch.equal(value, target)
    assert [point.residual_bytes for point in programs.points] == [0]
    assert [record.message for record in caplog.records if "can't be traced" in record.message] == caplog.messages
    assert len(caplog.messages) == 1


def test_broken_partitioner_leaves_the_ends_of_the_curve(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazytrain.partition.min_cut_rematerialization_partition", None)
    sample = tanh_sample()
    programs = programs_of(sample)
    assert len(programs.points) == 2
    assert len(caplog.messages) == 1
    assert torch.equal(run(programs, 1, sample)[1], plain_autograd(sample)[1])


def test_other_shapes_than_traced_are_refused() -> None:
    sample, programs = known("transformer")
    with pytest.raises(AssertionError, match="were called with"):
        programs.forward(sample.params, sample.x[:1], sample.ctx)


# --- the cache ---


def test_cache_keys_are_kind_function_layout_shapes_and_dtype() -> None:
    sample = tanh_sample()
    cache = ProgramCache(budgets=())

    def get(
        kind: str = "block", fn: Any = sample.fn, x: Tensor = sample.x, dtype: torch.dtype = FP32, **layout: Any
    ) -> Any:
        specs = {n: ParamSpec(full_name=n, shape=tuple(p.shape)) for n, p in sample.params.items()}
        params = {n: p.to(dtype) for n, p in sample.params.items()}
        return cache.get(kind, fn, params, x.to(dtype), {}, layout=make_layout(specs, dtype, **layout))

    first = get()
    assert get() is first
    others = [get("other"), get(fn=lambda p, x, ctx: sample.fn(p, x, ctx)), get(x=sample.x[:2]), get(dtype=BF16)]
    assert len({id(programs) for programs in (first, *others)}) == 5


def test_cache_flattens_as_the_layout_says() -> None:
    sample = tanh_sample()
    specs = {n: ParamSpec(full_name=n, shape=tuple(p.shape)) for n, p in reversed(sample.params.items())}
    layout = make_layout(specs, FP32)
    programs = ProgramCache().get("block", sample.fn, sample.params, sample.x, {}, layout=layout)
    _, flat, _ = run(programs, 1, sample)
    assert flat.shape == (layout.numel,)
    expected = plain_autograd(sample)[1]
    views = layout.views(flat)
    assert torch.equal(torch.cat([views["up"].reshape(-1), views["down"].reshape(-1)]), expected)
    assert flat.count_nonzero() == expected.count_nonzero()


# --- compiled ---


def pretend(monkeypatch: pytest.MonkeyPatch, compile: Callable[[Any], Any]) -> None:
    """Let torch.compile be something else."""
    monkeypatch.setattr(compilation.torch, "compile", lambda function, **options: compile(function))


def test_compiled_programs_go_through_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    pretend(monkeypatch, lambda function: compiled.append(function) or function)
    sample = transformer_sample()
    programs = programs_of(sample, compile=True)
    assert compiled == []
    for point in programs.points:
        for _ in range(2):
            for value, target in zip(run(programs, point.index, sample), plain_autograd(sample)):
                torch.testing.assert_close(value, target, rtol=COMPILED_TOLERANCE, atol=COMPILED_TOLERANCE)
    assert len(compiled) == 2 * len(programs.points)


def test_compiled_curve_leaves_cheap_values_to_the_compiler() -> None:
    sample, eager = known("transformer")
    compiled = programs_of(sample, compile=True)
    assert [p.residual_bytes for p in compiled.points] == [p.residual_bytes for p in eager.points[:-1]]


def test_exact_compiled_programs_offer_point_0_alone() -> None:
    assert len(programs_of(tanh_sample(), compile=True, exact=True).points) == 1
    assert len(programs_of(tanh_sample(), compile=False, exact=True).points) > 1


def test_failing_compiler_means_eager_and_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(function: Any) -> Any:
        raise FileNotFoundError("no C++ compiler here")

    pretend(monkeypatch, fail)
    sample = tanh_sample()
    cache = ProgramCache(compile=True)
    specs = {n: ParamSpec(full_name=n, shape=tuple(p.shape)) for n, p in sample.params.items()}
    for kind in ("one", "two"):
        programs = cache.get(kind, sample.fn, sample.params, sample.x, {}, layout=make_layout(specs, FP32))
        for point in programs.points:
            assert torch.equal(run(programs, point.index, sample)[2], plain_autograd(sample)[2])
    assert len(caplog.messages) == 1
    assert "no C++ compiler here" in caplog.messages[0]


def test_lack_of_memory_is_no_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    pretend(monkeypatch, fail)
    sample = tanh_sample()
    with pytest.raises(torch.OutOfMemoryError):
        programs_of(sample, compile=True).forward(sample.params, sample.x, {})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_tiny_block_agrees_with_eager(caplog: pytest.LogCaptureFixture) -> None:
    sample = tanh_sample()
    programs = programs_of(sample, compile=True)
    for point in (0, len(programs.points) - 1):
        for value, target in zip(run(programs, point, sample), plain_autograd(sample)):
            torch.testing.assert_close(value, target, rtol=COMPILED_TOLERANCE, atol=COMPILED_TOLERANCE)
    assert not [message for message in caplog.messages if "failed" in message]
