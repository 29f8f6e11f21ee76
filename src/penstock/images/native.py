"""The C extension on libjpeg-turbo, where it was built: the pixels of a box, shrunk by 2, 4 or 8 where that is enough.

`decode_box` decodes a JPEG; `region.decode_region` is what a pipeline calls, it also knows what to do without the
extension and with other formats. What cannot be decoded here raises, and the caller decodes the whole image otherwise:

=====================  ==============================================================================================
`ValueError`           a damaged or truncated file; `backends.decode` then finds the words, or forgives stray bytes
`NotImplementedError`  colours that libjpeg does not turn into RGB (CMYK, YCCK)
`IndexError`           the box is not inside the image, whose size is the error's text
`OverflowError`        a limit: more pixels than `max_pixels`, or more scans than any honest progressive file has
=====================  ==============================================================================================

Baseline files are decoded by our own decoder (`baseline.c`), to the bits of libjpeg-turbo. With restart markers, or
with `entries_of` a file, it begins near the box. libjpeg-turbo decodes what is rare: progressive and arithmetic-coded
files as a whole (shrunk all the same), other sampling factors than 4:4:4, 4:2:2 and 4:2:0, and damaged files.

Threads: the GIL is released; there is no shared state. Memory: the result, and one scratch of at most 32 MiB per
thread, in which results of `decode_box` lie until the next call: it is replaced, not overwritten, while somebody still
holds an array in it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

try:
    from penstock.images import _jpeg
except ImportError:  # built without compiler or headers, or libjpeg is not on this machine
    _jpeg = None  # type: ignore[assignment]

__all__ = [
    "Region",
    "decode_box",
    "decode_image",
    "draw_box",
    "entries_of",
    "is_available",
    "require",
    "with_restart_markers",
]

Data: TypeAlias = bytes | bytearray | memoryview

_KEPT = 32 << 20
_STEP = 1 << 20
_WHOLE = (0.0, 0.0, 0.0, 0.0)
_MOST = 65535 * 65535  # what a JPEG can have


class Region(NamedTuple):
    """Pixels of a part of an image, at 1 / `scale` of their size."""

    array: npt.NDArray[np.uint8]
    """(height, width, channels): 3 are RGB, 1 is gray. Rows need not be adjacent in memory."""
    x: int
    """Where the array's first pixel lies in the shrunken image."""
    y: int
    scale: int
    """1, 2, 4 or 8. Pixel i of the shrunken image is the mean of the pixels from i * scale on."""


class _Scratch(threading.local):
    buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


_scratch = _Scratch()


def is_available() -> bool:
    """Whether the extension was built and can be loaded."""
    return _jpeg is not None


def require(what: str) -> None:
    """Raise `ConfigError` without the extension. `what` is a noun and a verb: "restart markers need"."""
    if _jpeg is None:
        raise ConfigError(
            f"{what} the C extension, which is not built here: `penstock doctor` says what is missing for it"
        )


