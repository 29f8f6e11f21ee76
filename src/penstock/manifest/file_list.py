"""Lists of the files in a folder: manifests in text, which read back every name as it is."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from penstock.errors import ManifestError
from penstock.storage import kept_path, load_or_write

__all__ = ["line_of", "write_list"]


def line_of(path: str, label: int | None = None) -> bytes:
    """Return the line of a relative path, and of its label.

    Raises:
        ManifestError: the path contains a line break, which a manifest cannot hold.
    """
    if "\n" in path:
        raise ManifestError(f"{path!r}: a name with a line break cannot be in a manifest: rename it")
    if path[0] in " \t\ufeff":
        # A manifest strips spaces around a field, and skips a byte order mark.
        path = f"./{path}"
    text = path if label is None else f"{path} {label}"
    return f"{text}\n".encode("utf-8", "surrogateescape")


def write_list(lines: list[bytes], folder: str | os.PathLike[str], path: Path | None = None) -> Path:
    """Write a list and return its path.

    Args:
        lines: from `line_of`.
        folder: the folder of the files.
        path: by default a file in the user's cache with a name by folder and content: a folder that grows gets a list
            of another name, and running jobs keep theirs. So does another folder with the same names of files, because
            sizes and entries of the images lie beside the list.
    """
    content = b"".join(lines)
    key = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)) + b"\0" + content)
    where = kept_path("folders", f"{key}.txt") if path is None else path
    return load_or_write(
        [where],
        lambda path: path if path.exists() and path.read_bytes() == content else None,
        lambda out: out.write(content),
    )
