"""Decode only the part of an image that a crop needs, at no more resolution than its resize needs.

A random crop uses two fifths of an image on average, and is often shrunk afterwards. `decode_region` decodes only that
part if it can, and returns the position of the crop in its result:

    array, inner = decode_region(data, (10.5, 20, 250, 260.25), target=(224, 224))
    # resize `inner` (left, top, right, bottom, in pixels of `array`) to 224 x 224

Promises: `array` contains exactly the box, rounded outward to whole pixels; boxes stay fractional. Unless the box is at
least twice as large as `target`, its pixels equal those of `decode`, bit for bit, with and without the C extension.
Otherwise the extension shrinks a JPEG by 2, 4 or 8 in the frequency domain, never below `target`. Without it, `array`
is not shrunk. EXIF orientation is ignored, as in `decode`.
"""

from __future__ import annotations

import math
import os
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.images import native
from penstock.images.decode import MAX_PIXELS, decode
from penstock.images.headers import size_of_file

__all__ = ["Box", "decode_region", "outward"]

Box: TypeAlias = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels. Pixel i covers i to i + 1."""


def outward(pixels: npt.NDArray[Any], box: Box) -> tuple[npt.NDArray[Any], Box]:
    """Return the part of an image in a box, rounded outward to whole pixels, and the box in its coordinates."""
    left, top, right, bottom = box
    x, y = math.floor(left), math.floor(top)
    return pixels[y : math.ceil(bottom), x : math.ceil(right)], (left - x, top - y, right - x, bottom - y)


def decode_region(
    data: bytes | bytearray | memoryview,
    box: Box,
    *,
    target: tuple[int, int],
    path: str | os.PathLike[str] | None = None,
    mode: Literal["rgb", "gray"] = "rgb",
    max_pixels: int = MAX_PIXELS,
    size: tuple[int, int] | None = None,
    entries: bytes | memoryview | None = None,
) -> tuple[npt.NDArray[np.uint8], Box]:
    """Decode the part of an image that contains `box`, and return it with the box in its coordinates.

    `box` is in pixels of the stored image, `target` is the (height, width) to which the box is resized afterwards, and
    `size` is the result of `size_of_file(data)`, if known. Return a uint8 array, (h, w, 3) RGB or (h, w, 1) gray, whose
    rows need not be adjacent in memory, and `box` in pixels of that array.

    With `entries` of the same `data` (see `penstock.images.entries`) the extension begins to decode near the box. The
    pixels are the same; with entries of another file they would be wrong.

    Raises `ImageError`, which names `path`, as `decode` does, also for an image of more than `max_pixels`, and
    `ConfigError` for a box that is empty or not inside the image. Damage below the box may stay undetected, but a
    truncated JPEG is an error.

    Cost: entropy decoding from the start to the box's lower edge, or with `entries` of the box alone; all other steps
    for the box only. Other formats are decoded as a whole.
    """
    left, top, right, bottom = box
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf) or min(target) < 1:
        raise ConfigError(f"not a region of an image: box {box!r} (left, top, right, bottom), target {target!r}")
    outside = f"box {box!r} (left, top, right, bottom) is not inside an image of"
    size = size or size_of_file(data)
    width, height = size or (0, 0)
    if native.is_available() and data[:2] == b"\xff\xd8" and 0 < width * height <= max_pixels:
        if right > width or bottom > height:
            raise ConfigError(f"{outside} {width} x {height} pixels")
        scale = 1
        while scale < 8 and right - left >= 2 * scale * target[1] and bottom - top >= 2 * scale * target[0]:
            scale *= 2
        x, y = int(left // scale), int(top // scale)
        shape = -int(-bottom // scale) - y, -int(-right // scale) - x, 1 if mode == "gray" else 3
        array = np.empty(shape, np.uint8)
        try:
            native.draw_box(data, box, array, max_pixels=max_pixels, size=size, entries=entries, scale=scale)
        except (ValueError, NotImplementedError, OverflowError):
            pass  # a whole decode tolerates stray bytes, converts CMYK, and reports errors and limits
        else:
            return array, (left / scale - x, top / scale - y, right / scale - x, bottom / scale - y)
    image = decode(data, path=path, mode=mode, max_pixels=max_pixels, size=size)
    height, width = image.shape[:2]
    if right > width or bottom > height:
        raise ConfigError(f"{outside} {width} x {height} pixels")
    return outward(image, box)
