"""Backends that decode images, by name, with a common contract.

`decode.decode` is the public function, which handles limits, orientation, truncated files and names in errors. A
backend decodes bytes to pixels:

    ``native``        JPEG, by Penstock's C extension (region decode is in `region`)
    ``simplejpeg``    JPEG
    ``opencv``        JPEG, PNG, WebP, BMP, TIFF, GIF, PNM, JPEG 2000, AVIF
    ``pillow``        the same, and all others that Pillow supports

**Contract**: a backend checks the image's size against a `limits.Limit` before it decodes. It returns a new,
C-contiguous uint8 array (height, width, 3) RGB or (height, width, 1) gray, in stored orientation. CMYK and YCCK,
palettes and 16 bits are converted, alpha is dropped, and only the first frame of an animation is decoded. `ValueError`
with a reason means that the image cannot be decoded or is truncated. `native` and `simplejpeg` refuse every JPEG with a
libjpeg warning, except for stray bytes; the others also decode JPEGs that are damaged in the middle.

**Tolerance**: RGB of a JPEG is equal bit for bit on one build of libjpeg-turbo; another build may differ by `TOLERANCE`
levels, because colour conversion and upsampling are rounded. Libraries convert CMYK differently, within 2 levels
without a profile.

A new backend is a function and an entry in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from penstock.errors import ConfigError
from penstock.images import jpeg, native
from penstock.images.headers import kind as kind_of
from penstock.images.headers import orientation
from penstock.images.limits import Limit, TooManyPixels, check_jpeg, check_opencv, open_pillow

__all__ = ["BACKENDS", "TOLERANCE", "Backend", "choose", "installed", "oriented"]

Image: TypeAlias = npt.NDArray[np.uint8]
Data: TypeAlias = bytes | bytearray | memoryview

TOLERANCE = 3
"""The largest difference of two backends in an RGB or gray JPEG, in levels."""

_HAS_PILLOW = find_spec("PIL") is not None
# Warnings of libjpeg that do not affect pixels, and rare subsamplings, which OpenCV decodes. All others mean missing or
# wrong pixels.
_TOLERATED = (
    *("extraneous bytes", "unknown JFIF revision", "Unknown Adobe color transform", "Inconsistent progression"),
    "subsampling",
)


class Backend(NamedTuple):
    """An image decoder: its formats, and its function ``decode(data, channels, partial, limit)``."""

    name: str
    formats: frozenset[str] | None
    """Names of `headers.kind`; `None` means all that the library supports."""
    decode: Callable[[Data, int, bool, Limit], Image]
    partial: frozenset[str] = frozenset()
    """The formats that it decodes in part if a file is truncated or damaged."""

    def reads(self, kind: str) -> bool:
        """Return whether it reads images of this `headers.kind`."""
        return self.formats is None or kind in self.formats


def installed() -> list[str]:
    """Return the names of the installed backends, usually the fastest for a whole JPEG first."""
    return [name for name in BACKENDS if _is_installed(name)]


def choose(name: str, kind: str, partial: bool = False) -> Backend:
    """Return the backend called `name`, or for ``auto`` the preferred one for images of this `kind`.

    With `partial`, ``auto`` is a backend that can decode a part of such an image, if one is installed.

    Raises `ConfigError` if the name is unknown or not installed, or if the backend does not support the format or
    `partial`.
    """
    if name == "auto":
        if partial and kind in ("png", "bmp", "gif", "tiff") and _is_installed("pillow"):
            return BACKENDS["pillow"]
        return BACKENDS["simplejpeg" if kind == "jpeg" else "opencv"]
    if name not in BACKENDS:
        raise ConfigError(f"no backend {name!r}: use 'auto' or one of {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    if not _is_installed(name):
        raise ConfigError(f"backend {name!r} is not installed here: use 'auto' or one of {', '.join(installed())}")
    if not backend.reads(kind):
        raise ConfigError(f"backend {name!r} reads no {kind} images: use 'auto' or 'opencv'")
    if partial and kind not in backend.partial:
        others = [other for other, found in BACKENDS.items() if kind in found.partial]
        instead = f"use {' or '.join(map(repr, others))}" if others else "no backend does, so leave partial= out"
        raise ConfigError(f"backend {name!r} decodes no part of a damaged {kind} image: {instead}")
    return backend


def _is_installed(name: str) -> bool:
    return {"native": native.is_available(), "pillow": _HAS_PILLOW}.get(name, True)


def _native(data: Data, channels: int, partial: bool, limit: Limit) -> Image:
    if limit.size is not None:  # `decode.decode` has checked it: memory for it is about to be allocated
        width, height = limit.size
        image = np.empty((height, width, channels), np.uint8)
        whole, most = (0, 0, width, height), limit.max_pixels
        try:
            native.draw_box(data, whole, image, max_pixels=most, size=limit.size, scale=1, partial=partial)
            return image
        except (ValueError, NotImplementedError, OverflowError):
            pass  # CMYK, or an error or a limit, which simplejpeg describes
    return _simplejpeg(data, channels, partial, limit)


def _simplejpeg(data: Data, channels: int, partial: bool, limit: Limit) -> Image:
    """Decode strictly first, where every libjpeg warning is an error; then retry after harmless warnings."""
    space = "RGB" if channels == 3 else "GRAY"
    check_jpeg(data, limit)
    image: Image
    try:
        image = simplejpeg.decode_jpeg(data, space, strict=True)
    except ValueError as error:
        reason = str(error)
        # libjpeg reports only its first warning. If that one is harmless, the end-of-image marker must show that no
        # data is missing.
        complete = jpeg.has_end(data)
        if not partial and not (complete and any(text in reason for text in _TOLERATED)):
            reason = f"truncated: {reason}" if "remature end" in reason or not complete else reason
            raise ValueError(reason) from None
        try:
            image = simplejpeg.decode_jpeg(data, space, strict=False)
        except ValueError:  # TurboJPEG tolerates errors in pixels, not in the header
            image = _opencv(data, channels, partial, limit)
    return image


def _opencv(data: Data, channels: int, partial: bool, limit: Limit) -> Image:
    form = kind_of(data)
    gray = channels == 1 and form == "jpeg"  # other formats convert colour to gray differently
    _check_end(data, partial)
    check_opencv(data, form, limit)
    try:
        flags = cv2.IMREAD_GRAYSCALE if gray else cv2.IMREAD_COLOR
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ValueError(str(error)) from error
    if pixels is None:
        raise ValueError(f"truncated, damaged or not an image, starting with {bytes(data[:12])!r}")
    image: Image = pixels[:, :, None] if gray else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return _as_stored(image, channels, data)


def _pillow(data: Data, channels: int, partial: bool, limit: Limit) -> Image:
    from PIL import Image as pil

    _check_end(data, partial)
    try:
        with open_pillow(data, limit) as image:
            if image.format == "JPEG" and channels == 1 and image.mode == "RGB":
                image.draft("L", image.size)  # the stored luminance
            try:
                image.load()
            except OSError:
                if not partial:
                    raise
                image.tile = []  # use the part that was decoded
            if image.mode.startswith("I"):  # 16 bits, perhaps stored as 32: conversion by Pillow would clip them
                pixels = (np.array(image, np.int64) >> 8).clip(0, 255).astype(np.uint8)
            else:
                pixels = np.array(image.convert("L" if image.mode == "L" else "RGB"))
    except TooManyPixels:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, RuntimeError, pil.DecompressionBombError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return _as_stored(pixels[:, :, None] if pixels.ndim == 2 else pixels, channels, data)


def _as_stored(image: Image, channels: int, data: Data) -> Image:
    """Convert to the channels; undo the orientation of a TIFF, the only format for which libraries always apply it."""
    if image.shape[2] == 1 and channels == 3:
        image = np.repeat(image, 3, axis=2)
    elif image.shape[2] == 3 and channels == 1:
        image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None]
    turned = orientation(data) if kind_of(data) == "tiff" else 1
    # All orientations undo themselves, but for the two quarter turns.
    return image if turned == 1 else oriented(image, {6: 8, 8: 6}.get(turned, turned))


def oriented(image: Image, how: int) -> Image:
    """Return `image` (height, width, channels) turned and mirrored by EXIF orientation `how`, C-contiguous."""
    if how >= 5:
        image = image.transpose(1, 0, 2)
    # After the transposition, mirror left to right and top to bottom.
    if how in (2, 3, 6, 7):
        image = image[:, ::-1]
    if how in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def _check_end(data: Data, partial: bool) -> None:
    """Refuse a truncated JPEG: libjpeg fills the missing part and only warns, which these libraries hide."""
    if not partial and kind_of(data) == "jpeg" and not jpeg.has_end(data):
        raise ValueError("truncated: no end-of-image marker")


_JPEG = frozenset({"jpeg"})
_PILLOW_PARTS = frozenset({"jpeg", "png", "bmp", "gif", "tiff", "other"})

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("native", _JPEG, _native, _JPEG),
        Backend("simplejpeg", _JPEG, _simplejpeg, _JPEG),
        Backend("opencv", None, _opencv),
        Backend("pillow", None, _pillow, _PILLOW_PARTS),
    )
}
"""All backends by name, installed or not."""
