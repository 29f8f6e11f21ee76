"""Write the seeds of the fuzz targets: small JPEG files of every kind, ordinary and odd.

    python tests/fuzz/corpus.py FOLDER

The files are the same each time. Most come from a writer in this file, because no encoder chooses such tables, segments
and frames. What stands behind each file are the `TAIL` bytes that a target takes for its arguments; see input.h.
"""

from __future__ import annotations

import base64
import random
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg

TAIL = 48
VARIANTS = 4
SUBSAMPLINGS = ("444", "422", "420", "440", "411")
FACTORS = {
    "444": ((1, 1), (1, 1), (1, 1)),
    "422": ((2, 1), (1, 1), (1, 1)),
    "420": ((2, 2), (1, 1), (1, 1)),
    "440": ((1, 2), (1, 1), (1, 1)),
    "411": ((4, 1), (1, 1), (1, 1)),
    "410": ((4, 2), (1, 1), (1, 1)),
    "odd": ((2, 2), (2, 1), (1, 2)),
    "quarter and half": ((4, 1), (1, 1), (2, 1)),
    "third": ((3, 1), (1, 1), (1, 1)),
    "equal": ((2, 2), (2, 2), (2, 2)),
    "shrunken luma": ((1, 1), (2, 2), (2, 2)),
}
SIZES = ((1, 1), (7, 9), (16, 16), (33, 17), (40, 24), (64, 1), (3, 70))  # width, height

# An arithmetic-coded file, 40 x 24, and a progressive one, 16 x 16: nothing that can be installed here writes them.
ARITHMETIC = base64.b64decode(
    "/9j/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/2wBD"
    "ARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/yQARCAAYACgD"
    "ASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AJyFnwv1V+ifbG3Ol2kMLOsvsfOUzXRhPNjLKyLrkaZ+iJUUoVzQ"
    "ILGo4yUKXW8jC5rUg7xokSlHgAzwXxmnNG2mjG268mfA/9k="
)
ARITHMETIC_PROGRESSIVE = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5a"
    "YVpQYEpRUk//ygALCAAQABABAREA/8wABAAQ/9oACAEBAAAAAeOTKH+A/8wABBAF/9oACAEBAAEFAhVsDz4ETdZxz9+SQ4eA/8wABBAF/9oA"
    "CAEBAAY/Anz89jazz7BvRq7cgewTjDD/zAAEEAX/2gAIAQEAAT8hnXM9REyA1z6E4RU/FtVk/9oACAEBAAAAECD/zAAEEAX/2gAIAQEAAT8Q"
    "GA/KfPWSgglH/m0yVh2tF2GnRZqELyD/2Q=="
)


class Huffman(NamedTuple):
    """A Huffman table as a file has it, and the codes of its symbols as strings of bits."""

    content: bytes
    codes: dict[int, str]


def huffman(lengths: dict[int, int]) -> Huffman:
    """The table of symbols that have codes of these lengths."""
    symbols = sorted(lengths, key=lambda symbol: (lengths[symbol], symbol))
    counts = bytes(sum(length == n for length in lengths.values()) for n in range(1, 17))
    codes, code, before = {}, 0, 0
    for symbol in symbols:
        code <<= lengths[symbol] - before
        before = lengths[symbol]
        codes[symbol] = format(code, f"0{before}b")
        code += 1
    return Huffman(counts + bytes(symbols), codes)


