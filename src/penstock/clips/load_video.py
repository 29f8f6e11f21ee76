"""`LoadVideo`: decodes a video clip to a tensor, and returns its label, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.clips.clip_files import ClipRecord, FrameRule
from penstock.clips.frame_reader import FrameReader
from penstock.clips.frame_transforms import draw_clip
from penstock.errors import ClipError, ImageError
from penstock.images.transforms import Compose
from penstock.random import generator
from penstock.stages import stage
from penstock.storage.urls import shown

__all__ = ["LoadVideo"]


class LoadVideo:
    """``load(record) -> (video, label)``; picklable.

    Args:
        reader: reads the files' frames.
        rule: decides which frames are a clip.
        transform: uses the same random draws for all frames of a clip.

    Attributes:
        pure: whether the result depends only on the record and `penstock.generator`.
        form: shape and dtype of every clip; None if they differ.
    """

    def __init__(self, reader: FrameReader, rule: FrameRule, transform: Compose) -> None:
        self.reader, self.rule, self.transform = reader, rule, transform
        self.pure = transform.pure
        form = transform.form
        known = form.size is not None and form.dtype is not None
        self.form: Any = ((rule.frames, 3, *form.size), form.dtype) if known and form.size else None

    def __call__(self, record: ClipRecord, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Decode the clip of a record, into `out` if given, which has the shape and dtype of `form`.

        Raises:
            ClipError, DataFileChangedError, StorageError: as `FrameReader.frames`.
        """
        with stage("decode"):
            opened = self.reader.open(record.file)
        if record.first >= record.end:
            raise ClipError(f"{shown(record.path)!r} has no frame in the time range of row {record.row}")
        first = record.first
        if record.last > first:
            first += int(generator().integers(record.last - first + 1))
        numbers = np.minimum(first + np.arange(self.rule.frames) * self.rule.step, record.end - 1)
        with stage("decode"):
            frames = self.reader.frames(opened, numbers)
        try:
            video = draw_clip(frames, self.transform, out, rotation=opened.coding.rotation)
        except ImageError as error:
            raise ImageError(f"{shown(record.path)!r}: {error}") from error
        except Exception as error:
            error.add_note(f"while the frames of {shown(record.path)!r} were transformed")
            raise
        if record.label is not None:
            return video, record.label
        seconds = float(opened.packets.times[first]) - opened.coding.origin
        return video, {"path": record.path, "frame": first, "seconds": seconds}
