"""Describe the contents of a folder for error messages: "2 folders (a, b), in which there are 7 .txt files"."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

from penstock.images.files import is_image
from penstock.wording import counted

__all__ = ["count_images", "describe_folder"]

_SHOWN = 3
_MOST = 10_000
"""The most entries to read, so that an error message does not take long."""


def describe_folder(path: str) -> str:
    """Return a description of a folder and of its subfolders; hidden files are left out."""
    files, folders = _look(path)
    parts = [f"{counted(len(folders), 'folder')} ({_names(folders)})"] if folders else []
    parts += _kinds(files)
    found = f"a folder with {' and '.join(parts)}" if parts else "an empty folder"
    inside = [name for folder in folders[:_SHOWN] for name in _look(os.path.join(path, folder))[0]]
    if inside:
        found += f", in which there are {' and '.join(_kinds(inside))}"
    elif folders:
        found += ", in which there are no files"
    return found


def count_images(path: str) -> int:
    """Return the number of images directly in a folder."""
    return sum(map(is_image, _look(path)[0]))


def _look(path: str) -> tuple[list[str], list[str]]:
    """Return the names of files and of folders in a folder."""
    with os.scandir(path) as entries:
        found = [(entry.name, entry.is_dir()) for entry in islice(entries, _MOST) if not entry.name.startswith(".")]
    return sorted(name for name, is_dir in found if not is_dir), sorted(name for name, is_dir in found if is_dir)


def _kinds(files: list[str]) -> list[str]:
    kinds = Counter(os.path.splitext(name)[1].lower() for name in files)
    common = [counted(count, f"{kind} file" if kind else "file") for kind, count in kinds.most_common(_SHOWN)]
    return [*common, "others"] if len(kinds) > _SHOWN else common


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
