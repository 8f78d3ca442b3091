"""Where each tensor of a unit lies in its slabs.

A unit has one weight slab (working weights, one dtype, so that it streams as one contiguous copy) and one state slab
(bytes). The weight slab holds the tensors with 8-bit states first, then those with fp32 states; every tensor starts at
a multiple of 128 elements and padding is zero, which AdamW keeps at zero.

    weight slab   [ quantized tensors ........ | fp32-state tensors .... ]
    state slab    [ lo_q | m_q | m_scale | v_q | v_scale | lo_f | m_f | v_f ]     each part at a multiple of 256 bytes

`lo` is the master correction: int16 (or int8 for quantized tensors of a 24-bit master) beside bf16 working weights,
absent beside fp32 ones, which are their own master.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lazytrain.base import Params, ParamSpec
from lazytrain.kernels.codec import GROUP

ALIGN_ELEMENTS = 128
ALIGN_BYTES = 256
MIN_QUANTIZED_NUMEL = 4096


class TensorPlace(NamedTuple):
    """One tensor in the weight slab; `offset` and `numel` in elements."""

    name: str
    full_name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    quantized: bool
    first_group: int  # of the unit's scales; meaningless where not quantized


class Segment(NamedTuple):
    """A run of quantized tensors that one kernel call updates; neighbours whose rows hold whole groups are merged."""

    offset: int
    rows: int
    cols: int
    first_group: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return self.rows * groups_in_row(self.cols)


class StatePart(NamedTuple):
    """One component of the state slab."""

    offset_bytes: int
    dtype: torch.dtype
    numel: int


def groups_in_row(cols: int) -> int:
    """Return how many groups of 128 a row has; the last may be ragged."""
    return -(-cols // GROUP)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The places of a unit's tensors in its weight and state slabs (see the head of this file)."""

    dtype: torch.dtype
    places: tuple[TensorPlace, ...]
    segments: tuple[Segment, ...]
    quantized_numel: int
    numel: int
    num_groups: int
    parts: Mapping[str, StatePart]
    state_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weight slab, padding included."""
        return self.numel * self.dtype.itemsize

    def views(self, flat: Tensor) -> Params:
        """Return local name -> view of `flat`, a slab in this layout (any dtype)."""
        return {p.name: flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.places}

    def shapes(self) -> Params:
        """Return local name -> tensor without data, on the meta device."""
        return self.views(torch.empty(self.numel, dtype=self.dtype, device="meta"))

    def flatten(self, tensors: Params) -> Tensor:
        """Return one new slab of `tensors` (local name -> tensor, one dtype), padding zero. Traceable."""
        pieces, position = [], 0
        example = next(iter(tensors.values()))
        for place in self.places:
            if place.offset > position:
                pieces.append(example.new_zeros(place.offset - position))
            pieces.append(tensors[place.name].reshape(-1))
            position = place.offset + place.numel
        if self.numel > position:
            pieces.append(example.new_zeros(self.numel - position))
        return torch.cat(pieces)

    def state_views(self, slab: Tensor) -> dict[str, Tensor]:
        """Return the components of a state slab (uint8, `state_bytes` long) as typed flat views."""
        return {
            name: slab[part.offset_bytes : part.offset_bytes + part.numel * part.dtype.itemsize].view(part.dtype)
            for name, part in self.parts.items()
        }


def make_layout(
    params: Mapping[str, ParamSpec],
    dtype: torch.dtype,
    *,
    state_bits: int = 8,
    master_bits: int = 32,
    fp32_patterns: Sequence[str] = (),
) -> UnitLayout:
    """Lay out a unit's tensors.

    Args:
        params: local name -> specification.
        dtype: of the working weights: torch.bfloat16 or torch.float32.
        state_bits: 8, or 32 for fp32 moments everywhere.
        master_bits: 32 or 24, of quantized tensors beside bf16 weights.
        fp32_patterns: regular expressions; a tensor whose full name one of them finds keeps fp32 moments.

    Tensors of one dimension or under 4096 elements always keep fp32 moments and a 32-bit master.
    """

    def is_quantized(spec: ParamSpec) -> bool:
        small = len(spec.shape) < 2 or spec.numel < MIN_QUANTIZED_NUMEL
        return state_bits == 8 and not small and not any(re.search(p, spec.full_name) for p in fp32_patterns)

    ordered = sorted(params.items(), key=lambda item: not is_quantized(item[1]))
    places, position, group, quantized_numel = [], 0, 0, 0
    for name, spec in ordered:
        quantized = is_quantized(spec)
        places.append(TensorPlace(name, spec.full_name, spec.shape, position, spec.numel, quantized, group))
        position = round_up(position + spec.numel, ALIGN_ELEMENTS)
        if quantized:
            rows, cols = rows_and_cols(spec.shape)
            group += rows * groups_in_row(cols)
            quantized_numel = position
    parts, state_bytes = _lay_out_states(dtype, quantized_numel, position - quantized_numel, group, master_bits)
    return UnitLayout(
        dtype=dtype,
        places=tuple(places),
        segments=_merge_segments(places),
        quantized_numel=quantized_numel,
        numel=position,
        num_groups=group,
        parts=parts,
        state_bytes=state_bytes,
    )


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a tensor's shape as a matrix: its last dimension is a row."""
    cols = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, cols


def _merge_segments(places: Iterable[TensorPlace]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for place in places:
        if not place.quantized:
            continue
        rows, cols = rows_and_cols(place.shape)
        if cols % GROUP == 0:
            rows, cols = rows * cols // GROUP, GROUP
            last = segments[-1] if segments else None
            if last and last.cols == GROUP and last.offset + last.numel == place.offset:
                segments[-1] = last._replace(rows=last.rows + rows)
                continue
        segments.append(Segment(place.offset, rows, cols, place.first_group))
    return tuple(segments)


def _lay_out_states(
    dtype: torch.dtype, quantized_numel: int, rest_numel: int, num_groups: int, master_bits: int
) -> tuple[dict[str, StatePart], int]:
    wanted: list[tuple[str, torch.dtype, int]] = [
        ("m_q", torch.int8, quantized_numel),
        ("m_scale", torch.float32, num_groups),
        ("v_q", torch.uint8, quantized_numel),
        ("v_scale", torch.float32, num_groups),
        ("m_f", torch.float32, rest_numel),
        ("v_f", torch.float32, rest_numel),
    ]
    if dtype == torch.bfloat16:
        lo_dtype = torch.int16 if master_bits == 32 else torch.int8
        wanted += [("lo_q", lo_dtype, quantized_numel), ("lo_f", torch.int16, rest_numel)]
    parts, position = {}, 0
    for name, part_dtype, numel in sorted(wanted, key=lambda w: -w[1].itemsize):
        parts[name] = StatePart(position, part_dtype, numel)
        position = round_up(position + numel * part_dtype.itemsize, ALIGN_BYTES)
    return parts, position
