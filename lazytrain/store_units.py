"""How a unit lies in a checkpoint: its weights as a model's file, all else beside it in a file that no model needs.

    model-00004-of-00026.safetensors    NAME                the working weight, in the model's shape
    unit-00004.states                   NAME.lo             the master correction (beside bf16 weights)
                                        NAME.m, .v          fp32 moments, or
                                        NAME.m_q, .m_scale, .v_q, .v_scale    8-bit moments, `lazytrain.kernels.codec`

The working weight is the upper half of the master, which is stored here and nowhere else. The names don't depend on
where the plan keeps anything: a run resumes under any plan, with the same bits.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from lazytrain.layout import TensorPlace, UnitLayout, groups_in_row, rows_and_cols
from lazytrain.tensorfile import STATES_SUFFIX


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
