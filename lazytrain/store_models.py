"""What LazyTrain recorded of a model directory that it wrote, and the comparison when it is read again.

A model of others has no such record; its headers and its index are still checked against each other.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lazytrain.errors import ModelFileError
from lazytrain.paths import resolve_inside
from lazytrain.store_checks import find_damage
from lazytrain.store_manifest import MODEL_CHECKSUMS, MODEL_FORMAT, MODEL_VERSION, ManifestError, read_manifest
from lazytrain.tensorfile import TensorFile
from lazytrain.tensorwriter import FileRecord, crc32_of, tensor_bytes

_REMEDY = f"Get an intact copy; if the change is meant, delete {MODEL_CHECKSUMS}."


class ModelChecksums:
    """The checksums of one directory; each tensor is compared once, when it is first read.

    Attributes:
        files: file name -> record; empty for a model of others.
    Raises (also by every check):
        ModelFileError: a file isn't what was written; the text names file and tensor.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checked: set[str] = set()
        self.files: Mapping[str, FileRecord] = {}
        path = resolve_inside(directory, MODEL_CHECKSUMS)
        if path.exists():
            try:
                self.files = read_manifest(path.resolve(), MODEL_FORMAT, MODEL_VERSION)[1]
            except ManifestError as error:
                raise ModelFileError(f"{error} {_REMEDY}") from error

    def check_texts(self, names: Iterable[str]) -> None:
        """Compare whole files; one that was not recorded passes."""
        recorded = {name: self.files[name] for name in names if name in self.files}
        changed = find_damage(self._directory, recorded, follow_links=True)
        if changed:
            raise ModelFileError(f"{self._directory}: {'; '.join(changed)} since it was written. {_REMEDY}")

    def check_headers(self, shards: Mapping[str, TensorFile]) -> None:
        """Compare what stands before the data section of each shard."""
        for name, file in shards.items():
            if name in self.files and crc32_of(tensor_bytes(file.raw_header())) != self.files[name].header_crc32:
                raise ModelFileError(
                    f"{self._directory}: {name}: the header has changed since it was written. {_REMEDY}"
                )

    def check_tensor(self, shard: str, name: str, raw: Tensor) -> None:
        """Compare the bytes of a tensor, uint8, at the first call with its name."""
        if shard not in self.files or name in self._checked:
            return
        if crc32_of(tensor_bytes(raw)) != self.files[shard].tensor_crc32.get(name):
            raise ModelFileError(
                f"{self._directory}: {shard}: tensor {name!r} has changed since it was written. {_REMEDY}"
            )
        self._checked.add(name)
