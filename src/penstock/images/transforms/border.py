"""`Border`: pixels around an image, of one value for each channel.

It is known before any pixel is, so the image can be drawn inside of it:

    whole[...] = colour(border.fill)
    draw(whole[border.inside(whole.shape[:2])])
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.images.transforms.view import Pixels

__all__ = ["Border", "colour"]

_PLAIN = cv2.BORDER_CONSTANT


class Border(NamedTuple):
    """So many pixels on each side; `fill` is one number for all channels, or one for each."""

    left: int
    top: int
    right: int
    bottom: int
    fill: Any = 0

    def mirror(self, *, upside_down: bool = False) -> Border:
        """That of the image mirrored left to right, or upside down."""
        left, top, right, bottom, fill = self
        return Border(left, bottom, right, top, fill) if upside_down else Border(right, top, left, bottom, fill)

    def inside(self, size: tuple[int, int]) -> tuple[slice, slice]:
        """Rows and columns that are the image's, of a whole of (height, width) pixels."""
        return slice(self.top, size[0] - self.bottom), slice(self.left, size[1] - self.right)

    def around(self, pixels: Pixels, mode: int = _PLAIN) -> Pixels:
        """A new image: (height, width, channels) with the border around it, made in one of OpenCV's ways."""
        ends = self.top, self.bottom, self.left, self.right
        made: Pixels = cv2.copyMakeBorder(pixels, *ends, mode, value=_values(self.fill))
        return made if made.ndim == 3 else made[:, :, None]


@lru_cache(maxsize=64)
def colour(fill: Any) -> npt.NDArray[np.uint8]:
    """The bytes that OpenCV rounds a `fill` to: one, or three where they differ, which NumPy is slower to fill with."""
    made: Pixels = cv2.copyMakeBorder(np.zeros((1, 1, 3), np.uint8), 1, 0, 0, 0, _PLAIN, value=_values(fill))
    found: npt.NDArray[np.uint8] = made[0, 0]
    return found if np.ptp(found) else found[:1]


def _values(fill: Any) -> tuple[float, ...]:
    return fill if isinstance(fill, tuple) else (fill,) * 4
