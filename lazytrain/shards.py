"""Read a HF model directory: config, index and shards, all checked before anything is allocated.

Shards are mapped read-only; one tensor at a time is read, the whole model is never copied.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazytrain.base import Model
from lazytrain.errors import ModelFileError
from lazytrain.paths import resolve_inside
from lazytrain.store_models import ModelChecksums
from lazytrain.tensorfile import TensorFile, TensorInfo

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_QUANTIZED_ENDINGS = (
    ".scales",
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_packed",
)
# Buffers that old checkpoints hold and that the config determines.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
_MAX_JSON_BYTES = 100_000_000
_COMPARE_BYTES = 2**26
_MAX_LINES = 20


@dataclass(frozen=True, kw_only=True)
class ModelDir:
    """A checked model directory.

    Attributes:
        path: as resolved.
        config, generation_config: the parsed JSON; `generation_config` is None where there is no such file.
        tensors: name -> file, element type, shape.
        side_files: tokenizer and generation files, to be copied on export.
        checksums: of every file, where LazyTrain wrote the directory; tensors are compared as they are read.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    side_files: tuple[Path, ...]
    files: Mapping[str, TensorFile]
    checksums: ModelChecksums

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor: a view of the mapped shard, or a converted copy where `dtype` is another one."""
        tensor = self._file(name).read(name)
        return tensor if dtype is None else tensor.to(dtype)

    def read_raw(self, name: str) -> Tensor:
        """Return the bytes of a tensor, uint8, as a view of the mapped shard."""
        return self._file(name).raw(name)

    def _file(self, name: str) -> TensorFile:
        if name not in self.tensors:
            raise ModelFileError(f"{self.path} has no tensor {name!r}.")
        shard = self.tensors[name].shard
        self.checksums.check_tensor(shard, name, self.files[shard].raw(name))
        return self.files[shard]


def open_model_dir(path: Path | str) -> ModelDir:
    """Open a HF model directory; all shards are mapped, their headers checked against each other and the index.

    Raises:
        ModelFileError: lists all missing shards; all shards that are not safetensors, and what they are; every
            tensor on which index and headers disagree. A quantized model is refused by name.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelFileError(
            f"{path} is not a directory. Give the directory of a model: {CONFIG} and safetensors files; "
            "a model of the hub must be downloaded first."
        )
    directory = directory.resolve()
    checksums = ModelChecksums(directory)
    checksums.check_texts((CONFIG, INDEX))
    config = _read_json(directory, CONFIG)
    _refuse_quantized(directory, config)
    weight_map = _read_weight_map(directory)
    shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    files = _open_shards(directory, shards)
    tensors = _join_headers(directory, files, weight_map)
    checksums.check_headers(files)
    sides = tuple(resolve_inside(directory, name) for name in SIDE_FILES if (directory / name).exists())
    has_generation = (directory / "generation_config.json").exists()
    generation = _read_json(directory, "generation_config.json") if has_generation else None
    return ModelDir(
        path=directory,
        config=config,
        generation_config=generation,
        tensors=tensors,
        side_files=sides,
        files=files,
        checksums=checksums,
    )


def resolve_tied(model: ModelDir, tied: bool, *, embed_name: str = EMBED_NAME, head_name: str = HEAD_NAME) -> bool:
    """Decide whether a stored head is a duplicate to drop; check that flag and files agree.

    Args:
        tied: `tie_word_embeddings` of the config.
    Returns:
        True if the head is stored although tied, with the embedding's bytes.
    Raises:
        ModelFileError: tied, but the stored head is another matrix; untied, but no head is stored.
    """
    is_stored = head_name in model.tensors
    if not tied and not is_stored:
        raise ModelFileError(
            f"{model.path} stores no {head_name!r} and its config doesn't tie it to the embeddings. "
            f'Set "tie_word_embeddings": true in {CONFIG} if the model shares them, else get the complete files.'
        )
    if tied and is_stored and not _have_equal_bytes(model, head_name, embed_name):
        raise ModelFileError(
            f"{model.path}: {CONFIG} ties {head_name!r} to {embed_name!r}, but both are stored and they differ. "
            f'Set "tie_word_embeddings": false in {CONFIG} if both are meant.'
        )
    return tied and is_stored


def check_params(model: Model, model_dir: ModelDir) -> list[str]:
    """Check every parameter of a model against the headers: name, shape, type. Nothing is read but tied duplicates.

    Returns:
        Notes on stored tensors that are ignored (rotary buffers, a duplicate of a tied head).
    Raises:
        ModelFileError: lists missing tensors, tensors of another shape or a type that can't be trained, and extra
            ones; counts of each, the first 20 by name.
    """
    stored, notes = model_dir.tensors, []
    specs = {spec.full_name: spec for unit in model.units for spec in unit.params.values()}
    if (HEAD_NAME in specs or model.tied) and resolve_tied(model_dir, bool(model.tied)):
        notes.append(f"{HEAD_NAME} is a stored copy of the tied embeddings; dropped.")
    missing = [name for name in specs if name not in stored]
    found = [(specs[name], stored[name]) for name in specs if name in stored]
    shapes = [f"{s.full_name}: {list(t.shape)}, expected {list(s.shape)}" for s, t in found if t.shape != s.shape]
    types = [f"{t.name}: {t.dtype}" for _, t in found if t.dtype not in _TRAINABLE]
    others = [name for name in stored if name not in specs and not (model.tied and name == HEAD_NAME)]
    ignored = [name for name in others if name.endswith(_IGNORED_ENDINGS)]
    extra = [name for name in others if not name.endswith(_IGNORED_ENDINGS)]
    problems = [
        *_list_problem("missing", missing),
        *_list_problem("of another shape than the config says", shapes),
        *_list_problem("of a type that can't be trained (use the unquantized model)", types),
        *_list_problem("unknown to this architecture", extra),
    ]
    if problems:
        raise ModelFileError("\n".join([f"{model_dir.path}: its tensors don't fit its {CONFIG}.", *problems]))
    if ignored:
        notes.append(f"{len(ignored)} stored rotary buffers are ignored; the config determines them.")
    return notes


