import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lazytrain import durable
from lazytrain.errors import ModelFileError
from lazytrain.tensorfile import DTYPES, TensorFile, describe_foreign
from lazytrain.tensorwriter import TensorFileWriter, TensorSpec, build_header, crc32_of, tensor_bytes

ODD_SHAPES = [(), (0,), (1,), (63,), (123, 0), (7, 9), (2, 3, 5)]


def write(path, tensors, metadata=None):
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, tensor in reversed(list(tensors.items())):
            writer.write(name, tensor)
        return writer.finish()


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bool,
    ]
    return {
        f"{dtype}{shape}": (torch.randn(shape, generator=generator) * 9).to(dtype)
        for dtype in dtypes
        for shape in ODD_SHAPES
    }


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_writer_and_library_agree_both_ways(tmp_path):
    tensors = make_tensors()
    write(tmp_path / "ours", tensors, {"format": "pt"})
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    loaded, file = load_file(tmp_path / "ours"), TensorFile(tmp_path / "theirs")
    assert loaded.keys() == file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for other in (loaded[name], file.read(name), TensorFile(tmp_path / "ours").read(name)):
            assert other.dtype == tensor.dtype
            assert other.shape == tensor.shape
            assert torch.equal(other, tensor)
    with safe_open(tmp_path / "ours", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert file.metadata == {"format": "pt"}


def test_writer_handles_views_and_shared_storage(tmp_path):
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    tensors = {
        "whole": base,
        "same": base,
        "turned": base.t(),
        "strided": base[::2, 1::3],
        "wide": base[:1].expand(4, 10),
    }
    write(tmp_path / "f", tensors)
    loaded = load_file(tmp_path / "f")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_writer_survives_short_writes(tmp_path, monkeypatch):
    # One write call moves at most 2,147,479,552 bytes; here at most 7 (case C8).
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    tensors = {"a": torch.randn(31), "b": torch.randn(3, 3)}
    write(tmp_path / "f", tensors)
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "f")["a"], tensors["a"])


def test_write_calls_stay_below_the_limit_of_one_call(tmp_path, monkeypatch):
    sizes = []
    real = os.pwrite
    monkeypatch.setattr(durable, "WRITE_PIECE_BYTES", 1000)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: sizes.append(len(data)) or real(fd, data, offset))
    write(tmp_path / "f", {"a": torch.randn(999)})
    assert max(sizes) <= 1000
    assert sum(sizes) == (tmp_path / "f").stat().st_size


def test_reader_reaches_tensors_beyond_4_gib(tmp_path):
    # A sparse file: the sizes are real, the room on the disk isn't.
    specs = [TensorSpec("big", torch.bfloat16, (151936, 16384)), TensorSpec("last", torch.bfloat16, (3,))]
    header, starts = build_header(specs, {})
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        out.write(header)
        out.seek(starts["last"])
        out.write(tensor_bytes(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)))
    file = TensorFile(path)
    assert file.tensors["last"].start_bytes > 2**32
    assert file.read("last").tolist() == [1.0, 2.0, 3.0]
    assert file.read("big")[-1, -1] == 0


def test_reader_copies_what_is_not_aligned(tmp_path):
    header = {"a": entry("U8", (3,), (0, 3)), "b": entry("F32", (1,), (3, 7))}
    path = raw_file(tmp_path / "f", header, b"\x01\x02\x03" + b"\x00\x00\x80\x3f")
    assert TensorFile(path).read("b").tolist() == [1.0]


def test_writer_aligns_every_tensor_to_its_element(tmp_path):
    write(
        tmp_path / "f",
        {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.int16), "c": torch.ones(3)},
    )
    infos = TensorFile(tmp_path / "f").tensors.values()
    assert all(info.start_bytes % info.dtype.itemsize == 0 for info in infos)


def test_writing_to_a_view_never_reaches_the_file(tmp_path):
    save_file({"a": torch.ones(5)}, tmp_path / "f")
    before = (tmp_path / "f").read_bytes()
    (tmp_path / "f").chmod(0o444)
    TensorFile(tmp_path / "f").read("a").zero_()
    assert (tmp_path / "f").read_bytes() == before


def test_writer_refuses_what_was_not_planned(tmp_path):
    with TensorFileWriter(
        tmp_path / "f", [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.int8, ())]
    ) as writer:
        with pytest.raises(ModelFileError, match=r"'a' is torch.float32 \[3\]; planned: torch.float32 \[2\]"):
            writer.write("a", torch.zeros(3))
        with pytest.raises(ModelFileError, match="'c'"):
            writer.write("c", torch.zeros(3))
        writer.write("a", torch.zeros(2))
        with pytest.raises(ModelFileError, match="'a'"):
            writer.write("a", torch.zeros(2))
        with pytest.raises(ModelFileError, match=r"never came: \['b'\]"):
            writer.finish()
    with pytest.raises(ModelFileError, match="twice"):
        TensorFileWriter(tmp_path / "g", [TensorSpec("a", torch.float32, (2,))] * 2)
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "f", [])


