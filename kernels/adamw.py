"""AdamW's fused step, in place: with 8-bit moments (codec.py) or fp32 ones; with a split master (master.py) or fp32.

    g' = coef * g                                        coef: the clip coefficient
    m  = beta1 * m + fl(1 - beta1) * g'
    v  = beta2 * v + fl(1 - beta2) * (g' * g'),          r = sqrt(v)
    u  = m / (r * fl(1 / sqrt(1 - beta2^t)) + eps)
    w  = w * fl(1 - lr * weight_decay) - fl(lr / (1 - beta1^t)) * u            torch.optim.AdamW's order

Everything is fp32 with one rounding an operation; fl() marks scalars computed in double and rounded once. On CUDA a
Triton kernel runs, on the CPU the C++ operator or, without a compiler, the reference: all give the same bits.
Gradients and states must be finite: the caller skips a step whose norm is not. A coef that is a tensor (fp32, one
element, on the weights' device; clipping.py makes it) is read where it lies, without host synchronisation on CUDA, and
a NaN in it skips the step: nothing is written.

State of one parameter: bf16 weight 2 bytes, lo 2 (32-bit master) or 1 (24-bit), m 1, v 1, scales 8 / 128.

Example:
    >>> w, g, m, v = torch.ones(4), torch.ones(4), torch.zeros(4), torch.zeros(4)
    >>> adamw_update_into(w, None, m, v, g, coef=1.0, hyper=AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1))
    >>> w
    tensor([0.9000, 0.9000, 0.9000, 0.9000])
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lazytrain.kernels import codec, native
from lazytrain.kernels.codec import CHUNK, GROUP, check_tensor, count_groups
from lazytrain.kernels.hyper import AdamWHyper, AdamWScalars, derive_scalars
from lazytrain.kernels.master import join_master, split_bits


def reference_step(
    s: AdamWScalars, g: Tensor, w: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (w, m, v, r) after one step on fp32 tensors of one shape, as the formulas say it."""
    g = g * s.coef
    m = m * s.beta1 + g * s.one_minus_beta1
    v = v * s.beta2 + (g * g) * s.one_minus_beta2
    r = codec.root(v)
    u = m.div(r * s.inv_sqrt_bias2 + s.eps)
    return w * s.decay - u * s.step_size, m, v, r


def _load_weights(weights: Tensor, lo: Tensor | None) -> Tensor:
    return weights if lo is None else join_master(weights, lo)


def _store_weights(w: Tensor, dither: Tensor, weights: Tensor, lo: Tensor | None) -> None:
    if lo is None:
        weights.view(-1).copy_(w)
    else:
        hi, low = split_bits(w.contiguous().view(torch.int32), lo.dtype, (dither & 0xFF).to(torch.int32))
        weights.view(-1).copy_(hi)
        lo.view(-1).copy_(low)


def reference_adamw8bit_update_into(
    weights: Tensor,
    lo: Tensor | None,
    m_q: Tensor,
    m_scale: Tensor,
    v_q: Tensor,
    v_scale: Tensor,
    grads: Tensor,
    *,
    rows: int,
    cols: int,
    first_group: int,
    coef: float,
    hyper: AdamWHyper,
) -> None:
    """Do `adamw8bit_update_into` with plain torch operations: decode, step, encode."""
    s = derive_scalars(hyper, coef, first_group)
    m_gi, r_gi = codec.reference_decode(
        codec.to_groups(m_q, rows, cols), m_scale, codec.to_groups(v_q, rows, cols), v_scale
    )
    g_gi = codec.to_groups(grads, rows, cols).float()
    w_gi = codec.to_groups(_load_weights(weights, lo), rows, cols)
    dither_g1 = codec.dither_of_groups(s.dither, len(g_gi))
    w_gi, m_gi, _, r_gi = reference_step(s, g_gi, w_gi, m_gi, r_gi * r_gi)
    new = codec.reference_encode(m_gi, r_gi, dither_g1)
    w = codec.from_groups(w_gi, rows, cols).flatten()
    dither = codec.from_groups(dither_g1.expand(-1, GROUP).contiguous(), rows, cols).flatten()
    _store_weights(w, dither, weights, lo)
    m_q.view(-1).copy_(codec.from_groups(new.m_q, rows, cols).flatten())
    v_q.view(-1).copy_(codec.from_groups(new.v_q, rows, cols).flatten())
    m_scale.view(-1).copy_(new.m_scale)
    v_scale.view(-1).copy_(new.v_scale)