AC_SYMBOLS = (0x00, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, 11)))
DC_FLAT = huffman(dict.fromkeys(range(12), 4))
TABLES = {
    "flat": (DC_FLAT, huffman(dict.fromkeys(AC_SYMBOLS, 8))),
    "long": (
        huffman({size: min(2 + size, 16) for size in range(12)}),
        huffman({symbol: at + 2 if at < 7 else 16 for at, symbol in enumerate(AC_SYMBOLS)}),
    ),
    "skewed": (
        huffman({size: 1 if size == 0 else 11 for size in range(12)}),
        huffman({symbol: 1 if symbol == 0x00 else 9 + (at & 1) for at, symbol in enumerate(AC_SYMBOLS)}),
    ),
    "all ones": (  # which no code may be
        huffman(dict.fromkeys(range(16), 4)),
        huffman({symbol: 7 + (at >= 94) for at, symbol in enumerate(AC_SYMBOLS)}),
    ),
    "every byte": (huffman(dict.fromkeys(range(16), 5)), huffman({symbol: 9 + symbol // 200 for symbol in range(256)})),
}


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def coded(bits: str) -> bytes:
    """Bits as bytes with stuffed zeros, filled up with ones."""
    bits += "1" * (-len(bits) % 8)
    return int("0" + bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


def magnitude(value: int) -> tuple[int, str]:
    """The category of a coefficient, and its additional bits."""
    size = abs(value).bit_length()
    return size, format(value if value > 0 else value + (1 << size) - 1, f"0{size}b") if size else ""


def block_bits(block: Sequence[int], before: int, tables: tuple[Huffman, Huffman]) -> str:
    """The code of a block of 64 coefficients in the order of the file, whose DC value is a difference to `before`."""
    dc, ac = tables
    size, more = magnitude(block[0] - before)
    bits, run = dc.codes[size] + more, 0
    for value in block[1:]:
        if value == 0:
            run += 1
            continue
        bits += ac.codes[0xF0] * (run // 16)
        size, more = magnitude(value)
        bits += ac.codes[run % 16 << 4 | size] + more
        run = 0
    return bits + (ac.codes[0x00] if run else "")


def random_block(rng: random.Random) -> list[int]:
    block = [rng.randint(-60, 60)] + [0] * 63
    for _ in range(rng.choice((0, 0, 1, 3, 12))):
        block[min(63, int(rng.expovariate(0.12)) + 1)] = rng.choice((-300, -9, -1, 1, 2, 30))
    return block


class Writer:
    """Writes files of random coefficients, in as many ways as the attributes say."""

    def __init__(self, size: tuple[int, int], factors: Sequence[tuple[int, int]], seed: str = "") -> None:
        self.width, self.height = size
        self.factors = factors
        self.rng = random.Random(f"{size} {factors} {seed}")
        self.frame = 0xC0
        self.precision = 8
        self.tables = TABLES["flat"]
        self.interval = 0
        self.names: Sequence[int] = range(1, len(factors) + 1)
        self.scans: Sequence[Sequence[int]] = [range(len(factors))]
        self.spectrum = (0, 63, 0)
        self.numbers = (0, 0)  # of the DC and the AC table
        self.quantisation = bytes([0] + [min(255, 3 + at) for at in range(64)])

    def segments(self) -> list[bytes]:
        """SOI, DQT, SOF, DHT, DRI, then SOS with the data of each scan, and EOI."""
        frame = struct.pack(">BHHB", self.precision, self.height, self.width, len(self.factors))
        for name, (across, down) in zip(self.names, self.factors, strict=True):
            frame += bytes((name, across << 4 | down, self.quantisation[0] & 15))
        dc, ac = self.tables
        tables = bytes((self.numbers[0],)) + dc.content + bytes((0x10 | self.numbers[1],)) + ac.content
        made = [b"\xff\xd8", segment(0xDB, self.quantisation), segment(self.frame, frame), segment(0xC4, tables)]
        if self.interval:
            made.append(segment(0xDD, struct.pack(">H", self.interval)))
        for scan in self.scans:
            header = bytes((len(scan),))
            for component in scan:
                header += bytes((self.names[component], self.numbers[0] << 4 | self.numbers[1]))
            made.append(segment(0xDA, header + bytes(self.spectrum)) + self.data(scan))
        return [*made, b"\xff\xd9"]

    def file(self) -> bytes:
        return b"".join(self.segments())

    def data(self, scan: Sequence[int]) -> bytes:
        """The coded data of a scan, with restart markers."""
        most_wide = max(across for across, _ in self.factors)
        most_high = max(down for _, down in self.factors)
        if len(scan) == 1:
            across, down = self.factors[scan[0]]
            blocks = [scan[0]]
            wide = -(-self.width * across // (8 * most_wide))
            high = -(-self.height * down // (8 * most_high))
        else:
            blocks = [n for n in scan for _ in range(self.factors[n][0] * self.factors[n][1])]
            wide, high = -(-self.width // (8 * most_wide)), -(-self.height // (8 * most_high))
        out, bits, before = b"", "", dict.fromkeys(scan, 0)
        for mcu in range(wide * high):
            if self.interval and mcu and mcu % self.interval == 0:
                out += coded(bits) + bytes((0xFF, 0xD0 + (mcu // self.interval - 1) % 8))
                bits, before = "", dict.fromkeys(scan, 0)
            for component in blocks:
                block = random_block(self.rng)
                bits += block_bits(block, before[component], self.tables)
                before[component] = block[0]
        return out + coded(bits)


def lossless(size: tuple[int, int], precision: int, components: int) -> bytes:
    """A file of frame SOF3, predicted from the left, as libjpeg-turbo 3 reads it."""
    writer = Writer(size, ((1, 1),) * components)
    writer.frame, writer.precision, writer.spectrum = 0xC3, precision, (1, 0, 0)
    bits = ""
    for _ in range(size[0] * size[1] * components):
        category, more = magnitude(writer.rng.randint(-3, 3))
        bits += DC_FLAT.codes[category] + more
    made = writer.segments()
    head = made[-2][: 2 + struct.unpack(">H", made[-2][2:4])[0]]
    return b"".join([*made[:-2], head, coded(bits), made[-1]])


def drawn(width: int, height: int) -> np.ndarray:
    """A picture with structure at every place and in every channel."""
    small = np.random.default_rng(width).integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def encoded() -> Iterator[tuple[str, bytes]]:
    """Files that encoders write."""
    for width, height in SIZES:
        image = drawn(width, height)
        gray = np.ascontiguousarray(image[..., :1])
        name = f"{width}x{height}"
        yield f"gray {name}", simplejpeg.encode_jpeg(gray, 70, colorspace="GRAY", colorsubsampling="Gray")
        for kind in SUBSAMPLINGS:
            yield f"{kind} {name}", simplejpeg.encode_jpeg(image, 60, colorsubsampling=kind)
    image = drawn(40, 24)
    for quality in (1, 100):
        yield f"quality {quality}", simplejpeg.encode_jpeg(image, quality, colorsubsampling="420")
    four = np.dstack([image, image[..., :1]])
    yield "cmyk", simplejpeg.encode_jpeg(four, 70, colorspace="CMYK")
    options = {
        "progressive": (cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "restart 1": (cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
        "restart 3": (cv2.IMWRITE_JPEG_RST_INTERVAL, 3),
        "optimised": (cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    }
    for sampling in (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420):
        for name, option in options.items():
            choice = [*option, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
            yield f"{name} {sampling:x}", cv2.imencode(".jpg", image, choice)[1].tobytes()
    yield "progressive gray", cv2.imencode(".jpg", image[..., :1], options["progressive"])[1].tobytes()
    yield "arithmetic", ARITHMETIC
    yield "arithmetic progressive", ARITHMETIC_PROGRESSIVE


def written() -> Iterator[tuple[str, bytes]]:
    """Files of the writer above: one thing is unusual in each of them."""
    for kind, factors in FACTORS.items():
        yield f"factors {kind}", Writer((40, 24), factors).file()
        marked = Writer((40, 24), factors)
        marked.interval, marked.tables = 2, TABLES["long"]
        yield f"factors {kind}, restart", marked.file()
    for name, tables in TABLES.items():
        for factors in (((1, 1),), ((2, 2),), FACTORS["420"]):
            odd = Writer((33, 17), factors, name)
            odd.tables = tables
            yield f"tables {name} {len(factors)} {factors[0]}", odd.file()
    for interval in (1, 2, 5, 65535):
        marked = Writer((40, 24), ((1, 1),))
        marked.interval = interval
        yield f"restart {interval}", marked.file()
    for numbers in ((1, 1), (2, 3), (3, 0)):
        odd = Writer((16, 16), FACTORS["420"])
        odd.numbers = numbers
        yield f"table numbers {numbers}", odd.file()
    for frame in range(0xC0, 0xD0):
        if frame not in (0xC4, 0xC8, 0xCC):
            odd = Writer((16, 16), FACTORS["420"])
            odd.frame = frame
            yield f"frame {frame:02x}", odd.file()
    for precision in (2, 12, 16):
        odd = Writer((16, 16), FACTORS["444"])
        odd.frame, odd.precision = 0xC1, precision
        yield f"precision {precision}", odd.file()
        for components in (1, 3):
            yield f"lossless {precision} {components}", lossless((16, 9), precision, components)
    yield "lossless 8", lossless((16, 9), 8, 1)
    for spectrum in ((0, 63, 1), (0, 0, 0), (0, 62, 0), (1, 63, 0), (0, 255, 16)):
        odd = Writer((16, 16), ((1, 1),))
        odd.spectrum = spectrum
        yield f"spectrum {spectrum}", odd.file()
    for scans in ([[0], [1], [2]], [[0, 1], [2]], [[0]], [[1, 0, 2]], [[0, 1, 2], [0]]):
        odd = Writer((24, 16), FACTORS["420"])
        odd.scans = scans
        yield f"scans {scans}", odd.file()
    for names in ((82, 71, 66), (0, 0, 0), (1, 34, 35), (255, 1, 2)):
        odd = Writer((16, 16), FACTORS["444"])
        odd.names = names
        yield f"names {names}", odd.file()
    for transform in (0, 1, 2):
        for components in (1, 3, 4):
            parts = Writer((16, 16), ((1, 1),) * components).segments()
            parts.insert(1, segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes((transform,))))
            yield f"adobe {transform} of {components}", b"".join(parts)
    for count in (2, 5):
        yield f"{count} components", Writer((16, 16), ((1, 1),) * count).file()
    yield "gray of 2 x 2", Writer((33, 17), ((2, 2),)).file()
    for large in (255, 256, 65535):
        odd = Writer((16, 16), FACTORS["420"])
        odd.quantisation = b"\x10" + struct.pack(">64H", *[large] * 64)
        yield f"16-bit quantisation {large}", odd.file()
    for factor in (20, 65, 100, 255):
        for kind in ("gray", "420", "444"):
            odd = Writer((40, 24), FACTORS.get(kind, ((1, 1),)))
            odd.quantisation = bytes([0] + [factor] * 64)
            yield f"large values {factor} {kind}", odd.file()
    odd = Writer((16, 16), ((1, 1),))
    odd.quantisation = bytes([3] + [0] * 64)
    yield "quantisation by zero", odd.file()


def rearranged() -> Iterator[tuple[str, bytes]]:
    """A file with other segments, in other orders, and with bytes between them."""
    writer = Writer((33, 17), FACTORS["420"])
    writer.interval = 2
    soi, dqt, sof, dht, dri, scan, eoi = writer.segments()
    other_dht = segment(0xC4, b"\0" + DC_FLAT.content)
    comment, exif = segment(0xFE, b"text"), segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0")
    jfif = segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
    profile = segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(20))
    scan_head = 2 + struct.unpack(">H", scan[2:4])[0]
    no_height = sof[:5] + b"\0\0" + sof[7:]
    yield "tables behind the frame", b"".join([soi, sof, dht, dri, dqt, scan, eoi])
    yield "tables twice", b"".join([soi, dqt, dqt, other_dht, sof, dht, other_dht, dri, dri, scan, eoi])
    yield "metadata", b"".join([soi, jfif, exif, profile, comment, dqt, comment, sof, dht, comment, dri, scan, eoi])
    yield "thumbnail", b"".join([soi, segment(0xE1, b"Exif\0\0" + writer.file()), dqt, sof, dht, dri, scan, eoi])
    yield "fill bytes", b"\xff\xff".join([soi, dqt, sof, dht, dri, scan, eoi])
    yield "junk", b"ab\0".join([soi, dqt, sof, dht, dri, scan, eoi])
    yield "stuffed junk", b"\xff\0".join([soi, dqt, sof, dht, dri, scan, eoi])
    yield "two frames", b"".join([soi, dqt, sof, sof, dht, dri, scan, eoi])
    yield "two files", b"".join([soi, dqt, sof, dht, dri, scan, eoi]) * 2
    yield "tables alone first", b"".join([soi, dqt, dht, eoi, soi, dqt, sof, dht, dri, scan, eoi])
    yield "two scans", b"".join([soi, dqt, sof, dht, dri, scan, other_dht, scan, eoi])
    yield "no tables", b"".join([soi, dqt, sof, dri, scan, eoi])
    yield "no quantisation", b"".join([soi, sof, dht, dri, scan, eoi])
    yield "no restart interval", b"".join([soi, dqt, sof, dht, scan, eoi])
    yield "height behind", b"".join([soi, dqt, no_height, dht, dri, scan, segment(0xDC, sof[5:7]), eoi])
    yield "another height behind", b"".join([soi, dqt, sof, dht, dri, scan, segment(0xDC, b"\0\x09"), eoi])
    yield "arithmetic conditioning", b"".join([soi, segment(0xCC, b"\0\x10"), dqt, sof, dht, dri, scan, eoi])
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\0")
    yield "Adobe's colours behind", b"".join([soi, dqt, sof, dht, dri, scan, adobe, eoi])
    yield "JFIF behind", b"".join([soi, dqt, sof, dht, dri, scan, jfif, eoi])
    yield "comment behind", b"".join([soi, dqt, sof, dht, dri, scan, comment, eoi])
    yield "tables behind", b"".join([soi, dqt, sof, dht, dri, scan, other_dht, dqt[:4] + bytes(65), eoi])
    yield "end in front", b"".join([soi, segment(0xE4, eoi), dqt, sof, dht, dri, scan])
    plain = Writer((16, 16), FACTORS["444"])
    yield "end in front of a scan without markers", soi + segment(0xE4, eoi) + plain.file()[2:-2]
    plain.names = (82, 71, 66)
    yield "JFIF behind RGB", plain.file()[:-2] + jfif + eoi
    yield "no end", b"".join([soi, dqt, sof, dht, dri, scan])
    yield "bytes behind", b"".join([soi, dqt, sof, dht, dri, scan, eoi, b"tail" * 5])
    yield "end within", b"".join([soi, dqt, sof, dht, dri, scan[: scan_head + 30], eoi, scan[scan_head + 30 :], eoi])
    yield "missing marker", b"".join([soi, dqt, sof, dht, dri, scan.replace(b"\xff\xd0", b""), eoi])
    yield "fill before marker", b"".join([soi, dqt, sof, dht, dri, scan.replace(b"\xff\xd0", b"\xff\xff\xd0"), eoi])
    yield "junk before marker", b"".join([soi, dqt, sof, dht, dri, scan.replace(b"\xff\xd0", b"abc\xff\xd0"), eoi])
    yield "marker twice", b"".join([soi, dqt, sof, dht, dri, scan.replace(b"\xff\xd0", b"\xff\xd0\xff\xd0"), eoi])
    for part in (3, 5, 7, 9):
        whole = b"".join([soi, dqt, sof, dht, dri, scan, eoi])
        yield f"cut at {part}", whole[: len(whole) * part // 10] + eoi


def by_hand(dc: dict[int, str], ac: dict[int, str], bits: str) -> bytes:
    """A gray file of 40 x 24 pixels with these codes of symbols, and these coded bits."""
    made = []
    for number, codes in ((0, dc), (0x10, ac)):
        ordered = sorted(codes, key=lambda symbol: (len(codes[symbol]), codes[symbol]))
        counts = bytes(sum(len(code) == length for code in codes.values()) for length in range(1, 17))
        made.append(segment(0xC4, bytes((number,)) + counts + bytes(ordered)))
    frame = segment(0xC0, struct.pack(">BHHB", 8, 24, 40, 1) + b"\1\x11\0")
    quantisation = segment(0xDB, b"\0" + b"\1" * 64)
    scan = segment(0xDA, b"\1\1\0\0\x3f\0") + coded(bits)
    return b"".join([b"\xff\xd8", quantisation, frame, *made, scan, b"\xff\xd9"])


def with_far_runs(seed: int) -> bytes:
    """A file with short codes of long runs: what is looked up at once passes over 79 coefficients, beyond the block."""
    rng = random.Random(seed)
    dc, ac = {0: "0", 1: "10"}, {0xF0: "0", 0xE1: "10", 0: "110", 1: "1110"}
    blocks = []
    for _ in range(17):
        block = rng.choice(("0", "100", "101"))
        for symbol in rng.sample((1, 1, 0xE1, 0xF0, 0xF0), rng.randint(0, 5)):
            block += ac[symbol] + (rng.choice("01") if symbol & 15 else "")
        blocks.append(block + ac[0])
    at = rng.randrange(9)
    one = ac[0xE1] + rng.choice("01")
    blocks[at : at + 2] = ["0" + 4 * ac[0xF0], "0" + ac[0xF0] + one + ac[0xF0] + one + ac[0]]
    return by_hand(dc, ac, "".join(blocks))


def seeds() -> dict[str, bytes]:
    """All files by their names, without arguments of a target."""
    found = {**dict(encoded()), **dict(written()), **dict(rearranged())}
    for seed in range(4):
        found[f"far runs {seed}"] = with_far_runs(seed)
    return found


def inputs() -> dict[str, bytes]:
    """All files with arguments of a target behind them, in a few variants."""
    found = {}
    for name, data in seeds().items():
        for variant in range(VARIANTS):
            found[f"{name} {variant}"] = data + random.Random(f"{name} {variant}").randbytes(TAIL)
    return found


def main(folder: Path) -> None:
    """Write all inputs, and those that once found a fault."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, data) in enumerate(inputs().items()):
        (folder / f"{number:04}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}").write_bytes(data)
    for path in sorted(Path(__file__).with_name("regressions").glob("*")):
        (folder / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
