"""`LoadFrame`: decodes a frame of an episode, with its windows, to a dict of tensors."""

from __future__ import annotations

from typing import Any

import av
import numpy as np
import numpy.typing as npt
import torch

from penstock.clips.frame_reader import FrameReader
from penstock.clips.frame_transforms import draw_clip
from penstock.clips.lerobot import FrameRecord, StoredImages, VideoTimes
from penstock.clips.open_files import OpenFile
from penstock.clips.packets import Ints
from penstock.errors import ClipError, ImageError
from penstock.images.transforms import Compose
from penstock.stages import stage
from penstock.storage.urls import shown
from penstock.tables.image_columns import make_image

__all__ = ["LoadFrame", "nearest"]


class LoadFrame:
    """``load(record) -> dict``; picklable.

    Args:
        reader: reads the videos' frames; None for a dataset without videos.
        transform: image transforms, with separate random draws for each camera.
        tolerance_s: by how many seconds the nearest frame of a video may differ from a time.

    Attributes:
        pure: whether the result depends only on the record and `penstock.generator`.
    """

    def __init__(self, reader: FrameReader | None, transform: Compose, tolerance_s: float) -> None:
        self.reader, self.transform, self.tolerance_s = reader, transform, tolerance_s
        self.pure = transform.pure

    def __call__(self, record: FrameRecord) -> dict[str, Any]:
        """Decode the images of a record.

        Raises:
            ClipError: no frame is near enough to a time; or as `FrameReader.frames`.
            ImageError: an image is missing, or cannot be decoded.
            DataFileChangedError, StorageError: as `FrameReader.frames`.
        """
        item = {name: _as_tensor(value) for name, value in record.values.items()}
        for name, frames in record.cameras.items():
            try:
                item[name] = self._video(frames) if isinstance(frames, VideoTimes) else self._images(frames)
            except Exception as error:
                error.add_note(f"while the feature {name!r} was loaded")
                raise
        return item

    def _video(self, frames: VideoTimes) -> torch.Tensor:
        assert self.reader is not None
        with stage("decode"):
            opened = self.reader.open(frames.file)
            found = self.reader.frames(opened, self._numbers(opened, frames))
        video = draw_clip(found, self.transform, rotation=opened.coding.rotation)
        # As in LeRobot, videos alone have no time dimension if the window has one time.
        return video[0] if len(video) == 1 else video

    def _numbers(self, opened: OpenFile, frames: VideoTimes) -> Ints:
        times = opened.packets.times
        numbers = nearest(times, frames.seconds)
        off = np.abs(times[numbers] - frames.seconds)
        if not (off <= self.tolerance_s).all():  # NaN fails, too
            worst = int(off.argmax())
            raise ClipError(
                f"{shown(opened.path)!r}, episode {frames.episode}: no frame at {frames.seconds[worst]:.6f} s. "
                f"The nearest is at {times[numbers[worst]]:.6f} s, and tolerance_s is {self.tolerance_s}"
            )
        return numbers

    def _images(self, frames: StoredImages) -> torch.Tensor:
        pictures = []
        for data, name in frames.images:
            if data is None:
                raise ImageError(f"{name}: the image is missing")
            pictures.append(av.VideoFrame.from_ndarray(make_image(data, name, "rgb"), format="rgb24"))
        video = draw_clip(pictures, self.transform)
        return video if frames.is_window else video[0]


def nearest(times: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> Ints:
    """Return the index of the nearest time for each value of ``seconds``; the earlier one of two equally near.

    >>> nearest(np.array([0.0, 0.1, 0.2]), np.array([-1.0, 0.11, 0.16, 9.0])).tolist()
    [0, 1, 2, 2]
    """
    after = np.clip(np.searchsorted(times, seconds), 1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    return np.where(seconds - times[before] <= times[after] - seconds, before, after)


def _as_tensor(value: Any) -> Any:
    """Return numbers as a tensor, and other values unchanged."""
    return torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
