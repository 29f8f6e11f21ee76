"""`LeRobotMeta`: the metadata in the folder ``meta`` of a LeRobot dataset, format v3.

    meta/info.json                              version, frames per second, features, paths of files
    meta/tasks.parquet                          the text of each task
    meta/episodes/chunk-000/file-000.parquet    frames and files of each episode
    meta/stats.json                             mean, standard deviation, min and max of each feature

One file contains frames of many episodes, and only the rows of ``meta/episodes`` state where each begins.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.clips.discovery import LEROBOT_INFO
from penstock.clips.packets import Ints
from penstock.errors import DataFileError, DataFileIOError
from penstock.storage.urls import is_inside

__all__ = ["Episodes", "LeRobotMeta", "TableParts", "VideoParts"]

_FORMAT = 3  # the major version
_VERSION = re.compile(r"v?(\d+)(\.|$)")
_FIELD = re.compile(r"\{(\w+)(?::(0?\d?d))?\}")
"""A field of a path's template, such as ``{chunk_index:03d}``."""
_CONVERTER = "python -m lerobot.scripts.convert_dataset_v21_to_v30"


class VideoParts(NamedTuple):
    """Positions of the episodes in the videos of one camera.

    Attributes:
        file: int64 (episodes, 2): numbers of chunk and file.
        begin: float64 (episodes,): start of the episode in the file, in seconds.
    """

    file: Ints
    begin: npt.NDArray[np.float64]


class TableParts(NamedTuple):
    """Positions of the episodes in the tables.

    Attributes:
        names: int64 (tables, 2): numbers of chunk and file of each table.
        rows: int64 (tables,): number of rows of each table.
        table: int64 (episodes,): index of the table that contains each episode.
        begin: int64 (episodes,): the first row of the episode in its table.
    """

    names: Ints
    rows: Ints
    table: Ints
    begin: Ints


class Episodes(NamedTuple):
    """Positions of the episodes in tables and videos.

    Attributes:
        begin, end: int64 (episodes,): range [begin, end) of the episode's frames, counted over all episodes.
        file: int64 (episodes, 2): numbers of chunk and file of the table with its frames.
        videos: positions in the videos, by camera.
    """

    begin: Ints
    end: Ints
    file: Ints
    videos: dict[str, VideoParts]

    def in_tables(self) -> TableParts:
        """Return the positions in the tables, which contain the episodes in ascending order."""
        length = self.end - self.begin
        names, table = np.unique(self.file, axis=0, return_inverse=True)
        table = table.reshape(-1)
        rows = np.bincount(table, length).astype(np.int64)
        order = np.argsort(table, kind="stable")
        begin = np.empty_like(length)
        begin[order] = np.cumsum(length[order]) - length[order]
        return TableParts(names, rows, table, begin - (np.cumsum(rows) - rows)[table])


