"""`View`: the part of an image to use, its size and its flips, which are applied in one resampling at the end.

    view = View.of((375, 500))                       # (height, width) of the stored image
    view = view.crop(10, 20, 200, 300).mirror()
    image = render(pixels, view.box, view)           # one resampling for all steps

A chain of crops, resizes and flips is one `View`, so only the used part of an image is decoded. A crop after a resize
becomes a fractional box, which is not rounded: rounding it to whole pixels costs 3 to 10 dB. When shrinking by a factor
of 2 or more, blocks of pixels are averaged first; for factors between 1 and 2, neighbours are blended.

Invariant: the image is ``mirror(resize(source[box], size))`` inside its border; each method returns the view after one
more step. A constant border is part of the view, so its size is known, and the image can be drawn inside it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images import native
from penstock.images.native import resize
from penstock.images.region import Box, outward

__all__ = ["WARP", "Border", "Fill", "Filter", "Pixels", "View", "fill_values", "padded", "render"]

Pixels: TypeAlias = npt.NDArray[Any]
"""(height, width, channels)."""

Filter: TypeAlias = Literal["nearest", "bilinear", "bicubic"]

Fill: TypeAlias = float | tuple[float, ...]
"""The value of new pixels: one for all channels, or one per channel."""

_PLAIN = {"nearest": cv2.INTER_NEAREST_EXACT, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
WARP = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
"""OpenCV's filters by name, for `cv2.warpAffine`."""

_FAINT = 0.02
"""Weight of a neighbour below which nothing is blended: for factors up to 1.11."""


class Border(NamedTuple):
    """Numbers of pixels on each side of an image."""

    left: int
    top: int
    right: int
    bottom: int


