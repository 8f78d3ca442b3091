"""Checkpoints: directories that appear whole, hold a checksum for every tensor, and replace older ones only then.

    RUN/checkpoints/step_00000123/
        manifest.json                                 written last: a directory without a valid one is no checkpoint
        model-00001-of-00026.safetensors ...          the weights: with the next line, a model that other tools load
        model.safetensors.index.json  config.json ... index, config, tokenizer
        unit-00001.states ...                         all else of the state

A flipped bit is found by CRC-32 and named by file and tensor.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain.errors import CheckpointError, ModelFileError
from lazytrain.shards import CONFIG, INDEX, SIDE_FILES
from lazytrain.store_checks import find_damage
from lazytrain.store_manifest import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_VERSION,
    MANIFEST,
    ManifestError,
    ManifestVersionError,
    is_count,
    read_manifest,
)
from lazytrain.tensorfile import TensorFile, holds_tensors
from lazytrain.tensorwriter import FileRecord

TEXTS = (CONFIG, INDEX, *SIDE_FILES)

_STEP_NAME = re.compile(r"step_\d{8,}")


class OtherVersionError(CheckpointError):
    """A whole checkpoint, of a version of the format that this program doesn't read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose manifest is intact (`verify` checks the data).

    Attributes:
        path: its directory. step: the optimizer step. meta: what `save_checkpoint` was given.
        files: file name -> size and checksums.
    """

    path: Path
    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, FileRecord]

    def open_file(self, name: str) -> TensorFile:
        """Map one of the files (read-only; tensors are views, see `TensorFile`)."""
        if name not in self.files:
            raise CheckpointError(f"{self.path} has no file {name!r}; it has {', '.join(self.files)}.")
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{self.path} is incomplete: {name} is missing.")
        size = path.stat().st_size
        if size != self.files[name].size_bytes:
            raise CheckpointError(f"{path} is damaged: {size} bytes, {self.files[name].size_bytes} were saved.")
        try:
            return TensorFile(path)
        except ModelFileError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error

    def verify(self) -> None:
        """Read all tensors and compare checksums.

        Raises:
            CheckpointError: names every file and tensor that differs from what was saved.
        """
        problems = find_damage(self.path, {n: record for n, record in self.files.items() if holds_tensors(n)})
        if problems:
            raise CheckpointError(f"{self.path} is damaged: {'; '.join(problems)}. Use an older checkpoint.")

    def verify_texts(self) -> None:
        """Compare config and tokenizer, which a resumed run doesn't read, with what was saved.

        Raises:
            CheckpointError: names every file that differs.
        """
        problems = find_damage(self.path, {n: record for n, record in self.files.items() if not holds_tensors(n)})
        if problems:
            raise CheckpointError(f"{self.path}: {'; '.join(problems)}. Give config and tokenizer with --model DIR.")


def find_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints with an intact manifest, newest first; each broken one is named in a warning."""
    checkpoints = []
    for path in step_directories(run_dir):
        try:
            checkpoints.append(open_checkpoint(path))
        except CheckpointError as error:
            warnings.warn(f"Skipping a broken checkpoint: {error}", RuntimeWarning, stacklevel=2)
    return checkpoints


def count_checkpoints(run_dir: Path, run: Any = None) -> int:
    """Return the number of checkpoints with an intact manifest.

    Args:
        run: count only those whose meta has this, as JSON makes it, as "run"; None = all.
    """
    run = json.loads(json.dumps(run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads them will name the broken ones
        return sum(run is None or found.meta.get("run") == run for found in find_checkpoints(run_dir))


def latest_valid(run_dir: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose tensors are what was saved, or None; each broken one is named in a warning.

    Raises:
        OtherVersionError: there is none but what another version of LazyTrain saved.
    """
    for checkpoint in find_checkpoints(run_dir):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            warnings.warn(f"Skipping a broken checkpoint: {error}", RuntimeWarning, stacklevel=2)
        else:
            return checkpoint
    for path in step_directories(run_dir):
        try:
            open_checkpoint(path)
        except OtherVersionError:
            raise  # starting anew beside it would look like a lost run
        except CheckpointError:
            continue
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, it is damaged, of another version, or lists a file outside the directory.
    """
    try:
        body, files = read_manifest(path / MANIFEST, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
    except ManifestVersionError as error:
        raise OtherVersionError(
            f"{error} Go on with the release that saved it; or let that release export it, and train from the export."
        ) from error
    except ManifestError as error:
        raise CheckpointError(f"{error} Use an older checkpoint.") from error
    step: Any = body.get("step")
    meta = body.get("meta")
    if not is_count(step) or not isinstance(meta, dict):
        raise CheckpointError(f"{path / MANIFEST} is damaged: no step or no meta. Use an older checkpoint.")
    strangers = [name for name in files if not holds_tensors(name) and name not in TEXTS]
    if strangers:
        raise CheckpointError(f"{path / MANIFEST} lists {strangers[0]!r}, which no checkpoint holds. Don't use it.")
    return Checkpoint(path=path, step=step, meta=meta, files=files)


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_number(path: Path) -> int:
    """Return the step that the name of a checkpoint's directory says."""
    return int(path.name.removeprefix("step_"))


def step_directories(run_dir: Path) -> list[Path]:
    """Return the directories named like checkpoints, highest step first."""
    parent = run_dir / "checkpoints"
    entries = list(parent.iterdir()) if parent.is_dir() else []
    found = [(step_number(path), path) for path in entries if _STEP_NAME.fullmatch(path.name)]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir() and not path.is_symlink()]
