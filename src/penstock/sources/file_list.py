"""Lists of the files in a folder: manifests in text, which read back every name as it is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import ManifestError
from penstock.images.sample_record import EXTENSIONS
from penstock.storage.derived import derived_path, write_derived
from penstock.storage.files import DATA

__all__ = ["list_arrays", "list_images"]


def list_images(folder: str | os.PathLike[str], out: Path | None = None) -> dict[str, Any] | None:
    """Write a manifest of a folder with a subfolder of images for each class, and return the arguments of
    `Manifest.open` for it; None if it has no images.

    Args:
        folder: the folder. Classes are numbered in the order of their names. Hidden folders and files, such as those
            of editors, are ignored. A folder without images counts as a class, with a warning.
        out: the path of the manifest; by default in the user's cache, see `_write`.

    Raises:
        ManifestError: an image name contains a line break, which a manifest cannot hold.
    """
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    lines: list[bytes] = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        found = [_line(os.path.relpath(path, folder), label) for path in _images(os.path.join(folder, name))]
        lines += found
        empty += [] if found else [name]
    if not lines:
        return None
    if empty:
        verb, kind = ("", "classes") if len(empty) > 1 else ("s", "a class")
        warnings.warn(
            f"{os.fspath(folder)}: {', '.join(map(repr, empty))} contain{verb} no images, and count{verb} as {kind}: "
            "classes after an empty folder have higher labels. Remove an empty folder that is not a class",
            stacklevel=2,
        )
    return {"source": _write(lines, folder, out), "root": os.path.abspath(folder), "classes": classes}


def list_arrays(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Write a manifest of the ``.npy`` files in a folder, sorted by name, and return the arguments of `Manifest.open`
    for it; None if there are no files. Hidden files and subfolders are left out.

    Raises:
        ManifestError: a file name contains a line break.
        DataFileIOError: the folder cannot be read.
    """
    with DATA.naming(folder):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".npy") and not name.startswith("."))
    if not names:
        return None
    return {"source": _write([_line(name) for name in names], folder), "root": os.path.abspath(folder), "label": None}


def _images(folder: str) -> Iterator[str]:
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found = sorted(name for name in names if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
        yield from (os.path.join(base, name) for name in found)


def _line(path: str, label: int | None = None) -> bytes:
    """Return the line of a relative path, and of its label."""
    if "\n" in path:
        raise ManifestError(f"{path!r}: a name with a line break cannot be in a manifest: rename it")
    if path[0] in " \t\ufeff":
        # A manifest strips spaces around a field, and skips a byte order mark.
        path = f"./{path}"
    text = path if label is None else f"{path} {label}"
    return f"{text}\n".encode("utf-8", "surrogateescape")


def _write(lines: list[bytes], folder: str | os.PathLike[str], path: Path | None = None) -> Path:
    """Write a list and return its path.

    By default it is a file in the user's cache with a name by folder and content: a folder that grows gets a list of
    another name, and running jobs keep theirs. So does another folder with the same names of files, because sizes and
    entries of the images lie beside the list.
    """
    content = b"".join(lines)
    key = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)) + b"\0" + content)
    where = derived_path("folders", f"{key}.txt") if path is None else path
    if not where.exists() or where.read_bytes() != content:
        where.parent.mkdir(parents=True, exist_ok=True)
        with write_derived(where) as file:
            file.write(content)
    return where