def _list_problem(what: str, items: list[str]) -> Iterator[str]:
    if items:
        yield f"{len(items)} tensors are {what}:"
        yield from (f"  {item}" for item in items[:_MAX_LINES])
        if len(items) > _MAX_LINES:
            yield f"  ... and {len(items) - _MAX_LINES} more"


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = resolve_inside(directory, name)
    try:
        if not path.is_file():
            raise ModelFileError(f"{directory} has no {name}.{_hint(directory)}")
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path} has {path.stat().st_size} bytes; at most {_MAX_JSON_BYTES} are read.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path} can't be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is no JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} must hold a JSON object. Download it again.")
    return content


def _hint(directory: Path) -> str:
    """Say what a directory without the wanted files holds instead, with sizes."""
    kinds = (".bin", ".pt", ".pth", ".gguf", ".h5", ".safetensors")
    found = sorted(path for path in directory.iterdir() if path.suffix in kinds)
    if found:
        listed = ", ".join(
            f"{path.name} ({path.stat().st_size} bytes)" for path in found[:_MAX_LINES] if path.is_file()
        )
        return (
            f" It holds {listed}, none of which is used: only {SINGLE}, or {INDEX} and its shards, are read. "
            "Convert pickles with transformers: from_pretrained(DIR).save_pretrained(NEW_DIR)."
        )
    if (directory / "snapshots").is_dir():
        return " It is a folder of the hub's cache: give one of the directories in its snapshots folder."
    return " Download the model again."


def _refuse_quantized(directory: Path, config: Mapping[str, Any]) -> None:
    details = config.get("quantization_config") or config.get("quantization")
    if details:
        kind = details.get("quant_method") if isinstance(details, dict) else None
        bits = details.get("bits") if isinstance(details, dict) else None
        named = ", ".join(filter(None, [str(kind) if kind else "", f"{bits} bits" if bits else ""])) or "kind not named"
        raise ModelFileError(
            f"{directory} holds a quantized model ({named}); its weights can't be trained. Use the unquantized model."
        )


def _read_weight_map(directory: Path) -> dict[str, str] | None:
    """Return tensor name -> shard, or None where there is a single file and no index."""
    has_index, has_single = (directory / INDEX).is_file(), (directory / SINGLE).exists()
    if not has_index:
        if not has_single:
            raise ModelFileError(f"{directory} has neither {INDEX} nor {SINGLE}.{_hint(directory)}")
        return None
    weight_map = _read_json(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelFileError(f"{directory / INDEX}: weight_map must map tensor names to file names. Download it again.")
    if not weight_map:
        raise ModelFileError(f"{directory / INDEX}: weight_map is empty. Download it again.")
    packed = [name for name in weight_map if name.endswith(_QUANTIZED_ENDINGS)]
    if packed:
        raise ModelFileError(
            f"{directory} holds a quantized model ({len(packed)} tensors such as {packed[0]!r}); its weights can't be "
            "trained. Use the unquantized model."
        )
    if has_single and SINGLE not in weight_map.values():
        raise ModelFileError(f"{directory} has {SINGLE} and an {INDEX} that doesn't name it. Move one of them away.")
    return weight_map


def _open_shards(directory: Path, shards: list[str]) -> dict[str, TensorFile]:
    paths = {shard: resolve_inside(directory, shard) for shard in shards}
    missing = [shard for shard, path in paths.items() if not path.exists()]
    if missing:
        raise ModelFileError(
            f"{directory}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. "
            "The download was interrupted: fetch these files."
        )
    files, problems = {}, []
    for shard, path in paths.items():
        try:
            files[shard] = TensorFile(path)
        except ModelFileError as error:
            problems.append(str(error))
    if problems:
        raise ModelFileError("\n".join(problems))
    return files


def _join_headers(
    directory: Path, files: Mapping[str, TensorFile], weight_map: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for shard, file in files.items():
        for name, info in file.tensors.items():
            if name in tensors:
                problems.append(f"{name} is both in {tensors[name].shard} and in {shard}")
            elif weight_map is not None and name not in weight_map:
                problems.append(f"{name} is in {shard}, but not in the index")
            tensors.setdefault(name, info)
    for name, shard in (weight_map or {}).items():
        if name not in files[shard].tensors:
            problems.append(f"{name} is not in {shard}, where the index has it")
    if problems:
        lines = "\n".join(_list_problem("not where the index says", problems))
        raise ModelFileError(f"{directory}: index and shards disagree. Download them again.\n{lines}")
    if not tensors:
        raise ModelFileError(f"{directory}: its shards hold no tensors. Download them again.")
    return tensors


def _have_equal_bytes(model: ModelDir, first: str, second: str) -> bool:
    if second not in model.tensors:
        return False
    a, b = model.tensors[first], model.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pieces = (model.read_raw(name).split(_COMPARE_BYTES) if a.num_bytes else () for name in (first, second))
    return all(torch.equal(x, y) for x, y in zip(*pieces, strict=True))
