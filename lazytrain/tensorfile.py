"""Read one safetensors file without trusting it: checked header, read-only file, one tensor at a time.

Layout: 8 bytes (little-endian length n), n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data section.
Nothing is ever allocated by a size that the file merely declares.
"""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.durable import map_private
from lazytrain.errors import ModelFileError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}

# A checkpoint's states are safetensors too, under a name that no loader of models looks for.
STATES_SUFFIX = ".states"
# Begins the name of what only fills a gap between two tensors of such a file.
PADDING = "lazytrain.padding."

# The format's own limit; a real header has about 120 bytes a tensor.
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 64
_MAX_NUMEL = 2**62


class TensorInfo(NamedTuple):
    """Where one tensor lies: file name, element type, shape, first byte in the file, length."""

    name: str
    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    num_bytes: int


def holds_tensors(name: str) -> bool:
    """Tell by its name whether a file is in the safetensors format."""
    return name.endswith((".safetensors", STATES_SUFFIX))


class TensorFile:
    """One safetensors file, mapped. Tensors are views of the mapping.

    The mapping is private: the file is opened read-only, and a write to such a view (a mistake) copies the page, it
    never reaches the file. Whoever replaces the file must write a new one and rename: cutting a mapped file kills
    every process that reads it.

    Raises:
        ModelFileError: the file is cut, empty, foreign or its header contradicts itself; the text says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = _open_regular(path)
        try:
            size_bytes = os.fstat(fd).st_size
            self.header_bytes, header = _read_header(fd, size_bytes, path)
            self.metadata = _check_metadata(header.pop("__metadata__", {}), path)
            self.tensors = _check_entries(header, self.header_bytes, size_bytes, path)
            mapping = map_private(fd, size_bytes)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path} can't be mapped: {error}.") from error
        finally:
            os.close(fd)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def raw(self, name: str) -> Tensor:
        """Return the bytes of a tensor, uint8 (num_bytes,), a view of the mapping."""
        info = self._info(name)
        return self._bytes[info.start_bytes : info.start_bytes + info.num_bytes]

    def raw_header(self) -> Tensor:
        """Return the bytes before the data section, uint8, a view of the mapping."""
        return self._bytes[: self.header_bytes]

    def read(self, name: str) -> Tensor:
        """Return a tensor as stored: a view of the mapping, or a copy where the file doesn't align it."""
        info = self._info(name)
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        raw = self.raw(name)
        if info.start_bytes % info.dtype.itemsize:
            raw = raw.clone()
        return raw.view(info.dtype).reshape(info.shape)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelFileError(f"{self.path} has no tensor {name!r}.")
        return self.tensors[name]


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"{path} can't be opened: {os.strerror(error.errno or 0)}.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelFileError(f"{path} is not a regular file.")
    return fd


def _read_header(fd: int, size_bytes: int, path: Path) -> tuple[int, dict[str, Any]]:
    start = os.pread(fd, 512, 0)
    length = int.from_bytes(start[:8], "little")
    if size_bytes < 10 or length < 2 or length > min(MAX_HEADER_BYTES, size_bytes - 8) or start[8:9] != b"{":
        raise ModelFileError(f"{path} is no safetensors file: {describe_foreign(start, size_bytes)}")
    try:
        header = json.loads(os.pread(fd, length, 8).decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} ({size_bytes} bytes) has a damaged header: {error}. Download it again."
        ) from error
    assert isinstance(header, dict)
    return 8 + length, header


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"it lists {name!r} twice")
        result[name] = value
    return result


def describe_foreign(start: bytes, size_bytes: int) -> str:
    """Say what a file that should be safetensors is instead, from its first bytes and its size in bytes."""
    text = start.lstrip().lower()
    if size_bytes == 0:
        return "it is empty (0 bytes). Download it again."
    if start.startswith(b"version https://git-lfs"):
        return f"it is a Git LFS pointer ({size_bytes} bytes), not the file itself. Fetch it with `git lfs pull`."
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return f"it is an HTML or XML page ({size_bytes} bytes), likely a server's error page. Download it again."
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and size_bytes - 8 < length <= MAX_HEADER_BYTES:
        return f"it is cut ({size_bytes} bytes; its header alone needs {8 + length}). Download it again."
    for magic, kind in _FOREIGN:
        if start.startswith(magic):
            return f"it is {kind} ({size_bytes} bytes). Convert it to safetensors with the library that wrote it."
    if size_bytes < 10:
        return f"it is cut ({size_bytes} bytes). Download it again."
    if not any(start):
        return f"it begins with zeros ({size_bytes} bytes), an unfinished download. Download it again."
    return f"its first bytes are {start[:8].hex(' ')} ({size_bytes} bytes). Download it again."


_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, most likely a PyTorch pickle"),
    *((b"\x80" + bytes([protocol]), "a Python pickle") for protocol in range(2, 6)),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", "a JSON text"),
)


def _check_metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(f"{path}: the header's __metadata__ must map texts to texts.")
    return metadata


def _check_entries(header: dict[str, Any], data_start: int, size_bytes: int, path: Path) -> dict[str, TensorInfo]:
    """Check that the entries tile the data section exactly: no gap, no overlap, no byte too few or too many."""
    infos = [_check_entry(name, entry, data_start, size_bytes, path) for name, entry in header.items()]
    position = data_start
    for info in sorted(infos, key=lambda info: (info.start_bytes, info.num_bytes)):
        if info.start_bytes != position:
            relation = "overlaps the one before it" if info.start_bytes < position else "leaves a gap before it"
            raise ModelFileError(
                f"{path}: tensor {info.name!r} {relation} (byte {info.start_bytes}). Download it again."
            )
        position += info.num_bytes
    if position != size_bytes:
        state = "cut" if position > size_bytes else "too long"
        raise ModelFileError(
            f"{path} is {state}: {size_bytes} bytes, its header describes {position}. Download it again."
        )
    return {info.name: info for info in infos}


def _check_entry(name: str, entry: Any, data_start: int, size_bytes: int, path: Path) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ModelFileError(f"{where} must have dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModelFileError(
            f"{where} has the element type {dtype!r}, which is not supported ({', '.join(DTYPES)}). "
            "Use the model's unquantized files."
        )
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelFileError(f"{where} must have a shape of at most {MAX_RANK} sizes, each 0 or more.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ModelFileError(f"{where} must have data_offsets [start, end] with 0 <= start <= end.")
    if math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:
        raise ModelFileError(f"{where} has an impossible shape {shape}.")
    start, end = data_start + offsets[0], data_start + offsets[1]
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != needed:
        raise ModelFileError(
            f"{where}: shape {shape} of {dtype} takes {needed} bytes, data_offsets hold {end - start}."
        )
    if end > size_bytes:
        raise ModelFileError(
            f"{path} is cut: {size_bytes} bytes, but tensor {name!r} ends at byte {end}. Download it again."
        )
    return TensorInfo(name, path.name, DTYPES[dtype], tuple(shape), start, needed)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