class LeRobotMeta:
    """The metadata of a LeRobot dataset.

    Args:
        root: folder of the dataset.

    Raises:
        DataFileIOError: a file is missing, or cannot be read.
        DataFileError: a file is damaged, incomplete, or of another version of the format.

    Memory: about 60 bytes per episode, 24 more per camera, and the text of the tasks.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self._path = os.path.join(self.root, LEROBOT_INFO)
        info = _read_json(self._path)
        _check_version(self._path, info)
        self.fps: float = _positive(self._path, info, "fps")
        """Frames per second."""
        self.features: dict[str, dict[str, Any]] = _features(self._path, info)
        """``dtype``, ``shape`` and further entries of each feature, by name."""
        self.videos: list[str] = [name for name, feature in self.features.items() if feature["dtype"] == "video"]
        """The names of the features that are videos."""
        self.images: list[str] = [name for name, feature in self.features.items() if feature["dtype"] == "image"]
        """The names of the features that are images in the tables."""
        self._paths = {
            "data": info.get("data_path", "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"),
            "video": info.get("video_path", "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"),
        }
        self.episodes: Episodes = self._read_episodes()
        """Positions of the episodes in tables and videos."""
        self.tasks: dict[int, str] = self._read_tasks()
        """The text of each task, by number."""

    @property
    def total_episodes(self) -> int:
        """The number of episodes."""
        return len(self.episodes.begin)

    @cached_property
    def stats(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """The content of ``meta/stats.json``, such as ``stats["action"]["mean"]``; empty without this file.

        Raises:
            DataFileError: it is not JSON, or not a dict of dicts of numbers.
        """
        path = os.path.join(self.root, "meta", "stats.json")
        if not os.path.exists(path):
            return {}
        said = _read_json(path)
        try:
            return {
                feature: {name: np.atleast_1d(np.array(value)) for name, value in values.items()}
                for feature, values in said.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise DataFileError(f"{path} does not map features to numbers by name: {error}") from None

    def is_depth(self, name: str) -> bool:
        """Return whether a feature is a depth map."""
        feature = self.features[name]
        places = feature, feature.get("info"), feature.get("video_info")
        said = (place for place in places if isinstance(place, Mapping))
        return any(place.get(key) for place in said for key in ("is_depth_map", "video.is_depth_map"))

    def data_file(self, chunk: int, file: int) -> str:
        """Return the path of a table. Raises `DataFileError` if the template in ``info.json`` is invalid."""
        return self._file("data", chunk_index=chunk, file_index=file)

    def video_file(self, camera: str, chunk: int, file: int) -> str:
        """Return the path of a video. Raises `DataFileError` if the template in ``info.json`` is invalid."""
        return self._file("video", video_key=camera, chunk_index=chunk, file_index=file)

    def _file(self, kind: str, **names: Any) -> str:
        template = self._paths[kind]
        try:
            # str.format would evaluate attributes and items of its arguments.
            name = _FIELD.sub(lambda field: format(names[field[1]], field[2] or ""), template)
            if re.search("[{}]", _FIELD.sub("", template)) or not is_inside(name):
                raise ValueError(name)
        except (KeyError, TypeError, ValueError) as error:
            raise DataFileError(
                f"{self._path}: {kind}_path is {template!r}, not a template of a path within the folder"
            ) from error
        return os.path.join(self.root, name)

    def _read_episodes(self) -> Episodes:
        columns = ["episode_index", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
        parts = {name: [f"videos/{name}/{part}" for part in _VIDEO_PARTS] for name in self.videos}
        wanted = [*columns, *(column for names in parts.values() for column in names)]
        folder = os.path.join(self.root, "meta", "episodes")
        tables = [_read_table(path, wanted) for path in sorted(Path(folder).glob("*/*.parquet"))]
        if not tables:
            raise DataFileIOError(f"{folder} contains no tables of episodes (chunk-000/file-000.parquet)")
        try:
            said = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in wanted}
            order = np.argsort(said["episode_index"], kind="stable")
            number, begin, end, *file = (said[name][order].astype(np.int64, casting="safe") for name in columns)
            videos = {name: _video_parts([said[column][order] for column in names]) for name, names in parts.items()}
        except (TypeError, ValueError, pa.ArrowInvalid) as error:
            raise DataFileError(f"{folder}: missing or invalid numbers of episodes: {error}") from None
        if not np.array_equal(number, np.arange(len(number))) or not _follow(begin, end):
            raise DataFileError(f"{folder}: episodes are not numbered from 0 on, or do not follow one another")
        return Episodes(begin, end, np.stack(file, 1), videos)

    def _read_tasks(self) -> dict[int, str]:
        path = os.path.join(self.root, "meta", "tasks.parquet")
        table = _read_table(path, None)
        texts = [name for name in table.column_names if name != "task_index"]
        # pandas stores an unnamed index under this name.
        text = next((name for name in ("task", "__index_level_0__") if name in texts), None)
        if text is None or "task_index" not in table.column_names:
            raise DataFileError(f"{path} has the columns {', '.join(table.column_names)}, not task_index and task")
        return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


_VIDEO_PARTS = ("chunk_index", "file_index", "from_timestamp")


def _video_parts(columns: list[npt.NDArray[Any]]) -> VideoParts:
    chunk, file, begin = columns
    return VideoParts(np.stack([chunk, file], 1).astype(np.int64, casting="safe"), begin.astype(np.float64))


def _follow(begin: Ints, end: Ints) -> bool:
    """Return whether each episode begins where the previous one ends."""
    return bool((begin[1:] == end[:-1]).all() and (end >= begin).all())


def _read_json(path: str) -> dict[str, Any]:
    try:
        said = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataFileIOError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataFileError(f"{path} is not JSON, or is truncated: {error}") from None
    if not isinstance(said, dict):
        raise DataFileError(f"{path} is not a JSON object")
    return said


def _read_table(path: str | os.PathLike[str], columns: list[str] | None) -> pa.Table:
    try:
        file = pq.ParquetFile(path)
        missing = [name for name in columns or [] if name not in file.schema_arrow.names]
        if missing:
            raise DataFileError(f"{path} has no column {missing[0]!r}")
        return file.read(columns=columns)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataFileError(f"{path} is not a Parquet file, or is truncated: {error}") from None
    except OSError as error:
        raise DataFileIOError(f"{path}: {error.strerror or error}") from error


def _check_version(path: str, info: Mapping[str, Any]) -> None:
    version = info.get("codebase_version")
    found = _VERSION.match(version) if isinstance(version, str) else None
    if found is None:
        raise DataFileError(f"{path} states no version of the format: codebase_version is {version!r}")
    if int(found[1]) < _FORMAT:
        raise DataFileError(
            f"{path}: a LeRobot dataset of format {version}, but v{_FORMAT}.0 is required. Convert v2.1 with "
            f"`{_CONVERTER} --repo-id=...`; convert older formats to v2.1 first"
        )
    if int(found[1]) > _FORMAT:
        raise DataFileError(f"{path}: a LeRobot dataset of format {version}, which is newer than v{_FORMAT}.0")


def _positive(path: str, info: Mapping[str, Any], name: str) -> float:
    value = info.get(name)
    if isinstance(value, bool) or not isinstance(value, Real) or value <= 0:
        raise DataFileError(f"{path}: {name} must be a positive number, not {value!r}")
    return float(value)


def _features(path: str, info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    features = info.get("features")
    if not isinstance(features, dict) or not features:
        raise DataFileError(f"{path} names no features")
    for name, feature in features.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            raise DataFileError(f"{path}: the feature {name!r} has no dtype")
    return features
