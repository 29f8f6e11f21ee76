"""Decode image files to RGB arrays, and read image sizes without decoding.

JPEG is decoded by libjpeg-turbo (simplejpeg); PNG, WebP, BMP, TIFF, GIF, PNM, JPEG 2000 and AVIF by OpenCV. Other
backends can be selected by name (`penstock.images.backends`). The result is uint8, (height, width, 3), RGB,
C-contiguous: grey, palette and CMYK images are converted, 16 bits become 8, an alpha channel is dropped, and only the
first frame of an animation is decoded.

**EXIF orientation is ignored** by default: pixels are in stored order, and `image_size` agrees with `decode`. The
usual training pipelines for ImageNet do the same. To apply the orientation, rotate the files once, or pass
``orientation="apply"``.

A truncated file is an error, never an image with a grey lower half. A complete JPEG with stray bytes before a marker,
as in ImageNet and from many cameras, is decoded as Pillow and OpenCV do.

    >>> image = read_image("cat.jpg")      # doctest: +SKIP
    >>> image.shape, image.dtype           # doctest: +SKIP
    ((375, 500, 3), dtype('uint8'))

All functions are thread-safe and release the GIL while they decode. Memory: the file's bytes and the image.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, ImageError
from penstock.images import headers, jpeg
from penstock.images.backends import choose, oriented
from penstock.images.headers import TruncatedHeader, size_from_header, size_of_file
from penstock.images.limits import Limit, TooManyPixels
from penstock.stages import account, spent
from penstock.storage import Storage, is_remote
from penstock.storage.urls import shown

__all__ = ["MAX_PIXELS", "decode", "image_size", "read_bytes", "read_image"]

_HEADER_BYTES = 64 * 1024
_MAX_SIDE = 2**31 - 1
MAX_PIXELS = 2**28
"""The default limit for the pixels of an image: 268 million, 805 MB as RGB."""


def read_image(
    path: str | os.PathLike[str], *, storage: Storage | None = None, data: Callable[[], bytes] | None = None
) -> npt.NDArray[np.uint8]:
    """Read the image of a file or remote object, as uint8 (height, width, 3) RGB.

    `storage` gives access to remote objects. `data` returns the bytes, if they are not read from `path`.

    Raises `ImageError`, which names the path, if the file is missing, a folder, unreadable, empty, truncated, not an
    image, or has more than `MAX_PIXELS`.
    """
    return decode(read_bytes(path, storage=storage, data=data), path=path)


def decode(
    data: bytes | bytearray | memoryview,
    *,
    path: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    mode: Literal["rgb", "gray"] = "rgb",
    orientation: Literal["ignore", "apply"] = "ignore",
    partial: bool = False,
    max_pixels: int = MAX_PIXELS,
    size: tuple[int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """Decode an encoded image to uint8, (height, width, 3) RGB, or (height, width, 1) with ``mode="gray"``.

    `path` is only for error messages. `backend` is a name of `backends.BACKENDS`; ``auto`` is the preferred installed
    one for the format. With ``orientation="apply"`` the image is turned by its EXIF orientation. With `partial` a
    truncated or damaged image is decoded as far as possible, with the rest gray or black: a JPEG by ``native``,
    ``simplejpeg`` or ``pillow``, a PNG, BMP, GIF or TIFF by ``pillow``. ``auto`` uses these if installed, and decodes
    only whole images of other formats. `max_pixels` is checked before decoding, with the header as the decoding
    library reads it (`penstock.images.limits`). `size` is the result of `size_of_file(data)`, if known. The array is
    new and C-contiguous.

    Raises `ImageError` for empty, truncated, undecodable or too large data, `ConfigError` for a backend that is
    unknown, not installed, does not read this format, or does not support `partial` for it.

    >>> decode(data, mode="gray", orientation="apply").shape                 # doctest: +SKIP
    (500, 375, 1)
    """
    if mode not in ("rgb", "gray") or orientation not in ("ignore", "apply"):
        raise ConfigError(
            f"mode must be 'rgb' or 'gray', orientation 'ignore' or 'apply', not {mode!r}, {orientation!r}"
        )
    if len(data) == 0:
        raise ImageError(f"{_name(path)} is empty (0 bytes), not an image")
    kind = headers.kind(data)
    chosen = choose(backend, kind, partial)
    limit = Limit(max_pixels, size or size_of_file(data))
    try:
        if limit.size is not None:
            limit.check(*limit.size)
        image = chosen.decode(data, 1 if mode == "gray" else 3, partial, limit)
        limit.check(image.shape[1], image.shape[0])  # formats without a size in the header
    except TooManyPixels as error:
        raise ImageError(
            f"{_name(path)} has {error}: damaged or malicious; if it is neither, pass a larger max_pixels="
        ) from None
    except ValueError as error:
        what, reason = "cannot be decoded", str(error)
        if kind == "jpeg" and jpeg.is_lossless(data):
            what = "is a lossless JPEG (SOF3), which is decoded only to the colours that are stored, if at all"
        elif kind == "jpeg":
            what = "is truncated" if reason.startswith("truncated") else "is a damaged JPEG"
            reason = reason.removeprefix("truncated: ")
        raise ImageError(f"{_name(path)} {what} ({len(data)} bytes): {reason}") from error
    if orientation == "apply":
        return oriented(image, headers.orientation(data))
    return image


def image_size(path: str | os.PathLike[str], *, storage: Storage | None = None) -> tuple[int, int]:
    """Return ``(width, height)`` in pixels of the image in a file or object, as stored (EXIF orientation ignored).

    Reads the first 64 KiB, or the whole file if the size is further behind (large EXIF or ICC blocks, a TIFF). Decodes
    only formats without a simple header (AVIF). So a file that is truncated after its header has a size here, but fails
    in `read_image`. `storage` gives access to remote objects. Raises `ImageError` as `read_image` does.
    """
    for count in (_HEADER_BYTES, -1):
        data = read_bytes(path, count, storage=storage)
        try:
            size = size_from_header(data)
            break
        except TruncatedHeader:
            continue
    else:
        raise ImageError(f"{_name(path)} is truncated: no image size in {len(data)} bytes")
    if size is None:
        height, width = read_image(path, storage=storage).shape[:2]
        return width, height
    if not (0 < size[0] <= _MAX_SIDE and 0 < size[1] <= _MAX_SIDE):
        raise ImageError(f"{_name(path)} is damaged: its header states {size[0]} x {size[1]} pixels")
    return size


def read_bytes(
    path: str | os.PathLike[str],
    size: int = -1,
    *,
    storage: Storage | None = None,
    data: Callable[[], bytes] | None = None,
) -> bytes:
    """Return the first `size` bytes of an image file or object, or all of them; or the result of `data`, if given.

    `storage` gives access to remote objects. Raises `ImageError`, which names the path, if it cannot be read.
    """
    clock = account.clock
    start = clock()
    try:
        if data is not None:
            return data()
        if is_remote(path):
            how = storage or Storage()
            return how.read(path) if size < 0 else how.open(path).read_at(0, size)
        return _read_file(path, size)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, FileNotFoundError) and data is None and not os.path.isabs(path):
            reason += ", relative to the working folder; pass root= (--root) to set the folder of a manifest's paths"
        raise ImageError(f"{_name(path)}: cannot be read: {reason}") from error
    finally:
        spent("read", clock() - start)


def _read_file(path: str | os.PathLike[str], size: int) -> bytes:
    """Return the first `size` bytes of a file, or all if negative, in half the time of Python's file objects."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        available = os.fstat(descriptor).st_size
        wanted = size if 0 <= size <= available else available + 1  # one byte more: a short read means the end
        data = os.read(descriptor, wanted)
        if len(data) == min(wanted, available):
            return data
        with open(descriptor, "rb", closefd=False) as rest:  # a pipe, a file that grows, or more than 2 GiB
            return data + rest.read(size if size < 0 else size - len(data))
    finally:
        os.close(descriptor)


def _name(path: str | os.PathLike[str] | None) -> str:
    return "image" if path is None else f"image {shown(path)!r}"
