"""Fused attention of one block: causal, or causal within the segments of packed samples.

Shape letters as in decoder.py. Of packed samples: n flat positions of all rows, s segments of all rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lazytrain.base import Context

# The widest head that CUDA's flash kernels take, and what a head must be a multiple of where torch does not pad it.
MAX_FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8
MIN_FLASH_CAPABILITY = (8, 0)


def causal_attention(q_bhtk: Tensor, k_bgtk: Tensor, v_bgtk: Tensor, ctx: Context) -> Tensor:
    """Attend to earlier positions: of the own segment with `ctx["bounds_s"]`, or to what `ctx["mask_b1tt"]` shows.

    On CUDA the fused kernels take grouped heads only without a mask and in 16 bits; elsewhere torch would fall back
    to all t x t scores in memory, so the key/value heads are repeated. Their backward adds parts of dq in no fixed
    order: the same bits from run to run need `torch.use_deterministic_algorithms(True)` there.
    """
    if "bounds_s" in ctx:
        return segment_attention(q_bhtk, k_bgtk, v_bgtk, ctx["bounds_s"])
    mask_b1tt = ctx.get("mask_b1tt")
    num_shared = q_bhtk.shape[1] // k_bgtk.shape[1]
    if q_bhtk.is_cuda and (
        mask_b1tt is not None or q_bhtk.dtype == torch.float32 or q_bhtk.shape[-1] > MAX_FLASH_HEAD_DIM
    ):
        k_bgtk, v_bgtk = k_bgtk.repeat_interleave(num_shared, 1), v_bgtk.repeat_interleave(num_shared, 1)
        num_shared = 1
    return F.scaled_dot_product_attention(
        q_bhtk, k_bgtk, v_bgtk, attn_mask=mask_b1tt, is_causal=mask_b1tt is None, enable_gqa=num_shared > 1
    )


def segment_attention(q_bhtk: Tensor, k_bgtk: Tensor, v_bgtk: Tensor, bounds_s: Tensor) -> Tensor:
    """Attend to the earlier positions of the own segment, by flash attention of many lengths: no mask, no t x t scores.

    Args:
        bounds_s: int32 (segments + 1), where each segment of the flattened rows begins, and their end; a segment may
            be empty, and none is longer than a row.
    Memory: of backward, where it repeats bit for bit, 4 h k (b t + 128 segments) bytes.
    """
    num_positions = q_bhtk.shape[2]
    q_nhk, k_ngk, v_ngk = (x.transpose(1, 2).flatten(0, 1) for x in (q_bhtk, k_bgtk, v_bgtk))
    o_nhk = _attend_by_lengths(q_nhk, k_ngk, v_ngk, bounds_s, num_positions)
    return o_nhk.unflatten(0, (-1, num_positions)).transpose(1, 2)


def _attend_by_lengths(q_nhk: Tensor, k_ngk: Tensor, v_ngk: Tensor, bounds_s: Tensor, max_length: int) -> Tensor:
    """Call what `torch.nn.attention.varlen` and nested tensors are made of.

    Not `varlen_attn` itself: its arguments differ between torch 2.10, 2.11 and 2.13, it is an operator in Python, and
    the partitioner, which counts the FLOPs of this one, knows nothing of it.
    """
    outputs = torch.ops.aten._flash_attention_forward(
        q_nhk, k_ngk, v_ngk, bounds_s, bounds_s, max_length, max_length, 0.0, True, False
    )
    o_nhk: Tensor = outputs[0]
    return o_nhk


def takes_lengths(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether attention of many lengths has a kernel: CUDA's from capability 8.0 on, in 16 bits, not ROCm's."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= MIN_FLASH_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= MAX_FLASH_HEAD_DIM
        and head_dim % FLASH_HEAD_MULTIPLE == 0
    )
