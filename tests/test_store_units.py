"""Blobs on NVMe behind their headers are files of a checkpoint, for any shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lazytrain.base import ParamSpec
from lazytrain.layout import UnitLayout, make_layout
from lazytrain.store_units import (
    is_packed,
    packed_bytes,
    packed_weights,
    state_tensors,
    states_header,
    unpack_weights_into,
    weight_tensors,
    weights_header,
)
from lazytrain.tensorfile import PADDING, TensorFile

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = st.lists(
    st.sampled_from([(1,), (63,), (123,), (128,), (7, 3), (64, 64), (63, 123), (40, 128), (2, 40, 65)]),
    min_size=1,
    max_size=6,
)


def layout_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, bits: int = 8, master: int = 32) -> UnitLayout:
    params = {f"p{i}": ParamSpec(full_name=f"model.p{i}.weight", shape=shape) for i, shape in enumerate(shapes)}
    return make_layout(params, dtype, state_bits=bits, master_bits=master)


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, dtype=st.sampled_from(DTYPES), bits=st.sampled_from([8, 32]), master=st.sampled_from([24, 32]))
def test_a_blob_behind_its_header_is_a_file_of_tensors(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtype: torch.dtype, bits: int, master: int
) -> None:
    layout = layout_of(shapes, dtype, bits, master)
    directory = tmp_path_factory.getbasetemp()
    weights = random_bytes(layout.weight_bytes).view(dtype)
    slab = random_bytes(layout.state_bytes)
    for name, header, blob, tensors in (
        ("weights", weights_header(layout), packed_weights(layout, weights), weight_tensors(layout, weights)),
        ("states", states_header(layout), slab, state_tensors(layout, slab)),
    ):
        assert len(header) % 4096 == 0
        (directory / name).write_bytes(header + blob.numpy().tobytes())
        file, expected = TensorFile(directory / name), dict(tensors)
        theirs = load_file(directory / name)
        assert theirs.keys() == file.tensors.keys()
        assert {key for key in file.tensors if not key.startswith(PADDING)} == expected.keys()
        if name == "weights":
            assert file.tensors.keys() == expected.keys()  # a loader of models would stumble over padding
            assert len(blob) == packed_bytes(layout)
        for key, tensor in expected.items():
            for found in (file.read(key), theirs[key]):
                assert found.dtype == tensor.dtype
                assert torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, dtype=st.sampled_from(DTYPES))
def test_weights_come_back_and_padding_is_zero(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = layout_of(shapes, dtype)
    weights = random_bytes(layout.weight_bytes).view(dtype)
    packed = packed_weights(layout, weights).clone()
    back = random_bytes(layout.weight_bytes).view(dtype)

    def read_into(out: torch.Tensor) -> None:
        out.copy_(packed)

    unpack_weights_into(layout, read_into, back)
    expected = torch.zeros_like(back)
    for (_, source), (_, target) in zip(weight_tensors(layout, weights), weight_tensors(layout, expected)):
        target.copy_(source)
    assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8))


def test_weights_without_padding_between_them_are_not_copied() -> None:
    layout = layout_of([(64, 64), (128,), (40, 128), (3, 64)], torch.bfloat16)
    weights = torch.zeros(layout.numel, dtype=torch.bfloat16)
    assert is_packed(layout)
    assert packed_weights(layout, weights).data_ptr() == weights.data_ptr()
    assert packed_bytes(layout) == layout.weight_bytes - 2 * 64
    assert not is_packed(layout_of([(63,), (64, 64), (7, 3)], torch.bfloat16))
