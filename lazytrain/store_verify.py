"""Verify a run directory, a checkpoint or a model directory: every file that has a checksum is read and compared."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lazytrain.checkpoint import open_checkpoint
from lazytrain.durable import STAGED_MARK
from lazytrain.errors import CheckpointError, LazyTrainError, ModelFileError
from lazytrain.locking import LOCK_FILE
from lazytrain.progress import progress_bar
from lazytrain.shards import CONFIG, INDEX, SINGLE, ModelDir, open_model_dir
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.plan import Plan
from lazytrain.store_checks import find_damage
from lazytrain.store_manifest import MANIFEST, MODEL_CHECKSUMS, canonical
from lazytrain.store_models import ModelChecksums
from lazytrain.tensorwriter import FileRecord

PLAN, METRICS = "plan.json", "metrics.jsonl"
MIB = 2**20

_HUB_BLOB = re.compile(r"[0-9a-f]{64}")


@dataclass(kw_only=True)
class Report:
    """What a verification found: damage, and notes on what is intact or can't be checked."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Files with records in one directory; `manifest` is the file that holds the records."""

    path: Path
    files: Mapping[str, FileRecord]
    manifest: str
    is_model: bool

    @property
    def num_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())


def verify_directory(directory: Path, *, stream: TextIO | None = None) -> Report:
    """Read everything in a run directory, a checkpoint or a model directory, and compare it with its checksums.

    Args:
        stream: where to show the progress; None = standard error.
    Returns:
        The report; `problems` is empty where all is as it was written. Each names the file and, in a file of tensors,
        the tensor.
    Raises:
        CheckpointError: the directory is none of the three kinds.
    """
    report = Report()
    targets: list[_Target] = []
    for kind, path in _find_parts(directory):
        if kind == "checkpoint":
            _add_checkpoint(path, targets, report)
        else:
            _add_model(path, targets, report)
    if _is_run(directory):
        _check_plan(directory, report)
        _check_metrics(directory / METRICS, report)
    total = sum(_mib(target.num_bytes) for target in targets)
    with progress_bar("verifying", total, unit="MiB", stream=stream) as bar:
        for target in targets:
            _check_target(target, report, _in_mib(bar.advance, _mib(target.num_bytes)))
    return report


def _find_parts(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield ("checkpoint" or "model", directory) for all that `directory` is or holds."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory. Give a run directory, a checkpoint or a model directory.")
    if (directory / MANIFEST).exists() or directory.parent.name == "checkpoints":
        yield "checkpoint", directory
    elif _is_model(directory):
        yield "model", directory
    elif _is_run(directory):
        parent = directory / "checkpoints"
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path.is_dir() and not path.is_symlink():
                yield "checkpoint", path
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink() and path != parent and _is_model(path):
                yield "model", path
    else:
        raise CheckpointError(
            f"{directory} is no run directory, checkpoint or model directory: it has no checkpoints folder, {MANIFEST} "
            f"or {CONFIG}. Give one of these."
        )


def _is_model(path: Path) -> bool:
    return any((path / name).exists() for name in (MODEL_CHECKSUMS, CONFIG, INDEX, SINGLE))


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or any((path / name).exists() for name in (LOCK_FILE, PLAN, METRICS))


def _add_checkpoint(path: Path, targets: list[_Target], report: Report) -> None:
    if STAGED_MARK in path.name:
        report.notes.append(f"{path}: being written now, or left by a killed process; the next save removes it")
        return
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        report.problems.append(str(error))
        return
    targets.append(_Target(path=path, files=checkpoint.files, manifest=MANIFEST, is_model=False))


def _add_model(path: Path, targets: list[_Target], report: Report) -> None:
    try:
        files = ModelChecksums(path.resolve()).files
    except ModelFileError as error:
        report.problems.append(str(error))
        return
    targets.append(_Target(path=path, files=files, manifest=MODEL_CHECKSUMS, is_model=True))


