"""JPEG files whose every pixel is another one, and boxes of them."""

from __future__ import annotations

import random
import struct
from typing import Any

import cv2
import numpy as np
import simplejpeg

from penstock.images import native
from penstock.images.headers import size_of_file

LIMIT = 1 << 28
FAR = (1 << 20, 1 << 20)  # a target that no box is twice as large as
USUAL = ["444", "422", "420"]  # that our own decoder accepts
SUBSAMPLINGS = [*USUAL, "440", "411"]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with structure at every place and in every channel, so that no shift or mix-up goes unseen."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def jpeg(image: np.ndarray, subsampling: str = "420", quality: int = 85) -> bytes:
    space = "GRAY" if image.shape[2] == 1 else "RGB"
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=quality, colorspace=space, colorsubsampling=subsampling
    )


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    ok, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    assert ok
    return data.tobytes()


def outward(box: tuple[float, float, float, float]) -> tuple[slice, slice]:
    return slice(int(box[1]), int(np.ceil(box[3]))), slice(int(box[0]), int(np.ceil(box[2])))


def boxes(height: int, width: int, count: int, seed: int = 1) -> list[tuple[float, float, float, float]]:
    rng = np.random.default_rng(seed)
    found = [(0.0, 0.0, float(width), float(height)), (width - 0.5, height - 0.5, float(width), float(height))]
    for _ in range(count):
        left, top = rng.uniform(0, width - 0.01), rng.uniform(0, height - 0.01)
        found.append((left, top, rng.uniform(left + 0.005, width), rng.uniform(top + 0.005, height)))
    return found


def drawn(
    data: bytes,
    box: tuple[float, float, float, float] | None = None,
    *,
    scale: int = 1,
    channels: int = 3,
    max_pixels: int = LIMIT,
    **how: Any,
) -> np.ndarray:
    """Decode a box, or the whole image, with the C extension: its pixels, shrunk by `scale`."""
    if box is None:
        width, height = size_of_file(data) or (0, 0)
        box = (0, 0, width, height) if 0 < width * height <= max_pixels else (0, 0, 1, 1)  # others are refused
    rows, columns = outward(tuple(edge / scale for edge in box))
    out = np.zeros((rows.stop - rows.start, columns.stop - columns.start, channels), np.uint8)
    native.draw_box(data, box, out, scale=scale, max_pixels=max_pixels, **how)
    return out


def with_frame(data: bytes, marker: int) -> bytes:
    """The file with another marker in front of its frame header, which must be that of baseline files."""
    return data.replace(b"\xff\xc0", bytes((0xFF, marker)), 1)


def by_hand(
    frame: int, size: tuple[int, int], dc: dict[int, str], ac: dict[int, str], scan: tuple[int, int], bits: str
) -> bytes:
    """A gray file with these codes of symbols, these first and last coefficients of its scan, and these coded bits."""

    def table(number: int, codes: dict[int, str]) -> bytes:
        ordered = sorted(codes, key=lambda symbol: (len(codes[symbol]), codes[symbol]))
        counts = bytes(sum(len(codes[symbol]) == length for symbol in codes) for length in range(1, 17))
        return segment(0xC4, bytes((number,)) + counts + bytes(ordered))

    def segment(marker: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content

    bits += "1" * (-len(bits) % 8)
    coded = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    header = segment(0xDB, b"\0" + b"\1" * 64) + segment(frame, struct.pack(">BHHB", 8, *size, 1) + b"\1\x11\0")
    header += table(0, dc) + table(0x10, ac) + segment(0xDA, b"\1\1\0" + bytes((*scan, 0)))
    return b"\xff\xd8" + header + coded + b"\xff\xd9"


def of_short_codes(seed: int) -> bytes:
    """A gray file of 40 x 24 pixels that libjpeg reads without a warning, but with codes that no encoder chooses: one
    look-up passes over 79 coefficients, where a run reaches beyond its block."""
    rng = random.Random(seed)
    dc, ac = {0: "0", 1: "10"}, {0xF0: "0", 0xE1: "10", 0: "110", 1: "1110"}
    last, far = ac[0], ac[0xF0]
    blocks = []
    for _ in range(17):  # two more than there are: whoever takes two for one goes on to the end
        block = rng.choice(("0", "100", "101"))
        for symbol in rng.sample((1, 1, 0xE1, 0xF0, 0xF0), rng.randint(0, 5)):  # 49 coefficients at most
            block += ac[symbol] + (rng.choice("01") if symbol & 15 else "")
        blocks.append(block + last)
    at = rng.randrange(9)
    one = ac[0xE1] + rng.choice("01")
    blocks[at : at + 2] = ["0" + 4 * far, "0" + far + one + far + one + last]
    return by_hand(0xC0, (24, 40), dc, ac, (0, 63), "".join(blocks))
