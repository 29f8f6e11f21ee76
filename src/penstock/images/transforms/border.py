"""`Border`: a constant border around an image.

Its size is known before the image is decoded, so the image can be drawn inside it:

    whole[...] = colour(border.fill)
    draw(whole[border.inside(whole.shape[:2])])
"""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.transforms.output import Conversion, look_up_table
from penstock.images.transforms.view import Pixels

__all__ = ["Border", "check_fill", "fill_bits", "fill_values"]

_PLAIN = cv2.BORDER_CONSTANT
_MOST = 1 << 31  # OpenCV converts to 32-bit integers first


def check_fill(fill: Any) -> float | tuple[float, ...]:
    """Check and return the value of new pixels: a number for all channels, or one per channel; None is 0.

    Raises:
        ConfigError: another value, such as torchvision's dict of types.
    """
    if fill is None:
        return 0
    values = tuple(fill) if isinstance(fill, list | tuple) else (fill,)
    if not 1 <= len(values) <= 4 or not all(isinstance(value, Real) and abs(float(value)) < _MOST for value in values):
        raise ConfigError(f"fill must be a number, or one for each channel, not {fill!r}")
    numbers = tuple(value if isinstance(value, int) else float(value) for value in values)
    return numbers[0] if len(numbers) == 1 else numbers


def fill_values(fill: float | tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return the value for OpenCV, which takes a number for each of four channels.

    Raises:
        ConfigError: the number of values does not match the channels.
    """
    if not isinstance(fill, tuple):
        return (fill,) * 4
    if len(fill) != channels:
        raise ConfigError(f"fill has {len(fill)} values, and the image {channels} channels: pass one for each, or one")
    return fill


class Border(NamedTuple):
    """Numbers of pixels on each side; `fill` is a result of `check_fill`."""

    left: int
    top: int
    right: int
    bottom: int
    fill: float | tuple[float, ...] = 0

    def mirror(self, *, upside_down: bool = False) -> Border:
        """Return the border of the image mirrored left to right, or upside down."""
        left, top, right, bottom, fill = self
        return Border(left, bottom, right, top, fill) if upside_down else Border(right, top, left, bottom, fill)

    def inside(self, size: tuple[int, int]) -> tuple[slice, slice]:
        """Return rows and columns of the image inside the whole of (height, width) pixels."""
        return slice(self.top, size[0] - self.bottom), slice(self.left, size[1] - self.right)

    def around(self, pixels: Pixels, mode: int = _PLAIN) -> Pixels:
        """Return a new image (height, width, channels) with the border, in one of OpenCV's border modes."""
        ends = self.top, self.bottom, self.left, self.right
        made: Pixels = cv2.copyMakeBorder(pixels, *ends, mode, value=fill_values(self.fill, pixels.shape[2]))
        return made if made.ndim == 3 else made[:, :, None]


@lru_cache(maxsize=64)
def fill_bits(fill: float | tuple[float, ...], conversion: Conversion, channels: int = 3) -> npt.NDArray[Any]:
    """Return the value of a border after a conversion, as bits, in the shape that fills an image.

    It is what OpenCV rounds `fill` to. One value if all are equal, which NumPy fills faster.
    """
    made = Border(0, 1, 0, 0, fill).around(np.zeros((1, 1, channels), np.uint8))
    values: npt.NDArray[Any] = look_up_table(conversion, channels)[np.arange(channels), made[0, 0]]
    if (values == values[0]).all():
        return values[:1]
    return values if conversion.channels_last else values[:, None, None]
