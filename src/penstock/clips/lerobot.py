"""`LeRobotFiles`: a source whose rows are the frames of a LeRobot dataset's episodes.

    row -> episode, frame in it -> table rows, one per time of a window
                                -> seconds in the video of each camera

A window is a list of times relative to a frame, in frames: ``[-1, 0, 1]``. Times beyond an end of the episode use its
first or last frame, and a mask marks them.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.clips.indexing import open_index
from penstock.clips.lerobot_meta import LeRobotMeta
from penstock.clips.lerobot_options import (
    PLACE,
    Window,
    check_tolerance,
    chosen_columns,
    chosen_episodes,
    windows_of,
)
from penstock.clips.packets import Ints
from penstock.errors import DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.stages import stage
from penstock.tables.found_files import FoundFiles
from penstock.tables.table import CACHE_BYTES, TableFiles
from penstock.tables.values import as_array, as_values, shaped
from penstock.wording import counted

__all__ = ["FrameRecord", "LeRobotFiles", "StoredImages", "VideoTimes"]

_NOW: Window = (0,)


class VideoTimes(NamedTuple):
    """Frames of one camera, stored in a video.

    Attributes:
        file: number of the video in the index.
        seconds: float64 (times,): display times of the frames.
        episode: number of the episode, for messages.
    """

    file: int
    seconds: npt.NDArray[np.float64]
    episode: int


class StoredImages(NamedTuple):
    """Frames of one camera, stored as images in the tables.

    Attributes:
        images: the encoded bytes of each image, and its name for messages.
        is_window: whether the camera has a window, so the result has a time dimension.
    """

    images: list[tuple[bytes | None, str]]
    is_window: bool


class FrameRecord(NamedTuple):
    """A row: a frame's values from the tables, windows included, and the locations of its images.

    Attributes:
        row: its number in the source.
        values: arrays, numbers or text by feature; the first dimension of a window is time.
        cameras: location of the images by feature.
    """

    row: int
    values: dict[str, Any]
    cameras: dict[str, VideoTimes | StoredImages]


class _Spans(NamedTuple):
    """Positions of the chosen episodes in the open tables.

    Attributes:
        begin: the first table row of each episode.
        length: its number of frames.
        end: the total number of frames of the chosen episodes up to and including this one.
        files: the number of tables that contain the episodes up to this one.
    """

    begin: Ints
    length: Ints
    end: Ints
    files: Ints


class _Places(NamedTuple):
    """Frames with their episodes.

    Attributes:
        span: int64 (n,): index of the episode among the chosen ones.
        place: int64 (n,): number of the frame in the episode.
        begin, length: int64 (n,): the episode's, as in `_Spans`.
    """

    span: Ints
    place: Ints
    begin: Ints
    length: Ints

    def rows(self, window: Window) -> Ints:
        """Return the table rows of a window's times, clipped to the episode: int64 (n, times)."""
        return self.begin[:, None] + np.clip(self._times(window), 0, self.length[:, None] - 1)

    def outside(self, window: Window) -> npt.NDArray[np.bool_]:
        """Return which times of a window are outside the episode: bool (n, times)."""
        times = self._times(window)
        return (times < 0) | (times >= self.length[:, None])

    def _times(self, window: Window) -> Ints:
        return self.place[:, None] + np.array(window, np.int64)


