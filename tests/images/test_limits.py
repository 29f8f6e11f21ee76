"""No way past `max_pixels`: files that have one size for a parser and another one for a decoder."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from busy_support import HANG
from interpreter_support import run
from jpeg_support import drawn
from PIL import Image

from penstock.datasets.loading import EncodedImage
from penstock.errors import ImageError
from penstock.images import native
from penstock.images.backends import BACKENDS, installed
from penstock.images.decode import MAX_PIXELS, decode, image_size
from penstock.images.headers import size_from_header, size_of_file
from penstock.images.jpeg import MAX_SCANS, scans
from penstock.images.limits import open_pillow
from penstock.images.region import decode_region
from penstock.images.transforms.view import View

LARGE = (30_000, 30_000)
FRAME = b"\xff\xc0"


def jpeg(width: int = 16, height: int = 16) -> bytes:
    return simplejpeg.encode_jpeg(np.full((height, width, 3), 128, np.uint8), quality=50)


def parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before a JPEG's frame header, that, and the rest."""
    at = data.index(FRAME)
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[:at], data[at:end], data[end:]


def resized(frame: bytes, size: tuple[int, int]) -> bytes:
    return frame[:5] + struct.pack(">HH", size[1], size[0]) + frame[9:]


def hiding(marker: int, first: bytes, second: bytes, data: bytes) -> bytes:
    """A JPEG with `marker`, a length, and `first`, behind which a comment hides `second` from who has seen `first`."""
    before, _, rest = parts(data)
    comment = b"\xff\xfe" + struct.pack(">H", len(second) + 2)
    content = first + comment
    return (
        before[:2]
        + b"\xff"
        + bytes((marker,))
        + struct.pack(">H", len(content) + 2)
        + content
        + second
        + (before[2:] + rest)
    )


def large_for_libjpeg() -> bytes:
    """`FF 00` is no marker for libjpeg, and what follows it no length."""
    _, frame, _ = parts(jpeg())
    return hiding(0x00, resized(frame, LARGE), frame, jpeg())


def small_for_libjpeg() -> bytes:
    _, frame, _ = parts(jpeg())
    return hiding(0x00, frame, resized(frame, LARGE), jpeg())


jpegs = pytest.mark.parametrize("name", [name for name in installed() if BACKENDS[name].reads("jpeg")])

PROGRAM = """
import json, resource, sys
from penstock.errors import ImageError
from penstock.images.decode import decode

name, good, *bad = sys.argv[1:]
read = lambda path: open(path, "rb").read()

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

decode(read(good), backend=name)
before, texts = most(), []
for path in bad:
    for limit in (1 << 20, 1 << 28):
        try:
            decode(read(path), backend=name, max_pixels=limit)
            texts.append("decoded")
        except ImageError as error:
            texts.append(str(error))
json.dump([most() - before, texts], sys.stdout)
"""


