"""Image files to RGB arrays, and image sizes without decoding.

JPEG is decoded by libjpeg-turbo (simplejpeg), everything else that OpenCV reads (PNG, WebP, BMP, TIFF, GIF, ...) by
OpenCV. The result is always uint8, (height, width, 3), RGB, C-contiguous: grey, palette and CMYK images are converted,
16 bits become 8, an alpha channel is dropped, of an animation the first frame is taken.

**EXIF orientation is ignored**: pixels come as they are stored, and `image_size` agrees with `decode`. This is what
the pipelines that ImageNet models were trained with do; whoever needs rotation rotates the files once.

A file that ends too early is an error, never an image with a grey lower half. A complete JPEG with stray bytes before
a marker, as ImageNet and many cameras have them, is decoded, as Pillow and OpenCV decode it.

    >>> image = read_image("cat.jpg")      # doctest: +SKIP
    >>> image.shape, image.dtype           # doctest: +SKIP
    ((375, 500, 3), dtype('uint8'))

All functions are thread-safe and release the GIL while they decode. Memory: the file's bytes and the image.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from penstock.errors import ImageError
from penstock.images.headers import TruncatedHeader, size_from_header
from penstock.stages import stage
from penstock.storage import Storage, is_remote

__all__ = ["decode", "image_size", "read_image"]

_FLAGS = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
_HEADER_BYTES = 64 * 1024
_MAX_SIDE = 2**31 - 1
# Warnings of libjpeg after which the picture is whole. All others mean missing or wrong pixels.
_HARMLESS = ("extraneous bytes", "unknown JFIF revision", "Unknown Adobe color transform", "Inconsistent progression")


def read_image(
    path: str | os.PathLike[str], *, storage: Storage | None = None, data: Callable[[], bytes] | None = None
) -> npt.NDArray[np.uint8]:
    """The image in a file, or in a remote object, as uint8 (height, width, 3) RGB.

    Raises `ImageError`, which names the path, when the file is missing, a folder, unreadable, empty, truncated or no
    image. `storage` says how remote objects are reached; `data` gives the bytes, when somebody else reads them.
    """
    return decode(_read(path, storage=storage, data=data), path=path)


def decode(
    data: bytes | bytearray | memoryview, *, path: str | os.PathLike[str] | None = None
) -> npt.NDArray[np.uint8]:
    """The image in an encoded buffer as uint8 (height, width, 3) RGB.

    `path` is for the error message only. Raises `ImageError` for empty, truncated or undecodable data.
    """
    if len(data) == 0:
        raise ImageError(f"{_name(path)} is empty (0 bytes), not an image")
    if data[:2] == b"\xff\xd8":
        return _decode_jpeg(data, path)
    return _decode_opencv(data, path)


def image_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """``(width, height)`` in pixels of the image in a file, as stored (EXIF orientation ignored).

    Reads the first 64 KiB, the whole file only where the header is longer (large EXIF or ICC blocks), and decodes only
    what has no simple header (TIFF, JPEG 2000, AVIF). A file that is cut behind its header therefore has a size here
    and fails in `read_image`. Raises `ImageError` as `read_image` does.
    """
    data = _read(path, _HEADER_BYTES)
    try:
        try:
            size = size_from_header(data)
        except TruncatedHeader:
            if len(data) < _HEADER_BYTES:
                raise
            data = _read(path)
            size = size_from_header(data)
    except TruncatedHeader:
        message = f"{_name(path)} is truncated: {len(data)} bytes, and no image size in them"
        raise ImageError(message) from None
    if size is None:
        height, width = read_image(path).shape[:2]
        return width, height
    if not (0 < size[0] <= _MAX_SIDE and 0 < size[1] <= _MAX_SIDE):
        raise ImageError(f"{_name(path)} is damaged: its header says {size[0]} x {size[1]} pixels")
    return size


def _decode_jpeg(data: bytes | bytearray | memoryview, path: str | os.PathLike[str] | None) -> npt.NDArray[np.uint8]:
    """Strict first, which turns every libjpeg warning into an error; then the harmless ones are forgiven."""
    try:
        image: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True)
        return image
    except ValueError as error:
        reason = str(error)
    # libjpeg reports its first warning only: where that one is harmless, the end-of-image marker has to show that
    # nothing is missing behind it.
    complete = b"\xff\xd9" in bytes(data[-4096:])
    if complete and any(text in reason for text in _HARMLESS):
        try:
            image = simplejpeg.decode_jpeg(data, "RGB", strict=False)
            return image
        except ValueError:  # TurboJPEG forgives in the pixels only, not in the header
            return _decode_opencv(data, path)
    if complete and "subsampling" in reason:  # it knows the usual ones only; OpenCV's libjpeg decodes the others
        return _decode_opencv(data, path)
    what = "is truncated" if "remature end" in reason or not complete else "is a damaged JPEG"
    raise ImageError(f"{_name(path)} {what} ({len(data)} bytes): {reason}")


def _decode_opencv(data: bytes | bytearray | memoryview, path: str | os.PathLike[str] | None) -> npt.NDArray[np.uint8]:
    try:
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), _FLAGS)
    except cv2.error as error:
        raise ImageError(f"{_name(path)} cannot be decoded ({len(data)} bytes): {error}") from error
    if bgr is None:
        start = bytes(data[:12])
        raise ImageError(
            f"{_name(path)} is truncated, damaged or not an image ({len(data)} bytes, starting with {start!r})"
        )
    image: npt.NDArray[np.uint8] = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
    return image


def _read(
    path: str | os.PathLike[str],
    size: int = -1,
    *,
    storage: Storage | None = None,
    data: Callable[[], bytes] | None = None,
) -> bytes:
    """The first `size` bytes of a file or object, or all of them."""
    try:
        if data is not None:
            with stage("read"):
                return data()
        if is_remote(path):
            with stage("read"):
                how = storage or Storage()
                return how.read(path) if size < 0 else how.open(path).read_at(0, size)
        with stage("read"), open(path, "rb", buffering=0) as file:
            return file.read(size)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ImageError(f"{_name(path)}: cannot be read: {reason}") from error


def _name(path: str | os.PathLike[str] | None) -> str:
    return "image" if path is None else f"image {os.fspath(path)!r}"
