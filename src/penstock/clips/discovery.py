"""Which files of video or sound are meant: a folder of them, or of folders that are classes; a list, a pattern. Or the
folder is a data set of LeRobot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from penstock.clips.media import place_of
from penstock.errors import ConfigError
from penstock.shards.urls import Urls, expand, local_path
from penstock.storage import Storage
from penstock.storage.parallel_requests import in_threads
from penstock.storage.urls import shown

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
        labels: the number of the class of each path, or what lies beside it in an archive; empty where there are none.
    """

    paths: list[str]
    classes: list[str]
    labels: list[Any]


def files_of(files: Urls, endings: tuple[str, ...], storage: Storage | None = None) -> Found:
    """Return the files that are meant.

    Args:
        files: a folder of files, or of folders of them, which are classes; a file, a pattern, an address in a store; or
            a list of these, in which there are no classes. Of tar archives, and of a folder of those, the members.
        endings: of the names of those in folders, in small letters.
        storage: how stores are reached, for patterns.

    Raises:
        ConfigError: a folder without such files, or with some beside folders of classes; or nothing is named.
        ShardIOError, StorageNotFoundError: a pattern that nothing matches.
    """
    if _is_folder(files):
        archives = _archives_in(os.fspath(files), endings)
        return _in_archives(archives, endings, storage) if archives else _in_folder(os.fspath(files), endings)
    if isinstance(files, str | os.PathLike | bytes) or not isinstance(files, Iterable):
        names = expand(files, storage)
        if len(names) == 1 and not _is_there(names[0]):
            raise ConfigError(f"{names[0]} does not exist: give a folder, a file, a pattern, or a list of these")
    else:
        names = [name for one in files for name in _listed(one, endings, storage)] or expand(files, storage)
    archives = [name for name in names if _is_archive(name)]
    if len(archives) == len(names):
        return _in_archives(names, endings, storage)
    if archives:
        raise ConfigError(f"{shown(archives[0])!r} is a tar archive, and others are none: give a list of either")
    return Found(names, [], [])


def _listed(one: Any, endings: tuple[str, ...], storage: Storage | None) -> list[str]:
    """The files, or archives, that an element of a list means."""
    if not _is_folder(one):
        return expand(one, storage)
    return _archives_in(os.fspath(one), endings) or _in_folder(os.fspath(one), endings).paths


def _is_folder(one: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(one, str | os.PathLike) and os.path.isdir(one)


def _archives_in(folder: str, endings: tuple[str, ...]) -> list[str]:
    """The tar archives in a folder.

    Raises:
        ConfigError: other files of this kind are beside them.
    """
    archives = sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(".tar"))
    beside = next(_walk(folder, endings), None) if archives else None
    if beside is not None:
        raise ConfigError(
            f"{folder} holds tar archives, and beside them {beside[1]!r}: give a list of one or the other"
        )
    return archives


def _is_there(name: str) -> bool:
    """Whether a path leads to something; of an address that is found out later."""
    path = local_path(name)
    return path is None or os.path.lexists(path)


def _is_archive(name: str) -> bool:
    return place_of(name) is None and name.partition("?")[0].lower().endswith(".tar")


def _in_archives(archives: list[str], endings: tuple[str, ...], storage: Storage | None) -> Found:
    from penstock.clips.tar_members import members_of

    listed = in_threads(lambda name: members_of(name, endings, storage), archives)
    members = [member for some in listed for member in some]
    if not members:
        raise ConfigError(f"{shown(archives[0])} and the like hold no member of this kind ({', '.join(endings)})")
    labels = [member.label for member in members]
    return Found([member.name for member in members], [], labels if any(one is not None for one in labels) else [])


def is_lerobot_folder(path: str) -> bool:
    """Return whether a folder is a data set of LeRobot, of any version."""
    try:
        return "codebase_version" in json.loads(Path(path, LEROBOT_INFO).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _in_folder(root: str, endings: tuple[str, ...]) -> Found:
    found = list(_walk(root, endings))
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


def _walk(root: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder, each with the first folder that it is in; "." for none."""
    seen: set[tuple[int, int]] = set()  # a link may lead back
    for at, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        status = os.stat(at)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        first = os.path.relpath(at, root).split(os.sep)[0]
        yield from ((first, os.path.join(at, name)) for name in sorted(names) if name.lower().endswith(endings))