def decode_image(
    data: Data,
    *,
    channels: int = 3,
    max_pixels: int,
    partial: bool = False,
    size: tuple[int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """The whole image in a JPEG as a new uint8 array (height, width, channels): 3 are RGB, 1 is gray.

    An image of more than `max_pixels` is refused by the header that libjpeg reads, and so is one of another size than
    `size` (width, height), which the caller has read. With `partial`, what is missing or damaged is gray or wrong
    instead of an error. Raises as this module says.
    """
    arguments = (*_WHOLE, 0, 0, channels, _limit(max_pixels), partial, *(size or (0, 0)), None, True)
    needed = _jpeg.decode(data, bytearray(0), *arguments)
    assert isinstance(needed, int)
    out = np.empty(needed, np.uint8)
    done = _jpeg.decode(data, out, *arguments)
    assert not isinstance(done, int)
    return out.reshape(done[1], done[0], channels)


def decode_box(
    data: Data,
    box: tuple[float, float, float, float],
    *,
    target: tuple[int, int],
    channels: int = 3,
    max_pixels: int,
    size: tuple[int, int] | None = None,
    entries: bytes | memoryview | None = None,
) -> Region:
    """The pixels of `box` (left, top, right, bottom), rounded outward to whole pixels.

    They are shrunk by 2, 4 or 8 where the box stays at least as large as `target` (height, width). At scale 1 they are
    the pixels of a decode of the whole image. `entries` are those of the same data, from `entries_of`: with others the
    pixels are wrong, or it raises. The array lies in this thread's scratch: copy what you keep. The limit
    and `size` are those of `decode_image`. Raises as this module says.
    """
    arguments = (*box, *target, channels, _limit(max_pixels), False, *(size or (0, 0)), entries, True)
    out = _free_scratch()
    done = _jpeg.decode(data, out, *arguments)
    if isinstance(done, int):
        out = _new_scratch(done)
        done = _jpeg.decode(data, out, *arguments)
        assert not isinstance(done, int)
    width, height, x, y, scale, _, _ = done
    array = out[: height * width * channels].reshape(height, width, channels)
    # What was decoded besides: columns up to the next block, and all of a file that is decoded whole.
    left, top = int(box[0] // scale), int(box[1] // scale)
    right, bottom = -int(-box[2] // scale), -int(-box[3] // scale)
    return Region(array[top - y : bottom - y, left - x : right - x], left, top, scale)


def draw_box(
    data: Data,
    box: tuple[float, float, float, float],
    out: npt.NDArray[Any],
    *,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    antialias: bool = True,
    flipped: tuple[bool, bool] = (False, False),
    table: npt.NDArray[Any] | None = None,
    planar: bool = False,
    max_pixels: int,
    size: tuple[int, int] | None = None,
    entries: bytes | memoryview | None = None,
) -> float:
    """Decode `box` and resize it into `out`: what `decode_box` and `resize` do, without an image in between.

    Rows are resized as they are decoded. Arguments are those of the two. Returns the seconds that resizing took. Raises
    as this module says; `out` may have been written to then.
    """
    how = interpolation == "bicubic", antialias, *flipped
    spent = _jpeg.draw(data, out, *box, *how, table, planar, _limit(max_pixels), *(size or (0, 0)), entries, True)
    return spent / 1e9


def entries_of(data: Data, *, step: int = 8) -> bytes | None:
    """The entries of a JPEG, at which its coded data can be begun: every `step` MCUs of each row; None if it has none.

    `decode_box` decodes a box of the same data by them without reading what comes before. Progressive, arithmetic-coded
    and damaged files have none, nor need those with restart markers any.

    Cost: two fifths of a decode. 10 bytes an entry: with a `step` of 8, about 3 % of a photograph.
    """
    out = bytearray(max(4096, len(data) // 16))
    size = _jpeg.entries(data, out, step)
    if size > len(out):
        out = bytearray(size)
        size = _jpeg.entries(data, out, step)
    return bytes(out[:size]) if size else None


def with_restart_markers(data: Data, *, interval: int | None = None, max_pixels: int) -> bytes | None:
    """The same JPEG with a restart marker every `interval` MCUs, where `decode_box` can begin; None if it has to stay.

    No interval is one that suits the width: of the divisors of a row of MCUs from 4 on the one nearest to 8. 0 removes
    all markers. Coefficients, quantisation, sampling and colours stay what they are, so pixels do; all APPn and COM
    segments (EXIF, ICC) and what follows the image are kept byte for byte. Huffman tables are made for the image.
    Progressive, arithmetic-coded and damaged files, those of several scans, of more than `max_pixels`, and what is no
    JPEG have to stay as they are.

    Raises `IndexError` for an interval outside 0 to 65,535.

    Cost: three decodes. 0.8 % more bytes of a photograph. Memory: 2 bytes a coefficient: 3 to 6 bytes a pixel.

    >>> marked = with_restart_markers(data, max_pixels=MAX_PIXELS)               # doctest: +SKIP
    """
    wanted = -1 if interval is None else interval
    if interval is not None and not 0 <= interval <= 65535:
        raise IndexError(f"an interval is from 0 to 65,535 MCUs, not {interval}")
    out = bytearray(len(data) + len(data) // 8 + 4096)
    size = _jpeg.remark(data, out, wanted, _limit(max_pixels))
    if size > len(out):
        out = bytearray(size)
        size = _jpeg.remark(data, out, wanted, _limit(max_pixels))
    return bytes(memoryview(out)[:size]) if size else None


def _limit(max_pixels: int) -> int:
    """The limit as a C number, which has no sign."""
    return max(0, min(max_pixels, _MOST))


def _free_scratch() -> npt.NDArray[np.uint8]:
    """This thread's scratch, or none at all while an earlier result lies in it.

    Every array over it holds a reference, so two are those of the thread and of this call.
    """
    if sys.getrefcount(_scratch.buffer) <= 2:
        return _scratch.buffer
    return np.empty(0, np.uint8)


def _new_scratch(size: int) -> npt.NDArray[np.uint8]:
    if size > _KEPT:
        return np.empty(size, np.uint8)
    _scratch.buffer = np.empty(-(-size // _STEP) * _STEP, np.uint8)
    return _scratch.buffer
