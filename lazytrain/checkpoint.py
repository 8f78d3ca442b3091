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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lazytrain.durable import (
    discard_directory,
    explain_os_error,
    remove_stale_directories,
    stage_directory,
    write_file,
)
from lazytrain.errors import CheckpointError, ConfigError, ModelFileError
from lazytrain.paths import is_plain_name
from lazytrain.shards import CONFIG, INDEX, SIDE_FILES
from lazytrain.store_checks import find_damage
from lazytrain.store_manifest import ManifestError, ManifestVersionError, encode_manifest, is_count, read_manifest
from lazytrain.tensorfile import STATES_SUFFIX, TensorFile, holds_tensors
from lazytrain.tensorwriter import METADATA, FileRecord, TensorFileWriter, TensorSpec

MANIFEST = "manifest.json"
FORMAT, VERSION = "lazytrain-checkpoint", 2
TEXTS = (CONFIG, INDEX, *SIDE_FILES)

Producer = Callable[[], Mapping[str, Tensor]]


class Linked(NamedTuple):
    """A file that is on the disk already.

    link: gives it a name and returns its record, or None where that can't be. tensors: makes the tensors for a copy.
    """

    link: Callable[[Path], FileRecord | None]
    tensors: Producer


_STEP_NAME = re.compile(r"step_(\d{8,})")


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


def save_checkpoint(
    run_dir: Path,
    step: int,
    files: Iterable[tuple[str, Linked | Producer | Mapping[str, Tensor]]],
    meta: Mapping[str, Any],
    keep: int = 2,
    texts: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a checkpoint; older ones are deleted once it is durable and was read back, so that `keep` remain.

    Args:
        step: optimizer steps done; names the directory.
        files: (plain name of a file of tensors, its tensors or where they come from), one at a time.
        meta: JSON, returned by `Checkpoint.meta`.
        keep: at least 1.
        texts: the content of further files, of `TEXTS`.
    Returns:
        The checkpoint's directory.
    Memory: the tensors of one file.
    Raises:
        CheckpointError: a full disk or a failed write. Nothing is left of the new checkpoint, the older ones and the
            tensors are untouched: training may go on. Or the disk gives back other bytes than were written: then
            nothing is deleted.
    """
    if keep < 1:
        raise ConfigError(f"The number of checkpoints to keep must be at least 1, not {keep}.")
    meta = json.loads(json.dumps(meta))  # as it will be read; what JSON can't hold fails here, before the first byte
    parent = run_dir / "checkpoints"
    target = parent / f"step_{step:08d}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale_directories(parent, ".step_")
        with stage_directory(target) as staged:
            records = {name: _save_file(staged, name, source) for name, source in files}
            for name, content in (texts or {}).items():
                assert name in TEXTS, name
                write_file(staged / name, content)
                records[name] = FileRecord.of_bytes(content)
            write_file(staged / MANIFEST, encode_manifest(FORMAT, VERSION, records, step=step, meta=meta))
    except OSError as error:
        raise CheckpointError(explain_os_error(error, f"Saving the checkpoint of step {step}", parent)) from error
    _rotate(run_dir, keep, newest=target)
    return target


def find_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints with an intact manifest, newest first; each broken one is named in a warning."""
    checkpoints = []
    for path in _step_directories(run_dir):
        try:
            checkpoints.append(open_checkpoint(path))
        except CheckpointError as error:
            warnings.warn(f"Skipping a broken checkpoint: {error}", RuntimeWarning, stacklevel=2)
    return checkpoints


def count_checkpoints(run_dir: Path) -> int:
    """Return the number of checkpoints with an intact manifest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads them will name the broken ones
        return len(find_checkpoints(run_dir))


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
    for path in _step_directories(run_dir):
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
        body, files = read_manifest(path / MANIFEST, FORMAT, VERSION)
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


def _save_file(directory: Path, name: str, source: Linked | Producer | Mapping[str, Tensor]) -> FileRecord:
    if not isinstance(source, Linked):
        return _write_tensors(directory, name, source)
    return source.link(directory / name) or _write_tensors(directory, name, source.tensors)


def _write_tensors(directory: Path, name: str, tensors: Producer | Mapping[str, Tensor]) -> FileRecord:
    assert is_plain_name(name), name
    assert holds_tensors(name), name
    content = tensors() if callable(tensors) else tensors
    specs = [TensorSpec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in content.items()]
    with TensorFileWriter(directory / name, specs, {} if name.endswith(STATES_SUFFIX) else METADATA) as writer:
        for key, tensor in content.items():
            writer.write(key, tensor)
        return writer.finish()


def _step_directories(run_dir: Path) -> list[Path]:
    """Return the directories named like checkpoints, highest step first."""
    parent = run_dir / "checkpoints"
    entries = list(parent.iterdir()) if parent.is_dir() else []
    found = [(int(match[1]), path) for path in entries if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir() and not path.is_symlink()]


def _rotate(run_dir: Path, keep: int, newest: Path) -> None:
    """Delete the oldest checkpoints, but only whole ones that hold nothing that we did not write.

    Before the first is deleted, the newest is read from the disk: what it replaces may be the last good one.
    """
    others = []
    for path in _step_directories(run_dir):
        try:
            if path != newest:
                others.append(open_checkpoint(path))
        except CheckpointError:
            continue  # not provably ours; `find_checkpoints` names it
    if others[keep - 1 :]:
        problems = find_damage(newest, open_checkpoint(newest).files, from_disk=True)
        if problems:
            raise CheckpointError(
                f"{newest} reads back damaged: {'; '.join(problems)}. The older checkpoints are kept. "
                "Check the disk and the memory of this machine."
            )
    for checkpoint in others[keep - 1 :]:
        foreign = {path.name for path in checkpoint.path.iterdir()} - {MANIFEST, *checkpoint.files}
        try:
            if foreign:
                warnings.warn(
                    f"{checkpoint.path} is kept: it holds files of others ({', '.join(sorted(foreign)[:3])}).",
                    RuntimeWarning,
                    stacklevel=3,
                )
            else:
                discard_directory(checkpoint.path)
        except OSError as error:
            warnings.warn(f"{checkpoint.path} can't be deleted: {error}", RuntimeWarning, stacklevel=3)
