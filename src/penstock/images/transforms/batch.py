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

from collections.abc import Callable
from operator import length_hint
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock.images import native
from penstock.images.transforms.output import BYTES, Conversion, as_bits, fill_bits, look_up_table
from penstock.images.transforms.view import Fill, Filter
from penstock.stages import account, spent

__all__ = ["Batch", "Chosen", "pair"]

T = TypeVar("T")

Chosen: TypeAlias = npt.NDArray[np.bool_]
Pairs: TypeAlias = npt.NDArray[Any]
"""(2, images) of x and y; or (2, 1), for all images."""


def pair(height: int, width: int) -> Pairs:
    """Return a size for all images."""
    return np.array([[width], [height]])


class Batch:
    """The state of several images in a chain, as that of each on its `Canvas`.

    Args:
        width, height: sizes of the images; 0 x 0 declines one.
        numbers: (images, `Compose.draws`): the first random numbers of each image's generator.
        channels: of all images.

    Attributes:
        size: (2, images) of current widths and heights.
        declined: images for which a step needs pixels. Their other values have no meaning.
        resized: images that were resized.
        conversion: the conversion of the pixels at the end; None: no conversion.
    """

    def __init__(
        self,
        width: npt.NDArray[Any],
        height: npt.NDArray[Any],
        numbers: npt.NDArray[np.float64],
        channels: int = 3,
    ) -> None:
        self.channels = channels
        self.declined: Chosen = width == 0
        self.size: Pairs = np.maximum(np.array([width, height], np.int64), 1)
        self.resized: Chosen = np.zeros(len(width), bool)
        self.conversion: Conversion | None = None
        self._numbers = numbers
        self._drawn: int | npt.NDArray[np.int64] = 0  # of the numbers, by all images or by each
        self._plans = np.zeros(len(width), native.PLAN)
        self._plans["size"] = self.size.T
        # As in `View`: the box that is drawn, from left and top to right and bottom, and its flips.
        self._from, self._to = np.zeros(self.size.shape), self.size.astype(np.float64)
        self._flips: Pairs = np.zeros(self.size.shape, bool)
        self._filter: tuple[Filter, bool] | None = None
        # Pixels of the border at left and top, and at right and bottom; None if no image has a border.
        self._border: tuple[Pairs, Pairs] | None = None
        self._bordered: Chosen = self.resized
        self._fill: Fill = 0

    def random(self, chosen: Chosen | None = None) -> npt.NDArray[np.float64]:
        """Draw a random number for each image; images that are not `chosen` draw none, and their numbers are any."""
        drawn = self._drawn
        if chosen is not None and isinstance(drawn, int):
            drawn = np.full(len(chosen), drawn)
        found: npt.NDArray[np.float64]
        found = self._numbers[:, drawn] if isinstance(drawn, int) else self._numbers[np.arange(len(drawn)), drawn]
        self._drawn = drawn + (1 if chosen is None else chosen)
        return found

    def choose(self, p: float) -> Chosen | None:
        """Choose images with a probability, as steps that draw only for a probability below 1; None: all."""
        return self.random() < p if p < 1 else None

    def draw_each(self, draw: Callable[[int, int, Callable[[], float]], T], default: T) -> list[T]:
        """Return ``draw(height, width, random)`` of each image, and `default` of declined ones."""
        results, drawn = [default] * len(self.declined), np.zeros(len(self.declined), np.int64) + self._drawn
        for row in np.flatnonzero(~self.declined).tolist():
            numbers = self._numbers[row, drawn[row] :].tolist()
            left = iter(numbers)
            results[row] = draw(int(self.size[1, row]), int(self.size[0, row]), left.__next__)
            drawn[row] += len(numbers) - length_hint(left)
        self._drawn = drawn
        return results

    def decline(self, chosen: Chosen) -> None:
        """Decline images."""
        self.declined = self.declined | chosen

    def crop(self, chosen: Chosen | None, start: Pairs, size: Pairs) -> None:
        """Crop images (None: all) to parts of them, in their pixels."""
        chosen = ~self.declined if chosen is None else chosen & ~self.declined
        self.decline(chosen & self._bordered)
        chosen = chosen & ~self.declined
        start = np.where(self._flips, self.size - start - size, start)
        step = (self._to - self._from) / self.size
        begin = self._from + start * step
        self._to = np.where(chosen, np.minimum(self._to, begin + size * step), self._to)
        self._from = np.where(chosen, begin, self._from)
        self.size = np.where(chosen, size, self.size)

    def window(self, chosen: Chosen | None, start: Pairs, size: Pairs, *, constant: bool, fill: Fill) -> None:
        """Crop images (None: all) to parts that may lie outside of them, with pixels `fill` in a `constant` border."""
        before, after = np.maximum(0, -start), np.maximum(0, start + size - self.size)
        outside: Chosen = (before + after).any(axis=0)
        outside = outside & ~self.declined if chosen is None else outside & ~self.declined & chosen
        inner = size - before - after
        # Pixels are needed for a second border, and beside the visible ones of a resized image.
        unplanned = self.resized | (inner < 1).any(axis=0)
        # `apply` raises the error, which then names the image.
        wrong = isinstance(fill, tuple) and len(fill) != self.channels
        if not constant or wrong or (self._border is not None and self._fill != fill):
            unplanned = outside
        self.decline(outside & unplanned)
        self.crop(chosen, np.maximum(0, start), inner)
        outside = outside & ~self.declined
        if not outside.any():
            return
        if self._border is not None:
            before, after = (np.where(outside, *both) for both in zip((before, after), self._border, strict=True))
        else:
            before, after = before * outside, after * outside
        self._border, self._fill = (before, after), fill
        self._bordered = self._bordered | outside
        self.size = np.where(outside, size, self.size)

    def resize(self, size: Pairs, *, interpolation: Filter, antialias: bool) -> None:
        """Resize images. Those of this size stay as they are."""
        chosen = (self.size != size).any(axis=0) & ~self.declined
        how = interpolation, antialias
        if interpolation == "nearest" or self._filter not in (None, how):
            self.decline(chosen)
        self.decline(chosen & (self.resized | self._bordered))
        chosen = chosen & ~self.declined
        if chosen.any():
            self._filter = how
        self.resized = self.resized | chosen
        self.size = np.where(chosen, size, self.size)

    def mirror(self, chosen: Chosen, *, upside_down: bool = False) -> None:
        """Mirror images left to right, or upside down."""
        axis = int(upside_down)
        self._flips[axis] ^= chosen
        if self._border is not None:
            before, after = (side[axis] for side in self._border)
            before[chosen], after[chosen] = after[chosen], before[chosen]

    def draw(self, sources: list[bytes] | npt.NDArray[np.uint8], out: torch.Tensor, max_pixels: int) -> Chosen:
        """Draw all images into rows of `out`, which has their layout in memory; return which of them were drawn.

        Args:
            sources: their JPEG files; or their pixels, (images, height, width, channels).
            max_pixels: files with more pixels are not drawn.
        """
        conversion = self.conversion or BYTES
        height, width = out.shape[1:3] if conversion.channels_last else out.shape[2:]
        # The program may have changed steps since `out` was chosen.
        if out.dtype is not conversion.dtype or out.shape[3 if conversion.channels_last else 1] != self.channels:
            return np.zeros(len(out), bool)
        self.decline((self.size != pair(height, width)).any(axis=0))
        declined, plans, bits, fill = self.declined, self._plans, as_bits(out), None
        plans["box"][:, :2], plans["box"][:, 2:], plans["flips"] = self._from.T, self._to.T, self._flips.T
        plans["inside"] = 0, 0, width, height
        if self._border is not None:
            before, after = self._border
            plans["inside"] = np.concatenate([before, self.size - after]).T
            fill = np.empty(self.channels, bits.dtype)
            fill[:] = fill_bits(self._fill, conversion, self.channels).reshape(-1)
        if declined.any():
            plans["box"][declined] = 0, 0, 1, 1
            plans["inside"][declined] = 0
            if isinstance(sources, list):
                sources = [b"" if skip else data for data, skip in zip(sources, declined.tolist(), strict=True)]
        interpolation, antialias = self._filter or ("bilinear", True)
        assert interpolation != "nearest"
        start = account.clock()
        states, resizing = native.draw_batch(
            sources,
            plans,
            bits,
            fill=fill,
            table=None if conversion.dtype is torch.uint8 else look_up_table(conversion, self.channels),
            interpolation=interpolation,
            antialias=antialias,
            planar=not conversion.channels_last,
            max_pixels=max_pixels,
        )
        seconds = account.clock() - start
        if isinstance(sources, list):
            spent("decode", seconds - resizing)
        spent("resize", resizing if isinstance(sources, list) else seconds)
        complete: Chosen = np.frombuffer(states, np.uint8) == 0
        return complete & ~declined
