"""`LeRobotDataset`: frames of robot episodes, with windows over neighbouring times and decoded camera images.

dataset = LeRobotDataset("pusht", delta_timestamps={"action": [0.0, 0.1, 0.2]}, size=96)
dataset[0]["observation.image"]       # uint8 tensor (3, 96, 96), RGB
dataset[0]["action"]                  # float32 tensor (3, 2): the actions at 0, 0.1 and 0.2 s from the frame
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from penstock.clips.lerobot import LeRobotFiles
from penstock.datasets.clips import check_pixels
from penstock.datasets.loading import chain_of
from penstock.datasets.source_dataset import SourceDataset, opened, with_blocks
from penstock.errors import ConfigError
from penstock.plan.share import SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.storage.urls import is_remote, shown

if TYPE_CHECKING:
    from penstock.images.transforms import Compose

__all__ = ["LeRobotDataset"]

# LeRobot's own default.
_TOLERANCE_S = 1e-4


class LeRobotDataset(SourceDataset):
    """The frames of a LeRobot dataset (format v3), split across ranks; a map-style dataset.

    Args:
        source: the dataset's folder, with ``meta/info.json``; or open `LeRobotFiles`.
        episodes: the numbers of the episodes to read; by default all.
        columns: the names of the features to read, in addition to the columns that identify the frame; by default all.
            A camera that is left out is not decoded.
        delta_timestamps: for each feature, a list of offsets in seconds from the frame, multiples of 1/fps. Items then
            contain a window of that feature at these times, and the mask ``<feature>_is_pad``.
        tolerance_s: the largest allowed difference in seconds between a requested time and a frame's time.
        size: (height, width), or one int for both: whole images are resized. None keeps the file's size.
        transform: instead of ``size``: a `penstock.images.transforms.Compose`, or a list of transforms, as for images.
            All images of a camera in an item get the same crop, flip and colours.
        max_pixels: raise an error for a video frame with more pixels, instead of exhausting memory.
        index, progress: of the videos' packets, see `penstock.VideoDataset`.
        cache_bytes: memory in each process for decoded row groups of the tables; 256 MiB by default.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`. With ``shuffle="block"``, a block is by
            default one row group of the tables; ``block_size`` overrides this.

    Raises:
        ConfigError: invalid arguments, an unknown episode or feature, or PyAV is not installed.
        DataFileError: a file is damaged, contradicts another, or has another version of the format.
        DataFileIOError: a file of ``meta`` or a table is missing, or the index cannot be written.
        ClipError: (on access) a video is missing or damaged, or has no frame at a time; the message names file, episode
            and time.
        ImageError: (on access) an image in a table cannot be decoded.
        DataFileChangedError: (on access) a file was modified since it was opened.

    Items are dicts: each feature by its name, ``task`` as text, and the masks of windows. Numbers are tensors with the
    dtype and shape of the tables; a feature of shape (1,) is a scalar. Images are uint8 (3, height, width), RGB, unless
    the transform returns another dtype. The first dimension of a window is its times, (times, ...); a video window with
    a single time has no such dimension, as in LeRobot. Times outside the episode repeat its first or last frame, and
    ``<feature>_is_pad``, bool (times,), is True there.

    Row i of ``dataset.files`` is the i-th frame of the chosen episodes, in the order of the episode numbers.
    ``dataset.meta`` has ``fps``, ``features``, ``tasks`` and ``stats``.

    Cost: creating the index reads all videos once. An item reads one table row per time, and decodes, per video, the
    groups of pictures that contain its frames. Memory: 150 bytes per episode, ``cache_bytes``, 24 bytes per video frame
    in the mapped index, and some open decoders per thread.
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
        options: dict[str, Any] = {"episodes": episodes, "columns": columns, "delta_timestamps": delta_timestamps}
        options |= {"tolerance_s": tolerance_s, "index": index, "cache_bytes": cache_bytes, "progress": progress}
        # Check the transforms before reading all videos for the index.
        check_pixels(max_pixels)
        try:
            from penstock.clips.decoder import MAX_PIXELS
            from penstock.clips.frame_reader import FrameReader
            from penstock.clips.lerobot_load import LoadFrame
        except ImportError as error:
            raise ConfigError("videos of LeRobot datasets need PyAV: pip install 'penstock[clips]'") from error
        chain, pixels = chain_of(size, False, transform), int(max_pixels or MAX_PIXELS)
        if isinstance(source, LeRobotFiles):
            options["tolerance_s"] = None if tolerance_s == _TOLERANCE_S else tolerance_s
        elif not isinstance(source, str | os.PathLike):
            raise ConfigError(f"LeRobotDataset takes a folder, as str or Path, got {source!r}")
        elif is_remote(source):
            raise ConfigError(
                f"{shown(os.fspath(source))}: LeRobot datasets are read from a local folder: copy this one there"
            )
        elif index is not None and not isinstance(index, str | os.PathLike):
            raise ConfigError(f"index= takes a path, got {index!r}")
        self.files: LeRobotFiles = opened(LeRobotFiles, source, options)
        """The frames, in the order of the episodes."""
        self.meta = self.files.meta
        """The dataset's metadata: ``fps``, ``features``, ``tasks``, ``stats``, ``episodes``."""
        with_blocks(share, self.files.table)
        reader = None if self.files.index is None else FrameReader(self.files.index, None, pixels)
        load = LoadFrame(reader, chain, self.files.tolerance_s)
        super().__init__(self.files, SharePlan(self.files, **share), load)
