"""The programs of a block: forward, and forward and backward for every point of its residual curve.

Point 0 keeps nothing: backward recomputes the block from its boundary activation x. Later points keep more bytes and
recompute less; residuals are plain tensors, which may be moved anywhere in between. Eager programs call the operators
that eager autograd calls, so that every point gives the same bits; compiled ones may fuse and round differently.

    programs = make_programs(fn, params, x, ctx, flatten=layout.flatten)
    y, residuals = programs.forward_keep(2, params, x, ctx)
    flat_grads, dx = programs.backward(2, params, x, ctx, residuals, dy)
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from lazytrain.base import Context, Params
from lazytrain.compilation import Compiler, first_line, whole_functions
from lazytrain.errors import LazyTrainError
from lazytrain.joint import BlockFunction, Flatten, Joint, differentiate, refuse_random, trace_joint
from lazytrain.layout import UnitLayout
from lazytrain.partition import backward_graph, forward_graph, keep_all, product_candidates, residual_candidates
from lazytrain.straightline import Function, write_function

LOG = logging.getLogger(__name__)
# Shares of what backward would like to find, as the partitioner counts them.
BUDGETS = (0.15, 0.25, 0.35, 0.5, 0.8, 1.0)
# Few points, as every one is compiled, for some ten seconds: so many of the largest products, and the share that all
# products take, but not attention's output beside them.
COMPILED_BUDGETS = (0.6,)
COMPILED_PRODUCTS = (1, 2)


class ResidualSpec(NamedTuple):
    """What one residual looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class ResidualPoint:
    """A point of a block's residual curve: what forward keeps for backward.

    Attributes:
        residual_bytes: the sum over `specs`, without any rounding of single tensors.
    """

    index: int
    residual_bytes: int
    specs: tuple[ResidualSpec, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockPrograms:
    """The programs of one kind of block at one shape; gradients are switched off inside.

    Attributes:
        points: by increasing residual_bytes, no two equal. Point 0 keeps nothing. In eager mode the last keeps all
            that autograd would: its backward recomputes nothing.
    """

    points: tuple[ResidualPoint, ...]
    x_shape: torch.Size
    param_names: tuple[str, ...]
    ctx_names: tuple[str, ...]
    forwards: tuple[Function, ...]
    backwards: tuple[Function, ...]

    def forward(self, params: Params, x: Tensor, ctx: Context) -> Tensor:
        """Return y and keep nothing. Of an identity block y is x itself."""
        return self.forward_keep(0, params, x, ctx)[0]

    def forward_keep(self, point: int, params: Params, x: Tensor, ctx: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (y, residuals).

        Residuals share no storage with params, x, ctx or each other. One of them may share y's storage, if backward
        reads y: nobody may write into y. They keep their strides on their way to `backward` (`points[i].specs`).
        """
        with torch.no_grad():
            y, *residuals = self.forwards[point](self._inputs(params, x, ctx))
        return y, tuple(residuals)

    def backward(
        self, point: int, params: Params, x: Tensor, ctx: Context, residuals: Sequence[Tensor], dy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the flat grads, a new tensor, and dx (which may share the storage of dy).

        Args:
            residuals: what `forward_keep(point, ...)` returned. A list (not a tuple) is emptied, so that each
                residual is released at its last use, if nobody else holds it.
        """
        assert len(residuals) == len(self.points[point].specs), "residuals of another point"
        values = [*self._inputs(params, x, ctx), *residuals, dy.contiguous()]
        if isinstance(residuals, list):
            residuals.clear()
        with torch.no_grad():
            flat, dx = self.backwards[point](values)
        return flat, dx

    def _inputs(self, params: Params, x: Tensor, ctx: Context) -> list[Tensor]:
        assert x.shape == self.x_shape, f"programs for x of {tuple(self.x_shape)} were called with {tuple(x.shape)}"
        return [*(params[name] for name in self.param_names), x, *(ctx[name] for name in self.ctx_names)]


def make_programs(
    fn: BlockFunction,
    params: Params,
    x: Tensor,
    ctx: Context,
    *,
    flatten: Flatten,
    compile: bool = False,
    exact: bool = False,
    budgets: Sequence[float] = BUDGETS,
    device: torch.device | None = None,
    compiler: Compiler | None = None,
) -> BlockPrograms:
    """Make the programs of a block from examples of its arguments; nothing is computed on them.

    Args:
        fn: the pure block, `(params, x, ctx) -> y`.
        params, x, ctx: examples, real, fake or meta: programs are for exactly these shapes, dtypes and devices.
        flatten: local name -> gradient, to one new slab; runs inside backward.
        compile: use torch.compile. Where it fails, all goes on eagerly, with one line in the log.
        exact: of a compiled block offer point 0 only: another point may round differently. Eager points all give
            the same bits, those of `torch.autograd.grad` on `fn`.
        budgets: for the partitioner, between 0 and 1; with any, a compiled block may keep its largest products, too.
        device: where the block will run; None = where the examples are.
        compiler: shares the knowledge whether torch.compile works.

    A block that can't be traced (Python control flow on values, an operator without a fake version) gets point 0
    only, through autograd, with one line in the log.

    Raises:
        ConfigError: the block returns no tensor, writes into its arguments, or draws random numbers.
    """
    try:
        joint = trace_joint(fn, params, x, ctx, flatten, device)
    except LazyTrainError:
        raise
    except Exception as error:
        LOG.warning("block can't be traced, so it recomputes all: %s", first_line(error))
        return _untraced(fn, params, x, ctx, flatten)
    curve = [[]] if compile and exact else _curve(joint, budgets, compile)
    graphs = [(forward_graph(joint, kept), backward_graph(joint, kept)) for kept in curve]
    forwards, backwards = ([write_function(graph, joint.module) for graph in side] for side in zip(*graphs))
    if compile:
        compiler = compiler or Compiler()
        whole = whole_functions(fn, tuple(params), tuple(ctx), flatten)
        kept_modules = [tuple(fx.GraphModule(joint.module, graph) for graph in pair) for pair in graphs[1:]]
        fast_forwards, fast_backwards = zip(whole, *kept_modules)
        forwards = list(map(compiler.compile, fast_forwards, forwards))
        backwards = list(map(compiler.compile, fast_backwards, backwards))
    return BlockPrograms(
        points=tuple(_point(index, kept) for index, kept in enumerate(curve)),
        x_shape=x.shape,
        param_names=tuple(params),
        ctx_names=tuple(ctx),
        forwards=tuple(forwards),
        backwards=tuple(backwards),
    )


class ProgramCache:
    """Block programs by kind, shapes, dtypes and devices, made at first use.

    Args:
        compile, exact, budgets: see `make_programs`.
    """

    def __init__(self, *, compile: bool = False, exact: bool = False, budgets: Sequence[float] = BUDGETS) -> None:
        self._options: dict[str, Any] = {"compile": compile, "exact": exact, "budgets": budgets, "compiler": Compiler()}
        self._programs: dict[Hashable, BlockPrograms] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Return how programs are made, as plain data."""
        return {name: value for name, value in self._options.items() if name != "compiler"}

    @property
    def compiles(self) -> bool:
        """Return whether programs are compiled: it is wanted and has not failed."""
        return bool(self._options["compile"] and self._options["compiler"].works)

    def get(
        self, kind: str, fn: BlockFunction, params: Params, x: Tensor, ctx: Context, *, layout: UnitLayout
    ) -> BlockPrograms:
        """Return the programs of a unit's kind for these shapes.

        Args:
            layout: how backward lays out the flat grads; units of one kind and equal layout share programs.
        """
        order = tuple((place.name, place.offset) for place in layout.places)
        params = {place.name: params[place.name] for place in layout.places}
        key = (kind, fn, order, layout.numel, *map(_signature, (params, {"x": x}, ctx)))
        if key not in self._programs:
            self._programs[key] = make_programs(fn, params, x, ctx, flatten=layout.flatten, **self._options)
        return self._programs[key]


def _signature(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors.items())


def _curve(joint: Joint, budgets: Sequence[float], compile: bool) -> list[list[fx.Node]]:
    """Return residuals by increasing bytes, from nothing on; where nothing fuses, up to all that autograd keeps."""
    try:
        chosen = list(residual_candidates(joint, budgets))
    except Exception as error:  # a private part of torch, which another version may change
        LOG.warning("torch's partitioner failed, so the residual curve has few points: %s", first_line(error))
        chosen = []
    if compile:
        candidates = [*product_candidates(joint, COMPILED_PRODUCTS if budgets else ()), *chosen]
    else:
        most = keep_all(joint)
        candidates = [most, *(kept for kept in chosen if _num_bytes(kept) < _num_bytes(most))]
    curve: list[list[fx.Node]] = [[]]
    for kept in sorted(candidates, key=_num_bytes):
        if _num_bytes(kept) > _num_bytes(curve[-1]):
            curve.append(kept)
    return curve


def _point(index: int, kept: Sequence[fx.Node]) -> ResidualPoint:
    values = [node.meta["val"] for node in kept]
    specs = tuple(ResidualSpec(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values)
    return ResidualPoint(index=index, residual_bytes=_num_bytes(kept), specs=specs)


def _num_bytes(kept: Sequence[fx.Node]) -> int:
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in kept)


def _untraced(fn: BlockFunction, params: Params, x: Tensor, ctx: Context, flatten: Flatten) -> BlockPrograms:
    """Return programs that call the block itself; the first forward checks that it draws no random numbers."""
    num_params, checked = len(params), False

    def unpack(values: Sequence[Tensor]) -> tuple[Params, Tensor, Context]:
        return dict(zip(params, values)), values[num_params], dict(zip(ctx, values[num_params + 1 :]))

    def forward(values: list[Tensor]) -> tuple[Tensor, ...]:
        nonlocal checked
        if not checked:
            with _RefuseRandom():
                y = fn(*unpack(values))
            checked = True
            return (y,)
        return (fn(*unpack(values)),)

    def backward(values: list[Tensor]) -> tuple[Tensor, ...]:
        return differentiate(fn, *unpack(values[:-1]), values[-1], flatten)[1:]

    return BlockPrograms(
        points=(_point(0, ()),),
        x_shape=x.shape,
        param_names=tuple(params),
        ctx_names=tuple(ctx),
        forwards=(forward,),
        backwards=(backward,),
    )


class _RefuseRandom(TorchDispatchMode):
    """Raises ConfigError at the first operator that draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
