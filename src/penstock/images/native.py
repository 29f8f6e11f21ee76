"""Wrapper of the optional C extension: decodes boxes of JPEGs with libjpeg-turbo, and resizes 8-bit images.

`resize` uses Pillow's filters in a fraction of its time; `draw_box` decodes a box of a JPEG, shrunk by 2, 4 or 8 if
possible, and resizes it in the same pass. All functions but `is_available`, `libjpeg_turbo` and `require` need the
extension. Pipelines call `region.decode_region`, which also handles other formats and a missing extension. If the
extension cannot decode an image, it raises, and the caller decodes the whole image by other means:

=====================  ==============================================================================================
`ValueError`           a damaged or truncated file; `backends.decode` then reports it, or tolerates stray bytes
`NotImplementedError`  colours that libjpeg does not convert to RGB (CMYK, YCCK), lossless files, more than 8 bits
`IndexError`           the box is not inside the image, whose size is the error's text
`OverflowError`        more pixels than `max_pixels`, or more scans than a legitimate progressive file has
=====================  ==============================================================================================

Penstock's own decoder (`c/region.c`) decodes baseline files, with the same result as libjpeg-turbo, bit for bit. With
restart markers, or with the entries from `entries_of`, it begins near the box. libjpeg-turbo decodes rare kinds: whole
progressive and arithmetic-coded files (also shrunk), sampling factors other than 4:4:4, 4:2:2 and 4:2:0, and damaged
files.

Threads: the GIL is released, and no state is shared. Memory: the result, some rows of the image, and 100 KB of tables
per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

try:
    from penstock.images import _jpeg
except ImportError:  # no compiler or headers at build time, or no libjpeg on this machine
    _jpeg = None  # type: ignore[assignment]

__all__ = [
    "PLAN",
    "draw_batch",
    "draw_box",
    "entries_of",
    "is_available",
    "libjpeg_turbo",
    "require",
    "resize",
    "sizes_of",
    "uniform",
    "with_restart_markers",
]

Data: TypeAlias = bytes | bytearray | memoryview

PLAN = np.dtype(
    [("box", np.float64, 4), ("inside", np.int32, 4), ("size", np.int32, 2), ("flips", np.uint8, 2)], align=True
)
"""How an image of a batch is drawn.

