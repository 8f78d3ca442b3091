"""Read records (dicts) out of data files, or name the file and the line that can't be read.

JSON and JSONL are read here and not by `datasets`, which needs the same columns in every file and every line; parquet
is read by pyarrow, which `datasets` brings along. Neither needs a cache directory or a network. Only a hub name goes
through `datasets.load_dataset`.
"""

import gzip
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from lazytrain.errors import DataError

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev"})
_SIDE_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_FOREIGN = (
    (b"PAR1", "a parquet file: give it the name .parquet"),
    (b"\x1f\x8b", "a gzip file: give it the name .gz"),
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"version https://git-lfs", "a Git LFS pointer, not the data: fetch it with `git lfs pull`"),
    (b"<!doctype html", "an HTML page: the download went wrong, fetch the file again"),
    (b"<html", "an HTML page: the download went wrong, fetch the file again"),
)


class Record(NamedTuple):
    """One record and where it stands: `file`, and `place` in it ("line 3", "record 2")."""

    file: str
    place: str
    fields: dict[str, Any]


def find_files(source: Path, split: str) -> list[Path]:
    """Return the data files of a directory that belong to a split, or the file itself.

    A file belongs to a split if the split's name is a word of its path inside the directory. Where no path holds the
    name of any split, all files belong.

    Raises:
        DataError: no data file is there, or only files of other splits.
    """
    if source.is_file():
        return [source]
    paths = sorted(p for p in source.rglob("*") if p.name.endswith(SUFFIXES) and p.name not in _SIDE_FILES)
    paths = [p for p in paths if p.is_file() and not p.name.startswith(".")]
    words = {p: set(re.split(r"[^a-z0-9]+", str(p.relative_to(source)).lower())) for p in paths}
    chosen = [p for p in paths if split.lower() in words[p]]
    if not chosen and not any(words[p] & SPLIT_WORDS for p in paths):
        chosen = paths
    if not chosen:
        found = ", ".join(p.name for p in paths[:5]) or "none"
        raise DataError(
            f"{source}: no data file of the split {split!r} (data files found: {found}); name a file itself"
        )
    return chosen


def read_records(path: Path, split: str) -> Iterator[Record]:
    """Yield the records of one file: a JSON list, JSON lines, either of them gzipped, or parquet.

    Raises:
        DataError: the file is cut, is not what its name says, or holds something else than records.
    """
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
    try:
        with path.open("rb") as raw:
            _refuse_foreign(path, name, raw.read(64))
        if name.endswith(".parquet"):
            yield from _read_parquet(path)
            return
        with cast(BinaryIO, gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb")) as file:
            yield from _read_lines(path, file) if ".jsonl" in name else _read_json(path, file, split)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip data is cut or damaged ({error}); fetch the file again") from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


def read_hub_records(name: str, split: str, cache_fallback: Path | None) -> Iterator[Record]:
    """Yield the records of a data set of the hub, "owner/name" or "owner/name:config".

    Raises:
        DataError: unknown name, configuration or split, or no network and not in the cache.
    """
    cache_dir = choose_cache_dir(cache_fallback)  # before the import: huggingface_hub reads its variables only then
    import datasets

    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=split, cache_dir=str(cache_dir))
    except Exception as error:  # the library raises a dozen unrelated types for one user's mistake
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        offline = " (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)" if datasets.config.HF_HUB_OFFLINE else ""
        raise DataError(
            f"{name}: no such file here, and the hub's data set can't be loaded{offline}: {reason}; "
            f"check name, configuration (name:config), split ({split!r}) and network, or give a local file"
        ) from error
    for index, fields in enumerate(rows):
        yield Record(name, f"row {index}", fields)


def choose_cache_dir(fallback: Path | None) -> Path:
    """Return the cache directory of `datasets`, or, with a warning, `fallback` where that can't be written.

    Args:
        fallback: under the run directory, say; None = a temporary directory.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(xdg, "huggingface"))
    wanted = Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        chosen = fallback or Path(tempfile.mkdtemp(prefix="lazytrain-datasets-"))
        chosen.mkdir(parents=True, exist_ok=True)
        warnings.warn(f"cache directory {wanted} can't be written ({error.strerror}); {chosen} is used", stacklevel=2)
    for variable, folder in (("HF_DATASETS_CACHE", ""), ("HF_HUB_CACHE", "hub"), ("HF_XET_CACHE", "xet")):
        os.environ[variable] = str(chosen / folder)
    return chosen


def _refuse_foreign(path: Path, name: str, head: bytes) -> None:
    if not head:
        raise DataError(f"{path}: the file is empty (0 bytes); fetch it again")
    own = b"PAR1" if name.endswith(".parquet") else b"\x1f\x8b" if name.endswith(".gz") else None
    for magic, what in _FOREIGN:
        if magic != own and head.lstrip(b"\xef\xbb\xbf \r\n\t")[: len(magic)].lower() == magic.lower():
            raise DataError(f"{path}: not what its name says; it is {what}")
    if name.endswith(".parquet") and not head.startswith(b"PAR1"):
        raise DataError(f"{path}: not a parquet file (it begins with {head[:8]!r}); name it after what it is")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        index = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    yield Record(str(path), f"row {index}", fields)
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: the parquet data is cut or damaged ({error}); fetch the file again") from error


def _read_lines(path: Path, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):  # binary: only \n ends a line, as JSON lines have it
        if not line.strip():
            continue
        value = _parse(path, line, number)
        if isinstance(value, list) and number == 1:
            raise DataError(f"{path}: line 1: a JSON list, not JSON lines: give the file the name .json")
        yield _check_record(path, f"line {number}", value)


def _read_json(path: Path, file: BinaryIO, split: str) -> Iterator[Record]:
    content = file.read()
    first_line = content.lstrip(b"\xef\xbb\xbf \r\n\t").partition(b"\n")[0]
    if first_line.startswith(b"{") and _is_object(first_line) and content.strip() != first_line.strip():
        yield from _read_lines(path, io.BytesIO(content))  # JSON lines under the name .json are common on the hub
        return
    value = _parse(path, content, 1)
    if isinstance(value, dict):
        lists = {
            key: item for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)
        }
        if split not in lists and len(lists) > 1:
            raise DataError(f"{path}: several lists of records ({', '.join(lists)}), none named as the split {split!r}")
        value = lists.get(split) or next(iter(lists.values()), [value])
    if not isinstance(value, list):
        raise DataError(f"{path}: a JSON {type(value).__name__}, not a list of records")
    for index, fields in enumerate(value, start=1):
        yield _check_record(path, f"record {index}", fields)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse(path: Path, content: bytes, first_line: int) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(
            f"{path}: line {line}, column {error.colno}: not valid JSON ({error.msg}); "
            "the file may be cut: fetch it again or remove the line"
        ) from error
    except UnicodeDecodeError as error:
        line = first_line + content[: error.start].count(b"\n")
        raise DataError(f"{path}: line {line}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}: line {first_line}: JSON that can't be read ({error})") from error


def _check_record(path: Path, place: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {place}: expected an object with named columns, found {type(value).__name__}")
    return Record(str(path), place, value)
