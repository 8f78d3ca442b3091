"""Slabs: every tensor has its place, padding is zero, states of any shape lie apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.base import ParamSpec
from lazytrain.layout import ALIGN_ELEMENTS, make_layout

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 70), st.integers(1, 300)),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 200)),
    ),
    min_size=1,
    max_size=8,
)


def specs(shapes: list[tuple[int, ...]]) -> dict[str, ParamSpec]:
    return {f"p{i}": ParamSpec(full_name=f"unit.p{i}", shape=shape) for i, shape in enumerate(shapes)}


@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([24, 32]), st.sampled_from([8, 32]))
@settings(max_examples=60, deadline=None)
def test_layout_gives_every_tensor_a_place_of_its_own(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, master_bits: int, state_bits: int
) -> None:
    layout = make_layout(specs(shapes), dtype, master_bits=master_bits, state_bits=state_bits)
    params = {
        name: torch.full(spec.shape, i + 1.0, dtype=dtype) for i, (name, spec) in enumerate(specs(shapes).items())
    }
    flat = layout.flatten(params)
    assert flat.numel() == layout.numel
    for name, view in layout.views(flat).items():
        assert torch.equal(view, params[name])
    assert flat.ne(0).sum() == sum(p.numel() for p in params.values())  # padding is zero
    assert all(place.offset % ALIGN_ELEMENTS == 0 for place in layout.places)
    covered = torch.zeros(layout.state_bytes, dtype=torch.uint8)
    for view in layout.state_views(covered).values():
        view.view(torch.uint8).add_(1)
    assert covered.max() <= 1  # no two parts overlap


@given(SHAPES)
@settings(max_examples=60, deadline=None)
def test_segments_cover_exactly_the_quantized_tensors_and_groups(shapes: list[tuple[int, ...]]) -> None:
    layout = make_layout(specs(shapes), torch.bfloat16)
    touched, groups = torch.zeros(layout.numel), torch.zeros(layout.num_groups)
    for segment in layout.segments:
        touched[segment.offset : segment.offset + segment.numel] += 1
        groups[segment.first_group : segment.first_group + segment.num_groups] += 1
    for place in layout.places:
        assert (touched[place.offset : place.offset + place.numel] == float(place.quantized)).all(), place
    assert (groups == 1).all()


def test_neighbours_with_whole_groups_are_updated_in_one_call() -> None:
    layout = make_layout(specs([(64, 256), (128, 128), (100, 130), (64, 256), (128,)]), torch.bfloat16)
    assert [(s.rows, s.cols) for s in layout.segments] == [(64 * 2 + 128, 128), (100, 130), (128, 128)]


@pytest.mark.parametrize(("bits", "expected"), [(32, 6.0625), (24, 5.0625)])
def test_bytes_a_parameter_are_those_of_the_format(bits: int, expected: float) -> None:
    layout = make_layout(specs([(4096, 4096)]), torch.bfloat16, master_bits=bits)
    assert (layout.weight_bytes + layout.state_bytes) / 4096**2 == expected


def test_small_and_named_tensors_keep_fp32_moments() -> None:
    layout = make_layout(specs([(63, 64), (64, 64), (128, 128), (9000,)]), torch.bfloat16, fp32_patterns=[r"p2$"])
    assert {p.name: p.quantized for p in layout.places} == {"p0": False, "p1": True, "p2": False, "p3": False}