def _check_target(target: _Target, report: Report, advance: Callable[[int], None]) -> None:
    found = find_damage(target.path, target.files, advance=advance, from_disk=True, follow_links=target.is_model)
    report.problems += [f"{target.path}: {text}" for text in found]
    if target.is_model and not found:
        _check_model(target, report)
        return
    if not found:
        report.notes.append(f"{target.path}: {_describe(target)} intact")
    strangers = {path.name for path in target.path.iterdir()} - {target.manifest, *target.files}
    if strangers:
        report.notes.append(f"{target.path}: not recorded, not checked: {', '.join(sorted(strangers)[:5])}")


def _check_model(target: _Target, report: Report) -> None:
    """Check index and headers against each other, and a model of the hub's cache against the names of its blobs."""
    try:
        model = open_model_dir(target.path)
    except LazyTrainError as error:
        report.problems.append(str(error))
        return
    if target.files:
        report.notes.append(f"{target.path}: {_describe(target)} intact")
        return
    checked = 0
    for name, digest in _hub_digests(model):
        checked += 1
        if _sha256_of(model.path / name) != digest:
            report.problems.append(f"{target.path}: {name} has changed: its SHA-256 is not the one the hub gave it")
    how = f"{checked} of {len(model.files)} files have the hub's SHA-256" if checked else "it has no checksums"
    report.notes.append(f"{target.path}: not written by LazyTrain: index and headers agree; {how}")


def _hub_digests(model: ModelDir) -> Iterator[tuple[str, str]]:
    """Yield (file, SHA-256) for shards that are links into the hub's cache, which names large files by it."""
    for name in model.files:
        blob = (model.path / name).resolve()
        if blob.parent.name == "blobs" and _HUB_BLOB.fullmatch(blob.name):
            yield name, blob.name


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_plan(directory: Path, report: Report) -> None:
    """Compare the run's plan with the one that the newest checkpoint was trained with."""
    path = directory / PLAN
    if not path.exists():
        return
    try:
        plan = Plan.load(path)
        broken = next((found for unit in plan.units if (found := unit.contradiction())), None)
        if broken is not None:
            raise PlannerError(f"{broken[0]} {broken[1]}")
        present = canonical(json.loads(path.read_bytes()))
    except (PlannerError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        report.problems.append(f"{path} is damaged: {error}. It is only a record: training goes on without it.")
        return
    saved = _saved_plan(directory)
    if saved is None:
        report.notes.append(f"{path}: can be read; no checkpoint records it yet")
        return
    plan_of_checkpoint, manifest = saved
    if canonical(plan_of_checkpoint) == present:
        report.notes.append(f"{path}: intact")
    elif path.stat().st_mtime > manifest.stat().st_mtime:
        report.notes.append(f"{path}: newer than {manifest.parent.name}, and another plan than its")
    else:
        report.problems.append(
            f"{path} has changed: it is not the plan that {manifest.parent.name} records (edited or damaged). "
            "It is only a record: training goes on without it."
        )


def _saved_plan(directory: Path) -> tuple[Any, Path] | None:
    for path in sorted((directory / "checkpoints").glob("step_*"), key=lambda path: path.name, reverse=True):
        try:
            meta = open_checkpoint(path).meta
        except CheckpointError:
            continue
        if "plan" in meta:
            return meta["plan"], path / MANIFEST
    return None


def _check_metrics(path: Path, report: Report) -> None:
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    except OSError as error:
        report.problems.append(f"{path} can't be read: {os.strerror(error.errno or 0)}")
        return
    for number, line in enumerate(lines[:-1], 1):  # what a kill cut off has no newline
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            report.problems.append(f"{path}: line {number} is no JSON")


def _describe(target: _Target) -> str:
    sums = sum(1 + len(record.tensor_crc32) + len(record.piece_checksums) for record in target.files.values())
    return f"{len(target.files)} files, {sums} checksums, {target.num_bytes / MIB:.1f} MiB"


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // MIB)


def _in_mib(advance: Callable[[int], None], total_mib: int) -> Callable[[int], None]:
    """Return a function that takes bytes and calls `advance` with whole MiB, `total_mib` in all."""
    seen_bytes = given_mib = 0

    def add(num_bytes: int) -> None:
        nonlocal seen_bytes, given_mib
        seen_bytes += num_bytes
        due = min(total_mib, _mib(seen_bytes))
        if due > given_mib:
            advance(due - given_mib)
            given_mib = due

    return add
