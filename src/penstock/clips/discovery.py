"""Find the video or audio files of a folder, of folders that are classes, of a list or of a pattern.

This module also recognises the folder of a LeRobot dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.clips.media import parse_member
from penstock.errors import ConfigError
from penstock.storage import Storage
from penstock.storage.names import Urls, expand
from penstock.storage.stream import in_threads
from penstock.storage.urls import path_of, shown

__all__ = ["LEROBOT_INFO", "SOUND_ENDINGS", "VIDEO_ENDINGS", "FileList", "find_files", "is_lerobot_folder"]

VIDEO_ENDINGS = (
    *(".3gp", ".asf", ".avi", ".divx", ".f4v", ".flv", ".m2ts", ".m2v", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg"),
    *(".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv"),
)
SOUND_ENDINGS = (
    *(".aac", ".aif", ".aiff", ".caf", ".flac", ".m4a", ".mka", ".mp2", ".mp3", ".oga", ".ogg", ".opus", ".wav"),
    ".wma",
)

LEROBOT_INFO = os.path.join("meta", "info.json")
"""The file that marks a LeRobot dataset and states its version."""


class FileList(NamedTuple):
    """Files with their classes.

    Attributes:
        paths: paths and URLs.
        classes: names of the class folders, sorted; empty without classes.
        labels: the class number of each path, or its label from the archive; empty if there are none.
    """

    paths: list[str]
    classes: list[str]
    labels: list[Any]


def find_files(files: Urls, endings: tuple[str, ...], storage: Storage | None = None) -> FileList:
    """Return the files that an argument refers to.

    Args:
        files: a folder of files or of class folders; a file, a pattern, a URL; or a list of these, which has no
            classes. Tar archives, and folders of them, yield their members.
        endings: extensions of files in folders, in lower case.
        storage: access to object stores, for patterns.

    Raises:
        ConfigError: a folder without such files, or with files beside class folders; or an empty list.
        ShardIOError, StorageNotFoundError: nothing matches a pattern.
    """
    names = expand(files, storage)
    if isinstance(files, str | os.PathLike) and len(names) == 1:
        path = path_of(names[0])
        if path is not None and os.path.isdir(path):
            archives = _archives_in(path, endings)
            return _in_archives(archives, endings, storage) if archives else _in_folder(path, endings)
        if path is not None and not os.path.lexists(path):
            raise ConfigError(f"{path} does not exist: pass a folder, a file, a pattern, or a list of these")
    names = [file for name in names for file in _files_of(name, endings)]
    archives = [name for name in names if _is_archive(name)]
    if len(archives) == len(names):
        return _in_archives(names, endings, storage)
    if archives:
        raise ConfigError(
            f"{shown(archives[0])!r} is a tar archive, and other files are not: pass a list of only one kind"
        )
    return FileList(names, [], [])


def _files_of(name: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files or archives of one name in a list."""
    if not os.path.isdir(name):
        return [name]
    return _archives_in(name, endings) or _in_folder(name, endings).paths


def _archives_in(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Return the tar archives in a folder.

    Raises:
        ConfigError: the folder contains media files, too.
    """
    archives = sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(".tar"))
    beside = next(_walk(folder, endings), None) if archives else None
    if beside is not None:
        raise ConfigError(
            f"{folder} contains tar archives, and beside them {beside[1]!r}: pass a list of one or the other"
        )
    return archives


def _is_archive(name: str) -> bool:
    return parse_member(name) is None and name.partition("?")[0].lower().endswith(".tar")


def _in_archives(archives: list[str], endings: tuple[str, ...], storage: Storage | None) -> FileList:
    from penstock.clips.tar_members import members_of

    listed = in_threads(lambda name: members_of(name, endings, storage), archives)
    members = [member for some in listed for member in some]
    if not members:
        raise ConfigError(f"{shown(archives[0])} and the others contain no member of this kind ({', '.join(endings)})")
    labels = [member.label for member in members]
    return FileList([member.name for member in members], [], labels if any(one is not None for one in labels) else [])


def is_lerobot_folder(path: str) -> bool:
    """Return whether a folder is a LeRobot dataset, of any version."""
    try:
        return "codebase_version" in json.loads(Path(path, LEROBOT_INFO).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _in_folder(root: str, endings: tuple[str, ...]) -> FileList:
    found = list(_walk(root, endings))
    if not found:
        raise ConfigError(f"{root} contains no file of this kind (by extension: {', '.join(endings)})")
    classes = sorted({first for first, _ in found} - {"."})
    if not classes:
        return FileList([path for _, path in found], [], [])
    beside = next((path for first, path in found if first == "."), None)
    if beside is not None:
        raise ConfigError(
            f"{root} contains class folders, and beside them the file {os.path.basename(beside)!r}: move it, or "
            "pass a list of files"
        )
    found.sort()
    numbers = {name: number for number, name in enumerate(classes)}
    return FileList([path for _, path in found], classes, [numbers[first] for first, _ in found])


def _walk(root: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (top-level folder, path) for the files below a folder; the folder is "." for files directly in it."""
    seen: set[tuple[int, int]] = set()  # links may form a cycle
    for at, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        status = os.stat(at)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        first = os.path.relpath(at, root).split(os.sep)[0]
        yield from ((first, os.path.join(at, name)) for name in sorted(names) if name.lower().endswith(endings))
