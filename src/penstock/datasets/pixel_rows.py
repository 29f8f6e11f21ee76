"""`PixelRows`: the rows of an `ArrayDataset` as images."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.arrays import ArrayDataset
from penstock.datasets.source_dataset import Empty
from penstock.errors import ConfigError
from penstock.images.transforms import Compose
from penstock.images.transforms.output import Form
from penstock.order.permutation import Indices
from penstock.stages import stage

__all__ = ["PixelRecord", "PixelRows"]

_MOST = 65535
"""The longest side of an image, as of a JPEG: `native.draw_batch` has this limit."""


class PixelRecord(NamedTuple):
    """An image and its label."""

    path: str
    label: Any
    row: int
    pixels: npt.NDArray[np.uint8]
    """(height, width, channels)."""

    def __repr__(self) -> str:
        return f"<{self.path}>"


class PixelRows:
    """The images of an `ArrayDataset`.

    Args:
        source: uint8 rows of (height, width, 3), (height, width, 1) or (height, width).

    Raises:
        ConfigError: other rows.

    Attributes:
        shape: (height, width, channels) of each image.
    """

    def __init__(self, source: ArrayDataset) -> None:
        self._arrays, self._labels = source.arrays, source.labels
        row = source.arrays.row
        if source.arrays.type is not torch.uint8 or len(row) not in (2, 3) or row[2:] not in ((), (1,), (3,)):
            raise ConfigError(
                "images are uint8 rows of (height, width, 3), (height, width, 1) or (height, width), and those of "
                f"{source.arrays!r} are {source.arrays.type} {row}"
            )
        if not 1 <= min(row) <= max(row) <= _MOST:
            raise ConfigError(f"images have 1 to {_MOST:,} pixels a side, and those of {source.arrays!r} are {row}")
        self.shape = row if len(row) == 3 else (*row, 1)
        # A label that is an integer is an int, as that of other images.
        self._counts = self._labels is not None and not (
            self._labels.row
            or self._labels.type.is_floating_point
            or self._labels.type.is_complex
            or self._labels.type is torch.bool
        )

    def form(self, transform: Compose) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape in memory, and dtype, of every transformed image; None if they are not known."""
        height, width, channels = self.shape
        return transform.leaves(Form((height, width), channels=channels)).row

    def pixels(self, rows: Indices) -> npt.NDArray[np.uint8]:
        """Return the images of rows, uint8 (rows, height, width, channels)."""
        found = np.empty((len(rows), *self._arrays.row), np.uint8)
        with stage("read"):
            self._arrays.read_into(found, rows)
        return found.reshape(len(rows), *self.shape)

    def labels(self, rows: Indices, empty: Empty) -> torch.Tensor | None:
        """Return the labels of rows, in a tensor that ``empty(shape, dtype)`` allocates; None if there are none."""
        if self._labels is None:
            return None
        found = empty((len(rows), *self._labels.row), torch.int64 if self._counts else self._labels.type)
        with stage("read"):
            self._labels.read_into(found.numpy(), rows)
        return found

    def records(self, rows: Indices) -> list[PixelRecord]:
        """Return the images and labels of rows."""
        found = self.labels(rows, lambda shape, dtype: torch.empty(shape, dtype=dtype))
        labels: Any = [None] * len(rows) if found is None else found.tolist() if self._counts else found.unbind()
        path = self._arrays.maps.files[0].path
        pairs = zip(labels, rows.tolist(), self.pixels(rows), strict=True)
        return [PixelRecord(f"{path} ...: row {row}", label, row, pixels) for label, row, pixels in pairs]