def reference_adamw_update_into(
    weights: Tensor, lo: Tensor | None, m: Tensor, v: Tensor, grads: Tensor, *, coef: float, hyper: AdamWHyper
) -> None:
    """Do `adamw_update_into` with plain torch operations."""
    _reference_adamw(weights, lo, m, v, grads, derive_scalars(hyper, coef))


def _reference_adamw(weights: Tensor, lo: Tensor | None, m: Tensor, v: Tensor, grads: Tensor, s: AdamWScalars) -> None:
    dither = codec.dither_of_groups(s.dither, count_groups(1, weights.numel()))
    w, m_new, v_new, _ = reference_step(
        s, grads.view(-1).float(), _load_weights(weights, lo).view(-1), m.view(-1), v.view(-1)
    )
    _store_weights(w, dither.expand(-1, GROUP).flatten()[: weights.numel()], weights, lo)
    m.view(-1).copy_(m_new)
    v.view(-1).copy_(v_new)


def _pieces(rows: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a flat tensor for the reference: (first element, rows, cols, first group) of about CHUNK elements each."""
    if cols % GROUP == 0:
        rows, cols = 1, rows * cols
    step = max(1, CHUNK // max(cols, 1))
    for row in range(0, rows if cols else 0, step):
        for col in range(0, cols, CHUNK):
            first_group = row * count_groups(1, cols) + col // GROUP
            yield row * cols + col, min(step, rows - row), min(CHUNK, cols - col), first_group


def _check_weights(weights: Tensor, lo: Tensor | None, grads: Tensor, numel: int) -> None:
    dtypes = (torch.float32,) if lo is None else (torch.bfloat16,)
    check_tensor("weights (bf16 with lo, fp32 without)", weights, dtypes, numel, weights.device)
    if lo is not None:
        check_tensor("lo", lo, (torch.int16, torch.int8), numel, weights.device)
    check_tensor("grads", grads, (torch.bfloat16, torch.float32), numel, weights.device)


def _check_coef(coef: float | Tensor, device: torch.device) -> float | Tensor | None:
    """Return what the kernels take: a number, a tensor on CUDA, or None where the step is skipped."""
    if not isinstance(coef, Tensor):
        return coef
    check_tensor("coef", coef, (torch.float32,), 1, device)
    if coef.is_cuda:
        return coef
    return None if math.isnan(coef.item()) else coef.item()


def _kinds(lo: Tensor | None, grads: Tensor) -> tuple[int, int]:
    """Return the C++ operator's codes of the types of weights and grads."""
    return 0 if lo is None else 1 if lo.dtype == torch.int16 else 2, int(grads.dtype == torch.bfloat16)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def adamw8bit_update_into(
    weights: Tensor,
    lo: Tensor | None,
    m_q: Tensor,
    m_scale: Tensor,
    v_q: Tensor,
    v_scale: Tensor,
    grads: Tensor,
    *,
    rows: int,
    cols: int,
    first_group: int,
    coef: float | Tensor,
    hyper: AdamWHyper,
) -> None:
    """Do one AdamW step with 8-bit moments in place, in one pass (formulas: head of this file, codec.py, master.py).

    All tensors are flat and without gaps on one device; views into larger slabs at any element are fine. Tensors that
    follow each other and whose cols are multiples of 128 may go in one call (rows=1, cols=their elements together).

    Args:
        weights: bf16 (with lo) or fp32 (lo None), rows * cols elements. lo: int16 or int8, rows * cols, or None.
        m_q: int8, rows * cols. v_q: uint8, rows * cols. m_scale, v_scale: fp32, rows * ceil(cols / 128).
        grads: bf16 or fp32, rows * cols; read only. rows, cols: groups of 128 don't cross rows.
        first_group: index k of the first group, for the dither: the same for every placement of the tensor.
        coef: factor of the grads (clipping), a number or a tensor (head of this file). hyper: with step t >= 1.

    Memory: none beside the arguments (fallback without compiler: about 60 MiB).

    Raises:
        ValueError: a dtype, size, device or stride differs from the above, or a hyperparameter is out of range.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.

    Example:
        >>> w, g, codes = torch.ones(1, 4), torch.ones(4), codec.quantize_moments(*torch.zeros(2, 1, 4), step=1)
        >>> hyper = AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.0, 1)
        >>> adamw8bit_update_into(w, None, *codes, g, rows=1, cols=4, first_group=0, coef=1.0, hyper=hyper)
    """
    numel, num_groups = rows * cols, count_groups(rows, cols)
    _check_weights(weights, lo, grads, numel)
    check_tensor("m_q", m_q, (torch.int8,), numel, weights.device)
    check_tensor("v_q", v_q, (torch.uint8,), numel, weights.device)
    check_tensor("m_scale", m_scale, (torch.float32,), num_groups, weights.device)
    check_tensor("v_scale", v_scale, (torch.float32,), num_groups, weights.device)
    factor = _check_coef(coef, weights.device)
    if factor is None:
        return
    if weights.is_cuda:
        from lazytrain.kernels.adamw_triton import adamw8bit_update_triton_into

        adamw8bit_update_triton_into(
            weights, lo, m_q, m_scale, v_q, v_scale, grads,
            rows=rows, cols=cols, first_group=first_group, coef=factor, hyper=hyper,
        )  # fmt: skip
        return
    assert isinstance(factor, float | int)
    library = native.load()
    if library is None:
        for at, piece_rows, piece_cols, group in _pieces(rows, cols):
            part = slice(at, at + piece_rows * piece_cols)
            scales = slice(group, group + count_groups(piece_rows, piece_cols))
            reference_adamw8bit_update_into(
                weights.view(-1)[part], None if lo is None else lo.view(-1)[part],
                m_q.view(-1)[part], m_scale[scales], v_q.view(-1)[part], v_scale[scales], grads.view(-1)[part],
                rows=piece_rows, cols=piece_cols, first_group=first_group + group, coef=factor, hyper=hyper,
            )  # fmt: skip
        return
    scalars = native.Scalars(*derive_scalars(hyper, factor, first_group))
    pointers = [_pointer(x) for x in (weights, lo, m_q, m_scale, v_q, v_scale, grads)]

    call = native.make_call(native.ADAMW8BIT, pointers, cols, kinds=_kinds(lo, grads), scalars=scalars)
    native.run_ranges(library, call, num_groups)


def adamw_update_into(
    weights: Tensor, lo: Tensor | None, m: Tensor, v: Tensor, grads: Tensor, *, coef: float | Tensor, hyper: AdamWHyper
) -> None:
    """Do one AdamW step with fp32 moments in place, in one pass (formulas: head of this file).

    For small tensors, for embeddings that a pattern keeps in fp32, and to match torch.optim.AdamW.

    Args:
        weights: bf16 (with lo) or fp32 (lo None). lo: int16 or int8, or None. m, v: fp32. grads: bf16 or fp32.
            All have the same number of elements, no gaps and one device. coef, hyper: as in `adamw8bit_update_into`.

    Raises:
        ValueError: a dtype, size, device or stride differs from the above, or a hyperparameter is out of range.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.

    Example: head of this file.
    """
    numel = weights.numel()
    _check_weights(weights, lo, grads, numel)
    check_tensor("m", m, (torch.float32,), numel, weights.device)
    check_tensor("v", v, (torch.float32,), numel, weights.device)
    factor = _check_coef(coef, weights.device)
    if factor is None:
        return
    if weights.is_cuda:
        from lazytrain.kernels.adamw_triton import adamw_update_triton_into

        adamw_update_triton_into(weights, lo, m, v, grads, coef=factor, hyper=hyper)
        return
    assert isinstance(factor, float | int)
    library = native.load()
    if library is None:
        for at in range(0, numel, CHUNK):
            part = slice(at, at + CHUNK)
            _reference_adamw(
                weights.view(-1)[part], None if lo is None else lo.view(-1)[part],
                m.view(-1)[part], v.view(-1)[part], grads.view(-1)[part], derive_scalars(hyper, factor, at // GROUP),
            )  # fmt: skip
        return
    scalars = native.Scalars(*derive_scalars(hyper, factor))
    pointers = [_pointer(x) for x in (weights, lo, m, v, grads)]

    call = native.make_call(native.ADAMW, pointers, numel, kinds=_kinds(lo, grads), scalars=scalars)
    native.run_ranges(library, call, count_groups(1, numel))
