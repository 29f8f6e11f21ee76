"""Resize 8-bit images with the C extension: Pillow's filters in a fraction of its time.

    out = np.empty((224, 224, 3), np.uint8)
    resize(pixels, (10.5, 20, 310.25, 270), out)            # left, top, right, bottom in pixels of the source
    resize(pixels, box, floats, table=table, planar=True)   # normalised, (channels, height, width), in the same pass

Results are within one level of Pillow's ``resize(box=)``, which uses the same two passes: columns first, rounded to 8
bits, then rows. (Pillow 13 begins with the rows if an image loses many more rows than columns. With bicubic weights,
which overshoot, pixels beside hard edges differ then.) The result is the same with and without AVX2, bit for bit.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

try:
    from penstock.images import _jpeg
except ImportError:  # see `native.is_available`
    _jpeg = None  # type: ignore[assignment]

__all__ = ["resize"]


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
    """Resize a box of an image into `out`. Needs the extension: see `native.is_available`.

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
