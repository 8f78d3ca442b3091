"""Trace a block's forward and backward as one graph of the operators that eager autograd would call.

    joint       (params, x, ctx, dy) -> (y, flat grads, dx)

Tracing runs the block and autograd on fake tensors, with no decomposition. Then what computes nothing goes, and equal
values are merged.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lazytrain.base import Context, Params
from lazytrain.errors import ConfigError

aten = torch.ops.aten
BlockFunction = Callable[[Params, Tensor, Context], Tensor]
Flatten = Callable[[Params], Tensor]
COPIES = (aten.detach.default, aten.alias.default)
PURE = "A block must be a pure function: replace the in-place operation by one that returns a new tensor."
RESHAPES = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A block's joint graph.

    Attributes:
        module: owner of the graph and of tensors that the block closes over.
        inputs: the placeholders by name: "params.<name>", "x", "ctx.<name>", "dy".
        y, flat, dx: the outputs.
        forward: what y needs, and the other outputs of the same operators.
        varying: the nodes that x or dy has a part in.
    """

    module: fx.GraphModule
    inputs: Mapping[str, fx.Node]
    y: fx.Node
    flat: fx.Node
    dx: fx.Node
    forward: frozenset[fx.Node]
    varying: frozenset[fx.Node]


def differentiate(
    fn: BlockFunction, params: Params, x: Tensor, ctx: Context, dy: Tensor, flatten: Flatten
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = fn(params, x, ctx), and the gradients of <dy, y>: those of params flattened, and by x.

    An x of integers has no gradient; an empty tensor stands for it, and for the gradients of no params.
    """
    with torch.enable_grad():
        own = {name: value.detach().requires_grad_() for name, value in params.items()}
        x_own = x.detach().requires_grad_(x.is_floating_point())
        y = fn(dict(own), x_own, ctx)
    wanted = [*own.values(), x_own] if x_own.requires_grad else [*own.values()]
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if y.requires_grad and wanted:
        grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    with torch.no_grad():
        filled = [torch.zeros_like(value) if grad is None else grad for value, grad in zip(wanted, grads)]
        flat = flatten(dict(zip(own, filled))) if own else dy.new_zeros(0)
        return y.detach(), flat, filled[-1] if x_own.requires_grad else dy.new_zeros(0)


def trace_joint(
    fn: BlockFunction, params: Params, x: Tensor, ctx: Context, flatten: Flatten, device: torch.device | None = None
) -> Joint:
    """Trace a block's joint graph on fake tensors; nothing is computed.

    Args:
        params, x, ctx: examples, of which only shape, strides, dtype and device are read.
        flatten: local name -> gradient, to one new slab.
        device: where the block will run; None = where the examples are.

    Raises:
        ConfigError: the block does not return one tensor, writes into its arguments, or draws random numbers.
        Exception: whatever Python control flow on values, or an operator without a fake version, raises.
    """
    names = [*(f"params.{name}" for name in params), "x", *(f"ctx.{name}" for name in ctx)]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        examples = [_example(value, device) for value in (*params.values(), x, *ctx.values())]

        def unpack(primals: Sequence[Tensor]) -> tuple[Params, Tensor, Context]:
            named = dict(zip(names, primals))
            return {n: named[f"params.{n}"] for n in params}, named["x"], {n: named[f"ctx.{n}"] for n in ctx}

        versions = [value._version for value in examples]
        y = fn(*unpack(examples))
        for name, value, version in zip(names, examples, versions):
            if value._version != version:
                raise ConfigError(f"the block writes into {name}. {PURE}")
        if not isinstance(y, Tensor):
            raise ConfigError(f"the block returned a {type(y).__name__}. A block must return one tensor.")
        dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)

        # The partitioner tells inputs from cotangents by these names of arguments.
        def joint(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return differentiate(fn, *unpack(primals), tangents[0], flatten)

        module = make_fx(joint)(examples, [dy])
        if any(map(_is_mutation, module.graph.nodes)):
            module = make_fx(torch.func.functionalize(module))(examples, [dy])
    _check(module.graph)
    return _clean(module, [*names, "dy"])


def refuse_random(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError if a call of an operator draws random numbers; attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            if given == 0.0:
                return
    raise ConfigError(
        f"the block draws random numbers ({operation}), and backward, which recomputes it, would draw others. "
        "Set its dropout to 0."
    )


def needed_nodes(outputs: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the outputs need if `given` are at hand (those that are read included)."""
    stop, found, stack = frozenset(given), set[fx.Node](), list(outputs)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                stack += node.all_input_nodes
    return found


def _example(value: Tensor, device: torch.device | None) -> Tensor:
    return torch.empty_strided(
        tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device=device or value.device
    )


def _is_mutation(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if _is_mutation(node):
            raise ConfigError(f"the block writes into a tensor that it did not make ({node.target}). {PURE}")
        refuse_random(node.target, node.args, node.kwargs)


def _clean(module: fx.GraphModule, names: Sequence[str]) -> Joint:
    """Drop what computes nothing, merge equal values, and sort out inputs and outputs."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node in graph.nodes:
        same = _same_value(node)
        if same is not None:
            node.replace_all_uses_with(same)
    graph = fx_graph_cse(graph)
    for node in graph.nodes:
        same = _same_value(node)
        if same is not None:
            node.replace_all_uses_with(same)
    nodes = list(graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    y, flat, dx = next(node for node in nodes if node.op == "output").args[0]
    inputs = dict(zip(names, placeholders, strict=True))
    varying = {inputs["x"], inputs["dy"]}
    for node in nodes:
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    forward = needed_nodes([y], frozenset())
    forward |= {part for node in forward for part in node.users if part.target is operator.getitem}
    return Joint(
        module=fx.GraphModule(module, graph),
        inputs=inputs,
        y=y,
        flat=flat,
        dx=dx,
        forward=frozenset(forward),
        varying=frozenset(varying),
    )


def _same_value(node: fx.Node) -> fx.Node | None:
    """Return a node of equal value, storage and strides that makes this one needless."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in COPIES:
        return source
    origin = source.args[0] if source.args else None
    if node.target is aten.t.default and source.target is aten.t.default:
        return origin if isinstance(origin, fx.Node) else None
    if node.target not in RESHAPES:
        return None
    if source.target in RESHAPES and isinstance(origin, fx.Node) and origin.meta["val"].is_contiguous():
        source = origin
        node.args = (source, *node.args[1:])
    value, given = node.meta["val"], source.meta["val"]
    return source if (value.shape, value.stride()) == (given.shape, given.stride()) else None
