"""LeRobot data sets that tests write, in the documented format v3, and the numbers that are in them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from video_support import picture, write_video

FPS = 10
TASKS = ("push the block", "lift the cup", "open the drawer")
HEIGHT, WIDTH = 32, 48
PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


@dataclass
class Written:
    """A data set that was written.

    Attributes:
        root: its folder.
        lengths: frames of each episode.
        cameras: the names of the features that are videos.
        images: those that are images in the tables.
        numbers: of each frame one number, the feature ``number``.
        chunks_size: files of a folder.
    """

    root: Path
    lengths: list[int]
    cameras: Sequence[str]
    images: Sequence[str]
    numbers: Sequence[int]
    chunks_size: int

    @property
    def begins(self) -> list[int]:
        """The first frame of each episode, counted over all."""
        return [sum(self.lengths[:episode]) for episode in range(len(self.lengths))]

    def task_of(self, episode: int) -> int:
        """Return the number of an episode's task."""
        return episode % len(TASKS)

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the episode of a frame, and its number in it."""
        episode = max(number for number, begin in enumerate(self.begins) if begin <= index)
        return episode, index - self.begins[episode]


def state_of(index: int) -> npt.NDArray[np.float32]:
    """Return the state of the robot at a frame, counted over all."""
    return np.array([index, index / 2, -index], np.float32)


def action_of(index: int) -> npt.NDArray[np.float32]:
    """Return the action at a frame, counted over all."""
    return np.array([index + 0.25, index - 0.25], np.float32)


def grid_of(index: int) -> npt.NDArray[np.float32]:
    """Return a feature of two dimensions at a frame."""
    return np.arange(6, dtype=np.float32).reshape(2, 3) + index


def picture_of(camera: int, index: int) -> npt.NDArray[np.uint8]:
    """Return what a camera sees at a frame."""
    return picture(index + 100 * camera, HEIGHT, WIDTH)


def write_lerobot(
    root: Path,
    lengths: Sequence[int] = (7, 5, 9, 4, 6),
    *,
    per_table: int = 2,
    per_video: Sequence[int] = (3, 2),
    cameras: Sequence[str] = ("observation.images.top", "observation.images.wrist"),
    images: Sequence[str] = (),
    numbers: Sequence[int] | None = None,
    version: str = "v3.0",
    chunks_size: int = 2,
    task_column: str = "task",
) -> Written:
    """Write a data set.

    Args:
        root: its folder.
        lengths: frames of each episode.
        per_table: episodes of a file of tables.
        per_video: episodes of a video, by camera.
        cameras: features that are videos.
        images: features that are images in the tables.
        numbers: of each frame, by default its own.
        version: of the format.
        chunks_size: files of a folder.
        task_column: what pandas calls the text of the tasks: "__index_level_0__" where its index had no name.
    """
    numbers = range(sum(lengths)) if numbers is None else numbers
    written = Written(root, list(lengths), cameras, images, numbers, chunks_size)
    episodes = [_episode(written, number, number // per_table) for number in range(len(lengths))]
    for file, inside in enumerate(_parts(len(lengths), per_table)):
        _write_table(written, inside, file)
    for camera, name in enumerate(cameras):
        for file, inside in enumerate(_parts(len(lengths), per_video[camera])):
            _write_video(written, camera, inside, file)
            for number in inside:
                episodes[number] |= _part_of_video(written, name, inside[0], number, file)
    _write_meta(written, version, task_column)
    _write_episodes(root / "meta/episodes/chunk-000", episodes)
    return written


def _parts(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _numbered(written: Written, file: int) -> dict[str, int]:
    return dict(zip(("chunk_index", "file_index"), divmod(file, written.chunks_size), strict=True))


def _episode(written: Written, number: int, file: int) -> dict[str, Any]:
    begin = written.begins[number]
    place = _numbered(written, file)
    return {
        "episode_index": number,
        "tasks": [TASKS[written.task_of(number)]],
        "length": written.lengths[number],
        **{f"data/{name}": value for name, value in place.items()},
        "dataset_from_index": begin,
        "dataset_to_index": begin + written.lengths[number],
        "stats/action/mean": [0.0, 0.0],
    }


def _part_of_video(written: Written, name: str, first: int, number: int, file: int) -> dict[str, Any]:
    begin = (written.begins[number] - written.begins[first]) / FPS
    times = {"from_timestamp": begin, "to_timestamp": begin + written.lengths[number] / FPS}
    place = {**_numbered(written, file), **times}
    return {f"videos/{name}/{part}": value for part, value in place.items()}


def _write_table(written: Written, inside: range, file: int) -> None:
    path = written.root / PATHS["data_path"].format(**_numbered(written, file))
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [_frames(written, number) for number in inside]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:  # LeRobot writes a row group for each episode
            writer.write_table(table)


def _frames(written: Written, number: int) -> pa.Table:
    begin, length = written.begins[number], written.lengths[number]
    indices = range(begin, begin + length)
    columns: dict[str, Any] = {
        "observation.state": pa.array([state_of(i) for i in indices], pa.list_(pa.float32(), 3)),
        "action": pa.array([action_of(i) for i in indices], pa.list_(pa.float32())),
        "observation.grid": pa.array([grid_of(i).tolist() for i in indices], pa.list_(pa.list_(pa.float32()))),
        "next.done": pa.array([i == indices[-1] for i in indices]),
        "note": pa.array([f"frame {i}" for i in indices]),
        "number": pa.array([written.numbers[i] for i in indices], pa.int64()),
        "timestamp": pa.array([k / FPS for k in range(length)], pa.float32()),
        "frame_index": pa.array(range(length), pa.int64()),
        "episode_index": pa.array([number] * length, pa.int64()),
        "index": pa.array(indices, pa.int64()),
        "task_index": pa.array([written.task_of(number)] * length, pa.int64()),
    }
    for camera, name in enumerate(written.images):
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        columns[name] = pa.array([{"bytes": _png(picture_of(camera, i)), "path": None} for i in indices], kind)
    return pa.table(columns)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def _write_video(written: Written, camera: int, inside: range, file: int) -> None:
    name = written.cameras[camera]
    path = written.root / PATHS["video_path"].format(video_key=name, **_numbered(written, file))
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = sum(written.lengths[number] for number in inside)
    pictures = partial(_of_camera, camera, written.begins[inside[0]])
    write_video(path, frames, gop=4, rate=FPS, size=(HEIGHT, WIDTH), pictures=pictures, options={"qp": "8"})


def _of_camera(camera: int, begin: int, number: int) -> npt.NDArray[np.uint8]:
    return picture_of(camera, begin + number)


def _write_meta(written: Written, version: str, task_column: str) -> None:
    meta = written.root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    numbers = {"dtype": "int64", "shape": [1], "names": None}
    seen = {"shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    features = {
        **{name: {"dtype": "video", **seen, "info": {"video.fps": FPS}} for name in written.cameras},
        **{name: {"dtype": "image", **seen} for name in written.images},
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "observation.grid": {"dtype": "float32", "shape": [2, 3], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "note": {"dtype": "string", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **dict.fromkeys(("number", "frame_index", "episode_index", "index", "task_index"), numbers),
    }
    info = {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(written.lengths),
        "total_frames": sum(written.lengths),
        "total_tasks": len(TASKS),
        "chunks_size": written.chunks_size,
        "fps": FPS,
        "splits": {"train": f"0:{len(written.lengths)}"},
        **PATHS,
        "features": features,
    }
    (meta / "info.json").write_text(json.dumps(info))
    stats = {"action": {"mean": [1.0, 2.0], "std": [0.5, 0.25], "count": [3]}}
    (meta / "stats.json").write_text(json.dumps(stats))
    tasks = pa.table({"task_index": list(range(len(TASKS))), task_column: list(TASKS)})
    # What pandas writes of a table that has the texts as its index.
    kinds = {"task_index": ("int64", "int64"), task_column: ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, (kind, dtype) in kinds.items()
    ]
    index = {"index_columns": [task_column], "column_indexes": [], "columns": columns, "pandas_version": "2.3.0"}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), meta / "tasks.parquet")


def _write_episodes(folder: Path, episodes: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = (len(episodes) + 1) // 2
    for file, part in enumerate((episodes[:half], episodes[half:])):
        if part:
            pq.write_table(pa.Table.from_pylist(part), folder / f"file-{file:03d}.parquet")
