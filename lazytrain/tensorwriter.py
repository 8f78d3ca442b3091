"""Write one safetensors file tensor by tensor: header first, room taken in advance, a checksum for each tensor.

The library's own save needs all tensors of a file in memory; here one tensor at a time is enough, in any order.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lazytrain.durable import WRITE_PIECE_BYTES, create_file, preallocate, stream_out, write_all
from lazytrain.errors import ModelFileError
from lazytrain.tensorfile import DTYPES

# Of a model's file. transformers wants "format"; "writer" is how a later export knows a directory of ours.
METADATA = {"format": "pt", "writer": "lazytrain"}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor that will be written: name, element type, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileRecord(NamedTuple):
    """What was written: size of the file, CRC-32 of all before the data section, CRC-32 of each tensor.

    A file that is no safetensors file has no data section: `header_crc32` is that of all its bytes. A file that was
    linked, not written, has the checksums that were taken when its data was: `store_io.piece_checksum` of every 8 MiB
    of the data section, in place of those of the tensors.
    """

    size_bytes: int
    header_crc32: int
    tensor_crc32: dict[str, int]
    piece_checksums: tuple[int, ...] = ()

    @classmethod
    def of_bytes(cls, content: bytes) -> "FileRecord":
        """Return the record of a file without tensors."""
        return cls(len(content), zlib.crc32(content), {})


def build_header(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str], *, multiple: int = 8
) -> tuple[bytes, dict[str, int]]:
    """Return all bytes before the data section, and where each tensor starts in the file.

    Args:
        specs: in the order of their data.
        multiple: the data section starts at a multiple of this many bytes.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, position = {}, 0
    for spec in specs:
        if spec.name in starts or spec.name == "__metadata__":
            raise ModelFileError(f"The tensor name {spec.name!r} can't be used twice in one file.")
        if spec.dtype not in _NAMES:
            raise ModelFileError(f"Tensor {spec.name!r} has the type {spec.dtype}, which safetensors can't hold.")
        starts[spec.name] = position
        end = position + spec.num_bytes
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    data_start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data_start + start for name, start in starts.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements in order as bytes: a view for a contiguous CPU tensor, else a copy of this one."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def crc32_of(data: memoryview) -> int:
    """Return the CRC-32 of bytes; it finds every flipped bit, and runs at several GB/s without the interpreter lock."""
    checksum = 0
    for start in range(0, len(data), WRITE_PIECE_BYTES):
        checksum = zlib.crc32(data[start : start + WRITE_PIECE_BYTES], checksum)
    return checksum


class TensorFileWriter:
    """A safetensors file in the making. Opening it takes all its room from the disk.

    Raises:
        OSError: the disk is full, or the file exists.
        ModelFileError: a tensor isn't the announced one, comes twice, or is missing at the end.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        # Wider elements come first, so that every tensor is aligned to its element.
        specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        header, self._starts = build_header(specs, metadata or {})
        self._missing = {spec.name: spec for spec in specs}
        self._size_bytes = len(header) + sum(spec.num_bytes for spec in self._missing.values())
        self._header_crc32 = zlib.crc32(header)
        self._crc32: dict[str, int] = {}
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="crc32")
        self._fd = create_file(path)
        try:
            preallocate(self._fd, self._size_bytes)
            write_all(self._fd, memoryview(header))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the announced tensors that have not come yet."""
        return tuple(self._missing)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one announced tensor; its checksum is taken meanwhile on another thread."""
        spec = self._missing.get(name)
        if spec is None or spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
            expected = f"{spec.dtype} {list(spec.shape)}" if spec else "not expected (any more)"
            raise ModelFileError(
                f"{self.path.name}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; planned: {expected}."
            )
        data = tensor_bytes(tensor)
        checksum = self._checker.submit(crc32_of, data)
        stream_out(self._fd, data, self._starts[name])
        self._crc32[name] = checksum.result()
        del self._missing[name]

    def finish(self) -> FileRecord:
        """Sync and close the file."""
        if self._missing:
            raise ModelFileError(f"{self.path.name}: these tensors were planned and never came: {list(self._missing)}.")
        os.fsync(self._fd)
        self.close()
        return FileRecord(self._size_bytes, self._header_crc32, self._crc32)

    def close(self) -> None:
        """Close the file as it is."""
        self._checker.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
