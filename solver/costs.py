"""Costs by arithmetic, for a machine that nobody has profiled: FLOPs over an achievable rate, bytes by formula.

Shape letters: d model width, f feed-forward, h heads, g key and value heads, k head dim, v vocabulary, n tokens of one
chunk, t tokens of one sequence.

    block, forward FLOPs     2·n·(d·k·(2h + 2g) + 3·d·f) + 2·n·t·h·k      (causal attention counts half)
    block, recompute all     4 of these: forward, recompute, and 2 for backward
    residuals, all kept      2·n·(2h·k + 2g·k + 2d + 2f) bytes in bf16
    head                     3 x 2·n·v·d FLOPs (logits, and both gradients)

Points between recompute all and keep all follow the curve that was measured on an H200 with a 7B block (32k tokens,
compiled): shares of the residuals kept, and what is left of the time.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from lazytrain.solver.errors import PlannerError
from lazytrain.solver.models import Shapes, parse_shapes
from lazytrain.solver.problem import Hardware, Problem, ResidualPoint, UnitCost, check_number

GROUP = 128
MIN_QUANTIZED_NUMEL = 4096
SCALE_BYTES = 4
# Share of all residuals that is kept, and the block's time (forward and backward) against recompute all.
CURVE = ((0.0, 1.0), (0.22, 0.968), (0.44, 0.924), (0.60, 0.894), (0.95, 0.828), (1.03, 0.813))
PEAK_SHARE = 1.94  # working memory of a recompute, against the residuals, the same source
KEEP_COST = 0.03  # of forward, where it writes residuals
BLOCK_EFFICIENCY = 0.85  # of the rate of large matrix products
TOKENS_AT_HALF_RATE = 200  # small chunks leave the matrix units idle
LOGITS_BYTES = 640 << 20  # logits at a time, as the trainer's head
HEAD_COPIES = 4  # of its input, in bf16: rows with a target, their norm, gradients of both
DEFAULT_CHUNK_TOKENS = 16384
MAX_TOKENS = 1 << 32


class Tensors(NamedTuple):
    """Totals over a unit's tensors: parameters, and bytes of working weights and of states."""

    num_params: int
    weight_bytes: int
    state_bytes: int


def problem_from_config(
    config: object,
    hardware: Hardware,
    *,
    batch: int,
    seq: int,
    microbatch: int | None = None,
    allow_nvme: bool = False,
    name: str = "model",
    device_is_host: bool = False,
) -> Problem:
    """Return the planner's problem for a parsed HF `config.json`, by arithmetic.

    Args:
        batch, seq: sequences of a step, and tokens of each.
        microbatch: sequences of a chunk; None = as many as make about 16k tokens.
        device_is_host: a run on the CPU.

    Raises:
        PlannerError: an unsupported model, or a size that can't be; names the key or option.
    """
    return problem_from_shapes(
        parse_shapes(config),
        hardware,
        batch=batch,
        seq=seq,
        microbatch=microbatch,
        allow_nvme=allow_nvme,
        name=name,
        device_is_host=device_is_host,
    )


