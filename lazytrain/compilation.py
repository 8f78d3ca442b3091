"""torch.compile for block programs, with the way back to eager where it does not work."""

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from lazytrain.base import Context, Params
from lazytrain.joint import BlockFunction, Flatten
from lazytrain.straightline import Function

LOG = logging.getLogger(__name__)
# Block programs are specialised, so that one function is compiled again for every shape that a run meets.
MAX_SHAPES = 256


class Compiler:
    """Compiles functions at their first call. Once one fails, all of this compiler's functions run eagerly."""

    def __init__(self) -> None:
        self.works = True

    def compile(self, function: Callable[..., Any], eager: Function) -> Function:
        """Return a program that calls the compiled `function(*arguments)`, or `eager(arguments)` if that fails."""
        compiled: Callable[..., Any] | None = None

        def run(arguments: list[Tensor]) -> tuple[Tensor, ...]:
            nonlocal compiled
            if not self.works:
                return eager(arguments)
            if compiled is not None:
                return compiled(*arguments)
            try:
                first = torch.compile(function, dynamic=False, fullgraph=True)
                with torch._dynamo.config.patch(recompile_limit=MAX_SHAPES, accumulated_recompile_limit=4 * MAX_SHAPES):
                    outputs = first(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.works = False
                LOG.warning("torch.compile failed, so blocks run eagerly: %s", first_line(error))
            else:
                compiled = first
                return outputs
            gc.collect()  # the exception and its frames, which hold the arguments, are a cycle
            return eager(arguments)

        return run


def whole_functions(
    fn: BlockFunction, param_names: Sequence[str], ctx_names: Sequence[str], flatten: Flatten
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward (*params, x, *ctx) -> (y,) and, around one vjp, backward (*params, x, *ctx, dy) -> (flat, dx)."""
    num_params = len(param_names)

    def unpack(values: Sequence[Tensor]) -> tuple[Params, Tensor, Context]:
        return dict(zip(param_names, values)), values[num_params], dict(zip(ctx_names, values[num_params + 1 :]))

    def forward(*values: Tensor) -> tuple[Tensor]:
        return (fn(*unpack(values)),)

    def backward(*values: Tensor) -> tuple[Tensor, Tensor]:
        params, x, ctx = unpack(values[:-1])
        dy = values[-1]
        if x.is_floating_point():
            _, pull = vjp(lambda p, x: fn(p, x, ctx), params, x)  # type: ignore[misc]
            grads, dx = pull(dy)
        else:
            _, pull = vjp(lambda p: fn(p, x, ctx), params)  # type: ignore[misc]
            (grads,), dx = pull(dy), dy.new_zeros(0)
        return flatten(grads) if params else dy.new_zeros(0), dx

    return forward, backward


def first_line(error: Exception) -> str:
    """Return an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