class LeRobotFiles:
    """The frames of a LeRobot dataset's episodes.

    Args:
        root: folder of the dataset.
        episodes: episode numbers, in any order; None for all. Rows are in ascending order of episodes.
        columns: names of the features to read, in addition to those that identify the frame; None for all.
        delta_timestamps: times of a feature's window in seconds relative to the frame, by feature.
        tolerance_s: by how many seconds a time may differ from the time of a frame.
        index: path of the index of the videos' packets; by default it is in the cache.
        cache_bytes: memory per process for decoded row groups, 256 MiB by default.
        progress: show a progress bar while videos are indexed.

    Raises:
        ConfigError: invalid arguments, or unknown features or episodes.
        DataFileError: a file is damaged, or contradicts another one; or ``index`` belongs to other files.
        DataFileIOError: a file is missing, or cannot be read.

    Memory: 150 bytes per episode, ``cache_bytes``, and the text of the tasks. Safe in threads; a pickle contains no
    data.
    """

    fork_safe = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        episodes: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        index: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        progress: bool | None = None,
    ) -> None:
        self._choose(LeRobotMeta(root), episodes, columns, delta_timestamps, tolerance_s)
        self.table = self._open_tables(CACHE_BYTES if cache_bytes is None else cache_bytes)
        """The rows of the tables that contain the episodes."""
        paths = [path for name in self._videos for path in self._video_files(name)[0]]
        self.index = open_index(paths, index, progress=progress) if paths else None
        """The index of the videos' packets; None without videos."""
        self._locate()

    def _choose(self, meta: LeRobotMeta, episodes: Any, columns: Any, delta_timestamps: Any, tolerance_s: Any) -> None:
        episodes, columns = _copied(episodes), _copied(columns)
        if isinstance(delta_timestamps, Mapping):
            delta_timestamps = {name: _copied(times) for name, times in delta_timestamps.items()}
        self.meta = meta
        """The metadata of the dataset."""
        self.tolerance_s = check_tolerance(tolerance_s)
        self.columns: list[str] = chosen_columns(meta, columns)
        """The names of the features to read."""
        self.windows: dict[str, Window] = windows_of(meta, self.columns, delta_timestamps, self.tolerance_s)
        """The times of each feature's window, in frames relative to the frame."""
        self.episodes: Ints = chosen_episodes(meta, episodes)
        """The numbers of the episodes, int64, ascending."""
        self._videos = [name for name in self.columns if name in meta.videos]
        self._reads = self._grouped()
        # A pickle keeps the number of episodes, so episodes that are added later do not appear.
        given = range(meta.total_episodes) if episodes is None else episodes
        self._chosen = given, columns, delta_timestamps, tolerance_s

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.meta.root, "chosen": self._chosen, "table": self.table, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._choose(LeRobotMeta(state["root"]), *state["chosen"])
        self.table, self.index = state["table"], state["index"]
        self._locate()

    def __len__(self) -> int:
        return int(self._spans.end[-1])

    def __repr__(self) -> str:
        episodes = counted(len(self.episodes), "episode")
        return f"<LeRobotFiles of {counted(len(self), 'frame')} in {episodes}: {self.meta.root}>"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the episodes and the fingerprints of their tables."""
        return self._prefix(len(self.episodes))

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether these are the episodes with this fingerprint, with further ones appended in further files."""
        counts = np.flatnonzero(self._spans.end == rows) + 1
        return any(self._prefix(int(count)) == fingerprint for count in counts)

    def _prefix(self, count: int) -> str:
        spans = self._spans
        digest = xxhash.xxh3_128(self.episodes[:count].tobytes() + spans.length[:count].tobytes())
        for file in range(int(spans.files[count - 1])):
            digest.update(self.table.maps.fingerprint(file).encode())
        return digest.hexdigest()

    # Reading.

    def __getitem__(self, row: int) -> FrameRecord:
        return self.records(np.array([operator.index(row)]))[0]

    def records(self, rows: Indices) -> list[FrameRecord]:
        """Return the records of the given rows, in this order.

        Raises:
            IndexError: a row is outside ``[-len, len)``.
            DataFileError: a table is damaged, or a row belongs to another frame.
            DataFileChangedError: a table was changed since it was opened.
        """
        numbers = normalise(rows, len(self))
        if not len(numbers):
            return []
        at = self._places(numbers)
        with stage("read"):
            found = {window: self._read(at.rows(window), names) for window, names in self._reads.items()}
        self._check(at, found[_NOW])
        masks = {f"{name}_is_pad": at.outside(window) for name, window in self.windows.items()}
        return [
            FrameRecord(row, self._values(found, number) | _rows_of(masks, number), self._cameras(found, at, number))
            for number, row in enumerate(numbers.tolist())
        ]

    def _places(self, numbers: Ints) -> _Places:
        spans = self._spans
        span = np.searchsorted(spans.end, numbers, side="right")
        return _Places(span, numbers - (spans.end - spans.length)[span], spans.begin[span], spans.length[span])

    def _read(self, rows: Ints, names: list[str]) -> dict[str, Any]:
        """Return the values of columns at table rows, by name: arrays (n, times, ...), or lists of lists."""
        # Windows overlap, mostly in a batch of neighbours, so read each row once.
        unique, places = np.unique(rows, return_inverse=True)
        batch = self.table.take(unique, names)
        return {
            name: self._column(name, column, unique, places.reshape(rows.shape))
            for name, column in zip(names, batch.columns, strict=True)
        }

    def _column(self, name: str, column: pa.Array, rows: Ints, places: Ints) -> Any:
        numbers = None if name in self.meta.images else as_array(column)
        if numbers is not None:
            return shaped(numbers, self.table.shapes[name])[places]
        if name in self.meta.images:
            values: list[Any] = self.table.encoded(column, rows)
        elif name in self.windows or name in PLACE:
            raise DataFileError(
                f"{self._where(int(rows[0]))}, or a row near it: {name!r} has no number, or numbers of another shape"
            )
        else:
            values = as_values(column, self.table.shapes[name])
        return [[values[place] for place in line] for line in places.tolist()]

    def _check(self, at: _Places, found: dict[str, Any]) -> None:
        """Check that rows belong to the expected frames."""
        episode = self.episodes[at.span]
        index = self.meta.episodes.begin[episode] + at.place
        wrong = np.flatnonzero((found["episode_index"][:, 0] != episode) | (found["index"][:, 0] != index))
        if len(wrong):
            first = int(wrong[0])
            row = int(at.begin[first] + at.place[first])
            raise DataFileError(
                f"{self._where(row)} is frame {int(found['index'][first, 0])} of episode "
                f"{int(found['episode_index'][first, 0])}, and meta/episodes says {int(index[first])} of episode "
                f"{int(episode[first])}"
            )

    def _where(self, row: int) -> str:
        """Return the name of a table row, for messages."""
        file = int(np.searchsorted(self.table.starts, row, side="right")) - 1
        return f"{self.table.maps.files[file].path}, row {row - int(self.table.starts[file])}"

    def _values(self, found: dict[Window, dict[str, Any]], number: int) -> dict[str, Any]:
        """Return the values of one frame from the tables."""
        values = {}
        for name in self.columns:
            if name not in self.meta.videos and name not in self.meta.images:
                value = found[self._window(name)][name][number]
                values[name] = value if name in self.windows else value[0]
        task = int(found[_NOW]["task_index"][number, 0])
        if task not in self.meta.tasks:
            raise DataFileError(f"{self.meta.root}: meta/tasks.parquet has no task {task}")
        return values | {"task": self.meta.tasks[task]}

    def _cameras(
        self, found: dict[Window, dict[str, Any]], at: _Places, number: int
    ) -> dict[str, VideoTimes | StoredImages]:
        """Return the locations of one frame's images."""
        cameras: dict[str, VideoTimes | StoredImages] = {}
        span = int(at.span[number])
        episode = int(self.episodes[span])
        for name in self.columns:
            columns = found[self._window(name)]
            if name in self.meta.images:
                cameras[name] = StoredImages(columns[name][number], name in self.windows)
            elif name in self.meta.videos:
                seconds = self.meta.episodes.videos[name].begin[episode] + columns["timestamp"][number].astype(float)
                cameras[name] = VideoTimes(int(self._files[name][span]), seconds, episode)
        return cameras

    def _window(self, name: str) -> Window:
        return self.windows.get(name, _NOW)

    # Opening.

    def _grouped(self) -> dict[Window, list[str]]:
        """Return the table columns to read, grouped by window."""
        groups: dict[Window, list[str]] = {_NOW: list(PLACE)}
        for name in self.columns:
            column = "timestamp" if name in self.meta.videos else name
            names = groups.setdefault(self._window(name), [])
            if column not in names:
                names.append(column)
        return groups

    def _open_tables(self, cache_bytes: int) -> TableFiles:
        parts = self.meta.episodes.in_tables()
        used = np.unique(parts.table[self.episodes])
        paths = [self.meta.data_file(*names) for names in parts.names[used].tolist()]
        columns = dict.fromkeys([*PLACE, *(name for name in self.columns if name not in self.meta.videos)])
        table = TableFiles(FoundFiles((path, None) for path in paths), columns=list(columns), cache_bytes=cache_bytes)
        for path, has, said in zip(paths, np.diff(table.starts).tolist(), parts.rows[used].tolist(), strict=True):
            if has != said:
                raise DataFileError(f"{path} has {has:,} rows, and meta/episodes says {said:,}")
        return table

    def _locate(self) -> None:
        """Compute the positions of the chosen episodes in the open tables, and their videos."""
        parts = self.meta.episodes.in_tables()
        table = np.unique(parts.table[self.episodes], return_inverse=True)[1]
        length = (self.meta.episodes.end - self.meta.episodes.begin)[self.episodes]
        begin = self.table.starts[table] + parts.begin[self.episodes]
        self._spans = _Spans(begin, length, np.cumsum(length), np.maximum.accumulate(table) + 1)
        self._files: dict[str, Ints] = {}
        before = 0
        for name in self._videos:
            paths, places = self._video_files(name)
            self._files[name] = before + places
            before += len(paths)

    def _video_files(self, name: str) -> tuple[list[str], Ints]:
        """Return the paths of one camera's videos, and each chosen episode's index into them."""
        file = self.meta.episodes.videos[name].file[self.episodes]
        files, which = np.unique(file, axis=0, return_inverse=True)
        return [self.meta.video_file(name, *numbers) for numbers in files.tolist()], which.reshape(-1)


def _rows_of(masks: Mapping[str, npt.NDArray[np.bool_]], number: int) -> dict[str, npt.NDArray[np.bool_]]:
    return {name: mask[number] for name, mask in masks.items()}


def _copied(values: Any) -> Any:
    """Copy an iterable to a list, so that later changes have no effect and it can be iterated again."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes | range) else values
