"""Small image files whose headers are changed at random, for `header_fuzz.py`."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable

import numpy as np
from PIL import Image
from test_native_fuzz import seeds as jpeg_seeds

FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC9, 0xCA, 0xCB, 0xCF)
SIDES = (0, 1, 7, 16, 24, 255, 1000, 1024, 1025, 16_384, 30_000, 65_500, 65_535)
NUMBERS = (
    0,
    1,
    2,
    12,
    13,
    16,
    40,
    255,
    1000,
    1025,
    30_000,
    65_535,
    1 << 20,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    2**32 - 1,
)


def frame(rng: random.Random, marker: int = 0xC0) -> bytes:
    height, width = rng.choice(SIDES), rng.choice(SIDES)
    return b"\xff" + bytes((marker,)) + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"


def hidden(rng: random.Random, marker: int, content: bytes) -> bytes:
    """A marker with a length that holds `content`, or nearly."""
    return b"\xff" + bytes((marker,)) + struct.pack(">H", len(content) + 2 + rng.choice((0, 0, 0, -1, 1))) + content


def piece(rng: random.Random) -> bytes:
    """Something that stands between two segments: what one parser reads past and another one reads."""
    made = frame(rng, rng.choice(FRAMES))
    pieces: tuple[Callable[[], bytes], ...] = (
        lambda: made,
        lambda: hidden(rng, 0x00, made),  # a stuffed zero, which has no length
        lambda: hidden(rng, rng.choice((0x01, 0xD0, 0xD7)), made),  # markers without a length
        lambda: hidden(rng, rng.choice((0xE0, 0xE1, 0xEE, 0xFE, 0xDC)), made),  # metadata that looks like a header
        lambda: hidden(rng, rng.choice((0x02, 0xBF, 0xF0, 0xDE, 0xC8)), made),  # markers that nobody knows
        lambda: hidden(rng, 0xFE, rng.choice((b"\xff\xd9", b"\xff\xda\x00\x02", b"\xff\xd8")) + made),
        lambda: b"\xff" * rng.randint(1, 5) + rng.choice((b"", b"\x00", b"\x00" + made)),
        lambda: rng.randbytes(rng.randint(1, 9)),
        lambda: bytes((0xFF, rng.choice((0xD8, 0xD9, 0x01, 0xD3, 0xDA, 0xDD, 0xC4, 0xCC)))),
        lambda: b"\xff\xfe\x00" + bytes((rng.randrange(3),)) + made,  # lengths below two
    )
    return rng.choice(pieces)()


def cut(data: bytes) -> list[bytes]:
    """A JPEG's beginning, its segments, and the rest from the first scan on."""
    parts, at = [data[:2]], 2
    while data[at + 1] != 0xDA:
        stop = at + 2 + (data[at + 2] << 8 | data[at + 3])
        parts.append(data[at:stop])
        at = stop
    return [*parts, data[at:]]


def jpeg_mutant(rng: random.Random, files: list[list[bytes]]) -> bytes:
    """One to four changes before the first scan."""
    parts = list(rng.choice(files))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(1, len(parts))
        way = rng.randrange(9)
        if way <= 2:
            parts.insert(at, piece(rng))
        elif way == 3:
            parts.insert(at, rng.choice(rng.choice(files)))  # a segment of another file, or its scans
        elif way == 4:
            parts[at : at + 2] = parts[at : at + 2][::-1]
        elif way == 5 and len(parts[at]) > 9:
            place = rng.randrange(2, 9)
            parts[at] = parts[at][:place] + rng.randbytes(1) + parts[at][place + 1 :]
        elif way == 6:
            parts[at] = parts[at][: rng.randrange(len(parts[at]) + 1)]
        elif way == 7:
            for number, part in enumerate(parts):
                if len(part) > 9 and part[1] in FRAMES:
                    sides = struct.pack(">HH", rng.choice(SIDES), rng.choice(SIDES))
                    parts[number] = part[:5] + sides + part[9:]
        else:
            del parts[at]
            parts.append(b"")
    return b"".join(parts)


def other_files() -> list[bytes]:
    """Files of 40 x 24 pixels in the formats other than JPEG."""
    y, x = np.mgrid[:24, :40]
    image = Image.fromarray(np.stack([x * 6, y * 10, x + y], axis=-1).astype(np.uint8))

    def encoded(form: str, picture: Image.Image = image, **options: object) -> bytes:
        file = io.BytesIO()
        picture.save(file, form, **options)
        return file.getvalue()

    frames = [image.quantize(), image.rotate(90).quantize()]
    files = [encoded("PNG"), encoded("PNG", image.quantize()), encoded("BMP"), encoded("BMP", image.convert("1"))]
    files += [encoded("GIF", frames[0], save_all=True, append_images=frames[1:]), encoded("PPM")]
    files += [encoded("PNG", save_all=True, append_images=[image.rotate(90)]), encoded("PPM", image.convert("1"))]
    files += [encoded("WEBP", lossless=True), encoded("WEBP", quality=50), encoded("WEBP", exif=b"Exif\0\0II*\0")]
    files += [encoded("WEBP", save_all=True, append_images=[image.rotate(90)])]
    files += [encoded("TIFF", compression=kind) for kind in ("raw", "tiff_lzw", "tiff_deflate", "jpeg")]
    files += [encoded("TIFF", big_tiff=True)]
    files += [encoded("JPEG2000"), encoded("JPEG2000", no_jp2=True), encoded("ICO"), encoded("TGA"), encoded("PCX")]
    return [*files, b"P3\n# made\n2 2\n255\n" + b"9 " * 12, b"P2 2 2 255 1 2 3 4 "]


def other_mutant(rng: random.Random, files: list[bytes]) -> bytes:
    """One to four changes in the first 120 bytes, or of a TIFF's directory, which may stand at the end."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 4)):
        start = 4
        if data[:4] in (b"II*\0", b"II+\0") and len(data) >= 16:
            (start,) = struct.unpack_from("<I", data, 4 if data[2:3] == b"*" else 8)
        if not len(data):
            break
        at = rng.randrange(min(start if start < len(data) else 0, len(data) - 1), min(start + 120, len(data)))
        way = rng.randrange(6)
        if way == 0:
            data[at] = rng.randrange(256)
        elif way == 1:
            layout = rng.choice("<>") + rng.choice("HI")
            size = struct.calcsize(layout)
            data[at : at + size] = struct.pack(layout, rng.choice(NUMBERS) & (1 << 8 * size) - 1)
        elif way == 2:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif way == 3:
            del data[at : at + rng.randint(1, 20)]
        elif way == 4:
            data[at:at] = rng.choice(
                (b"#\r30000 30000\n", b"# a\n", b"\n", b" 20000 20000 ", b"\xff\x00", b"\x9d\x01\x2a")
            )
        else:
            other = rng.choice(files)
            data[:at] = other[:at]
    return bytes(data)


def mutants(kind: str, seed: int) -> Callable[[], bytes]:
    """A function that gives another file each time: `kind` is ``jpeg`` or ``other``."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "other":
        others = other_files()
        return lambda: other_mutant(rng, others)
    files = [cut(data) for data in jpeg_seeds()]
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    files += [[parts[0], hidden(random.Random(0), 0xE1, exif), *parts[1:]] for parts in files[:2]]
    return lambda: jpeg_mutant(rng, files)
