"""Turn a graph of torch operators into one straight-line Python function.

The operators are called as traced, one after another, without interpreter or module machinery between them, and every
value is released right after its last use. Arguments come in a list that the function empties, so that they too live
no longer than needed, if the caller lets go of them.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

Function = Callable[[list[Tensor]], tuple[Tensor, ...]]


def write_function(graph: fx.Graph, attributes: object) -> Function:
    """Compile a graph to `function(arguments: list) -> tuple of outputs`.

    Args:
        graph: placeholders, operators and an output that is a tuple.
        attributes: owner of the tensors that the graph's get_attr nodes name.

    Example:
        >>> module = torch.fx.symbolic_trace(lambda a, b: (a + b,))
        >>> write_function(module.graph, module)([torch.ones(1), torch.ones(1)])
        (tensor([2.]),)
    """
    writer = _Writer(attributes)
    nodes = list(graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last_use.items():
        dying.setdefault(user, []).append(value)
    arguments = [node for node in nodes if node.op == "placeholder"]
    body = [writer.take(arguments), *writer.release(node for node in arguments if node not in last_use)]
    for node in nodes:
        if node.op != "placeholder":
            body.append(writer.line(node))
        if node.op != "output":
            body += writer.release(dying.get(node, []))
    source = "def function(arguments):\n" + "".join(f"    {line}\n" for line in body if line)
    exec(compile(source, "<block program>", "exec"), writer.scope)
    function: Function = writer.scope["function"]
    return function


class _Writer:
    """Names the values and the constants of one function."""

    def __init__(self, attributes: object) -> None:
        self.scope: dict[str, Any] = {}
        self._attributes = attributes
        self._names: dict[fx.Node, str] = {}

    def take(self, arguments: list[fx.Node]) -> str:
        if not arguments:
            return ""
        return f"{''.join(f'{self._name(node)}, ' for node in arguments)}= arguments; arguments.clear()"

    def release(self, nodes: Iterable[fx.Node]) -> list[str]:
        names = ", ".join(self._names[node] for node in nodes if node.op != "get_attr")
        return [f"del {names}"] if names else []

    def line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return ({''.join(f'{self._text(value)}, ' for value in node.args[0])})"  # type: ignore[union-attr]
        if node.op == "get_attr":
            self._names[node] = self._constant(operator.attrgetter(str(node.target))(self._attributes))
            return ""
        assert node.op == "call_function", node.op
        if node.target is operator.getitem:
            container, index = node.args
            return f"{self._name(node)} = {self._text(container)}[{index}]"
        pieces = [self._text(a) for a in node.args] + [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        # The operator's C++ entry point: one Python frame less than the operator object.
        callee = self._constant(getattr(node.target, "_op", node.target))
        return f"{self._name(node)} = {callee}({', '.join(pieces)})"

    def _name(self, node: fx.Node) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list | tuple) and any(isinstance(leaf, fx.Node) for leaf in value):
            return f"[{', '.join(self._text(leaf) for leaf in value)}]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant(value)