def test_checksums_are_those_of_the_bytes(tmp_path):
    tensors = {"a": torch.randn(1000), "b": torch.zeros(0)}
    record = write(tmp_path / "f", tensors)
    file = TensorFile(tmp_path / "f")
    assert record.size_bytes == (tmp_path / "f").stat().st_size
    assert record.tensor_crc32 == {name: crc32_of(tensor_bytes(file.raw(name))) for name in tensors}
    assert record.header_crc32 == crc32_of(tensor_bytes(file.raw_header()))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "empty \\(0 bytes\\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n", "Git LFS pointer \\(64 bytes\\)"),
        (b"<!DOCTYPE html><html>no</html>", "HTML or XML page \\(30 bytes\\)"),
        (b"  \n<html>", "HTML"),
        (b"PK\x03\x04" + bytes(100), "PyTorch pickle \\(104 bytes\\)"),
        (b"\x80\x04\x95" + bytes(20), "Python pickle \\(23 bytes\\)"),
        (b"GGUF" + bytes(20), "GGUF"),
        (b'{"error": "not found"}', "JSON text"),
        (bytes(5000), "begins with zeros \\(5000 bytes\\)"),
        (b"\x80\x02\x00\x00\x00\x00\x00\x00{" + bytes(50), "it is cut \\(59 bytes; its header alone needs 648\\)"),
        (b"\x80\x02", "cut|pickle"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00" + b"x" * 30, "first bytes are 10 00"),
    ],
)
def test_foreign_file_is_recognised_and_named_with_its_size(tmp_path, content, text):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=text) as caught:
        TensorFile(path)
    assert str(path) in str(caught.value)


def test_cut_file_is_named_at_every_length(tmp_path):
    save_file({"a": torch.ones(5), "b": torch.ones(3)}, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"cut|empty"):
            TensorFile(tmp_path / "cut")
    (tmp_path / "long").write_bytes(content + b"x")
    with pytest.raises(ModelFileError, match="too long"):
        TensorFile(tmp_path / "long")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": entry("Q4")}, "element type 'Q4'"),
        ({"a": entry(shape=(2,))}, r"shape \[2\] of F32 takes 8 bytes, data_offsets hold 4"),
        ({"a": entry(shape=(-1,))}, "0 or more"),
        ({"a": entry(shape=(True,))}, "0 or more"),
        ({"a": entry(shape=(2**40, 2**40), offsets=(0, 4))}, "impossible shape"),
        ({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}, "impossible shape"),
        ({"a": entry(shape=(2**80,))}, "0 or more"),
        ({"a": entry(shape=[1] * 65)}, "at most 64"),
        ({"a": entry(offsets=(4, 0))}, "start <= end"),
        ({"a": entry(offsets=(0, 4, 4))}, "start <= end"),
        ({"a": entry(), "b": entry()}, "overlaps"),
        ({"a": entry(), "b": entry("U8", (0,), (2, 2))}, "overlaps"),
        ({"a": entry(offsets=(4, 8))}, "cut"),
        ({"a": entry("U8", (1,), (2, 3))}, "gap"),
        ({"a": []}, "must have dtype"),
        ({"a": {"dtype": "F32"}}, "must have dtype"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        (b'{"a":1,"a":2}', "lists 'a' twice"),
        (b'{"a"' + b":[" * 5 + b"}", "damaged header"),
        (b'{"a":' + b"[" * 100_000 + b"}", "damaged header"),
        (b'{"a":' + b"9" * 5000 + b"}", "damaged header"),
        (b'{"\xff":1}', "damaged header"),
        ({}, "too long"),
    ],
)
def test_wrong_header_is_refused_by_name(tmp_path, header, text):
    with pytest.raises(ModelFileError, match=text):
        TensorFile(raw_file(tmp_path / "f", header, b"\0\0\0\0"))


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_declared_length_is_never_allocated(tmp_path, length):
    with pytest.raises(ModelFileError):
        TensorFile(raw_file(tmp_path / "f", {"a": entry()}, b"\0\0\0\0", length))


def test_special_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelFileError, match=r"not a regular file|can't be opened"):
            TensorFile(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_gives_an_error_or_a_readable_file(tmp_path_factory, data):
    base = raw_file(
        tmp_path_factory.getbasetemp() / "fuzz",
        {"ab": entry("BF16", (2, 3), (0, 12)), "c": entry("F32", (), (12, 16))},
        bytes(range(16)),
    )
    content = bytearray(base.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        content = content or bytearray(b"\0")
    path = base.with_name("damaged")
    path.write_bytes(content)
    try:
        file = TensorFile(path)
    except ModelFileError:
        return
    assert all(file.read(name).shape == info.shape for name, info in file.tensors.items())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(sorted(DTYPES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}) | json_values


@settings(max_examples=150, deadline=None)
@given(header=st.dictionaries(st.text(max_size=5), entries, max_size=3), data=st.binary(max_size=20))
def test_any_json_header_gives_an_error_or_a_readable_file(tmp_path_factory, header, data):
    path = raw_file(tmp_path_factory.getbasetemp() / "json", header, data)
    try:
        file = TensorFile(path)
    except ModelFileError:
        return
    assert all(file.read(name).shape == info.shape for name, info in file.tensors.items())


def test_description_never_fails_on_any_start():
    for first in range(256):
        assert describe_foreign(bytes([first]) * 20, 20).endswith(".")
