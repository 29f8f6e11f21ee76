"""Which files of video or sound are meant: a folder of them, or of folders that are classes; a list, a pattern. Or the
folder is a data set of LeRobot.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.shards.urls import Urls, expand
from penstock.storage import Storage

__all__ = ["LEROBOT_INFO", "SOUND_ENDINGS", "VIDEO_ENDINGS", "Found", "files_of", "is_lerobot_folder"]

VIDEO_ENDINGS = (
    *(".3gp", ".asf", ".avi", ".divx", ".f4v", ".flv", ".m2ts", ".m2v", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg"),
    *(".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv"),
)
SOUND_ENDINGS = (
    *(".aac", ".aif", ".aiff", ".caf", ".flac", ".m4a", ".mka", ".mp2", ".mp3", ".oga", ".ogg", ".opus", ".wav"),
    ".wma",
)

LEROBOT_INFO = os.path.join("meta", "info.json")
"""The file that says that a folder is a data set of LeRobot, and of which version."""


class Found(NamedTuple):
    """Files, and the classes that they are in.

    Attributes:
        paths: and addresses.
        classes: names of the folders that are classes, sorted; empty where there are none.
        labels: the number of the class of each path.
    """

    paths: list[str]
    classes: list[str]
    labels: list[int]


def files_of(files: Urls, endings: tuple[str, ...], storage: Storage | None = None) -> Found:
    """Return the files that are meant.

    Args:
        files: a folder of files, or of folders of them, which are classes; a file, a pattern, an address in a store; or
            a list of these.
        endings: of the names of those in folders, in small letters.
        storage: how stores are reached, for patterns.

    Raises:
        ConfigError: a folder without such files, or with some beside folders of classes; or nothing is named.
        ShardIOError, StorageNotFoundError: a pattern that nothing matches.
    """
    if isinstance(files, str | os.PathLike) and os.path.isdir(files):
        return _in_folder(os.fspath(files), endings)
    return Found(expand(files, storage), [], [])


def is_lerobot_folder(path: str) -> bool:
    """Return whether a folder is a data set of LeRobot, of any version."""
    try:
        return "codebase_version" in json.loads(Path(path, LEROBOT_INFO).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _in_folder(root: str, endings: tuple[str, ...]) -> Found:
    found: list[tuple[str, str]] = []
    for at, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        first = os.path.relpath(at, root).split(os.sep)[0]
        found.extend((first, os.path.join(at, name)) for name in sorted(names) if name.lower().endswith(endings))
    if not found:
        raise ConfigError(f"{root} holds no file of this kind (by their names: {', '.join(endings)})")
    classes = sorted({first for first, _ in found} - {"."})
    if not classes:
        return Found([path for _, path in found], [], [])
    beside = next((path for first, path in found if first == "."), None)
    if beside is not None:
        raise ConfigError(
            f"{root} holds folders of files, which are classes, and beside them {os.path.basename(beside)!r}: move "
            "it, or give a list of files"
        )
    found.sort()
    numbers = {name: number for number, name in enumerate(classes)}
    return Found([path for _, path in found], classes, [numbers[first] for first, _ in found])
