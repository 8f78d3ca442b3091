"""Which file names from untrusted files (an index, a manifest) may be opened: plain ones inside their directory."""

from pathlib import Path

from lazytrain.errors import ModelFileError

MAX_NAME_BYTES = 255  # of every common file system; beyond it even asking for the file is an OSError


def is_plain_name(name: str) -> bool:
    """Tell whether `name` names a file of one directory: no path parts, nothing that leaves the directory."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0") or not name.isprintable():
        return False
    return len(name.encode()) <= MAX_NAME_BYTES


def resolve_inside(directory: Path, name: str) -> Path:
    """Return the path of a plain file name whose symlinks, if any, don't leave its directory.

    The hub's cache keeps `.../snapshots/REVISION/name` as a link to `.../blobs/HASH`: such a link is followed, no
    other that leaves the directory is.

    Args:
        directory: resolved.
    Raises:
        ModelFileError: the name has path parts, or a link leaves the directory.
    """
    if not is_plain_name(name):
        raise ModelFileError(
            f"{directory}: {name!r} is not a plain file name inside the directory. Don't use this model."
        )
    path = directory / name
    target = path.resolve()
    in_cache = directory.parent.name == "snapshots" and target.parent == directory.parent.parent / "blobs"
    if not target.is_relative_to(directory) and not in_cache:
        raise ModelFileError(
            f"{path} is a symlink that leaves the directory ({target}). Replace it by the file itself."
        )
    return path
