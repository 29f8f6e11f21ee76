"""`VideoFiles`: clips of files of video as rows, by numbers alone: which frames of which file."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.clips.clip_index import ClipIndex
from penstock.clips.packets import Ints
from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.shards.urls import Urls, expand
from penstock.storage import Storage

__all__ = ["ENDINGS", "ClipRecord", "ClipRule", "Found", "VideoFiles", "is_video", "videos_of"]

ENDINGS = (
    *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"),
    *(".webm", ".wmv"),
)


def is_video(name: str) -> bool:
    """Whether a file of this name is taken for a video.

    >>> is_video("run/1.MP4"), is_video("notes.txt")
    (True, False)
    """
    return name.lower().endswith(ENDINGS)


class Found(NamedTuple):
    """Files of video, and the classes that they are in.

    Attributes:
        paths: and addresses.
        classes: names of the folders that are classes, sorted; empty where there are none.
        labels: the number of the class of each path.
    """

    paths: list[str]
    classes: list[str]
    labels: list[int]


def videos_of(files: Urls, storage: Storage | None = None) -> Found:
    """Return the videos that are meant.

    Args:
        files: a folder of videos, or of folders of them, which are classes; a file, a pattern, an address in a store;
            or a list of these.
        storage: how stores are reached, for patterns.

    Raises:
        ConfigError: a folder without videos, or with some beside folders of classes; or nothing is named.
        ShardIOError, StorageNotFoundError: a pattern that nothing matches.
    """
    if isinstance(files, str | os.PathLike) and os.path.isdir(files):
        return _in_folder(os.fspath(files))
    return Found(expand(files, storage), [], [])


def _in_folder(root: str) -> Found:
    found: list[tuple[str, str]] = []
    for at, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        first = os.path.relpath(at, root).split(os.sep)[0]
        found.extend((first, os.path.join(at, name)) for name in sorted(names) if is_video(name))
    if not found:
        raise ConfigError(f"{root} holds no video (by their names: {', '.join(ENDINGS)})")
    classes = sorted({first for first, _ in found} - {"."})
    if not classes:
        return Found([path for _, path in found], [], [])
    beside = next((path for first, path in found if first == "."), None)
    if beside is not None:
        raise ConfigError(
            f"{root} holds folders of videos, which are classes, and beside them {os.path.basename(beside)!r}: move "
            "it, or give a list of files"
        )
    found.sort()
    numbers = {name: number for number, name in enumerate(classes)}
    return Found([path for _, path in found], classes, [numbers[first] for first, _ in found])


class ClipRule(NamedTuple):
    """Which frames are a clip.

    Attributes:
        frames: of a clip.
        step: from one frame of a clip to the next.
        stride: frames from the beginning of a clip to that of the next; None: one clip of each file.
        random_start: whether the one clip of a file begins anywhere in it, or at its first frame.
    """

    frames: int
    step: int
    stride: int | None
    random_start: bool

    @property
    def span(self) -> int:
        """Frames from the first of a clip to its last, inclusive."""
        return (self.frames - 1) * self.step + 1

    def clips_of(self, frames: Ints) -> Ints:
        """Return how many clips files of so many frames have: one at least."""
        if self.stride is None:
            return np.ones_like(frames)
        return np.maximum((frames - self.span) // self.stride + 1, 1)


class ClipRecord(NamedTuple):
    """A row: where a clip may begin, in which file.

    Attributes:
        row: its number among all.
        path: of the file.
        file: its number in the index.
        first, last: the first and the last frame at which the clip may begin.
        end: the number of frames of the file.
        label: of the file; None if nobody said any.
    """

    row: int
    path: str
    file: int
    first: int
    last: int
    end: int
    label: Any


class VideoFiles:
    """The clips of some files.

    Args:
        index: of the files.
        rule: which clips they have.
        labels: of the files, in their order; None for none.

    Raises:
        ConfigError: labels for another number of files.

    Memory: 16 bytes for each file, whatever their length, and the labels.
    """

    fork_safe = True

    def __init__(self, index: ClipIndex, rule: ClipRule, labels: Sequence[Any] | None = None) -> None:
        if labels is not None and len(labels) != len(index):
            raise ConfigError(f"{len(labels)} labels for {len(index)} files: give one for each")
        self.index, self.rule, self.labels = index, rule, labels
        self._ends: Ints = np.cumsum(rule.clips_of(index.frames))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"VideoFiles({len(self):,} clips of {len(self.index):,} files)"

    def __reduce__(self) -> tuple[Any, ...]:
        return VideoFiles, (self.index, self.rule, self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the rows: what the files hold, their labels, and which frames are a clip."""
        return self._prefix(len(self.index))

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether files with this fingerprint have since got more files behind them."""
        files = np.flatnonzero(self._ends == rows)
        return any(self._prefix(int(file) + 1) == fingerprint for file in files)

    def _prefix(self, files: int) -> str:
        digest = xxhash.xxh3_128(repr(tuple(self.rule)).encode())
        for one in self.index.column("digest")[:files]:
            digest.update(one)
        if self.labels is not None:
            digest.update(repr([self.labels[file] for file in range(files)]).encode())
        return digest.hexdigest()

    def records(self, rows: Indices) -> list[ClipRecord]:
        """Return the records of some rows, in this order."""
        numbers = np.asarray(rows, np.int64)
        count = len(self)
        outside = (numbers < -count) | (numbers >= count)
        if outside.any():
            raise IndexError(f"row {int(numbers[outside][0])} is out of range for {count} clips")
        numbers = np.where(numbers < 0, numbers + count, numbers)
        files = np.searchsorted(self._ends, numbers, side="right")
        begins = self._ends[files] - self.rule.clips_of(self.index.frames[files])
        return [
            self._record(row, file, number)
            for row, file, number in zip(numbers.tolist(), files.tolist(), (numbers - begins).tolist(), strict=True)
        ]

    def __getitem__(self, row: int) -> ClipRecord:
        return self.records(np.array([operator.index(row)]))[0]

    def _record(self, row: int, file: int, number: int) -> ClipRecord:
        end, rule = int(self.index.frames[file]), self.rule
        if rule.stride is not None:
            first = last = number * rule.stride
        else:
            first, last = 0, max(0, end - rule.span) if rule.random_start else 0
        label = None if self.labels is None else self.labels[file]
        return ClipRecord(row, self.index.path_of(file), file, first, last, end, label)