class View(NamedTuple):
    """A part of an image, resampled and mirrored, perhaps with a border.

    Attributes:
        box: (left, top, right, bottom) in pixels of the source, fractional.
        size: (height, width) of the result, without the border.
        flipped: whether to mirror left to right, and upside down, after resampling.
        resized: whether a resize was applied: a second one needs the pixels of the first.
        interpolation: the interpolation method.
        antialias: whether to average all source pixels that a result pixel covers.
        border: a constant border around the result; None: no border.
        fill: the value of its pixels.
    """

    box: Box
    size: tuple[int, int]
    flipped: tuple[bool, bool] = (False, False)
    resized: bool = False
    interpolation: Filter = "bilinear"
    antialias: bool = True
    border: Border | None = None
    fill: Fill = 0

    @classmethod
    def of(cls, size: tuple[int, int]) -> View:
        """Return the view of a whole image of (height, width) pixels."""
        return cls((0.0, 0.0, float(size[1]), float(size[0])), size)

    def crop(self, top: int, left: int, height: int, width: int) -> View:
        """Return the view cropped to a part of the result, in pixels of the result."""
        sideways, upside_down = self.flipped
        if sideways:
            left = self.size[1] - left - width
        if upside_down:
            top = self.size[0] - top - height
        x0, y0, x1, y1 = self.box
        step_x, step_y = (x1 - x0) / self.size[1], (y1 - y0) / self.size[0]
        x0, y0 = x0 + left * step_x, y0 + top * step_y
        box = (x0, y0, min(x1, x0 + width * step_x), min(y1, y0 + height * step_y))
        return View(box, (height, width), *self[2:])

    def mirror(self, *, upside_down: bool = False) -> View:
        """Return the view mirrored left to right, or upside down, with its border."""
        (sideways, down), border = self.flipped, self.border
        flipped = (sideways, not down) if upside_down else (not sideways, down)
        if border is not None:
            left, top, right, bottom = border
            border = Border(left, bottom, right, top) if upside_down else Border(right, top, left, bottom)
        return View(self.box, self.size, flipped, *self[3:6], border, self.fill)

    def points(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Map positions (x, y) in the source, (n, 2), to positions in the result."""
        x0, y0, x1, y1 = self.box
        height, width = self.size
        x = (points[:, 0] - x0) * (width / (x1 - x0))
        y = (points[:, 1] - y0) * (height / (y1 - y0))
        sideways, upside_down = self.flipped
        return np.stack([width - x if sideways else x, height - y if upside_down else y], axis=1)


def fill_values(fill: Fill, channels: int) -> tuple[float, ...]:
    """Return the value of new pixels for OpenCV, which takes a number for each of four channels.

    Raises:
        ConfigError: the number of values does not match the channels.
    """
    if not isinstance(fill, tuple):
        return (fill,) * 4
    if len(fill) != channels:
        raise ConfigError(f"fill has {len(fill)} values, and the image {channels} channels: pass one for each, or one")
    return fill


def padded(pixels: Pixels, border: Border, fill: Fill, mode: int = cv2.BORDER_CONSTANT) -> Pixels:
    """Return a new image (height, width, channels) with a border, in one of OpenCV's border modes."""
    ends = border.top, border.bottom, border.left, border.right
    made: Pixels = cv2.copyMakeBorder(pixels, *ends, mode, value=fill_values(fill, pixels.shape[2]))
    return made if made.ndim == 3 else made[:, :, None]


def render(source: Pixels, box: Box, view: View) -> Pixels:
    """Return the pixels of a view without its border: (height, width, channels), contiguous, of the source's dtype.

    `source` contains at least the view's box: it is the whole image, or a part of it, perhaps decoded at lower
    resolution. `box` is the position of the view's box in `source`. The result is never a part of the source.
    """
    height, width = view.size
    sideways, upside_down = view.flipped
    is_picture = source.dtype == np.uint8 and source.shape[2] in (1, 3)
    if native.is_available() and view.interpolation != "nearest" and is_picture:
        out = np.empty((height, width, source.shape[2]), np.uint8)
        part, inner = outward(source, box)
        resize(part, inner, out, interpolation=view.interpolation, antialias=view.antialias, flipped=view.flipped)
        return out
    source, box = _shrink(source, (float(box[0]), float(box[1]), float(box[2]), float(box[3])), view)
    if view.interpolation == "bilinear" and view.antialias:
        source, box = _blend(source, box, view)
    left, top, right, bottom = box
    made: Pixels
    if left.is_integer() and top.is_integer() and right.is_integer() and bottom.is_integer():
        made = source[int(top) : int(bottom), int(left) : int(right)]
        if made.shape[:2] == (height, width):
            made = made.copy("C")
        else:
            smaller = made.shape[0] >= height and made.shape[1] >= width
            areas = view.interpolation == "bicubic" and view.antialias and smaller
            made = cv2.resize(
                made, (width, height), interpolation=cv2.INTER_AREA if areas else _PLAIN[view.interpolation]
            )
    else:
        step_x, step_y = (right - left) / width, (bottom - top) / height
        matrix = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
        flags = WARP[view.interpolation] | cv2.WARP_INVERSE_MAP
        made = cv2.warpAffine(source, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    if sideways or upside_down:
        made = cv2.flip(made, -1 if sideways and upside_down else int(sideways))
    # OpenCV uses two dimensions for grey images.
    return made if made.ndim == 3 else made[:, :, None]


def _blend(source: Pixels, box: Box, view: View) -> tuple[Pixels, Box]:
    """Blend neighbouring pixels before shrinking by a factor below 2, where interpolation alone would skip some.

    Return the blended pixels and the box in them. The three weights have the variance of Pillow's triangle filter
    beyond that of a pixel: (step**2 - 1) / 12 on either side. The result is as near to Pillow's as area averages, in a
    fraction of the time.
    """
    left, top, right, bottom = box
    steps = (right - left) / view.size[1], (bottom - top) / view.size[0]
    across, down = (max(0.0, (step * step - 1) / 12) for step in steps)
    if max(across, down) < _FAINT:
        return source, box
    part, inner = outward(source, box)
    row, column = (np.array([share, 1 - 2 * share, share]) for share in (across, down))
    made = cv2.sepFilter2D(part, -1, row, column, borderType=cv2.BORDER_REPLICATE)
    return made if made.ndim == 3 else made[:, :, None], inner


def _shrink(source: Pixels, box: Box, view: View) -> tuple[Pixels, Box]:
    """Average whole blocks of pixels, so that a factor below 2 remains; return the result and the box in it.

    Whole blocks take a fraction of the time of fractional areas, at the same distance from Pillow's result. The rest
    at the right and lower edge, less than a block, is not used.
    """
    left, top, right, bottom = box
    across, down = int((right - left) / view.size[1]), int((bottom - top) / view.size[0])
    if max(across, down) < 2 or not view.antialias or view.interpolation == "nearest":
        return source, box
    across, down = max(1, across), max(1, down)
    x0, y0 = math.floor(left), math.floor(top)
    wide, high = (math.ceil(right) - x0) // across, (math.ceil(bottom) - y0) // down
    blocks = source[y0 : y0 + high * down, x0 : x0 + wide * across]
    # Linear interpolation halfway between two pixels is their average, and two to three times as fast as INTER_AREA.
    method = cv2.INTER_LINEAR if across + down == 3 else cv2.INTER_AREA
    part = cv2.resize(blocks, (wide, high), interpolation=method)
    inner = (left - x0) / across, (top - y0) / down, (right - x0) / across, (bottom - y0) / down
    return part if part.ndim == 3 else part[:, :, None], inner
