"""From what a user names to the files of this machine."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from penstock.errors import ConfigError, ManifestError, ManifestIOError

__all__ = ["Source", "expand", "local_path"]

Source = str | os.PathLike[str]

_OURS = (".pstk", ".sizes.arrow")  # what we write beside sources, which their patterns may match as well
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def local_path(path: Source, what: str) -> str:
    """The path as str; ManifestError for a remote address, ``what`` being the argument's name."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a str or a Path, not {path!r}")
    if _REMOTE.match(text):
        raise ManifestError(f"{what} {text!r}: remote addresses are not supported in this version; use a local path")
    return text


def expand(source: Source | Sequence[Source]) -> list[str]:
    """Absolute paths of all sources, patterns expanded."""
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not given:
        raise ConfigError("no source was given")
    paths: list[str] = []
    for item in given:
        path = os.path.abspath(local_path(item, "source"))
        if glob.has_magic(path) and not os.path.lexists(path):
            found = sorted(name for name in glob.glob(path, recursive=True) if not name.endswith(_OURS))
            if not found:
                raise ManifestIOError(f"no file matches {path}")
            paths += found
        else:
            paths.append(path)
    return paths
