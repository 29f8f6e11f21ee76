"""Crops, padding, resizes and flips, with torchvision's names, arguments and defaults where it has them.

All apply to masks and boxes, too. Positions and sizes are whole pixels and depend only on the image's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, cast

import cv2
import numpy as np

from penstock.errors import ConfigError, ImageError
from penstock.images.transforms.base import (
    Size,
    Transform,
    bernoulli,
    check_bool,
    check_fill,
    check_probability,
    check_size,
)
from penstock.images.transforms.batch import Batch, Chosen, pair
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.images.transforms.view import Filter
from penstock.random import generator

__all__ = ["CenterCrop", "HorizontalFlip", "RandomCrop", "RandomResizedCrop", "Resize", "SquarePad", "VerticalFlip"]

PaddingMode: TypeAlias = Literal["constant", "edge", "reflect", "symmetric"]

_MODES = {
    "constant": cv2.BORDER_CONSTANT,
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}
_BEFORE = {"center": 0.5, "top_left": 0.0, "bottom_right": 1.0}
"""Shares of the border that are above and left of the image."""

_FILTERS = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    0: "nearest",
    2: "bilinear",
    3: "bicubic",
}
"""Filters by name and by Pillow's number."""


def check_filter(interpolation: Any) -> Filter:
    """Return the name of a filter, given as a name, torchvision's InterpolationMode or Pillow's Resampling.

    Raises:
        ConfigError: it is not supported.
    """
    name = getattr(interpolation, "value", interpolation)
    if not isinstance(name, str | int) or name not in _FILTERS:
        raise ConfigError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', not {interpolation!r}")
    return cast(Filter, _FILTERS[name])


def check_interval(values: Sequence[float], name: str) -> tuple[float, float]:
    """Check and return two positive numbers, the smaller first.

    Raises:
        ConfigError: they are not two positive numbers in this order.
    """
    if not isinstance(values, Sequence) or len(values) != 2 or not 0 < values[0] <= values[1]:
        raise ConfigError(f"{name} must be (min, max), both positive, got {values!r}")
    return float(values[0]), float(values[1])


def check_padding_mode(name: Any) -> PaddingMode:
    """Check and return the name of a padding mode.

    Raises:
        ConfigError: the mode is unknown.
    """
    if name not in _MODES:
        raise ConfigError(f"padding_mode must be one of {', '.join(_MODES)}, not {name!r}")
    return cast(PaddingMode, name)


def padding_sides(padding: Any) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) from one, two (left and right, top and bottom) or four numbers, or None.

    Raises:
        ConfigError: another value, or a negative number.
    """
    values = () if padding is None else tuple(padding) if isinstance(padding, list | tuple) else (padding,)
    if len(values) not in (0, 1, 2, 4) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ConfigError(f"padding must be one, two or four non-negative numbers, not {padding!r}")
    left, top, right, bottom = (values * (4 // len(values))) if values else (0, 0, 0, 0)
    return left, top, right, bottom


def draw_sides(
    area: int, scale: tuple[float, float], ratio: tuple[float, float], random: Callable[[], float]
) -> Iterator[tuple[int, int]]:
    """Draw the sides of a rectangle ten times: `scale` is its share of the area, `ratio` first side over second."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        part = area * (scale[0] + (scale[1] - scale[0]) * random())
        shape = math.exp(low + (high - low) * random())
        yield round(math.sqrt(part * shape)), round(math.sqrt(part / shape))


class RandomResizedCrop(Transform):
    """Crop a part of random area and aspect ratio, and resize it. Most image networks are trained with it.

    Args:
        size: size of the result: (height, width), or one int for both.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height, drawn uniformly on a log scale.
        interpolation: ``"bilinear"``, ``"nearest"`` or ``"bicubic"``, or torchvision's InterpolationMode.
        antialias: average all source pixels that a result pixel covers, instead of only the nearest ones.

    Raises:
        ConfigError: a size, share or ratio is not positive, or the filter is unknown.

    If ten draws do not fit into the image, the crop is the largest centred one of the nearest allowed ratio. Draws at
    most 22 numbers. An `ImageDataset` decodes only the crop.
    """

    def __init__(
        self,
        size: Size,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
    ) -> None:
        self.size = check_size(size)
        self.scale = check_interval(scale, "scale")
        self.ratio = check_interval(ratio, "ratio")
        self.interpolation = check_filter(interpolation)
        self.antialias = check_bool(antialias, "antialias")

    def apply(self, canvas: Canvas) -> None:
        if canvas.view.resized:
            canvas.render()
        canvas.look(canvas.view.crop(*self._box(*canvas.size, generator().random)))
        canvas.resize(*self.size, interpolation=self.interpolation, antialias=self.antialias)

    draws = 22

    def plan(self, batch: Batch) -> None:
        batch.decline(batch.resized)
        boxes = np.array(batch.draw_each(self._box, (0, 0, 1, 1))).reshape(-1, 4).T
        batch.crop(None, boxes[1::-1], boxes[:1:-1])
        batch.resize(pair(*self.size), interpolation=self.interpolation, antialias=self.antialias)

    def _box(self, height: int, width: int, random: Callable[[], float]) -> tuple[int, int, int, int]:
        """Return (top, left, height, width) of the crop."""
        for wide, tall in draw_sides(height * width, self.scale, self.ratio, random):
            if 0 < wide <= width and 0 < tall <= height:
                return int(random() * (height - tall + 1)), int(random() * (width - wide + 1)), tall, wide
        shape = min(max(width / height, self.ratio[0]), self.ratio[1])
        wide, tall = min(width, max(1, round(height * shape))), min(height, max(1, round(width / shape)))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def leaves(self, form: Form) -> Form:
        return form._replace(size=self.size)


