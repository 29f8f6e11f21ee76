"""Geometry before pixels: which part of an image is wanted, at what size, mirrored or not; resampled once, at the end.

    view = View.of((375, 500))                       # (height, width) of the stored image
    view = view.crop(10, 20, 200, 300).resize(224, 224).mirror()
    image = render(pixels, view.box, view)           # one resampling, whatever came together

A chain of crops, resizes and flips is one `View`, so an image is decoded only where it is looked at. A crop after a
resize becomes a fractional box, and stays one: rounding it to whole pixels costs 3 to 10 dB.

Invariant: the image is ``mirror(resize(source[box], size))``; each method gives the view after one more step.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from penstock.images.region import Box

__all__ = ["Filter", "Pixels", "View", "render"]

Pixels: TypeAlias = npt.NDArray[Any]
"""(height, width, channels)."""

Filter: TypeAlias = Literal["nearest", "bilinear", "bicubic"]

_PLAIN = {"nearest": cv2.INTER_NEAREST_EXACT, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_WARP = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_MANY = 2.0
"""Source pixels to one, in a direction, above which they are averaged. Below, linear interpolation costs a third."""


class View(NamedTuple):
    """A part of an image, resampled and mirrored.

    Attributes:
        box: (left, top, right, bottom) in pixels of the source, fractional.
        size: (height, width) of the result.
        flipped: whether mirrored left to right, and upside down, after resampling.
        resized: whether a resize was asked for: a second one has to look at the pixels of the first.
        interpolation: how pixels are made of others.
        antialias: whether all source pixels count where the image shrinks.
    """

    box: Box
    size: tuple[int, int]
    flipped: tuple[bool, bool] = (False, False)
    resized: bool = False
    interpolation: Filter = "bilinear"
    antialias: bool = True

    @classmethod
    def of(cls, size: tuple[int, int]) -> View:
        """All of an image of (height, width) pixels, as it is."""
        return cls((0.0, 0.0, float(size[1]), float(size[0])), size)

    def crop(self, top: int, left: int, height: int, width: int) -> View:
        """A part of the result, in its pixels."""
        sideways, upside_down = self.flipped
        if sideways:
            left = self.size[1] - left - width
        if upside_down:
            top = self.size[0] - top - height
        x0, y0, x1, y1 = self.box
        step_x, step_y = (x1 - x0) / self.size[1], (y1 - y0) / self.size[0]
        x0, y0 = x0 + left * step_x, y0 + top * step_y
        box = (x0, y0, min(x1, x0 + width * step_x), min(y1, y0 + height * step_y))
        return self._replace(box=box, size=(height, width))

    def resize(
        self, height: int, width: int, *, interpolation: Filter = "bilinear", antialias: bool = True
    ) -> View | None:
        """The result at another size; None if it has been resized before."""
        if (height, width) == self.size:
            return self
        if self.resized:
            return None
        return View(self.box, (height, width), self.flipped, True, interpolation, antialias)

    def mirror(self, *, upside_down: bool = False) -> View:
        """The result mirrored left to right, or upside down."""
        sideways, down = self.flipped
        return self._replace(flipped=(sideways, not down) if upside_down else (not sideways, down))

    def points(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(n, 2) positions (x, y) in the source as positions in the result."""
        x0, y0, x1, y1 = self.box
        height, width = self.size
        x = (points[:, 0] - x0) * (width / (x1 - x0))
        y = (points[:, 1] - y0) * (height / (y1 - y0))
        sideways, upside_down = self.flipped
        return np.stack([width - x if sideways else x, height - y if upside_down else y], axis=1)


def render(source: Pixels, box: Box, view: View, *, out: Pixels | None = None) -> Pixels:
    """The pixels of a view: (height, width, channels), contiguous, of the source's type.

    `source` are pixels that hold at least the view's box, and `box` is where that lies in them. With `out`, which has
    the result's shape and type and is contiguous, the result is written there. Otherwise it is new memory, never a
    part of the source.
    """
    height, width = view.size
    if out is None:
        out = np.empty((height, width, source.shape[2]), source.dtype)
    left, top, right, bottom = map(float, box)
    wide, high = right - left, bottom - top
    whole = left.is_integer() and top.is_integer() and wide.is_integer() and high.is_integer()
    if whole:
        part = source[int(top) : int(bottom), int(left) : int(right)]
        if part.shape[:2] == (height, width):
            np.copyto(out, part)
        else:
            cv2.resize(part, (width, height), dst=_flat(out), interpolation=_method(view, high, wide))
    else:
        _warp(source, box, view, out)
    sideways, upside_down = view.flipped
    if sideways or upside_down:
        code = -1 if sideways and upside_down else 1 if sideways else 0
        cv2.flip(_flat(out), code, dst=_flat(out))
    return out


def _flat(image: Pixels) -> Pixels:
    """The same memory without a third dimension of one, which is how OpenCV sees grey images."""
    return image[:, :, 0] if image.shape[2] == 1 else image


def _method(view: View, high: float, wide: float) -> int:
    """Which of OpenCV's ways resizes a box of whole pixels."""
    height, width = view.size
    if view.antialias and view.interpolation != "nearest" and high >= height and wide >= width:
        most = max(high / height, wide / width)
        if most > (_MANY if view.interpolation == "bilinear" else 1.0):
            return cv2.INTER_AREA
    return _PLAIN[view.interpolation]


def _warp(source: Pixels, box: Box, view: View, out: Pixels) -> None:
    """A fractional box: averaged by whole factors until less than two pixels make one, then interpolated."""
    height, width = view.size
    x0, y0 = max(0, math.floor(box[0]) - 1), max(0, math.floor(box[1]) - 1)
    part = source[y0 : math.ceil(box[3]) + 1, x0 : math.ceil(box[2]) + 1]
    left, top, right, bottom = box[0] - x0, box[1] - y0, box[2] - x0, box[3] - y0
    if view.antialias and view.interpolation != "nearest":
        across, down = max(1, int((right - left) / width)), max(1, int((bottom - top) / height))
        if across > 1 or down > 1:
            high, wide = part.shape[:2]
            size = -(-wide // across), -(-high // down)
            part = cv2.resize(part, size, interpolation=cv2.INTER_AREA)
            if part.ndim == 2:
                part = part[:, :, None]
            left, right = left * size[0] / wide, right * size[0] / wide
            top, bottom = top * size[1] / high, bottom * size[1] / high
    step_x, step_y = (right - left) / width, (bottom - top) / height
    matrix = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
    flags = _WARP[view.interpolation] | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(part, matrix, (width, height), dst=_flat(out), flags=flags, borderMode=cv2.BORDER_REPLICATE)
