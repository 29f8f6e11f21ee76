"""Sizes from the first bytes: against files that OpenCV wrote, at every cut."""

from __future__ import annotations

import io
import struct

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.images.headers import TruncatedHeader, png_is_whole, size_from_header, size_of_file


@given(st.sampled_from([".jpg", ".png", ".webp", ".bmp", ".gif", ".ppm"]), st.integers(1, 300), st.integers(1, 300))
def test_size_of_what_opencv_writes(extension: str, width: int, height: int) -> None:
    ok, data = cv2.imencode(extension, np.zeros((height, width, 3), np.uint8))
    assert ok
    assert size_from_header(data.tobytes()) == (width, height)


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp", ".bmp", ".gif"])
def test_a_cut_header_asks_for_more_and_never_lies(extension: str) -> None:
    ok, data = cv2.imencode(extension, np.zeros((77, 1234, 3), np.uint8))
    assert ok
    whole = data.tobytes()
    truncated = 0
    for cut in range(min(len(whole), 1000)):
        try:
            assert size_from_header(whole[:cut]) in (None, (1234, 77))
        except TruncatedHeader:
            truncated += 1
    assert truncated > 3


def test_lossy_and_extended_webp() -> None:
    ok, data = cv2.imencode(".webp", np.zeros((77, 123, 3), np.uint8), [cv2.IMWRITE_WEBP_QUALITY, 80])
    assert ok
    assert data.tobytes()[12:16] == b"VP8 "
    assert size_from_header(data.tobytes()) == (123, 77)
    extended = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (70_000 - 1).to_bytes(3, "little") + b"\x63\0\0"
    assert size_from_header(extended) == (70_000, 100)


def test_bitmaps_of_other_kinds() -> None:
    top_down = b"BM" + b"\0" * 12 + struct.pack("<Iii", 40, 30, -20)
    assert size_from_header(top_down) == (30, 20)
    os2 = b"BM" + b"\0" * 12 + struct.pack("<IHH", 12, 30, 20)
    assert size_from_header(os2) == (30, 20)


def test_pnm_with_comments() -> None:
    assert size_from_header(b"P6 # made by hand\n# twice\n 640\t480\n255\n") == (640, 480)


def test_jpeg_fill_bytes_and_restart_markers() -> None:
    frame = b"\xff\xc2\x00\x0b\x08" + struct.pack(">HH", 20, 30) + b"\x01\x01\x11\x00"
    assert size_from_header(b"\xff\xd8\xff\xff\xff\xd0" + b"\xff\xfe\x00\x04ab" + frame) == (30, 20)


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 64, b"<svg width='3'>", b"\xff\xd8\xff\xda\0\x08abcdef"])
def test_unknown_is_none(data: bytes) -> None:
    assert size_from_header(data) is None


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF89a", b"P6 "]))
def test_any_bytes_give_a_size_none_or_the_signal(data: bytes, start: bytes) -> None:
    try:
        size = size_from_header(start + data)
    except TruncatedHeader:
        return
    assert size is None or (len(size) == 2 and min(size) >= 0)


def test_a_chunk_of_png_beyond_the_end() -> None:
    ok, made = cv2.imencode(".png", np.zeros((9, 9, 3), np.uint8))
    assert ok
    data = made.tobytes()
    assert png_is_whole(data)
    assert png_is_whole(data + b"\xff" * 99)  # behind IEND
    at = data.index(b"IDAT") - 4
    for length in (len(data) - at - 11, 2**31, 2**32 - 1):
        assert not png_is_whole(data[:at] + struct.pack(">I", length) + data[at + 4 :])


def test_sizes_of_jpeg_2000() -> None:
    for name in (".jp2", ".j2k"):
        file = io.BytesIO()
        Image.new("RGB", (93, 61)).save(file, "JPEG2000", no_jp2=name == ".j2k")
        data = file.getvalue()
        assert size_of_file(data) == (93, 61)
        for cut in range(50):
            assert size_of_file(data[:cut]) is None
        at = data.index(b"\xff\x4f\xff\x51") + 43
        assert size_of_file(data[:at] + b"\x02" + data[at + 1 :]) is None  # a component of half the width
