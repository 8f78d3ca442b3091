"""Save checkpoints, and delete older ones when the new one is proven to be on the disk.

A checkpoint appears whole: it is written beside its place under a hidden name, synced, and renamed. What is deleted
must be proven to be this run's own and as it was saved.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lazytrain.checkpoint import TEXTS, open_checkpoint, step_directories, step_name, step_number
from lazytrain.durable import (
    discard_directory,
    explain_os_error,
    publish,
    remove_stale_directories,
    stage_directory,
    temporary_name,
    write_file,
)
from lazytrain.errors import CheckpointError, ConfigError
from lazytrain.paths import is_plain_name
from lazytrain.store_checks import find_damage, forget_cached
from lazytrain.store_manifest import CHECKPOINT_FORMAT, CHECKPOINT_VERSION, MANIFEST, encode_manifest
from lazytrain.tensorfile import STATES_SUFFIX, holds_tensors
from lazytrain.tensorwriter import METADATA, FileRecord, TensorFileWriter, TensorSpec

Producer = Callable[[], Mapping[str, Tensor]]


class Linked(NamedTuple):
    """A file that is on the disk already.

    link: gives it a name and returns its record, or None where that can't be. tensors: makes the tensors for a copy.
    """

    link: Callable[[Path], FileRecord | None]
    tensors: Producer


def save_checkpoint(
    run_dir: Path,
    step: int,
    files: Iterable[tuple[str, Linked | Producer | Mapping[str, Tensor]]],
    meta: Mapping[str, Any],
    keep: int = 2,
    texts: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a checkpoint; older ones are deleted once it is durable and was read back, so that `keep` remain.

    Deleted is only what this run saved and nobody changed; all else stays, is named in a warning, and doesn't count.
    So does a higher step, unless it is damaged: then it is deleted.

    Args:
        step: optimizer steps done; names the directory.
        files: (plain name of a file of tensors, its tensors or where they come from), one at a time.
        meta: JSON, returned by `Checkpoint.meta`; its "run" tells the runs apart that work in this directory.
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
    target = parent / step_name(step)
    reason = _reason_to_keep(target, meta) if os.path.lexists(target) else None
    aside = _kept_name(target) if reason else temporary_name(parent, f".{target.name}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale_directories(parent, ".step_")
        with stage_directory(target, keep_old=aside) as staged:
            records = {name: _save_file(staged, name, source) for name, source in files}
            for name, content in (texts or {}).items():
                assert name in TEXTS, name
                write_file(staged / name, content)
                records[name] = FileRecord.of_bytes(content)
            write_file(
                staged / MANIFEST, encode_manifest(CHECKPOINT_FORMAT, CHECKPOINT_VERSION, records, step=step, meta=meta)
            )
    except OSError as error:
        raise CheckpointError(explain_os_error(error, f"Saving the checkpoint of step {step}", parent)) from error
    if reason:
        warnings.warn(f"What {target} was is kept as {aside.name}: {reason}.", RuntimeWarning, stacklevel=2)
    _rotate(target, meta, keep, replaced=None if reason else aside)
    return target


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


def _rotate(newest: Path, meta: Mapping[str, Any], keep: int, replaced: Path | None) -> None:
    """Delete what is too many, if it is proven to be this run's own and the newest is proven to be on the disk.

    A higher step is of a run that ended, and this one started anew; or the run could not go on from it. Damage tells.

    Args:
        replaced: where an older checkpoint of the same step is now, if there was one.
    """
    others = [path for path in step_directories(newest.parents[1]) if path != newest]
    reasons = {path: _reason_to_keep(path, meta) for path in others}
    higher = [path for path in others if reasons[path] is None and step_number(path) > step_number(newest)]
    damaged = [path for path in higher if not _is_whole(path, (path / MANIFEST).stat().st_mtime_ns)]
    reasons |= {path: "its step is higher, and it is whole" for path in higher if path not in damaged}
    doomed = damaged + [path for path in others if reasons[path] is None and path not in damaged][keep - 1 :]
    if replaced is not None and replaced.exists():
        doomed.append(replaced)
    if doomed:
        problems = _read_back(newest)
        if problems:
            if replaced in doomed:
                publish(replaced, newest)  # the older one of this step gets its name back
            raise CheckpointError(
                f"{newest} reads back damaged: {'; '.join(problems)}. The older checkpoints are kept. "
                "Check the disk and the memory of this machine."
            )
    for path in doomed:
        try:
            discard_directory(path)
        except OSError as error:
            warnings.warn(f"{path} can't be deleted: {error}", RuntimeWarning, stacklevel=3)
    for path, reason in reasons.items():
        if reason is not None and len(others) >= keep:
            warnings.warn(f"{path} is kept: {reason}.", RuntimeWarning, stacklevel=3)


@functools.cache
def _is_whole(path: Path, saved_ns: int) -> bool:
    """Return whether a checkpoint's tensors are what was saved at this time; all of it is read, once in a process."""
    try:
        open_checkpoint(path).verify()
    except CheckpointError:
        return False
    return True


def _read_back(path: Path) -> list[str]:
    """Read a checkpoint from the disk, not from the page cache; return what differs from what was saved."""
    forget_cached([path / MANIFEST])
    try:
        return find_damage(path, open_checkpoint(path).files, from_disk=True)
    except CheckpointError as error:
        return [str(error)]


def _reason_to_keep(path: Path, meta: Mapping[str, Any]) -> str | None:
    """Return why a directory is not proven to be a checkpoint that this run saved and nobody changed since."""
    if path.is_symlink() or not path.is_dir():
        return "it is no directory"
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if step_name(checkpoint.step) != path.name:
        return f"it holds step {checkpoint.step}"
    if checkpoint.meta.get("run") != meta.get("run"):
        return "it is of a run with other options"
    try:
        foreign = sorted({entry.name for entry in path.iterdir()} - {MANIFEST, *checkpoint.files})
        changed = [name for name, record in checkpoint.files.items() if not _has_size(path / name, record.size_bytes)]
    except OSError as error:
        return f"it can't be read: {error}"
    if foreign:
        return f"it holds files of others ({', '.join(foreign[:3])})"
    texts = {name: record for name, record in checkpoint.files.items() if not holds_tensors(name)}
    problems = [f"{name} is not as it was saved" for name in changed] or find_damage(path, texts)
    return problems[0] if problems else None


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == num_bytes


def _kept_name(target: Path) -> Path:
    """Return a free name beside a checkpoint's, which no run takes for one."""
    number = 1
    while os.path.lexists(target.with_name(f"{target.name}.kept-{number}")):
        number += 1
    return target.with_name(f"{target.name}.kept-{number}")
