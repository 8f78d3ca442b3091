"""Compiled block programs, and the way back to eager ones."""

import gc
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_blocks import FP32, known, plain_autograd, programs_of, run, tanh_sample, transformer_sample

from lazytrain import compilation
from lazytrain.base import ParamSpec
from lazytrain.layout import make_layout
from lazytrain.programs import COMPILED_PRODUCTS, ProgramCache

COMPILED_TOLERANCE = 1e-5


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
    ours, others = ({point.residual_bytes for point in programs.points} for programs in (compiled, eager))
    assert ours >= others - {max(others)}
    assert max(ours) < max(others)
    assert len(ours - others) <= len(COMPILED_PRODUCTS)


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


def test_a_failed_attempt_holds_no_memory() -> None:
    """Its frames held the arguments, a block's weights among them, until the garbage collector came by."""

    def breaks(x: torch.Tensor) -> tuple[torch.Tensor]:
        torch._dynamo.graph_break()
        return (2 * x,)

    compiler, x = compilation.Compiler(), torch.ones(8)
    program = compiler.compile(breaks, lambda arguments: (2 * arguments.pop(),))
    gc.disable()
    try:
        assert torch.equal(program([x])[0], 2 * torch.ones(8))
        left = weakref.ref(x)
        del x
        assert not compiler.works
        assert left() is None
    finally:
        gc.enable()


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
