"""Write a HF model directory: planned before the first byte, streamed tensor by tensor, whole or not at all.

The directory is written under a hidden name beside its target and renamed; an older export of ours is replaced, the
base model and any foreign directory never.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.durable import explain_os_error, stage_directory, write_file
from lazytrain.errors import ModelFileError
from lazytrain.shards import CONFIG, INDEX, SIDE_FILES, SINGLE, ModelDir
from lazytrain.store_manifest import MODEL_CHECKSUMS, MODEL_FORMAT, MODEL_VERSION, encode_manifest
from lazytrain.tensorfile import TensorFile
from lazytrain.tensorwriter import METADATA, FileRecord, TensorFileWriter, TensorSpec, build_header

MAX_SHARD_BYTES = 5 * 2**30


class ExportPlan(NamedTuple):
    """Which tensors go to which shard; made at start-up, so that saving can't fail for a name or a shape hours later.

    shards: (file name, its tensors), in order. total_bytes: of the data sections.
    """

    shards: tuple[tuple[str, tuple[TensorSpec, ...]], ...]
    total_bytes: int

    @property
    def weight_map(self) -> dict[str, str]:
        """Return tensor name -> file name."""
        return {spec.name: shard for shard, specs in self.shards for spec in specs}


def plan_export(tensors: Iterable[TensorSpec], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> ExportPlan:
    """Divide tensors into shards of at most `max_shard_bytes`, in order; a larger tensor gets a shard of its own.

    Raises:
        ModelFileError: no tensors, a name twice, or an element type that safetensors can't hold.
    """
    groups: list[list[TensorSpec]] = []
    size_bytes = 0
    for spec in tensors:
        if not groups or size_bytes + spec.num_bytes > max_shard_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(spec)
        size_bytes += spec.num_bytes
    if not groups:
        raise ModelFileError("There are no tensors to export.")
    build_header([spec for group in groups for spec in group], METADATA)
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    total_bytes = sum(spec.num_bytes for group in groups for spec in group)
    return ExportPlan(tuple((name, tuple(group)) for name, group in zip(names, groups)), total_bytes)


def check_target(directory: Path, base_dir: Path | None = None) -> Path:
    """Check where an export may go; return the resolved directory. Call it at start-up.

    Raises:
        ModelFileError: it is, holds or lies in the base model's directory, or holds files that are not an export's.
    """
    target = directory.expanduser().resolve()
    base = base_dir.resolve() if base_dir is not None else None
    if base is not None and (target.is_relative_to(base) or base.is_relative_to(target)):
        raise ModelFileError(f"The output {target} would change the base model in {base}. Choose another directory.")
    if target.exists() and not _is_replaceable(target):
        raise ModelFileError(f"{target} exists and is not an export of LazyTrain. Choose another directory.")
    return target


def export_model(
    directory: Path,
    plan: ExportPlan,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    side_files: Sequence[Path] = (),
    base_dir: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model directory that safetensors and transformers load: shards, index, config, side files, checksums.

    Args:
        directory: where to; it appears, synced, only when complete.
        plan: of `plan_export`.
        tensors: (name, tensor) in any order, best a generator; every tensor of the plan once. One at a time is held.
        config: the base model's; its element type is set to that of the tensors.
        side_files: copied (`ModelDir.side_files`).
        base_dir: the model that was trained, which must stay untouched.
        metadata: added to the shards' own, and to the index's.
    Returns:
        The resolved directory.
    Memory: one tensor.
    Raises:
        ModelFileError: see `check_target`; a full disk (found before the first tensor; an older export stays intact);
            a tensor that isn't the planned one.
    """
    extra = dict(metadata or {})
    try:
        target = check_target(directory, base_dir)
        with stage_directory(target) as staged:
            records = _write_shards(staged, plan, tensors, {**extra, **METADATA})
            others = {CONFIG: _to_json(with_dtype(config, plan))}
            if [name for name, _ in plan.shards] != [SINGLE]:
                others[INDEX] = encode_index(plan.weight_map, plan.total_bytes, extra)
            for path in side_files:
                if path.name not in SIDE_FILES:
                    raise ModelFileError(f"{path} is no side file of a model ({', '.join(SIDE_FILES)}).")
                others[path.name] = path.read_bytes()
            for name, content in others.items():
                write_file(staged / name, content)
                records[name] = FileRecord.of_bytes(content)
            write_file(staged / MODEL_CHECKSUMS, encode_manifest(MODEL_FORMAT, MODEL_VERSION, records))
    except OSError as error:
        need = f"Writing the model ({plan.total_bytes / 2**30:.2f} GiB) to {directory}"
        raise ModelFileError(explain_os_error(error, need, directory.parent)) from error
    return target


def with_dtype(config: Mapping[str, Any], plan: ExportPlan) -> dict[str, Any]:
    """Return the config with the element type that most of the exported bytes have."""
    sizes: dict[torch.dtype, int] = {}
    for _, specs in plan.shards:
        for spec in specs:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
    return _with_dtype_name(config, max(sizes, key=lambda dtype: sizes[dtype]))


def encode_index(weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of an index: tensor name -> file, and the bytes of all tensors."""
    return _to_json({"metadata": {**metadata, "total_size": total_bytes}, "weight_map": dict(weight_map)})


def read_texts(model_dir: ModelDir, dtype: torch.dtype) -> dict[str, bytes]:
    """Return file name -> content of what a model directory needs beside its weights: config, tokenizer, generation.

    Read at the start of a run, so that a save hours later needs nothing of the base model.

    Args:
        dtype: of the weights, for the config.
    """
    texts = {CONFIG: _to_json(_with_dtype_name(model_dir.config, dtype))}
    return texts | {path.name: path.read_bytes() for path in model_dir.side_files}


def _write_shards(
    staged: Path, plan: ExportPlan, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> dict[str, FileRecord]:
    weight_map, records = plan.weight_map, {}
    with ExitStack() as stack:
        # All shards take their room now: a full disk is found before the first tensor is made.
        writers = {
            shard: stack.enter_context(TensorFileWriter(staged / shard, specs, metadata))
            for shard, specs in plan.shards
        }
        for name, tensor in tensors:
            if name not in weight_map:
                raise ModelFileError(f"Tensor {name!r} is not part of the planned export.")
            writer = writers[weight_map[name]]
            writer.write(name, tensor)
            if not writer.missing:
                records[weight_map[name]] = writer.finish()
        unfinished = [name for writer in writers.values() for name in writer.missing]
        if unfinished:
            raise ModelFileError(f"These tensors were planned and never came: {', '.join(unfinished[:20])}.")
    return records


def _with_dtype_name(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    # "torch_dtype" is the older key, which every version reads; newer files have "dtype".
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}


def _is_replaceable(target: Path) -> bool:
    """Tell whether a directory is empty or holds an export of ours and nothing else, and so may be replaced."""
    if not target.is_dir():
        return False
    entries = list(target.iterdir())
    shards = [path for path in entries if path.name.endswith(".safetensors")]
    known = {CONFIG, INDEX, MODEL_CHECKSUMS, *SIDE_FILES}
    if any(path.is_symlink() or not path.is_file() for path in entries):
        return False
    if any(path.name not in known and path not in shards for path in entries):
        return False
    try:
        return not entries or (bool(shards) and all(_is_ours(path) for path in shards))
    except ModelFileError:
        return False


def _is_ours(shard: Path) -> bool:
    return TensorFile(shard).metadata.get("writer") == METADATA["writer"]


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
