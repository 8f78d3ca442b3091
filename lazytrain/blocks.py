"""Train your own list of blocks: pure functions, or nn.Modules used as templates.

model, params = block_model([(first, first_params), (second, second_params)], loss=squared_error)
step = make_train_step(model, adamw8bit(1e-3))
state = step.init(params)
state, metrics = step(state, {"inputs": x, "labels": y})
"""

import copy
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.func import functional_call

from lazytrain.base import Batch, Context, Model, Params, ParamSpec, Unit, count_rows
from lazytrain.errors import ConfigError

BlockFunction = Callable[[Params, Tensor, Context], Tensor]


def block_model(
    blocks: Sequence[tuple[BlockFunction, Params]],
    *,
    loss: Callable[[Tensor, Batch], Tensor],
    inputs: str = "inputs",
    count: Callable[[Batch], int] = count_rows,
) -> tuple[Model, Params]:
    """Make a model of pure blocks `fn(params, x, ctx) -> y` between an input tensor and a loss.

    Args:
        blocks: (function, its initial parameters). Blocks of one function and equal shapes share their programs.
        loss: `(last output, batch) -> sum` over the batch's rows, 0-d.
        inputs: the key of the batch that is the first block's input.
        count: what the summed loss is divided by; the number of rows by default.

    Returns:
        The model, and full name -> initial parameter for `TrainStep.init`. Names are `blocks.<i>.<local name>`.

    Raises:
        ConfigError: there is no block.
    """
    if not blocks:
        raise ConfigError("block_model: the list of blocks is empty. Give at least one (function, params) pair.")
    kinds: dict[object, str] = {}
    units: list[Unit] = []
    params: Params = {}
    for i, (fn, own) in enumerate(blocks):
        signature = (fn, tuple((name, tuple(value.shape)) for name, value in own.items()))
        kind = kinds.setdefault(signature, f"block kind {len(kinds)}")
        specs = {n: ParamSpec(full_name=f"blocks.{i}.{n}", shape=tuple(v.shape)) for n, v in own.items()}
        units.append(Unit(name=f"blocks.{i}", kind=kind, fn=fn, params=specs))
        params |= {f"blocks.{i}.{name}": value for name, value in own.items()}
    model = Model(
        embed=Unit(name="inputs", kind="inputs", fn=lambda _, batch: batch[inputs]),
        blocks=tuple(units),
        head=Unit(name="loss", kind="loss", fn=lambda _, x, batch: loss(x, batch)),
        count=count,
    )
    return model, params


def blocks_from_modules(modules: Sequence[nn.Module]) -> list[tuple[BlockFunction, Params]]:
    """Turn modules of one architecture into (function, parameters) pairs that share one template on the meta device.

    Args:
        modules: equal but for their weights; `forward(x)` takes and returns one tensor. No buffers.

    Raises:
        ConfigError: a module has buffers, or differs from the first.
    """
    template = _make_template(modules[0])
    shapes = {name: value.shape for name, value in template.named_parameters()}

    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return functional_call(template, params, (x,))

    pairs: list[tuple[BlockFunction, Params]] = []
    for i, module in enumerate(modules):
        if any(True for _ in module.buffers()):
            raise ConfigError(f"module {i} has buffers, which a pure block can't have. Make them inputs or parameters.")
        own = {name: value.detach() for name, value in module.named_parameters()}
        if {name: value.shape for name, value in own.items()} != shapes:
            raise ConfigError(f"module {i} has other parameters than module 0. Call blocks_from_modules for each kind.")
        pairs.append((fn, own))
    return pairs


def _make_template(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device in which shared parameters are still shared."""
    template = copy.deepcopy(module).to("meta")
    first_names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            owner, _, attribute = name.rpartition(".")
            setattr(template.get_submodule(owner), attribute, template.get_parameter(first))
    return template


def block_from_module(module: nn.Module) -> tuple[BlockFunction, Params]:
    """Turn one module into a (function, parameters) pair, see `blocks_from_modules`."""
    return blocks_from_modules([module])[0]