``box`` (left, top, right, bottom) is the part of it that is drawn, and ``inside`` the part of its result that the box
fills; ``size`` the width and height that the caller has read in the header of a file, or 0 for unknown; ``flips``
whether the result is mirrored left to right, and upside down.
"""

_MOST = 65535 * 65535  # maximum pixels of a JPEG


def is_available() -> bool:
    """Return whether the extension was built and can be loaded."""
    return _jpeg is not None


def libjpeg_turbo() -> str | None:
    """Return the version of libjpeg-turbo that the extension was built with; None without the extension."""
    if not is_available():
        return None
    major, rest = divmod(_jpeg.LIBJPEG_TURBO_VERSION, 1_000_000)
    return f"{major}.{rest // 1000}.{rest % 1000}"


def require(what: str) -> None:
    """Raise `ConfigError` if the extension is missing. `what` is a subject with its verb: "restart markers need"."""
    if _jpeg is None:
        raise ConfigError(
            f"{what} the C extension, which is not built here: `penstock doctor` shows what is missing for it"
        )


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
    scale: int = 0,
    partial: bool = False,
) -> float:
    """Decode `box` of a JPEG and resize it into `out` as `resize` does, without an intermediate image.

    Rows are resized as they are decoded. A box of whole pixels that is as large as `out` is copied. Return the seconds
    that resizing took.

    Args:
        data: the whole file.
        max_pixels: the most pixels that the header, as libjpeg reads it, may state.
        size: the (width, height) that the caller has read from the header: another size is an error.
        entries: the result of `entries_of` for the same data. Others lead to wrong pixels or an error.
        scale: 1, 2, 4 or 8 rounds the box outward to whole pixels of the image shrunk by that factor. Pixel i of it is
            the mean of `scale` pixels a side, from i * scale on; at scale 1 the pixels are those of the image. 0
            shrinks the box as long as it stays as large as `out`.
        partial: leave missing or damaged parts gray or wrong instead of an error.

    The other arguments are those of `resize`. Raises the errors that the module's docstring lists; then `out` may be
    partly written.
    """
    how = interpolation == "bicubic", antialias, flipped, table, planar, True
    limit = _limit(max_pixels)
    return _jpeg.draw(data, out, box, *how, limit, size or (0, 0), entries, scale, True, partial) / 1e9


def resize(
    source: npt.NDArray[np.uint8],
    box: tuple[float, float, float, float],
    out: npt.NDArray[Any],
    *,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    antialias: bool = True,
    flipped: tuple[bool, bool] = (False, False),
    table: npt.NDArray[Any] | None = None,
    planar: bool = False,
    simd: bool = True,
) -> None:
    """Resize a box of an image into `out`.

    Results are within one level of Pillow's ``resize(box=)``, which uses the same two passes: columns first, rounded to
    8 bits, then rows. (Pillow 13 begins with the rows if an image loses many more rows than columns. With bicubic
    weights, which overshoot, pixels beside hard edges differ then.) The result is the same with and without AVX2, bit
    for bit.

        resize(pixels, (10.5, 20, 310.25, 270), out)           # left, top, right, bottom in pixels of the source
        resize(pixels, box, floats, table=table, planar=True)  # normalised, (channels, height, width), in the same pass

    Args:
        source: uint8 (height, width, channels), with 1 or 3 channels. Rows need not be adjacent in memory.
        box: (left, top, right, bottom), fractional, inside the source; pixel i covers i to i + 1.
        out: (height, width, channels), uint8 or the table's dtype. Rows, and planes if planar, need not be adjacent in
            memory. It must not overlap the source.
        interpolation: Pillow's filter, with a support of 2 or 4 pixels.
        antialias: average all source pixels that a result pixel covers.
        flipped: mirror the result left to right, and upside down.
        table: (channels, 256): replacement of each value of each channel, with 1, 2, 4 or 8 bytes an item.
        planar: `out` is (channels, height, width).
        simd: use AVX2 if available.

    Raises:
        ConfigError: the box is empty or outside the source, the filter is unknown, or the arrays do not match.

    Cost: 0.07 ms from 300 x 250 to 224 x 224 pixels, RGB, with AVX2, without the GIL; memory for some rows.
    """
    if interpolation not in ("bilinear", "bicubic"):
        raise ConfigError(f"interpolation must be 'bilinear' or 'bicubic', not {interpolation!r}")
    if source.dtype != np.uint8 or source.ndim != 3:
        raise ConfigError(f"source must be uint8 (height, width, channels), not {source.dtype} {source.shape}")
    if source.strides[1:] != (source.shape[2], 1):
        source = np.ascontiguousarray(source)
    bicubic = interpolation == "bicubic"
    try:
        _jpeg.draw(source, out, box, bicubic, antialias, flipped, table, planar, simd)
    except (ValueError, BufferError) as error:
        wanted = "no table" if table is None else f"a table {table.dtype} {table.shape}"
        raise ConfigError(
            f"cannot resize box {box!r} (left, top, right, bottom) of {source.shape} to {out.dtype} {out.shape} with "
            f"{wanted}, planar={planar}: {error}"
        ) from None


def draw_batch(
    sources: Sequence[Data] | npt.NDArray[np.uint8],
    plans: npt.NDArray[Any],
    out: npt.NDArray[Any],
    *,
    fill: npt.NDArray[Any] | None = None,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    antialias: bool = True,
    table: npt.NDArray[Any] | None = None,
    planar: bool = False,
    max_pixels: int,
) -> tuple[bytes, float]:
    """Draw a box of each of n images into its place in one array, in one call: `draw_box` for each, or `resize` of the
    pixels in the box, rounded outward.

    Args:
        sources: n JPEG files; or the pixels of n images, uint8 (n, height, width, channels), whose rows and images need
            not be adjacent in memory.
        plans: `PLAN` (n,).
        out: (n, height, width, channels), or (n, channels, height, width) if planar; 1 or 3 channels. Its dtype is
            that of the table, or uint8 without one. Images, rows and planes need not be adjacent in memory. It must not
            overlap the sources.
        fill: (channels,), the pixels of each result outside its ``inside``, of the dtype of `out`: the table is not
            applied. None: they are left as they are.
        interpolation, antialias, table: as in `draw_box`.
        max_pixels: the limit for each file.

    Return a byte for each image, and the seconds that resizing took. The byte is 0 for a result that is complete, and 1
    for an image that has to be drawn in another way, which also finds the reason: a file that is damaged, over a limit,
    smaller than its box, of another size than planned or not a JPEG, or an empty ``inside``. Its result is undefined.

    Raises `ValueError` for arrays whose shapes or types do not match, and for numbers out of range, before anything is
    written.
    """
    if getattr(plans, "dtype", None) != PLAN:
        raise ValueError(f"plans must be an array of native.PLAN, not {plans!r:.80}")
    how = table, interpolation == "bicubic", antialias, planar, _limit(max_pixels), True
    states, spent = _jpeg.draw_batch(sources, out, plans, fill, *how)
    return states, spent / 1e9


def sizes_of(sources: Sequence[Data]) -> npt.NDArray[np.int32]:
    """Return (width, height) of each file by its header, int32 (n, 2); 0 x 0 unless it is an ordinary baseline JPEG."""
    return np.ndarray((len(sources), 2), np.int32, _jpeg.sizes(sources))


def uniform(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float64]:
    """Return (n, count) random numbers in [0, 1): row i is ``generator_from_key(keys[i]).random(count)``, bit for bit.

    See `penstock.random.generator_from_key`. A row of six numbers takes 25 ns. Raises `ValueError` for keys that are
    not uint64 (n,).
    """
    if keys.dtype != np.uint64 or keys.ndim != 1:
        raise ValueError(f"keys must be uint64 (n,), not {keys.dtype} {keys.shape}")
    return np.ndarray((len(keys), count), np.float64, _jpeg.uniform(keys, count))


def entries_of(data: Data, *, step: int = 8) -> bytes | None:
    """Return the entries of a JPEG: points where decoding can begin, every `step` MCUs of each row; None without any.

    With them `draw_box` decodes a box of the same data without reading the data before it. Progressive,
    arithmetic-coded and damaged files have none, and files with restart markers need none.

    Cost: two thirds of a decode. Size: 10 bytes an entry, about 3 % of a photograph with a `step` of 8.
    """
    return _jpeg.entries(data, step)


def with_restart_markers(data: Data, *, interval: int | None = None, max_pixels: int) -> bytes | None:
    """Return the JPEG with a restart marker every `interval` MCUs, where `draw_box` can begin; None if not possible.

    Without `interval`, it is the divisor of the MCUs of a row, from 4 on, that is nearest to 8. 0 removes all markers.
    Coefficients, quantisation, sampling and colours are unchanged, and so are the pixels. All APPn and COM segments
    (EXIF, ICC) and the data after the image are kept byte for byte. Huffman tables are optimised for the image. It is
    not possible for progressive, arithmetic-coded and damaged files, files with several scans or more than
    `max_pixels`, and files that are not JPEG.

    Raises `IndexError` for an interval outside 0 to 65,535.

    Cost: three decodes. A photograph grows by 0.8 %. Memory: 2 bytes per coefficient, which is 3 to 6 bytes per pixel.

    >>> marked = with_restart_markers(data, max_pixels=MAX_PIXELS)               # doctest: +SKIP
    """
    if interval is not None and not 0 <= interval <= 65535:
        raise IndexError(f"an interval must be from 0 to 65,535 MCUs, not {interval}")
    return _jpeg.transcode(data, -1 if interval is None else interval, _limit(max_pixels))


def _limit(max_pixels: int) -> int:
    """Return the limit as an unsigned number for C."""
    return max(0, min(max_pixels, _MOST))
