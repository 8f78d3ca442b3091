"""The llama, mistral, qwen2 and qwen3 families as a list of units, their fresh weights, and a plain forward pass."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lazytrain.base import Batch, Model, Params, ParamSpec, Unit
from lazytrain.configuration import ModelConfig
from lazytrain.decoder import decoder_block, make_context
from lazytrain.vocabulary import CausalHead, embed_grads_into, embed_tokens, token_rows


def transformer_model(config: ModelConfig) -> Model:
    """List a decoder's units: "model.embed_tokens", "model.layers.N", "head" (final norm and vocabulary matrix).

    Args:
        config: a checked architecture.
    Returns:
        The model; full names are those of HF's files. With tied embeddings the head's matrix is the embed's.
    Example:
        >>> model = transformer_model(load_config(model_dir))
        >>> params = dict(random_params(model, seed=0, dtype=torch.float32))
    """
    block_fn, head = partial(decoder_block, config=config), CausalHead(config)
    vocabulary = (config.vocab_size, config.hidden_size)
    embed_spec = ParamSpec(full_name="model.embed_tokens.weight", shape=vocabulary)
    head_spec = ParamSpec(full_name="lm_head.weight", shape=vocabulary)
    norm_spec = ParamSpec(full_name="model.norm.weight", shape=(config.hidden_size,))
    tied = config.tie_word_embeddings
    return Model(
        embed=Unit(
            name="model.embed_tokens",
            kind="embed",
            fn=embed_tokens,
            params={"embed_tokens.weight": embed_spec},
            grads_into=embed_grads_into,
            rows=token_rows,
        ),
        blocks=tuple(
            Unit(name=f"model.layers.{idx}", kind="block", fn=block_fn, params=_block_specs(config, idx))
            for idx in range(config.num_hidden_layers)
        ),
        head=Unit(
            name="head",
            kind="head",
            fn=head,
            params={"norm.weight": norm_spec, "lm_head.weight": embed_spec if tied else head_spec},
            grads_into=head.grads_into,
        ),
        context=partial(make_context, config=config),
        tied={"lm_head.weight": "embed_tokens.weight"} if tied else {},
    )


def forward_logits(model: Model, get_params: Callable[[Unit], Params], batch: Batch) -> Tensor:
    """Run the whole model and return logits_btv (b t v elements: for short batches, parity and evaluation).

    Args:
        get_params: unit -> its parameters by local name, asked for in forward order, once each.
        batch: `tokens_bt`, and `positions_bt`, `segments_bt` where packed.
    """
    assert isinstance(model.head.fn, CausalHead)
    x_btd = model.embed.fn(get_params(model.embed), batch)
    ctx = model.context(batch, x_btd.dtype)
    for unit in model.blocks:
        x_btd = unit.fn(get_params(unit), x_btd, ctx)
    return model.head.fn.logits(get_params(model.head), x_btd)


def random_params(model: Model, seed: int, dtype: torch.dtype, *, std: float = 0.02) -> Iterator[tuple[str, Tensor]]:
    """Draw fresh weights as HF does, one tensor at a time: norms 1, biases 0, the rest normal.

    Args:
        dtype: of the tensors; numbers are drawn in fp32, so that every dtype rounds the same model.
        std: standard deviation (`ModelConfig.initializer_range`).
    Yields:
        (full name, tensor on the CPU), tied tensors once.
    """
    generator = torch.Generator().manual_seed(seed)
    for unit in model.units:
        for name, spec in unit.params.items():
            if unit is model.head and name in model.tied:
                continue
            if name.endswith("norm.weight"):
                yield spec.full_name, torch.ones(spec.shape, dtype=dtype)
            elif name.endswith(".bias"):
                yield spec.full_name, torch.zeros(spec.shape, dtype=dtype)
            else:
                yield spec.full_name, (torch.randn(spec.shape, generator=generator) * std).to(dtype)


def _block_specs(config: ModelConfig, block_idx: int) -> Mapping[str, ParamSpec]:
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,)}
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, d)
        if config.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["self_attn.o_proj.weight"] = (d, q)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (d,)
    shapes["post_attention_layernorm.weight"] = (d,)
    for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
        shapes[f"mlp.{name}_proj.weight"] = shape
        if config.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = shape[:1]
    prefix = f"model.layers.{block_idx}"
    return {name: ParamSpec(full_name=f"{prefix}.{name}", shape=shape) for name, shape in shapes.items()}
