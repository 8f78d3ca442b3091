"""Split a block's joint graph at any set of kept values.

    forward     (params, x, ctx)                 -> (y, *residuals)
    backward    (params, x, ctx, *residuals, dy) -> (flat grads, dx)

Every split computes each value by the same operators from the same values: how much is kept changes no bit.

A residual is never a parameter, x, ctx or a view of them, which backward has anyway; a view of another value is
replayed from that value, so that residuals share no storage with each other; and what x has no part in (a cast
weight, a mask made additive) is computed again.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import flop_registry

from lazytrain.joint import Joint, needed_nodes

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def residual_candidates(joint: Joint, budgets: Iterable[float]) -> Iterator[list[fx.Node]]:
    """Yield residuals for budgets between 0 (recompute all) and 1 (recompute what fuses), by min-cut.

    Source: torch._functorch.partitioners, `activation_memory_budget`; it counts inputs as free.
    """
    for budget in budgets:
        yield _choose(joint, budget)


def product_candidates(joint: Joint, counts: Iterable[int]) -> Iterator[list[fx.Node]]:
    """Yield the residuals with which backward does not repeat the so many largest matrix products of forward.

    Of a byte kept these save most, and what is kept of one block is little enough to leave while it computes.
    """
    repeated = needed_nodes([joint.flat, joint.dx], frozenset()) & joint.forward & joint.varying
    products = [node for node in joint.module.graph.nodes if node in repeated and node.target in PRODUCTS]
    largest_first = sorted(products, key=_num_flops, reverse=True)  # equal ones in the order of the graph
    for count in counts:
        if count <= len(products):
            yield _residuals(joint, largest_first[:count])


def _num_flops(product: fx.Node) -> int:
    """Return a matrix product's FLOPs, as torch counts them."""
    values = [argument.meta["val"] for argument in product.args if isinstance(argument, fx.Node)]
    return int(flop_registry[product.target.overloadpacket](*values, out_val=product.meta["val"]))  # type: ignore[union-attr]


def _choose(joint: Joint, budget: float) -> list[fx.Node]:
    """Return the partitioner's residuals for one budget, recompute priced by its FLOPs."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.module.graph, {}))  # names are kept; the partitioner changes the graph
    module = fx.GraphModule(joint.module, graph)
    with (
        functorch_config.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"),
        _attention_counted(),
    ):
        _, backward = min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=1, static_lifetime_input_indices=list(range(len(joint.inputs) - 1))
        )
    kept = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    return _residuals(joint, (node for node in joint.module.graph.nodes if node.name in kept))


@contextmanager
def _attention_counted() -> Iterator[None]:
    """Let torch count the FLOPs of causal attention.

    Its own formulas count the masked half too (attention's output would be kept before some products, and saved no time
    as measured), that of 2.11 refuses grouped heads, and of many lengths each is taken for the longest.
    """

    def count_rows(q_bhtk: Tensor, k_bgtk: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
        return 2 * q_bhtk.numel() * k_bgtk.shape[2]

    def count_lengths(q_nhk: Tensor, *arguments: Any, out_val: Any = None, **__: Any) -> int:
        longest: int = arguments[5]  # k, v, where segments of q and k begin, longest of q, of k
        return 2 * q_nhk.numel() * longest

    formulas: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention: count_rows,
        aten._flash_attention_forward: count_lengths,
    }
    before = {name: flop_registry[name] for name in formulas}
    flop_registry.update(formulas)
    try:
        yield
    finally:
        flop_registry.update(before)


def keep_all(joint: Joint) -> list[fx.Node]:
    """Return the residuals with which backward recomputes nothing, those that autograd would keep."""
    backward = needed_nodes([joint.flat, joint.dx], frozenset()) - joint.forward
    used = {argument for node in backward for argument in node.all_input_nodes}
    return _residuals(joint, used | {joint.flat, joint.dx})


def forward_graph(joint: Joint, residuals: Sequence[fx.Node]) -> fx.Graph:
    """Return the graph (*params, x, *ctx) -> (y, *residuals)."""
    return _extract(joint, list(joint.inputs.values())[:-1], [], [joint.y, *residuals])


def backward_graph(joint: Joint, residuals: Sequence[fx.Node]) -> fx.Graph:
    """Return the graph (*params, x, *ctx, *residuals, dy) -> (flat grads, dx)."""
    *inputs, dy = joint.inputs.values()
    return _extract(joint, [*inputs, *residuals, dy], residuals, [joint.flat, joint.dx])


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose storage a view, or a view of a view, shows."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        if node.target is operator.getitem:
            assert isinstance(source, fx.Node)
            if not _is_view(source):
                return node
        elif not _is_view(node):
            return node
        assert isinstance(source, fx.Node)
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def _residuals(joint: Joint, wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """Return, in graph order, the bases of the wanted values that backward then really reads."""
    bases = {
        base
        for base in map(_base, wanted)
        if base.op == "call_function" and base in joint.forward and base in joint.varying
    }
    reached = needed_nodes([joint.flat, joint.dx], bases)
    return [node for node in joint.module.graph.nodes if node in bases and node in reached]


def _extract(
    joint: Joint, arguments: Sequence[fx.Node], kept: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """Cut a program out of the joint graph. What is recomputed is computed right before its first use."""
    needed = needed_nodes(outputs, kept)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    position = {node: i for i, node in enumerate(joint.module.graph.nodes)}
    backward = [node for node in position if node in needed and node not in joint.forward]
    for goal in (*backward, *sorted(outputs, key=position.__getitem__)):
        for node in sorted(needed_nodes([goal], copies) - copies.keys(), key=position.__getitem__):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            for part in node.users:
                # At once, so that the outputs of an operator that nobody reads are released.
                if part.target is operator.getitem and part in needed and part not in copies:
                    copies[part] = graph.node_copy(part, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return graph
