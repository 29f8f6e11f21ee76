"""Crops, resizes and flips: names, arguments and defaults of torchvision. None looks at a pixel but to add a border.

Masks and boxes follow all of them. Positions and sizes are whole pixels, drawn from the image's size alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from penstock.errors import ConfigError, ImageError
from penstock.images.transforms.base import Size, Transform, chance, draws, pair, switch
from penstock.images.transforms.border import filling
from penstock.images.transforms.canvas import Canvas
from penstock.images.transforms.output import Form
from penstock.images.transforms.padding import MODES, border_mode, borders
from penstock.images.transforms.view import Filter
from penstock.random import generator

__all__ = ["CenterCrop", "HorizontalFlip", "RandomCrop", "RandomResizedCrop", "Resize", "VerticalFlip"]

_FILTERS = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    0: "nearest",
    2: "bilinear",
    3: "bicubic",
}
"""By name, and by Pillow's number."""


def filter_of(interpolation: Any) -> Filter:
    """A filter by its name, or as torchvision's InterpolationMode or Pillow's Resampling.

    Raises:
        ConfigError: it is none of ours.
    """
    name = getattr(interpolation, "value", interpolation)
    if not isinstance(name, str | int) or name not in _FILTERS:
        raise ConfigError(f"interpolation is 'nearest', 'bilinear' or 'bicubic', not {interpolation!r}")
    return cast(Filter, _FILTERS[name])


def interval(values: Sequence[float], name: str) -> tuple[float, float]:
    """Two positive numbers, the lesser one first.

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(values, Sequence) or len(values) != 2 or not 0 < values[0] <= values[1]:
        raise ConfigError(f"{name} must be (least, most), both positive, got {values!r}")
    return float(values[0]), float(values[1])


def draw_sides(area: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Iterator[tuple[int, int]]:
    """Ten times the two sides of a rectangle: a share of the area by `scale`, the first over the second by `ratio`."""
    random = generator().random
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        part = area * (scale[0] + (scale[1] - scale[0]) * random())
        shape = math.exp(low + (high - low) * random())
        yield round(math.sqrt(part * shape)), round(math.sqrt(part / shape))


class RandomResizedCrop(Transform):
    """A crop of random area and shape, resized: what most networks for images are trained with.

    Args:
        size: of the result: (height, width), or one int for both.
        scale: the crop's least and largest share of the image's area.
        ratio: its least and largest width over height, drawn by its logarithm.
        interpolation: ``"bilinear"``, ``"nearest"`` or ``"bicubic"``, or torchvision's name of these.
        antialias: make each pixel of all source pixels that it covers, rather than of the nearest alone.

    Raises:
        ConfigError: a size, share or ratio that is not positive, or an unknown filter.

    After ten draws that do not fit into the image, the largest crop in its middle of the nearest allowed shape is
    taken. Draws at most 40 numbers. With `ImageDataset` only the crop is decoded.
    """

    def __init__(
        self,
        size: Size,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
    ) -> None:
        self.size = pair(size)
        self.scale = interval(scale, "scale")
        self.ratio = interval(ratio, "ratio")
        self.interpolation = filter_of(interpolation)
        self.antialias = switch(antialias, "antialias")

    def apply(self, canvas: Canvas) -> None:
        if canvas.view.resized:
            canvas.pixels = canvas.pixels
        view = canvas.view.crop(*self._box(*canvas.size))
        made = view.resize(*self.size, interpolation=self.interpolation, antialias=self.antialias)
        assert made is not None
        canvas.look(made)

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the crop."""
        for wide, tall in draw_sides(height * width, self.scale, self.ratio):
            if 0 < wide <= width and 0 < tall <= height:
                random = generator().random
                return int(random() * (height - tall + 1)), int(random() * (width - wide + 1)), tall, wide
        shape = min(max(width / height, self.ratio[0]), self.ratio[1])
        wide, tall = min(width, max(1, round(height * shape))), min(height, max(1, round(width / shape)))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def leaves(self, form: Form) -> Form:
        return form._replace(size=self.size)


