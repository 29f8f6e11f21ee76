from collections.abc import Sequence
from typing import Any

LIBJPEG_TURBO_VERSION: int
"""1000000 * major + 1000 * minor + patch, of the headers that it was built with."""
AVX2: int
"""1 where the processor has AVX2 and the system saves its registers."""

def draw(
    data: bytes | bytearray | memoryview,
    out: Any,
    left: float,
    top: float,
    right: float,
    bottom: float,
    bicubic: bool,
    antialias: bool,
    flip_x: bool,
    flip_y: bool,
    table: Any,
    planar: bool,
    max_pixels: int,
    width: int,
    height: int,
    entries: bytes | memoryview | None,
    scale: int,
    own: bool,
    partial: bool,
    simd: bool,
    /,
) -> int: ...
def draw_batch(
    sources: Sequence[bytes | bytearray | memoryview] | Any,
    out: Any,
    boxes: Any,
    flips: Any,
    inside: Any,
    fill: Any,
    table: Any,
    bicubic: bool,
    antialias: bool,
    planar: bool,
    max_pixels: int,
    sizes: Any,
    simd: bool,
    /,
) -> tuple[bytes, int]: ...
def sizes(sources: Sequence[bytes | bytearray | memoryview], out: Any, /) -> None: ...
def uniform(keys: Any, out: Any, /) -> None: ...
def entries(data: bytes | bytearray | memoryview, out: bytearray, step: int, /) -> int: ...
def transcode(data: bytes | bytearray | memoryview, out: bytearray, interval: int, max_pixels: int, /) -> int: ...
def resize(
    source: Any,
    out: Any,
    left: float,
    top: float,
    right: float,
    bottom: float,
    bicubic: bool,
    antialias: bool,
    flip_x: bool,
    flip_y: bool,
    table: Any,
    planar: bool,
    simd: bool,
    /,
) -> None: ...
