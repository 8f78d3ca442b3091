"""How a unit lies in a checkpoint: its weights as a model's file, all else beside it in a file that no model needs.

    model-00004-of-00026.safetensors    NAME                the working weight, in the model's shape
    unit-00004.states                   NAME.lo             the master correction (beside bf16 weights)
                                        NAME.m, .v          fp32 moments, or
                                        NAME.m_q, .m_scale, .v_q, .v_scale    8-bit moments, `lazytrain.kernels.codec`

The working weight is the upper half of the master, which is stored here and nowhere else. The names don't depend on
where the plan keeps anything: a run resumes under any plan, with the same bits.

What the plan keeps on NVMe is a blob that becomes such a file by the header before it, so that a checkpoint may link
it: the weights end to end (a loader knows no padding), the state slab as it is, its gaps under names that nobody reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lazytrain.layout import TensorPlace, UnitLayout, groups_in_row, rows_and_cols
from lazytrain.store_io import BLOCK_BYTES
from lazytrain.tensorfile import PADDING, STATES_SUFFIX
from lazytrain.tensorwriter import METADATA, TensorSpec, build_header


class UnitFiles(NamedTuple):
    """The names of a unit's two files."""

    weights: str
    states: str


def name_files(num_units: int) -> list[UnitFiles]:
    """Return the files of each unit that has weights, in forward order."""
    return [
        UnitFiles(f"model-{i:05d}-of-{num_units:05d}.safetensors", f"unit-{i:05d}{STATES_SUFFIX}")
        for i in range(1, num_units + 1)
    ]


def weight_tensors(layout: UnitLayout, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (full name, view of a weight slab in this layout) for all tensors of a unit."""
    for place in layout.places:
        yield place.full_name, weights[place.offset : place.offset + place.numel].view(place.shape)


def state_tensors(layout: UnitLayout, slab: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, view of a state slab in this layout) for all states of a unit."""
    parts = layout.state_views(slab)
    for place in layout.places:
        for suffix, view in _state_views(layout, place, parts):
            yield f"{place.full_name}.{suffix}", view


def weights_header(layout: UnitLayout, multiple: int = BLOCK_BYTES) -> bytes:
    """Return what stands before `packed_weights` in a file of weights: whole blocks of 4096 bytes, or of `multiple`."""
    specs = [TensorSpec(place.full_name, layout.dtype, place.shape) for place in layout.places]
    return build_header(specs, METADATA, multiple=multiple)[0]


def states_header(layout: UnitLayout, multiple: int = BLOCK_BYTES) -> bytes:
    """Return what stands before a state slab in a file of states: whole blocks of 4096 bytes, or of `multiple`."""
    slab = torch.empty(layout.state_bytes, dtype=torch.uint8, device="meta")
    views = state_tensors(layout, slab)
    tensors = [(int(view.storage_offset()) * view.element_size(), name, view) for name, view in views]
    specs: list[TensorSpec] = []
    position = 0
    for start, name, view in [*sorted(tensors, key=itemgetter(0)), (layout.state_bytes, "", slab[:0])]:
        if start > position:
            specs.append(TensorSpec(f"{PADDING}{position}", torch.uint8, (start - position,)))
        if name:
            specs.append(TensorSpec(name, view.dtype, tuple(map(int, view.shape))))
        position = start + view.numel() * view.element_size()
    return build_header(specs, {}, multiple=multiple)[0]


def head_room(layouts: Sequence[UnitLayout]) -> int:
    """Return the size of the longest of the headers of these units.

    Where all headers are as long, units of equal shapes have files of equal sizes, however long their names.
    """
    return max(len(header(layout)) for layout in layouts for header in (weights_header, states_header))


def packed_bytes(layout: UnitLayout) -> int:
    """Return the size of `packed_weights`: of all tensors, without padding."""
    return sum(place.numel for place in layout.places) * layout.dtype.itemsize


def is_packed(layout: UnitLayout) -> bool:
    """Return whether a weight slab has padding at its end at most, which is so where sizes are multiples of 128."""
    return all(a.offset + a.numel == b.offset for a, b in pairwise(layout.places))


def packed_weights(layout: UnitLayout, weights: Tensor) -> Tensor:
    """Return a weight slab's tensors end to end, uint8: a view of the slab, or a copy where padding is between them."""
    if is_packed(layout):
        return weights.view(torch.uint8)[: packed_bytes(layout)]
    return torch.cat([view.reshape(-1) for _, view in weight_tensors(layout, weights)]).view(torch.uint8)


def unpack_weights_into(layout: UnitLayout, read_into: Callable[[Tensor], None], weights: Tensor) -> None:
    """Fill a weight slab from `packed_weights`, which `read_into` writes into a uint8 tensor; padding becomes zero."""
    if is_packed(layout):
        read_into(weights.view(torch.uint8)[: packed_bytes(layout)])
        weights.view(torch.uint8)[packed_bytes(layout) :].zero_()
        return
    packed = torch.empty(packed_bytes(layout), dtype=torch.uint8)
    read_into(packed)
    weights.zero_()
    position, flat = 0, packed.view(layout.dtype)
    for _, target in weight_tensors(layout, weights):
        target.view(-1).copy_(flat[position : position + target.numel()])
        position += target.numel()


def _state_views(layout: UnitLayout, place: TensorPlace, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if place.quantized:
        rows, cols = rows_and_cols(place.shape)
        at = slice(place.offset, place.offset + place.numel)
        groups = slice(place.first_group, place.first_group + rows * groups_in_row(cols))
        for name in ("m", "v"):
            yield f"{name}_q", parts[f"{name}_q"][at].view(place.shape)
            yield f"{name}_scale", parts[f"{name}_scale"][groups].view(rows, -1)
        if "lo_q" in parts:
            yield "lo", parts["lo_q"][at].view(place.shape)
        return
    at = slice(place.offset - layout.quantized_numel, place.offset - layout.quantized_numel + place.numel)
    for name in ("m", "v"):
        yield name, parts[f"{name}_f"][at].view(place.shape)
    if "lo_f" in parts:
        yield "lo", parts["lo_f"][at].view(place.shape)
