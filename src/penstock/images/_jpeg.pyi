from collections.abc import Sequence
from typing import Any

LIBJPEG_TURBO_VERSION: int
"""1000000 * major + 1000 * minor + patch, of the headers that it was built with."""
AVX2: int
"""1 where the processor has AVX2 and the system saves its registers."""

def draw(
    source: Any,  # bytes, bytearray, memoryview; NumPy's arrays are not known as buffers before Python 3.12
    out: Any,
    box: tuple[float, float, float, float],
    bicubic: bool,
    antialias: bool,
    flipped: tuple[bool, bool],
    table: Any,
    planar: bool,
    simd: bool,
    max_pixels: int = 0,
    size: tuple[int, int] = (0, 0),
    entries: bytes | memoryview | None = None,
    scale: int = 0,
    own: bool = True,
    partial: bool = False,
    /,
) -> int:
    """Resize a box of a JPEG file, or of pixels (height, width, channels), into `out`: nanoseconds of resizing files.

    The first arguments are as in `native.resize`, and those of files as in `native.draw_box`. `scale` 0 shrinks the box
    as long as it stays as large as `out`; 1, 2, 4 and 8 shrink it by that and round it outward to whole pixels. Without
    `own`, libjpeg decodes every file. Arguments that do not match raise `ValueError`, and `IndexError` for files.
    """

def draw_batch(
    sources: Sequence[bytes | bytearray | memoryview] | Any,
    out: Any,
    plans: Any,
    fill: Any,
    table: Any,
    bicubic: bool,
    antialias: bool,
    planar: bool,
    max_pixels: int,
    simd: bool,
    /,
) -> tuple[bytes, int]:
    """See `native.draw_batch`; the number is nanoseconds."""

def sizes(sources: Sequence[bytes | bytearray | memoryview], /) -> bytearray:
    """Return the width and height of each file, int32 (n, 2): see `native.sizes_of`."""

def uniform(keys: Any, count: int, /) -> bytearray:
    """Return random numbers for each key, uint64 (n,), as float64 (n, count): see `native.uniform`."""

def entries(data: bytes | bytearray | memoryview, step: int, /) -> bytes | None:
    """Return the entries of a file, every `step` MCUs of each row, or None without any: see `native.entries_of`."""

def transcode(data: bytes | bytearray | memoryview, interval: int, max_pixels: int, /) -> bytes | None:
    """Return the file with a restart marker every `interval` MCUs, -1 for a choice by its width, or None."""