class CenterCrop(Transform):
    """The middle of the image; a smaller image gets a border of zeros first.

    Args:
        size: (height, width), or one int for both.
        p: probability; otherwise the image stays as it is.

    Raises:
        ConfigError: a size that is not positive, or no probability.
    """

    def __init__(self, size: Size, p: float = 1.0) -> None:
        self.size = pair(size)
        self.p = chance(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not draws(self.p):
            return
        height, width = self.size
        short, narrow = max(0, height - canvas.size[0]), max(0, width - canvas.size[1])
        if short or narrow:
            canvas.pad(narrow // 2, short // 2, narrow - narrow // 2, short - short // 2)
        # As in torchvision, halves are rounded to the even neighbour.
        top, left = round((canvas.size[0] - height) / 2), round((canvas.size[1] - width) / 2)
        canvas.look(canvas.view.crop(top, left, height, width))

    def leaves(self, form: Form) -> Form:
        return _cropped(form, self.size, self.p)


class RandomCrop(Transform):
    """A part of the image anywhere, of the image with a border if that is asked for.

    Args:
        size: (height, width), or one int for both.
        padding: of the border: one number, (left and right, top and bottom), or (left, top, right, bottom).
        pad_if_needed: give an image that is smaller than `size` as much border on both sides as it lacks.
        fill: value of a constant border, or one for each channel: red, green, blue.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``. The border of masks is zero.
        p: probability; otherwise the image stays as it is.

    Raises:
        ConfigError: a size that is not positive, a negative or incomplete `padding`, an unknown mode, no probability.
        ImageError: (when called) an image that is smaller than `size`, without `pad_if_needed`.

    A border that is not constant takes the whole image to be decoded.
    """

    def __init__(
        self,
        size: Size,
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] | None = 0,
        padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant",
        p: float = 1.0,
    ) -> None:
        self.size = pair(size)
        self.padding = borders(padding)
        self.pad_if_needed = switch(pad_if_needed, "pad_if_needed")
        self.fill = filling(fill)
        self.padding_mode = border_mode(padding_mode)
        self.p = chance(p)

    def apply(self, canvas: Canvas) -> None:
        if self.p < 1 and not draws(self.p):
            return
        (tall, wide), (height, width), (left, top, right, bottom) = canvas.size, self.size, self.padding
        narrow, short = max(0, width - wide - left - right), max(0, height - tall - top - bottom)
        if (narrow or short) and not self.pad_if_needed:
            raise ImageError(
                f"an image of {canvas.size} (height, width) is smaller than the crop of {self.size}: "
                "RandomCrop(..., pad_if_needed=True) gives it a border, Resize before it makes it larger"
            )
        left, top, random = left + narrow, top + short, generator().random
        y = int(random() * (top + tall + bottom + short - height + 1)) - top
        x = int(random() * (left + wide + right + narrow - width + 1)) - left
        canvas.window(y, x, height, width, mode=MODES[self.padding_mode], fill=self.fill)

    def leaves(self, form: Form) -> Form:
        return _cropped(form, self.size, self.p)


def _cropped(form: Form, size: tuple[int, int], p: float) -> Form:
    return form._replace(size=size if p == 1 or form.size == size else None)


class Resize(Transform):
    """Another size: (height, width), or one int for the shorter side, the other in proportion.

    Args:
        size: (height, width), or the length of the shorter side; None: `max_size` alone says how large.
        interpolation: ``"bilinear"``, ``"nearest"`` or ``"bicubic"``, or torchvision's name of these.
        max_size: of the longer side. With one int as `size`: if it would be longer, it is made this long instead.
        antialias: make each pixel of all source pixels that it covers, rather than of the nearest alone.

    Raises:
        ConfigError: a size that is not positive, no size at all, `max_size` with two sizes or below the shorter side,
            or an unknown filter.
    """

    def __init__(
        self, size: Size | None, interpolation: Any = "bilinear", max_size: int | None = None, antialias: bool = True
    ) -> None:
        self.size: int | tuple[int, int] | None = None
        if size is None:
            if not isinstance(max_size, int) or max_size < 1:
                raise ConfigError(f"without a size, max_size is the length of the longer side, not {max_size!r}")
        else:
            one = isinstance(size, int) or len(size) == 1
            self.size = pair(size)[0] if one else pair(size)
            if max_size is not None and not (isinstance(self.size, int) and max_size > self.size):
                raise ConfigError(f"max_size={max_size} goes with one int as size, and is larger; got {size!r}")
        self.interpolation = filter_of(interpolation)
        self.max_size = max_size
        self.antialias = switch(antialias, "antialias")

    def apply(self, canvas: Canvas) -> None:
        height, width = self.size if isinstance(self.size, tuple) else self._sides(*canvas.size, self.size)
        how: dict[str, Any] = {"interpolation": self.interpolation, "antialias": self.antialias}
        canvas.resize(lambda view: view.resize(height, width, **how))

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
    """What both have in common."""

    _upside_down = False

    def __init__(self, p: float = 0.5) -> None:
        self.p = chance(p)

    def apply(self, canvas: Canvas) -> None:
        if draws(self.p):
            canvas.mirror(upside_down=self._upside_down)


class HorizontalFlip(_Flip):
    """Mirrored left to right.

    Args:
        p: probability.

    Raises:
        ConfigError: it is none.
    """


class VerticalFlip(_Flip):
    """Mirrored upside down.

    Args:
        p: probability.

    Raises:
        ConfigError: it is none.
    """

    _upside_down = True
