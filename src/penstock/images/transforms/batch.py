"""`Batch`: many images that pass through a chain together. NumPy arrays hold a number for each image.

    batch = Batch(width, height, numbers)
    chain.plan(batch)                               # as `chain.apply(canvas)` for each image
    drawn = batch.draw(files, out, max_pixels)      # all in one call of the C extension

A chain whose steps only crop, resize, mirror and convert has `Compose.draws`, and its steps have ``plan`` beside
``apply``. For small images, planning them together takes a tenth of the time of a `Canvas` for each.

Invariant: each image gets the pixels that ``apply`` would give it, with the same random numbers, bit for bit. An image
for which a step needs its pixels (to resize it again, or to crop it with its border) is *declined*: the caller then
transforms it with a `Canvas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import length_hint
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock.images import native
from penstock.images.transforms.border import fill_bits
from penstock.images.transforms.output import BYTES, Conversion, as_bits, look_up_table
from penstock.images.transforms.view import Filter
from penstock.stages import account, spent

__all__ = ["Batch"]

T = TypeVar("T")

Chosen: TypeAlias = npt.NDArray[np.bool_]
Numbers: TypeAlias = npt.NDArray[Any]
"""An integer or a float for each image."""


class Batch:
    """The state of several images in a chain, as that of each on its `Canvas`.

    Args:
        width, height: sizes of the images; 0 x 0 declines one.
        numbers: (images, `Compose.draws`): the first random numbers of each image's generator.

    Attributes:
        width, height: current sizes.
        declined: images for which a step needs pixels. Their other values have no meaning.
        conversion: the conversion of the pixels at the end; None: no conversion.
    """

    def __init__(self, width: Numbers, height: Numbers, numbers: npt.NDArray[np.float64]) -> None:
        self.declined: Chosen = width == 0
        self.width, self.height = np.maximum(width, 1).astype(np.int64), np.maximum(height, 1).astype(np.int64)
        self.conversion: Conversion | None = None
        self._numbers = numbers
        self._rows, self._drawn = np.arange(len(width)), np.zeros(len(width), np.int64)
        # As in `View`: the part of each image that is drawn, and its flips.
        self._left, self._top = np.zeros(len(width)), np.zeros(len(width))
        self._right, self._bottom = self.width.astype(np.float64), self.height.astype(np.float64)
        self._sideways, self._upside_down = np.zeros(len(width), bool), np.zeros(len(width), bool)
        self.resized: Chosen = np.zeros(len(width), bool)
        self._filter: tuple[Filter, bool] | None = None
        # As in `Border`: (left, top, right, bottom) of pixels beside that part.
        self._border: npt.NDArray[np.int64] | None = None
        self._bordered: Chosen = np.zeros(len(width), bool)
        self._fill: float | tuple[float, ...] = 0

    def random(self, chosen: Chosen | None = None) -> npt.NDArray[np.float64]:
        """Draw a random number for each image; images that are not `chosen` draw none, and their numbers are any."""
        found: npt.NDArray[np.float64] = self._numbers[self._rows, self._drawn]
        self._drawn += 1 if chosen is None else chosen
        return found

    def chosen(self, p: float) -> Chosen:
        """Choose images with a probability, as steps that draw only for a probability below 1."""
        return self.random() < p if p < 1 else ~self.declined

    def draw_each(self, draw: Callable[[int, int, Callable[[], float]], T], default: T) -> list[T]:
        """Return ``draw(height, width, random)`` of each image, and `default` of declined ones."""
        results = [default] * len(self.declined)
        for row in np.flatnonzero(~self.declined).tolist():
            numbers = self._numbers[row].tolist()
            left = iter(numbers[self._drawn[row] :])
            results[row] = draw(int(self.height[row]), int(self.width[row]), left.__next__)
            self._drawn[row] = len(numbers) - length_hint(left)
        return results

    def decline(self, chosen: Chosen) -> None:
        """Decline images."""
        self.declined = self.declined | chosen

    def crop(self, chosen: Chosen, top: Numbers, left: Numbers, height: Numbers | int, width: Numbers | int) -> None:
        """Crop images to parts of them, in their pixels."""
        self.decline(chosen & self._bordered)
        chosen = chosen & ~self.declined
        left = np.where(self._sideways, self.width - left - width, left)
        top = np.where(self._upside_down, self.height - top - height, top)
        across, down = (self._right - self._left) / self.width, (self._bottom - self._top) / self.height
        left, top = self._left + left * across, self._top + top * down
        self._right = np.where(chosen, np.minimum(self._right, left + width * across), self._right)
        self._bottom = np.where(chosen, np.minimum(self._bottom, top + height * down), self._bottom)
        self._left, self._top = np.where(chosen, left, self._left), np.where(chosen, top, self._top)
        self.width, self.height = np.where(chosen, width, self.width), np.where(chosen, height, self.height)

    def window(
        self, chosen: Chosen, top: Numbers, left: Numbers, height: int, width: int, *, constant: bool, fill: Any
    ) -> None:
        """Crop images to parts that may lie outside of them. Pixels there are `fill` if the border is `constant`."""
        right, bottom = left + width - self.width, top + height - self.height
        border = np.maximum(0, np.stack([-left, -top, right, bottom], axis=1))
        outside = chosen & border.any(axis=1)
        inner_height, inner_width = height - border[:, 1] - border[:, 3], width - border[:, 0] - border[:, 2]
        empty = (inner_height < 1) | (inner_width < 1)
        # Images have a border already, or pixels beside the visible ones are needed.
        unplanned = empty | self.resized | (not constant) | (self._border is not None and self._fill != fill)
        self.decline(outside & unplanned)
        self.crop(chosen, np.maximum(0, top), np.maximum(0, left), inner_height, inner_width)
        outside = outside & ~self.declined
        if not outside.any():
            return
        kept = np.zeros_like(border) if self._border is None else self._border
        self._border, self._fill = np.where(outside[:, None], border, kept), fill
        self._bordered = self._bordered | outside
        self.width, self.height = np.where(outside, width, self.width), np.where(outside, height, self.height)

    def resize(self, height: Numbers | int, width: Numbers | int, *, interpolation: Filter, antialias: bool) -> None:
        """Resize images. Those of this size stay as they are."""
        chosen = ((height != self.height) | (width != self.width)) & ~self.declined
        how = interpolation, antialias
        if interpolation == "nearest" or self._filter not in (None, how):
            self.decline(chosen)
        self.decline(chosen & (self.resized | self._bordered))
        chosen = chosen & ~self.declined
        if chosen.any():
            self._filter = how
        self.resized = self.resized | chosen
        self.width, self.height = np.where(chosen, width, self.width), np.where(chosen, height, self.height)

    def mirror(self, chosen: Chosen, *, upside_down: bool = False) -> None:
        """Mirror images left to right, or upside down."""
        if upside_down:
            self._upside_down = self._upside_down ^ chosen
        else:
            self._sideways = self._sideways ^ chosen
        if self._border is not None:
            mirrored = self._border[:, [0, 3, 2, 1] if upside_down else [2, 1, 0, 3]]
            self._border = np.where(chosen[:, None], mirrored, self._border)

    def draw(
        self, sources: Sequence[bytes] | npt.NDArray[np.uint8], out: torch.Tensor, sizes: Any, max_pixels: int
    ) -> Chosen:
        """Draw all images into rows of `out`, which has their layout in memory; return which of them were drawn.

        Args:
            sources: their JPEG files; or their pixels, (images, height, width, 3).
            sizes: int32 (images, 2) of width and height, which the files were found to have; None for pixels.
            max_pixels: files with more pixels are not drawn.
        """
        conversion = self.conversion or BYTES
        boxes = np.stack([self._left, self._top, self._right, self._bottom], axis=1)
        flips = np.stack([self._sideways, self._upside_down], axis=1)
        inside = fill = None
        if self._border is not None:
            inside = np.ascontiguousarray(self._border[:, [1, 0, 3, 2]], np.int32)
            inside[:, 2:] = out.shape[1:3] if conversion.channels_last else out.shape[2:]
            inside[:, 2:] -= self._border[:, [3, 2]]
            fill = np.ascontiguousarray(np.broadcast_to(fill_bits(self._fill, conversion).reshape(-1), 3))
        declined = self.declined
        if declined.any():
            boxes[declined] = 0, 0, 1, 1
            if inside is not None:
                inside[declined] = 0
            if isinstance(sources, list):
                sources = [b"" if skip else data for data, skip in zip(sources, declined.tolist(), strict=True)]
        interpolation, antialias = self._filter or ("bilinear", True)
        assert interpolation != "nearest"
        start = account.clock()
        states, resizing = native.draw_batch(
            sources,
            boxes,
            as_bits(out),
            flips=flips,
            inside=inside,
            fill=fill,
            table=None if conversion.dtype is torch.uint8 else look_up_table(conversion, 3),
            interpolation=interpolation,
            antialias=antialias,
            planar=not conversion.channels_last,
            max_pixels=max_pixels,
            sizes=sizes,
        )
        spent("decode", account.clock() - start - resizing)
        spent("resize", resizing)
        complete: Chosen = np.frombuffer(states, np.uint8) == 0
        return complete & ~declined
