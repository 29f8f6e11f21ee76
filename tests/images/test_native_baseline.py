"""Our own decoder of baseline JPEGs beside libjpeg: the same bits, with vectors and without, at any scale."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jpeg_support import LIMIT, SUBSAMPLINGS, boxes, by_hand, by_opencv, drawn, jpeg, noise, of_short_codes

from penstock.images import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

Box = tuple[float, float, float, float]


def pixels(data: bytes, box: Box, scale: int, *, channels: int, simd: bool, libjpeg: bool) -> np.ndarray:
    """The box, shrunk, by our own decoder or by libjpeg alone."""
    left, top, right, bottom = box
    target = max(1, int((bottom - top) / scale)), max(1, int((right - left) / scale))
    by = 1
    while by < 8 and right - left >= 2 * by * target[1] and bottom - top >= 2 * by * target[0]:
        by *= 2
    rows, columns = -int(-bottom // by) - int(top // by), -int(-right // by) - int(left // by)
    out = np.zeros((rows, columns, channels), np.uint8)
    how = False, False, (False, False), None, False
    native._jpeg.draw(data, out, box, *how, simd, LIMIT, (0, 0), None, by, not libjpeg)
    return out


def check(data: bytes, box: Box, scale: int, channels: int = 3) -> None:
    expected = pixels(data, box, scale, channels=channels, simd=True, libjpeg=True)
    for simd in (True, False):
        found = pixels(data, box, scale, channels=channels, simd=simd, libjpeg=False)
        assert np.array_equal(found, expected), (box, scale, simd)


@given(
    st.integers(0, 1 << 32),
    st.sampled_from(SUBSAMPLINGS),
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.integers(1, 100),
    st.sampled_from([1, 1, 2, 4, 8]),
    st.sampled_from([1, 3]),
    st.sampled_from([0, 1, 2, 3, 7]),
)
@settings(max_examples=examples(100, 2000))
def test_any_file(
    seed: int, subsampling: str, size: tuple[int, int], quality: int, scale: int, channels: int, interval: int
) -> None:
    data = jpeg(noise(*size, seed), subsampling, quality)
    if interval:
        data = native.with_restart_markers(data, interval=interval, max_pixels=LIMIT) or data
    for box in boxes(*size, 4, seed):
        check(data, box, scale, channels)


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_OPTIMIZE, 1), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)])
def test_gray_files(options: tuple[int, ...], scale: int) -> None:
    gray = noise(90, 130)[:, :, 0]
    ok, data = cv2.imencode(".jpg", gray, options)
    assert ok
    for box in boxes(90, 130, 20):
        for channels in (1, 3):
            check(data.tobytes(), box, scale, channels)


@pytest.mark.parametrize("quality", [1, 10, 50, 90, 100])
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_black_and_white(quality: int, scale: int) -> None:
    """Coefficients as large as pictures can have, and larger: libjpeg's sums leave 16 bits there."""
    dots = np.random.default_rng(quality).integers(0, 2, (120, 96, 1), np.uint8).repeat(3, axis=2) * 255
    stripes = np.zeros((120, 96, 3), np.uint8)
    stripes[:, ::2] = 255
    for image in (dots, stripes, 255 - stripes, np.ascontiguousarray(stripes.transpose(1, 0, 2))):
        for data in (by_opencv(image, cv2.IMWRITE_JPEG_QUALITY, quality), jpeg(image, "444", quality)):
            height, width, _ = image.shape
            for box in boxes(height, width, 4):
                check(data, box, scale)


def test_codes_that_no_encoder_chooses() -> None:
    """What is passed over at once is never taken for the end of a block, nor is the picture another one."""
    for seed in range(50):
        check(of_short_codes(seed), (0.0, 16.0, 40.0, 24.0), 1)


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
@pytest.mark.parametrize("dc", [1363, 1364, 1366, 1367, 1500, 2047])
def test_dc_values_beyond_those_of_pictures(dc: int, scale: int) -> None:
    """At an eighth of the size, libjpeg makes black of what is brighter than white by far."""
    for value in (dc, 2047 - dc):  # the second one stands for -dc
        data = by_hand(0xC0, (8, 8), {11: "0"}, {0: "0"}, (0, 63), f"0{value:011b}0")
        factors = data.replace(b"\0" + b"\1" * 64, b"\0\3" + b"\1" * 63)
        check(factors, (0.0, 0.0, 8.0, 8.0), scale, 1)


COMMENT, JFIF = b"\xff\xfe\0\5abc", b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
YCC, RGB, ODD = (b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform]) for transform in (1, 0, 2))
FACTORS = b"\xff\xdb\0\x43"
UNUSED = FACTORS + b"\3" + bytes(64)


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        (b"", True),
        (JFIF, True),
        (JFIF + RGB, True),
        (YCC, True),
        (RGB, False),
        (ODD, False),
        (RGB + YCC, True),
        (YCC + RGB, False),
        (RGB[:-1].replace(b"\x0e", b"\x0d"), True),  # too short to be Adobe's
        (COMMENT + b"\xff\xe7\0\2", True),
        (b"\xff\xff\xff" + COMMENT, True),  # filling
        (COMMENT + b"\0", False),  # stray bytes
        (COMMENT + b"\xff\0", False),
        (b"\xff\x01", False),  # TEM
        (b"\xff\xdc\0\4\0\x18", False),  # DNL
        (b"\xff\xcc\0\4\0\x10", False),  # DAC
        (b"\xff\xfe\0\1", False),  # a length that does not count itself
        (b"\xff\xdd\0\4\0\0", True),
        (b"\xff\xdb\0\2\xff\xc4\0\2", True),
        (UNUSED, True),
        (b"\xff\xdb\0\x83\x13" + b"\0\1" * 64, False),  # factors of 16 bits
        (b"\xff\xc4\0\x14\3\1" + bytes(15) + b"\5", True),  # a Huffman table that is not used
        (b"\xff\xc4\0\x13\0" + bytes(16), True),  # one that is defined again below
    ],
)
def test_headers_that_are_ours(header: bytes, ours: bool) -> None:
    """All others are left to libjpeg: entries tell which decoder takes a file."""
    plain = jpeg(noise(24, 40))
    data = plain[:2] + header + plain[plain.index(FACTORS) :]
    assert (native.entries_of(data) is not None) == ours
    check(data, (3.0, 3.0, 30.0, 20.0), 1)


@pytest.mark.parametrize("table", [FACTORS + b"\0" + bytes(range(1, 65)), FACTORS + b"\1" + bytes(range(65, 1, -1))])
def test_the_last_definition_of_a_table_counts(table: bytes) -> None:
    plain = jpeg(noise(24, 40))
    scan = plain.index(b"\xff\xda")
    data = plain[:scan] + table + plain[scan:]
    assert native.entries_of(data) is not None
    check(data, (3.0, 3.0, 30.0, 20.0), 1)
    assert not np.array_equal(drawn(data), drawn(plain))


def test_real_files(data_dir: Path) -> None:
    """All scales of each file, and boxes of it."""
    for number, path in enumerate(sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:: examples(10, 1)]):
        data = path.read_bytes()
        decoded = cv2.imread(str(path), cv2.IMREAD_IGNORE_ORIENTATION | cv2.IMREAD_COLOR)
        if decoded is None or decoded.size > 1 << 22:
            continue
        for box in boxes(*decoded.shape[:2], 2, number):
            for scale in (1, 2, 4, 8):
                check(data, box, scale)
