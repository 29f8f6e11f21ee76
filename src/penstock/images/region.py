"""Decode only the part of an image that a crop needs, at no more resolution than its resize needs.

A random crop uses two fifths of an image on average, and is often shrunk afterwards. `decode_region` decodes only that
part if it can, and returns the position of the crop in its result:

    array, inner = decode_region(data, (10.5, 20, 250, 260.25), target=(224, 224))
    # resize `inner` (left, top, right, bottom, in pixels of `array`) to 224 x 224

`draw_region` does both in one call, without an intermediate array, if the extension supports the image.

Promises: `array` contains exactly the box, rounded outward to whole pixels; boxes stay fractional. Unless the box is at
least twice as large as `target`, its pixels equal those of `decode`, bit for bit, with and without the C extension.
Otherwise the extension shrinks a JPEG by 2, 4 or 8 in the frequency domain, never below `target`. Without it, `array`
is not shrunk. EXIF orientation is ignored, as in `decode`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, ImageError
from penstock.images import native
from penstock.images.decode import MAX_PIXELS, decode
from penstock.images.headers import size_of_file
from penstock.storage.urls import shown

if TYPE_CHECKING:
    from penstock.images.transforms.view import View

__all__ = ["Box", "decode_region", "draw_region", "is_supported"]

T = TypeVar("T")

Box: TypeAlias = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels. Pixel i covers i to i + 1."""


def is_supported(data: bytes | bytearray | memoryview) -> bool:
    """Return whether the C extension is installed and decodes the format of an image."""
    return native.is_available() and data[:2] == b"\xff\xd8"


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
    rows need not be adjacent in memory, and `box` in pixels of that array. The array may be in this thread's scratch
    buffer and prevent its reuse: copy it to keep it.

    With `entries` of the same `data` (see `penstock.images.entries`) the extension begins to decode near the box. The
    pixels are the same; with entries of another file they would be wrong.

    Raises `ImageError`, which names `path`, as `decode` does, also for an image of more than `max_pixels`, and
    `ConfigError` for a box that is empty or not inside the image. Damage below the box may stay undetected, but a
    truncated JPEG is an error.

    Cost: entropy decoding from the start to the box's lower edge, or with `entries` of the box alone; all other steps
    for the box only. Other formats are decoded as a whole.
    """
    left, top, right, bottom = box
    _check(box, target)
    channels = 1 if mode == "gray" else 3
    size = size or size_of_file(data)
    region = _by_extension(
        lambda: native.decode_box(
            data, box, target=target, channels=channels, max_pixels=max_pixels, size=size, entries=entries
        ),
        data,
        box,
        path,
    )
    if region is not None:
        x, y, scale = region.x, region.y, region.scale
        return region.array, (left / scale - x, top / scale - y, right / scale - x, bottom / scale - y)
    image = decode(data, path=path, mode=mode, max_pixels=max_pixels, size=size)
    height, width = image.shape[:2]
    if right > width or bottom > height:
        raise _outside(box, f"{width} x {height}")
    x, y = int(left), int(top)
    array = image[y : -int(-bottom // 1), x : -int(-right // 1)]
    return array, (left - x, top - y, right - x, bottom - y)


def draw_region(
    data: bytes | bytearray | memoryview,
    view: View,
    out: npt.NDArray[Any],
    *,
    table: npt.NDArray[Any] | None = None,
    planar: bool = False,
    path: str | os.PathLike[str] | None = None,
    max_pixels: int = MAX_PIXELS,
    size: tuple[int, int] | None = None,
    entries: bytes | memoryview | None = None,
) -> float | None:
    """Decode and render a view of an encoded image into `out`, (height, width, 3) or (height, width, 1), in one call.

    The result equals `view.render` after `decode_region`. With a `table`, (channels, 256), values are replaced by its
    entries, and with `planar` the layout is (channels, height, width). Return the seconds that resizing took, or None
    if it is not supported: without the extension, for other formats, for JPEGs that another library must decode, and
    for nearest interpolation. `entries` and errors are as in `decode_region`.
    """
    _check(view.box, view.size)
    interpolation = view.interpolation
    if interpolation == "nearest":
        return None
    return _by_extension(
        lambda: native.draw_box(
            data,
            view.box,
            out,
            interpolation=interpolation,
            antialias=view.antialias,
            flipped=view.flipped,
            table=table,
            planar=planar,
            max_pixels=max_pixels,
            size=size or size_of_file(data),
            entries=entries,
        ),
        data,
        view.box,
        path,
    )


def _check(box: Box, target: tuple[int, int]) -> None:
    left, top, right, bottom = box
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf) or target[0] < 1 or target[1] < 1:
        raise ConfigError(f"not a region of an image: box {box!r} (left, top, right, bottom), target {target!r}")


def _by_extension(
    call: Callable[[], T], data: bytes | bytearray | memoryview, box: Box, path: str | os.PathLike[str] | None
) -> T | None:
    """Return the result of an extension call; None without the extension, or if it does not support the image."""
    if not is_supported(data):
        return None
    try:
        return call()
    except (ValueError, NotImplementedError):
        # A whole decode tolerates stray bytes, converts CMYK, and reports errors.
        return None
    except OverflowError as error:
        raise _beyond(path, error) from None
    except IndexError as error:
        raise _outside(box, str(error)) from None


def _outside(box: Box, size: str) -> ConfigError:
    return ConfigError(f"box {box!r} (left, top, right, bottom) is not inside an image of {size} pixels")


def _beyond(path: str | os.PathLike[str] | None, error: OverflowError) -> ImageError:
    name = "image" if path is None else f"image {shown(path)!r}"
    return ImageError(f"{name}: {error} (max_pixels=)" if "pixels" in str(error) else f"{name}: {error}")