class CenterCrop(Transform):
    """Crop the centre of the image; a smaller image is padded with zeros first.

    Args:
        size: (height, width), or one int for both.
        p: probability of the crop.

    Raises:
        ConfigError: the size is not positive, or `p` is not a probability.
    """

    def __init__(self, size: Size, p: float = 1.0) -> None:
        self.size = check_size(size)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        (height, width), (tall, wide) = self.size, canvas.size
        canvas.window(_middle(tall - height), _middle(wide - width), height, width)

    draws = 1

    def plan(self, batch: Batch) -> None:
        size, chosen = pair(*self.size), batch.choose(self.p)
        room = batch.size - size
        start = np.where(room < 0, -(-room // 2), np.rint(room / 2)).astype(np.int64)
        batch.window(chosen, start, size, constant=True, fill=0)

    def leaves(self, form: Form) -> Form:
        return _cropped(form, self.size, self.p)


def _middle(room: int) -> int:
    """Return where a centred crop begins, given the room beside it, which is negative for a border.

    As in torchvision, halves are rounded to even, and those of a border down.
    """
    return round(room / 2) if room > 0 else -(-room // 2)


class RandomCrop(Transform):
    """Crop a part at a random position, after optional padding.

    Args:
        size: (height, width), or one int for both.
        padding: width of the border: one number, (left and right, top and bottom), or (left, top, right, bottom).
        pad_if_needed: pad an image that is smaller than `size`, on each side by the missing length.
        fill: value of a constant border, or one per channel: red, green, blue.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``. The border of masks is zero.
        p: probability of the crop.

    Raises:
        ConfigError: the size is not positive, `padding` is negative or incomplete, the mode is unknown, or `p` is not a
            probability.
        ImageError: (when called) the image is smaller than `size`, without `pad_if_needed`.

    With a border that is not constant, the whole image is decoded.
    """

    def __init__(
        self,
        size: Size,
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] | None = 0,
        padding_mode: PaddingMode = "constant",
        p: float = 1.0,
    ) -> None:
        self.size = check_size(size)
        self.padding = padding_sides(padding)
        self.pad_if_needed = check_bool(pad_if_needed, "pad_if_needed")
        self.fill = check_fill(fill)
        self.padding_mode = check_padding_mode(padding_mode)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        (tall, wide), (height, width), (left, top, right, bottom) = canvas.size, self.size, self.padding
        narrow, short = max(0, width - wide - left - right), max(0, height - tall - top - bottom)
        if (narrow or short) and not self.pad_if_needed:
            raise ImageError(
                f"an image of {canvas.size} (height, width) is smaller than the crop of {self.size}: "
                "use RandomCrop(..., pad_if_needed=True) to pad it, or put Resize before to enlarge it"
            )
        left, top, random = left + narrow, top + short, generator().random
        y = int(random() * (top + tall + bottom + short - height + 1)) - top
        x = int(random() * (left + wide + right + narrow - width + 1)) - left
        canvas.window(y, x, height, width, mode=_MODES[self.padding_mode], fill=self.fill)

    draws = 3

    def plan(self, batch: Batch) -> None:
        size, (left, top, right, bottom), chosen = pair(*self.size), self.padding, batch.choose(self.p)
        padding = pair(top + bottom, left + right)
        missing = np.maximum(0, size - batch.size - padding)
        if not self.pad_if_needed:
            smaller: Chosen = missing.any(axis=0)
            batch.decline(smaller if chosen is None else smaller & chosen)
        y, x = batch.random(chosen), batch.random(chosen)
        room = batch.size + padding + 2 * missing - size + 1
        start = (np.array([x, y]) * room).astype(np.int64) - missing - pair(top, left)
        batch.window(chosen, start, size, constant=self.padding_mode == "constant", fill=self.fill)

    def leaves(self, form: Form) -> Form:
        return _cropped(form, self.size, self.p)


def _cropped(form: Form, size: tuple[int, int], p: float) -> Form:
    return form._replace(size=size if p == 1 or form.size == size else None)


class SquarePad(Transform):
    """Pad the shorter side to the length of the longer one.

    Args:
        position: position of the image: ``"center"``, ``"top_left"`` or ``"bottom_right"``.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``, as in torchvision's Pad.
        fill: value of a constant border, or one per channel: red, green, blue.
        p: probability of the padding.

    Raises:
        ConfigError: an unknown position or mode, or `p` is not a probability.

    Masks are padded with zeros, and boxes are shifted.
    """

    def __init__(
        self,
        position: Literal["center", "top_left", "bottom_right"] = "center",
        padding_mode: PaddingMode = "constant",
        fill: float | Sequence[float] = 0,
        p: float = 1.0,
    ) -> None:
        if position not in _BEFORE:
            raise ConfigError(f"position must be 'center', 'top_left' or 'bottom_right', not {position!r}")
        self.position = position
        self.padding_mode = check_padding_mode(padding_mode)
        self.fill = check_fill(fill)
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not bernoulli(self.p):
            return
        (height, width), share = canvas.size, _BEFORE[self.position]
        side = max(height, width)
        if height != width:
            top, left = int((side - height) * share), int((side - width) * share)
            canvas.window(-top, -left, side, side, mode=_MODES[self.padding_mode], fill=self.fill)

    def leaves(self, form: Form) -> Form:
        if form.size is None:
            return form
        return form._replace(size=(max(form.size),) * 2 if self.p == 1 or form.size[0] == form.size[1] else None)


class Resize(Transform):
    """Resize to (height, width), or to one int for the shorter side with the same aspect ratio.

    Args:
        size: (height, width), or the length of the shorter side; None: `max_size` determines the size.
        interpolation: ``"bilinear"``, ``"nearest"`` or ``"bicubic"``, or torchvision's InterpolationMode.
        max_size: length of the longer side if `size` is None; with one int as `size`, its maximum.
        antialias: average all source pixels that a result pixel covers, instead of only the nearest ones.

    Raises:
        ConfigError: a size is not positive, no size is given, `max_size` is combined with two sizes or not larger than
            the shorter side, or the filter is unknown.
    """

    def __init__(
        self, size: Size | None, interpolation: Any = "bilinear", max_size: int | None = None, antialias: bool = True
    ) -> None:
        self.size: int | tuple[int, int] | None = None
        if size is None:
            if not isinstance(max_size, int) or max_size < 1:
                raise ConfigError(f"without a size, max_size must be the length of the longer side, not {max_size!r}")
        else:
            one = isinstance(size, int) or len(size) == 1
            self.size = check_size(size)[0] if one else check_size(size)
            if max_size is not None and not (isinstance(self.size, int) and max_size > self.size):
                raise ConfigError(f"max_size={max_size} needs one int as size, which is smaller; got {size!r}")
        self.interpolation = check_filter(interpolation)
        self.max_size = max_size
        self.antialias = check_bool(antialias, "antialias")

    def apply(self, canvas: Canvas) -> None:
        height, width = self.size if isinstance(self.size, tuple) else self._sides(*canvas.size, self.size)
        canvas.resize(height, width, interpolation=self.interpolation, antialias=self.antialias)

    draws = 0

    def plan(self, batch: Batch) -> None:
        if isinstance(self.size, tuple):
            size = pair(*self.size)
        else:
            sizes = zip(*batch.size[::-1].tolist(), strict=True)
            size = np.array([self._sides(height, width, self.size) for height, width in sizes])[:, ::-1].T
        batch.resize(size, interpolation=self.interpolation, antialias=self.antialias)

    def _sides(self, height: int, width: int, short: int | None) -> tuple[int, int]:
        least, most = min(height, width), max(height, width)
        if short is None:
            short, long = least, most
        else:
            long = int(short * most / least)
        if self.max_size is not None and (self.size is None or long > self.max_size):
            short, long = max(1, int(self.max_size * short / long)), self.max_size
        return (short, long) if height <= width else (long, short)

    def leaves(self, form: Form) -> Form:
        if isinstance(self.size, tuple):
            return form._replace(size=self.size)
        return form._replace(size=None if form.size is None else self._sides(*form.size, self.size))


class _Flip(Transform):
    """Base class of the flips."""

    _upside_down = False

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(p)

    def apply(self, canvas: Canvas) -> None:
        if generator().random() < self.p:
            canvas.mirror(upside_down=self._upside_down)

    draws = 1

    def plan(self, batch: Batch) -> None:
        batch.mirror(batch.random() < self.p, upside_down=self._upside_down)


class HorizontalFlip(_Flip):
    """Mirror the image left to right.

    Args:
        p: probability of the flip.

    Raises:
        ConfigError: `p` is not a probability.
    """


class VerticalFlip(_Flip):
    """Mirror the image upside down.

    Args:
        p: probability of the flip.

    Raises:
        ConfigError: `p` is not a probability.
    """

    _upside_down = True
