"""What LazyTrain recorded of a model directory that it wrote, and the comparison when it is read again.

A model of others has no such record; its headers and its index are still checked against each other.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lazytrain.errors import ModelFileError
from lazytrain.paths import resolve_inside
from lazytrain.store_checks import find_damage
from lazytrain.store_manifest import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_VERSION,
    MANIFEST,
    MODEL_CHECKSUMS,
    MODEL_FORMAT,
    MODEL_VERSION,
    ManifestError,
    read_manifest,
)
from lazytrain.tensorfile import STATES_SUFFIX, TensorFile
from lazytrain.tensorwriter import FileRecord, crc32_of, tensor_bytes


class ModelChecksums:
    """The checksums of one directory, a model's or a checkpoint's; each tensor is compared once, when it is first read.

    Attributes:
        files: file name -> record; empty for a model of others.
    Raises (also by every check):
        ModelFileError: a file isn't what was written; the text names file and tensor.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checked: set[str] = set()
        self._remedy = f"Get an intact copy; if the change is meant, delete {MODEL_CHECKSUMS}."
        self.files: Mapping[str, FileRecord] = {}
        path, manifest = resolve_inside(directory, MODEL_CHECKSUMS), directory / MANIFEST
        try:
            if path.exists():
                self.files = read_manifest(path.resolve(), MODEL_FORMAT, MODEL_VERSION)[1]
            elif manifest.exists() and any(directory.glob(f"*{STATES_SUFFIX}")):  # else it is somebody else's
                self._remedy = "Use another checkpoint, or an export of this one if the change is meant."
                self.files = read_manifest(manifest, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)[1]
        except ManifestError as error:
            raise ModelFileError(f"{error} {self._remedy}") from error

    def check_texts(self, names: Iterable[str]) -> None:
        """Compare whole files; one that was not recorded passes."""
        recorded = {name: self.files[name] for name in names if name in self.files}
        changed = find_damage(self._directory, recorded, follow_links=True)
        if changed:
            raise ModelFileError(f"{self._directory}: {'; '.join(changed)} since it was written. {self._remedy}")

    def check_headers(self, shards: Mapping[str, TensorFile]) -> None:
        """Compare what stands before the data section of each shard."""
        for name, file in shards.items():
            if name in self.files and crc32_of(tensor_bytes(file.raw_header())) != self.files[name].header_crc32:
                raise ModelFileError(
                    f"{self._directory}: {name}: the header has changed since it was written. {self._remedy}"
                )

    def check_tensor(self, shard: str, name: str, raw: Tensor) -> None:
        """Compare the bytes of a tensor, uint8, at the first call with its name."""
        if shard not in self.files or name in self._checked or shard in self._checked:
            return
        if self.files[shard].piece_checksums:
            self._check_whole(shard)
            return
        if crc32_of(tensor_bytes(raw)) != self.files[shard].tensor_crc32.get(name):
            raise ModelFileError(
                f"{self._directory}: {shard}: tensor {name!r} has changed since it was written. {self._remedy}"
            )
        self._checked.add(name)

    def _check_whole(self, shard: str) -> None:
        """Compare a file that has a checksum for each piece, whatever tensors the piece holds."""
        damage = find_damage(self._directory, {shard: self.files[shard]}, follow_links=True)
        if damage:
            raise ModelFileError(f"{self._directory}: {'; '.join(damage)} since it was written. {self._remedy}")
        self._checked.add(shard)