def problem_from_shapes(
    shapes: Shapes,
    hardware: Hardware,
    *,
    batch: int,
    seq: int,
    microbatch: int | None = None,
    allow_nvme: bool = False,
    name: str = "model",
    device_is_host: bool = False,
) -> Problem:
    """Return the planner's problem for a model's shapes (see `problem_from_config`)."""
    for what, value in (("batch", batch), ("seq", seq), ("batch x seq", batch * seq)):
        check_number(value, what, low=1, high=MAX_TOKENS, integer=True)
    if microbatch is None:
        microbatch = max(1, min(batch, DEFAULT_CHUNK_TOKENS // seq))
    check_number(microbatch, "microbatch", low=1, high=batch, integer=True)
    if shapes.sliding_window is not None and seq > shapes.sliding_window:
        raise PlannerError(
            f"seq is {seq}, more than the model's sliding_window of {shapes.sliding_window}, which is not supported; "
            f"use sequences of at most {shapes.sliding_window} tokens"
        )
    tokens = microbatch * seq
    rate = _Rate(hardware, tokens)
    block = _block_cost(shapes, hardware, rate, tokens, seq)
    count = shapes.num_hidden_layers
    problem = Problem(
        model=name,
        embed=_embed_cost(shapes, hardware, tokens),
        blocks=tuple(replace(block, name=f"model.layers.{i}") for i in range(count)),
        head=_head_cost(shapes, hardware, rate, tokens),
        num_microbatches=-(-batch // microbatch),
        hardware=hardware,
        allow_nvme=allow_nvme,
        tokens_per_step=batch * seq,
        device_is_host=device_is_host,
        tied=shapes.tie_word_embeddings,
        train_flops=3.0
        * batch
        / microbatch
        * (count * _block_flops(shapes, tokens, seq) + _head_flops(shapes, tokens)),
    )
    problem.validate()
    return problem


class _Rate:
    """The achievable rate of a chunk's matrix products."""

    def __init__(self, hardware: Hardware, tokens: int) -> None:
        share = BLOCK_EFFICIENCY * tokens / (tokens + TOKENS_AT_HALF_RATE)
        self._flops_per_ms = hardware.matmul_tflops * 1e9 * share

    def ms(self, flops: float) -> float:
        return flops / self._flops_per_ms


def _block_flops(shapes: Shapes, tokens: int, seq: int) -> float:
    """Return the FLOPs of one forward."""
    d, f, k = shapes.hidden_size, shapes.intermediate_size, shapes.head_dim
    h, g = shapes.num_attention_heads, shapes.num_key_value_heads
    return 2.0 * tokens * (d * k * (2 * h + 2 * g) + 3 * d * f) + 2.0 * tokens * seq * h * k


def _head_flops(shapes: Shapes, tokens: int) -> float:
    return 2.0 * tokens * shapes.vocab_size * shapes.hidden_size


def _block_cost(shapes: Shapes, hardware: Hardware, rate: _Rate, tokens: int, seq: int) -> UnitCost:
    d, f = shapes.hidden_size, shapes.intermediate_size
    q, kv = shapes.num_attention_heads * shapes.head_dim, shapes.num_key_value_heads * shapes.head_dim
    sizes = [(d,), (d,), (q, d), (kv, d), (kv, d), (d, q), (f, d), (f, d), (d, f)]
    sizes += [(q,), (kv,), (kv,)] if shapes.qkv_bias else []
    sizes += [(d,)] if shapes.o_bias else []
    sizes += [(f,), (f,), (d,)] if shapes.mlp_bias else []
    sizes += [(shapes.head_dim,)] * 2 if shapes.qk_norm else []
    everything = 2 * tokens * (2 * q + 2 * kv + 2 * d + 2 * f)
    forward_ms = rate.ms(_block_flops(shapes, tokens, seq))
    points = []
    for share, time_share in CURVE:
        kept_bytes = int(share * everything)
        ms = forward_ms * (1 + KEEP_COST * min(1.0, share))
        points.append(
            ResidualPoint(
                residual_bytes=kept_bytes,
                forward_ms=ms,
                backward_ms=4 * forward_ms * time_share - ms,
                workspace_bytes=int(PEAK_SHARE * everything) - kept_bytes,
            )
        )
    return _unit("block", count_tensors(sizes), hardware, tuple(points), boundary_bytes=2 * tokens * d)


def _embed_cost(shapes: Shapes, hardware: Hardware, tokens: int) -> UnitCost:
    """A gather forward; backward adds fp32 rows to an fp32 sum, which is cleared before and rounded after."""
    tensors = count_tensors([(shapes.vocab_size, shapes.hidden_size)])
    row_bytes = 2 * tokens * shapes.hidden_size
    point = ResidualPoint(
        residual_bytes=0,
        forward_ms=2 * row_bytes / (hardware.device_memory_gbs * 1e6),
        backward_ms=(3 * tensors.weight_bytes + 3 * row_bytes) / (hardware.device_memory_gbs * 1e6),
        workspace_bytes=2 * row_bytes,
    )
    return _unit("embed", tensors, hardware, (point,), boundary_bytes=8 * tokens)


def _head_cost(shapes: Shapes, hardware: Hardware, rate: _Rate, tokens: int) -> UnitCost:
    """The loss in chunks of tokens, never all logits."""
    d, v = shapes.hidden_size, shapes.vocab_size
    tensors = count_tensors([(d,)] if shapes.tie_word_embeddings else [(d,), (v, d)])
    point = ResidualPoint(
        residual_bytes=0,
        forward_ms=0.0,
        backward_ms=rate.ms(3 * _head_flops(shapes, tokens)),
        workspace_bytes=min(2 * tokens * v, LOGITS_BYTES) + HEAD_COPIES * 2 * tokens * d,
    )
    return _unit("head", tensors, hardware, (point,), boundary_bytes=2 * tokens * d)


def count_tensors(sizes: Iterable[tuple[int, ...]]) -> Tensors:
    """Return a unit's totals: bf16 weights; 8-bit moments with a scale each per group of 128 in a row and 16 bits of
    master correction; fp32 moments for tensors of one dimension or under 4096 elements."""
    num_params = weight_bytes = state_bytes = 0
    for size in sizes:
        cols, rows = size[-1], 1
        for other in size[:-1]:
            rows *= other
        numel = rows * cols
        padded = -(-numel // GROUP) * GROUP
        num_params += numel
        weight_bytes += 2 * padded
        if len(size) > 1 and numel >= MIN_QUANTIZED_NUMEL:
            state_bytes += 4 * padded + 2 * SCALE_BYTES * rows * -(-cols // GROUP)
        else:
            state_bytes += 10 * padded
    return Tensors(num_params, weight_bytes, state_bytes)


def _unit(
    name: str, tensors: Tensors, hardware: Hardware, points: tuple[ResidualPoint, ...], boundary_bytes: int
) -> UnitCost:
    return UnitCost(
        name=name,
        kind=name,
        num_params=tensors.num_params,
        weight_bytes=tensors.weight_bytes,
        state_bytes=tensors.state_bytes,
        grad_bytes=tensors.weight_bytes,
        boundary_bytes=boundary_bytes,
        points=points,
        cpu_update_ms=tensors.num_params / (hardware.cpu_update_gparams_s * 1e6),
        device_update_ms=tensors.num_params / (hardware.device_update_gparams_s * 1e6),
    )
