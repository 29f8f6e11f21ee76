"""The part of an image that a crop needs, at no more resolution than its resize needs.

A random crop of a JPEG uses a third of the picture, and a large picture is shrunk at once: `decode_region` decodes
that part only, where it can, and says where the crop lies in what it returns:

    array, inner = decode_region(data, (10.5, 20, 250, 260.25), target=(224, 224))
    # resize `inner` (left, top, right, bottom, in pixels of `array`) to 224 x 224

Promises: `array` holds the whole box; it is never shrunk below `target`, so the resize that follows only shrinks what
a plain decode would also have had; boxes stay fractional. Pixels are those of `decode`, with EXIF orientation ignored.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images.decode import decode

__all__ = ["Box", "decode_region"]

Box: TypeAlias = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels: pixel i covers i to i + 1."""


def decode_region(
    data: bytes | bytearray | memoryview,
    box: Box,
    *,
    target: tuple[int, int],
    path: str | os.PathLike[str] | None = None,
    mode: Literal["rgb", "gray"] = "rgb",
) -> tuple[npt.NDArray[np.uint8], Box]:
    """The pixels of an encoded image that hold `box`, and the box in their coordinates.

    `box` is in the stored image's pixels, `target` the (height, width) that the box is resized to afterwards. Returns
    a uint8 array, (h, w, 3) RGB or (h, w, 1) gray, and `box` in pixels of that array. Raises `ImageError`, which names
    `path`, as `decode` does, and `ConfigError` for a box or target that cannot be.
    """
    left, top, right, bottom = box
    if not (0 <= left < right and 0 <= top < bottom) or target[0] < 1 or target[1] < 1:
        raise ConfigError(f"no region of an image: box {box!r} (left, top, right, bottom), target {target!r}")
    image = decode(data, path=path)
    height, width = image.shape[:2]
    if right > width or bottom > height:
        raise ConfigError(f"box {box!r} (left, top, right, bottom) is not inside an image of {width} x {height} pixels")
    if mode == "gray":
        image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None]
    return image, box
