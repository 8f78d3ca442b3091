"""Manifests: JSON that carries its own checksum and records size and checksums of the files beside it.

    {"crc32": C, "body": {"format": F, "version": V, "files": {NAME: FileRecord}, ...}}

C is the CRC-32 of the body as compact JSON with sorted keys. Every value is checked before anything is done with it: a
manifest may come from a stranger.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazytrain.errors import LazyTrainError
from lazytrain.paths import is_plain_name
from lazytrain.tensorwriter import FileRecord

MANIFEST = "manifest.json"
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "lazytrain-checkpoint", 2
# In a model directory of ours; a checkpoint, which is one too, has its own manifest.
MODEL_CHECKSUMS = "lazytrain_checksums.json"
MODEL_FORMAT, MODEL_VERSION = "lazytrain-model", 1

_MAX_BYTES = 100_000_000


class ManifestError(LazyTrainError):
    """A manifest that is missing, damaged, of another version, or lists files outside its directory."""


class ManifestVersionError(ManifestError):
    """An intact manifest of another format or version."""


def encode_manifest(form: str, version: int, files: Mapping[str, FileRecord], **others: Any) -> bytes:
    """Return the bytes of a manifest; `others` are further JSON fields of its body."""
    records = {
        name: {key: value for key, value in record._asdict().items() if key != "piece_checksums" or value}
        for name, record in files.items()
    }
    body = {"format": form, "version": version, **others, "files": records}
    return json.dumps({"crc32": zlib.crc32(canonical(body)), "body": body}, indent=1).encode()


def read_manifest(path: Path, form: str, version: int) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """Return a manifest's body and its file records; nothing else than the manifest is opened.

    Raises:
        ManifestError: no such file, a damaged one, another format or version, a record with wrong values, or a name
            that is not a plain file name.
    """
    try:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _MAX_BYTES:
            raise ManifestError(f"{path.parent} has no {path.name}: it was never completed.")
        content = json.loads(path.read_bytes())
        body = content["body"]
        if content["crc32"] != zlib.crc32(canonical(body)):
            raise ManifestError(f"{path} is damaged: its checksum differs.")
        if (body["format"], body["version"]) != (form, version):
            raise ManifestVersionError(f"{path} has version {body['version']}; this program reads {version} of {form}.")
        records = body["files"]
        outside = [name for name in records if not is_plain_name(name)]
        if outside:
            raise ManifestError(f"{path} lists {outside[0]!r}, which is no plain file name. Don't use it.")
        files = {name: _read_record(name, record) for name, record in records.items()}
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged ({error!r}).") from error
    return body, files


def canonical(body: Any) -> bytes:
    """Return the one JSON text of a value that its checksum is taken of."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def is_count(value: Any, limit: int = 2**63) -> bool:
    """Tell whether a JSON value is a whole number from 0 to below `limit` (true and false are none)."""
    return type(value) is int and 0 <= value < limit


def _read_record(name: str, value: Any) -> FileRecord:
    record = FileRecord(**value)
    checksums, pieces = record.tensor_crc32, record.piece_checksums
    if not isinstance(checksums, dict) or not all(is_count(checksum, 2**32) for checksum in checksums.values()):
        raise ValueError(f"{name}: tensor_crc32 must map tensor names to checksums")
    if not isinstance(pieces, list | tuple) or not all(is_count(checksum, 2**32) for checksum in pieces):
        raise ValueError(f"{name}: piece_checksums must be a list of checksums")
    if not is_count(record.size_bytes) or not is_count(record.header_crc32, 2**32):
        raise ValueError(f"{name}: size_bytes and header_crc32 must be whole numbers of 0 or more")
    return record._replace(piece_checksums=tuple(pieces))
