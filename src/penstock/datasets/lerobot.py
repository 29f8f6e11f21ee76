"""`LeRobotDataset`: the frames of robots' episodes, with windows of neighbouring times and the cameras' pictures.

dataset = LeRobotDataset("pusht", delta_timestamps={"action": [0.0, 0.1, 0.2]}, size=96)
dataset[0]["observation.image"]       # uint8 tensor (3, 96, 96), RGB
dataset[0]["action"]                  # float32 tensor (3, 2), the action now, and those at 0.1 and 0.2 s
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from penstock.clips.lerobot import LeRobotFiles
from penstock.datasets.clips import check_pixels
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.plan.share import SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.storage.urls import is_remote, shown

if TYPE_CHECKING:
    from penstock.clips.lerobot_load import LoadFrame
    from penstock.images.transforms import Compose

__all__ = ["LeRobotDataset"]

_TOLERANCE_S = 1e-4  # that of LeRobot


class LeRobotDataset(SourceDataset):
    """The frames of a LeRobot data set of format v3 that are this rank's, as a map-style data set.

    Args:
        source: its folder, with ``meta/info.json`` in it. Or `LeRobotFiles` that are open.
        episodes: the numbers of the episodes to read; by default all.
        columns: the names of the features to read, beside those that say which frame it is; by default all. A camera
            that is left out is not decoded.
        delta_timestamps: by feature a list of seconds from the frame, multiples of 1/fps: items then hold a window of
            that feature at these times, and ``<feature>_is_pad``.
        tolerance_s: by how many seconds a time may differ from that of a frame.
        size: (height, width), or one int for both: pictures are resized as a whole. None keeps that of the file.
        transform: instead of ``size``: a `penstock.images.transforms.Compose`, or a list of steps, as for images. All
            pictures of a camera in an item get the same crop, the same flip, the same colours.
        max_pixels: a frame of a video of more is an error instead of a full memory.
        index: the path of the index of the videos' packets, which is made there if it is not. By default it is in the
            cache.
        cache_bytes: memory of each process for row groups of the tables that are decoded, 256 MiB by default.
        progress: show a bar while videos are indexed: True, False, or None for several on a terminal.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`. Blocks of ``shuffle="block"`` are as large as
            a row group of the tables, unless ``block_size`` says otherwise.

    Raises:
        ConfigError: arguments that make no sense, name what there is not, or PyAV is not installed.
        DataFileError: a file that is damaged, disagrees with another, or is of another version of the format.
        DataFileIOError: a file of ``meta`` or a table is missing, or the index cannot be written.
        ClipError: (on access) a video that is missing or damaged, or has no frame at a time; it names file, episode and
            time.
        ImageError: (on access) an image in a table that cannot be decoded.
        DataFileChangedError: (on access) a file that was changed since it was opened.

    Items are dicts: each feature by its name, ``task`` as text, and the masks of windows. Numbers are tensors of the
    type and shape that the tables have, scalars where the shape is (1,); pictures uint8 (3, height, width), RGB, of
    another type where the transform says so. A window has its times first, (times, ...); that of a video with one time
    has no dimension for it, as in LeRobot. Times outside the episode hold its first or its last frame, and
    ``<feature>_is_pad``, bool (times,), is True there.

    Row i of ``dataset.files`` is the i-th frame of the chosen episodes, in the order of their numbers. ``dataset.meta``
    has ``fps``, ``features``, ``tasks`` and ``stats``.

    Cost: all videos are read once, when they are indexed. An item takes a row of a table for each time, by row groups
    that are kept once decoded; and of each video the groups of pictures that hold its frames, by one decoder. Memory:
    150 bytes for each episode, ``cache_bytes``, 24 bytes for each frame of a video in the index, mapped, and some open
    decoders for each thread.
    """

    releases_gil = True

    def __init__(
        self,
        source: str | os.PathLike[str] | LeRobotFiles,
        *,
        episodes: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = _TOLERANCE_S,
        size: int | tuple[int, int] | None = None,
        transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = None,
        max_pixels: int | None = None,
        index: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        progress: bool | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share)
        options: dict[str, Any] = {
            "episodes": episodes,
            "columns": columns,
            "delta_timestamps": delta_timestamps,
            "tolerance_s": tolerance_s,
            "index": index,
            "cache_bytes": cache_bytes,
            "progress": progress,
        }
        # Wrong steps are said before all videos are read for the index.
        loading = _loading(size, transform, max_pixels)
        self.files = _opened(source, options)
        """The frames as they are on disk."""
        self.meta = self.files.meta
        """What the data set says of itself: ``fps``, ``features``, ``tasks``, ``stats``, ``episodes``."""
        super().__init__(self.files, _plan(self.files, share), loading(self.files))


def _opened(source: Any, options: dict[str, Any]) -> LeRobotFiles:
    if isinstance(source, LeRobotFiles):
        untouched = {"tolerance_s": _TOLERANCE_S}
        given = [
            name
            for name, value in options.items()
            if (value is not None if name not in untouched else value != untouched[name])
        ]
        if given:
            raise ConfigError(f"{', '.join(given)} belong to LeRobotFiles(...), and this one is open already")
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a LeRobot data set is a folder, as str or Path, not {source!r}")
    if is_remote(source):
        raise ConfigError(f"{shown(os.fspath(source))}: LeRobot data sets are read from a local folder: copy it to one")
    index = options["index"]
    if index is not None and not isinstance(index, str | os.PathLike):
        raise ConfigError(f"index= takes a path, got {index!r}")
    return LeRobotFiles(source, **options)


def _plan(files: LeRobotFiles, share: ShareOptions) -> SharePlan:
    is_ours = all(share.get(name) is None for name in ("group", "block_size", "window"))
    blocks = files.table.blocks() if share.get("shuffle") == "block" and is_ours else None
    if blocks is not None:
        share["block_size"], share["window"] = blocks
    return SharePlan(files, **share)


def _loading(size: Any, transform: Any, max_pixels: Any) -> Callable[[LeRobotFiles], LoadFrame]:
    """Return what makes a ``load`` for files."""
    check_pixels(max_pixels)
    try:
        from penstock.clips.decoder import MAX_PIXELS
        from penstock.clips.lerobot_load import LoadFrame
        from penstock.clips.load_video import chain_of
        from penstock.clips.reading import FrameReader
    except ImportError as error:
        raise ConfigError("pictures of LeRobot data sets need PyAV: pip install 'penstock[clips]'") from error

    chain, pixels = chain_of(size, False, transform), int(max_pixels or MAX_PIXELS)

    def loading(files: LeRobotFiles) -> LoadFrame:
        reader = None if files.index is None else FrameReader(files.index, None, pixels)
        return LoadFrame(reader, chain, files.tolerance_s)

    return loading