@jpegs
def test_the_decoder_s_own_header_counts(name: str, tmp_path: Path) -> None:
    """In an interpreter of its own, whose memory tells whether pixels were made: 2.7 GB of them."""
    assert len(large_for_libjpeg()) < 800
    paths = [tmp_path / "good", tmp_path / "large", tmp_path / "scans"]
    for path, data in zip(paths, (jpeg(), large_for_libjpeg(), bomb_of_scans()), strict=True):
        path.write_bytes(data)
    environment = {**os.environ, "OPENCV_LOG_LEVEL": "SILENT"}
    done = run(["-c", PROGRAM, name, *map(str, paths)], timeout=HANG, alone=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    megabytes, texts = json.loads(done.stdout)
    assert megabytes < 100
    assert ["more than the limit" in text for text in texts[:2]] == [True, True], texts
    assert ["scans" in text for text in texts[2:]] == [True, True], texts


def bomb_of_scans() -> bytes:
    """A progressive JPEG whose first scan comes three hundred times, each behind a comment that looks like an end."""
    ok, made = cv2.imencode(".jpg", np.full((40, 40, 3), 9, np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert ok
    data = made.tobytes()
    first = data.index(b"\xff\xda")
    after = data.index(b"\xff\xc4", first)
    return data[:after] + (b"\xff\xfe\x00\x04\xff\xd9" + data[first:after]) * 300 + data[after:]


class TestJpeg:
    @jpegs
    def test_small_for_libjpeg_is_small(self, name: str) -> None:
        data = small_for_libjpeg()
        assert size_from_header(data) == (16, 16)
        assert decode(data, backend=name, max_pixels=256).shape == (16, 16, 3)

    @pytest.mark.parametrize("marker", [0x00, 0x01, 0xD0, 0xD7, 0xDC, 0xE0, 0xFE])
    def test_our_parser_says_what_libjpeg_says(self, marker: int, tmp_path: Path) -> None:
        _, frame, _ = parts(jpeg())
        data = hiding(marker, resized(frame, (20, 30)), frame, jpeg())
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
        assert size_from_header(data) == (width, height)
        path = tmp_path / "a.jpg"
        path.write_bytes(data)
        assert image_size(path) == (width, height)

    def test_what_transforms_draw_from_is_what_is_decoded(self) -> None:
        for data in (large_for_libjpeg(), small_for_libjpeg()):
            source = EncodedImage(data, "a.jpg", 1 << 20)
            height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
            assert source.size == (height, width)
        with pytest.raises(ImageError, match=r"'a\.jpg'.* more than the limit"):
            EncodedImage(large_for_libjpeg(), "a.jpg", 1 << 20).draw(View((0, 0, 9, 9), (9, 9)))

    @pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
    def test_the_extension_refuses_another_size_than_the_caller_s(self) -> None:
        box = (0.0, 0.0, 8.0, 8.0)
        assert decode_region(jpeg(), box, target=(8, 8), max_pixels=256, size=(16, 16))[0].shape == (8, 8, 3)
        for size in ((16, 15), (15, 16)):
            with pytest.raises(ValueError, match="ambiguous header"):
                native.draw_box(jpeg(), box, np.empty((8, 8, 3), np.uint8), max_pixels=256, size=size)
            with pytest.raises(ImageError, match="ambiguous header"):
                decode_region(jpeg(), box, target=(8, 8), max_pixels=256, size=size)
            with pytest.raises(ImageError, match="ambiguous header"):
                decode(jpeg(), backend="native", max_pixels=256, size=size)
        with pytest.raises(ImageError, match="more than the limit of 256"):
            decode(jpeg(), backend="native", max_pixels=256, size=(30_000, 30_000))

    @pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
    @pytest.mark.parametrize("limit", [0, -1, -(2**70)])
    def test_no_limit_is_so_low_that_it_is_none(self, limit: int) -> None:
        with pytest.raises(OverflowError, match="more than the limit of 0"):
            drawn(jpeg(), max_pixels=limit)
        for name in installed():
            if BACKENDS[name].reads("jpeg"):
                with pytest.raises(ImageError, match="limit"):
                    decode(jpeg(), backend=name, max_pixels=limit)

    def test_scans_are_counted_where_metadata_hide_the_end(self) -> None:
        assert scans(bomb_of_scans()) == MAX_SCANS + 1
        assert scans(jpeg()) == 1
        ok, progressive = cv2.imencode(".jpg", np.zeros((9, 9, 3), np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
        assert ok
        assert scans(progressive.tobytes()) == progressive.tobytes().count(b"\xff\xda") == 10
        several = bytearray(jpeg())  # says of its only scan that it is one of others
        several[several.index(b"\xff\xda") + 4] = 1
        assert scans(several + bytes(several[several.index(b"\xff\xda") :]) * 300) == 1  # behind the end
        at = several.index(b"\xff\xda")
        assert scans(several[:-2] + several[at:-2] * 300 + several[-2:]) == MAX_SCANS + 1
        hidden = jpeg()[:2] + b"\xff\xe1" + struct.pack(">H", 802) + b"\xff\xda" * 400 + jpeg()[2:]
        assert scans(hidden) == 1
        assert scans(jpeg() + b"\xff\xda" * 400) == 1
        assert decode(hidden).shape == (16, 16, 3)


def encoded(kind: str, size: tuple[int, int] = (40, 24), **options: object) -> bytes:
    file = io.BytesIO()
    y, x = np.mgrid[: size[1], : size[0]]
    Image.fromarray(np.stack([x, y, x + y], axis=-1).astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


def tiff(*entries: tuple[int, int, int]) -> bytes:
    """A TIFF of gray zeros, 16 x 16, with other or more entries (tag, type, value) in its directory."""
    tags = [(0x100, 3, 16), (0x101, 3, 16), (0x102, 3, 8), (0x103, 3, 1), (0x106, 3, 1), (0x111, 4, 8), (0x115, 3, 1)]
    tags += [(0x116, 4, 16), (0x117, 4, 256)]
    given = {tag for tag, _, _ in entries}
    tags = sorted([entry for entry in tags if entry[0] not in given] + list(entries))
    body = b"".join(struct.pack("<HHII", tag, form, 1, value) for tag, form, value in tags)
    return b"II*\0" + struct.pack("<I", 264) + bytes(256) + struct.pack("<H", len(tags)) + body + bytes(4)


def png_with_a_chunk_of(size: int) -> bytes:
    data = encoded("PNG")
    return data[:33] + struct.pack(">I", size) + b"teXt" + data[33:]


UNREADABLE: dict[str, Callable[[], bytes]] = {
    "an ASCII bitmap, of which only the comment is small": lambda: b"P3\n# 2 2\r30000 30000\n2 2\n255\n" + b"9 " * 12,
    "a comment that ends a number": lambda: b"P6\n16#30000\n30000 5\n255\n" + bytes(999),
    "a chunk larger than the file": lambda: png_with_a_chunk_of(2**31 - 1),
    "a chunk before IHDR": lambda: encoded("PNG")[:8] + b"\0\0\0\0teXt" + bytes(4) + encoded("PNG")[8:],
    "BigTIFF": lambda: b"II+\0\x08\0\0\0" + struct.pack("<Q", 16) + tiff()[8:],
    "two widths": lambda: tiff((0x100, 3, 16), (0x100, 3, 30_000)),
    "tiles larger than the image": lambda: tiff((0x142, 3, 30_000), (0x143, 3, 30_000)),
    "tiles of signed numbers": lambda: tiff((0x142, 9, 30_000), (0x143, 9, 30_000)),
    "tiles of two sizes": lambda: tiff((0x142, 3, 16), (0x142, 3, 30_000), (0x143, 3, 30_000)),
    "tiles with a depth": lambda: tiff((0x80E6, 4, 30_000)),
    "more tags than any picture has": lambda: tiff(*((tag, 3, 1) for tag in range(0x9000, 0x9500))),
    "strips larger than the image": lambda: tiff((0x116, 4, 1 << 23)),
    "a bare frame of WebP": lambda: b"\x50\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383) + bytes(60),
    "Radiance": lambda: b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 30000 +X 30000\n" + bytes(999),
    "a portable float map": lambda: b"PF\n30000 30000\n-1.0\n" + bytes(999),
    "an arbitrary map that looks like AVIF": lambda: (
        b"P7\n#ftypavif\nWIDTH 30000\nHEIGHT 30000\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n" + bytes(999)
    ),
    "a Sun raster": lambda: struct.pack(">8I", 0x59A66A95, 30_000, 30_000, 24, 999, 1, 0, 0) + bytes(999),
    "a palette in JPEG 2000": lambda: encoded("JPEG2000").replace(b"colr", b"pclr", 1),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_opencv_gets_only_what_we_read_beyond_doubt(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no call for the size alone, so nothing of these may reach it."""
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("OpenCV was asked"))
    with pytest.raises(ImageError):
        decode(UNREADABLE[what](), backend="opencv", max_pixels=1 << 20)


@pytest.mark.parametrize("rows", [16, 0, 2**32 - 1])
@pytest.mark.parametrize("name", ["opencv", "pillow"])
def test_tiles_and_strips_within_the_limit(name: str, rows: int) -> None:
    if rows:
        assert decode(tiff((0x116, 4, rows)), backend=name, max_pixels=256).shape == (16, 16, 3)
    assert size_of_file(tiff((0x116, 4, rows))) == (16, 16)
    for tags in [(0x142, 3, 1024), (0x143, 3, 1025)], [(0x116, 4, 1 << 17)]:
        with pytest.raises(ImageError, match="more than the limit of 1048576"):
            decode(tiff(*tags), backend=name, max_pixels=1 << 20)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000"])
def test_what_opencv_reads_is_read_by_us(kind: str) -> None:
    data = encoded(kind)
    assert size_of_file(data) == (40, 24)
    assert decode(data, backend="opencv", max_pixels=960).shape == (24, 40, 3)
    with pytest.raises(ImageError, match="40 x 24 pixels, more than the limit of 959"):
        decode(data, backend="opencv", max_pixels=959)


@pytest.mark.parametrize("name", ["auto", "pillow"])
def test_avif_has_the_limit_of_its_library(name: str) -> None:
    """What Pillow and OpenCV say of its size is not what its frames hold: this one is 40 x 24 pixels."""
    data = encoded("AVIF")
    at = data.index(b"ispe") + 8
    small = data[:at] + struct.pack(">II", 16, 16) + data[at + 8 :]
    assert decode(data, backend=name, max_pixels=MAX_PIXELS).shape == (24, 40, 3)
    for file in (data, small):
        with pytest.raises(ImageError, match="not known before it is decoded: pass max_pixels=268435456"):
            decode(file, backend=name, max_pixels=MAX_PIXELS - 1)


def test_a_damaged_avif_is_an_image_error() -> None:
    data = bytearray(encoded("AVIF"))
    data[-20:] = bytes(20)
    with pytest.raises(ImageError):
        decode(bytes(data), backend="pillow")


@pytest.mark.parametrize("name", ["auto", "pillow"])
def test_big_tiff(name: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 24), (9, 8, 7)).save(file, "TIFF", big_tiff=True)
    data = file.getvalue()
    assert data[:4] == b"II+\0"
    assert size_of_file(data) == (40, 24)
    assert decode(data, backend=name, max_pixels=960).tolist() == np.full((24, 40, 3), (9, 8, 7)).tolist()
    with pytest.raises(ImageError, match="40 x 24 pixels, more than the limit of 959"):
        decode(data, backend=name, max_pixels=959)


class TestPillow:
    def test_files_that_hold_another_image(self) -> None:
        icon = encoded("ICO", (64, 64))
        assert Image.open(io.BytesIO(icon)).size == (64, 64)
        with pytest.raises(ImageError, match="ICO"):
            decode(icon, backend="pillow")
        assert open_pillow(icon).size == (64, 64)

    def test_a_frame_larger_than_the_screen(self) -> None:
        data = bytearray(encoded("GIF"))
        data[6:10] = struct.pack("<HH", 8, 8)
        with pytest.raises(ImageError, match="ambiguous header: 8 x 8 pixels for one reader, 40 x 24 for another"):
            decode(bytes(data), backend="pillow")

    def test_a_jpeg_that_libjpeg_reads_otherwise(self) -> None:
        """Of two frame headers, Pillow's parser takes the second one; libjpeg refuses that, or has seen the first."""
        before, frame, rest = parts(jpeg())
        data = before + resized(frame, LARGE) + frame + rest
        assert Image.open(io.BytesIO(data)).size == (16, 16)
        with pytest.raises(ValueError, match=r"no image size|more than the limit|another"):
            open_pillow(data)
