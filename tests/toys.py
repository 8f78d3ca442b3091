"""A small model of pure functions, its weights and batches, for tests of the trainer.

Shape letters: b batch, t time, d model width, f feed-forward, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lazytrain.base import IGNORE_INDEX, Batch, Context, Model, Params, ParamSpec, Unit
from lazytrain.solver.plan import Plan, UnitPlan

D, FF, V, T = 64, 96, 80, 12


def block(params: Params, x_btd: Tensor, ctx: Context) -> Tensor:
    h_btd = F.layer_norm(x_btd, (D,), params["norm"], None)
    h_btf = torch.tanh(F.linear(h_btd, params["up"], params["bias"]))
    mixed_btf = torch.cumsum(h_btf, 1) / torch.arange(1, x_btd.shape[1] + 1, device=x_btd.device)[None, :, None]
    return x_btd + F.linear(mixed_btf.to(x_btd.dtype), params["down"])


def embed(params: Params, batch: Batch) -> Tensor:
    return F.embedding(batch["tokens_bt"], params["table"])


def embed_grads_into(params: Params, batch: Batch, dx_btd: Tensor, sums: Params) -> None:
    """Add the embed's gradients: it needs no weights, so that they may have left."""
    sums["table"].index_add_(0, batch["tokens_bt"].flatten(), dx_btd.flatten(0, 1).float())


def head(params: Params, x_btd: Tensor, batch: Batch) -> Tensor:
    logits_btv = F.linear(F.layer_norm(x_btd, (D,), params["norm"], None), params["out"]).float()
    return F.cross_entropy(
        logits_btv.flatten(0, 1), batch["targets_bt"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def make_model(num_blocks: int = 4, *, tied: bool = True, streams_embed: bool = False) -> Model:
    """Return a model of `num_blocks` equal blocks, whose embed has a backward that needs no weights, or none."""

    def spec(name: str, *shape: int) -> ParamSpec:
        return ParamSpec(full_name=name, shape=shape)

    blocks = tuple(
        Unit(
            name=f"blocks.{i}",
            kind="block",
            fn=block,
            params={
                "norm": spec(f"blocks.{i}.norm", D),
                "up": spec(f"blocks.{i}.up", FF, D),
                "bias": spec(f"blocks.{i}.bias", FF),
                "down": spec(f"blocks.{i}.down", D, FF),
            },
        )
        for i in range(num_blocks)
    )
    out = "embed.table" if tied else "head.out"
    return Model(
        embed=Unit(
            name="embed",
            kind="embed",
            fn=embed,
            params={"table": spec("embed.table", V, D)},
            grads_into=embed_grads_into if streams_embed else None,
        ),
        blocks=blocks,
        head=Unit(name="head", kind="head", fn=head, params={"norm": spec("head.norm", D), "out": spec(out, V, D)}),
        tied={"out": "table"} if tied else {},
    )


def make_params(model: Model, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return full name -> random weight."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for unit in model.units:
        for spec in unit.params.values():
            value = torch.randn(spec.shape, generator=generator) * 0.1
            params[spec.full_name] = (value + (len(spec.shape) == 1)).to(dtype)
    return params


def make_batch(seed: int = 0, rows: int = 8, time: int = T) -> dict[str, Tensor]:
    """Return tokens, and as targets the next token, none in the first quarter of each row."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens_bt = torch.randint(0, V, (rows, time), generator=generator)
    targets_bt = torch.roll(tokens_bt, -1, 1)
    targets_bt[:, -1] = IGNORE_INDEX
    targets_bt[:, : time // 4] = IGNORE_INDEX
    return {"tokens_bt": tokens_bt, "targets_bt": targets_bt}


def reference_loss(model: Model, params: dict[str, Tensor], batch: Batch) -> Tensor:
    """Return the mean loss by plain PyTorch, differentiable by the tensors of `params`."""

    def local(unit: Unit) -> Params:
        return {name: params[spec.full_name] for name, spec in unit.params.items()}

    x_btd = model.embed.fn(local(model.embed), batch)
    ctx = model.context(batch, x_btd.dtype)
    for unit in model.blocks:
        x_btd = unit.fn(local(unit), x_btd, ctx)
    head_params = local(model.head)
    for name, source in model.tied.items():
        head_params[name] = params[model.embed.params[source].full_name]
    return model.head.fn(head_params, x_btd, batch) / model.count(batch)


STREAMED = UnitPlan(weights="host", states="host", update="device", grads="host")
RESIDENT = UnitPlan()


def make_plan(
    num_blocks: int = 4,
    *,
    default: UnitPlan = STREAMED,
    ends: UnitPlan | tuple[UnitPlan, UnitPlan] = RESIDENT,
    change: Callable[[int, UnitPlan], UnitPlan] = lambda i, unit: unit,
    depth: int = 2,
    microbatches: int = 1,
) -> Plan:
    """Return a plan of `default` blocks, each passed through `change`; `ends` is what embed and head do, or each."""
    first, last = ends if isinstance(ends, tuple) else (ends, ends)
    return Plan(
        model="toy",
        num_microbatches=microbatches,
        prefetch_depth=depth,
        embed=first,
        blocks=tuple(change(i, default) for i in range(num_blocks)),
        head=last,
    )


ON_CPU = replace(STREAMED, update="cpu")
