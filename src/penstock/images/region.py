"""The part of an image that a crop needs, at no more resolution than its resize needs.

A random crop uses two fifths of a picture on average, and a large picture is shrunk at once: `decode_region` decodes
that part only, where it can, and says where the crop lies in what it returns:

    array, inner = decode_region(data, (10.5, 20, 250, 260.25), target=(224, 224))
    # resize `inner` (left, top, right, bottom, in pixels of `array`) to 224 x 224

`draw_region` does both in one call, where the extension can, without an array in between.

Promises: `array` holds the box, rounded outward to whole pixels, and nothing else; boxes stay fractional. Unless the
box is twice as large as `target` or more, its pixels are those of `decode`, bit for bit, with the C extension and
without. Otherwise the extension shrinks a JPEG by 2, 4 or 8 in the frequency domain, never below `target`; without it
`array` is never shrunk, and the resize that follows has to. EXIF orientation is ignored, as in `decode`.
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

__all__ = ["Box", "decode_region", "draw_region"]

T = TypeVar("T")

Box: TypeAlias = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels: pixel i covers i to i + 1."""


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
    """The pixels of an encoded image that hold `box`, and the box in their coordinates.

    `box` is in the stored image's pixels, `target` the (height, width) that the box is resized to afterwards, `size`
    what `size_of_file` says of the data, if that is known. Returns a uint8 array, (h, w, 3) RGB or (h, w, 1) gray,
    whose rows need not be adjacent in memory, and `box` in pixels of that array. The array may lie in this thread's
    scratch and keep it from being used again: copy what you keep.

    `entries` are those of this very `data` (see `penstock.images.entries`), with which the extension begins to decode
    near the box. The pixels are the same; with those of another file they would be wrong.

    Raises `ImageError`, which names `path`, as `decode` does, also for an image of more than `max_pixels`, and
    `ConfigError` for a box that is empty or not inside the image. A JPEG that is damaged below the box may pass; one
    that ends too early does not.

    Cost: entropy decoding down to the box's lower edge, with `entries` that of the box alone, the rest for the box
    only; a whole decode for other formats.
    """
    left, top, right, bottom = box
    _check(box, target)
    channels = 1 if mode == "gray" else 3
    how: dict[str, Any] = {"target": target, "channels": channels, "max_pixels": max_pixels, "entries": entries}
    how["size"] = size or size_of_file(data)
    region = _by_extension(lambda: native.decode_box(data, box, **how), data, box, path)
    if region is not None:
        x, y, scale = region.x, region.y, region.scale
        return region.array, (left / scale - x, top / scale - y, right / scale - x, bottom / scale - y)
    image = decode(data, path=path, mode=mode, max_pixels=max_pixels)
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
    """Draw a view of an encoded image into `out`, (height, width, 3) or (height, width, 1), in one call.

    What is drawn is what `view.render` makes of `decode_region`; with a `table`, (channels, 256), what it has for these
    values, and with `planar` as (channels, height, width). Returns the seconds that resizing took; None where it
    cannot be done: without the extension, for other formats, for what another library has to decode, and for the
    nearest pixels. `entries` are those of `decode_region`, which also raises the same.
    """
    _check(view.box, view.size)
    if view.interpolation == "nearest":
        return None
    how: dict[str, Any] = {"interpolation": view.interpolation, "antialias": view.antialias, "flipped": view.flipped}
    how |= {"max_pixels": max_pixels, "size": size or size_of_file(data), "entries": entries}
    how |= {"table": table, "planar": planar}
    return _by_extension(lambda: native.draw_box(data, view.box, out, **how), data, view.box, path)


def _check(box: Box, target: tuple[int, int]) -> None:
    left, top, right, bottom = box
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf) or target[0] < 1 or target[1] < 1:
        raise ConfigError(f"no region of an image: box {box!r} (left, top, right, bottom), target {target!r}")


def _by_extension(
    call: Callable[[], T], data: bytes | bytearray | memoryview, box: Box, path: str | os.PathLike[str] | None
) -> T | None:
    """What the extension makes of a JPEG; None without it, and for what it leaves to others."""
    if not native.is_available() or data[:2] != b"\xff\xd8":
        return None
    try:
        return call()
    except (ValueError, NotImplementedError):
        return None  # a whole decode forgives stray bytes, converts CMYK, and knows how to name what is wrong
    except OverflowError as error:
        raise _beyond(path, error) from None
    except IndexError as error:
        raise _outside(box, str(error)) from None


def _outside(box: Box, size: str) -> ConfigError:
    return ConfigError(f"box {box!r} (left, top, right, bottom) is not inside an image of {size} pixels")


def _beyond(path: str | os.PathLike[str] | None, error: OverflowError) -> ImageError:
    name = "image" if path is None else f"image {shown(path)!r}"
    return ImageError(f"{name}: {error} (max_pixels=)" if "pixels" in str(error) else f"{name}: {error}")
