"""Resolve the sources that a user names to local paths and URLs."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, ManifestError, ManifestIOError
from penstock.storage.urls import is_remote, local_part

if TYPE_CHECKING:
    from penstock.storage import Storage

__all__ = ["Source", "as_root", "as_storage", "as_text", "expand", "local_folder"]

Source = str | os.PathLike[str]

_OURS = (".pstk", ".sizes.arrow")  # files that Penstock writes beside sources; patterns may match them


def as_text(path: Source, what: str) -> str:
    """Return a URL as it is, anything else as a local path; ``what`` is the argument's name for errors."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a str or a Path, not {path!r}")
    return text if is_remote(text) else local_part(text)


def as_root(root: Source) -> str:
    """Return the root of relative paths: a folder or a URL."""
    return as_text(root, "root")


def as_storage(storage: Storage | None) -> Storage:
    """Return the given storage options, or the defaults."""
    from penstock.storage import Storage  # needed for URLs only

    return Storage() if storage is None else storage


def local_folder(path: Source, what: str) -> str:
    """Return the absolute path of a folder; ManifestError for a URL."""
    text = as_text(path, what)
    if is_remote(text):
        raise ManifestError(f"{what} {text!r} must be a folder of this machine, not a remote address")
    return os.path.abspath(text)


def _ours_left_out(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(_OURS)]


def expand(source: Source | Sequence[Source], storage: Storage | None = None) -> list[str]:
    """Return the absolute paths and URLs of all sources, with patterns expanded."""
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not given:
        raise ConfigError("no source was given")
    paths: list[str] = []
    for item in given:
        text = as_text(item, "source")
        if is_remote(text):  # a question mark begins the query of a web address
            pattern = any(sign in text for sign in "*[") and not text.startswith(("http://", "https://"))
            paths += _ours_left_out(as_storage(storage).glob(text)) if pattern else [text]
            continue
        path = os.path.abspath(text)
        if glob.has_magic(path) and not os.path.lexists(path):
            found = _ours_left_out(sorted(glob.glob(path, recursive=True)))
            if not found:
                raise ManifestIOError(f"no file matches {path}")
            paths += found
        else:
            paths.append(path)
    return paths
