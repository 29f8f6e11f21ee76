"""`draw_box`: decoding and resizing in one call makes what the two make one after the other, bit for bit."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jpeg_support import LIMIT, SUBSAMPLINGS, boxes, by_opencv, drawn, jpeg, noise

from penstock.images import native
from penstock.images.region import decode_region

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

FENCE = 64


def apart(
    data: bytes, box: Any, size: tuple[int, int], channels: int = 3, entries: bytes | None = None, **how: Any
) -> np.ndarray:
    mode = "gray" if channels == 1 else "rgb"
    array, inner = decode_region(data, box, target=size, mode=mode, max_pixels=LIMIT, entries=entries)
    out = np.empty((*size, channels), np.uint8)
    native.resize(array, inner, out, **how)
    return out


def fenced(size: tuple[int, int], channels: int) -> tuple[np.ndarray, np.ndarray]:
    memory = np.full(size[0] * size[1] * channels + 2 * FENCE, 77, np.uint8)
    return memory, memory[FENCE:-FENCE].reshape(*size, channels)


def check(data: bytes, box: Any, size: tuple[int, int], channels: int = 3, **how: Any) -> None:
    memory, out = fenced(size, channels)
    assert native.draw_box(data, box, out, max_pixels=LIMIT, **how) >= 0
    assert np.array_equal(out, apart(data, box, size, channels, **how)), (box, size, how)
    assert (memory[:FENCE] == 77).all()
    assert (memory[-FENCE:] == 77).all()


@given(
    st.integers(0, 1 << 32),
    st.sampled_from(SUBSAMPLINGS),
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.fixed_dictionaries(
        {
            "interpolation": st.sampled_from(["bilinear", "bicubic"]),
            "antialias": st.booleans(),
            "flipped": st.tuples(st.booleans(), st.booleans()),
        }
    ),
    st.booleans(),
)
def test_any_box_of_any_file(
    seed: int, subsampling: str, shape: tuple[int, int], size: tuple[int, int], how: dict[str, Any], entered: bool
) -> None:
    data = jpeg(noise(*shape, seed), subsampling)
    entries = native.entries_of(data, step=2) if entered else None
    for box in boxes(*shape, 3, seed):
        check(data, box, size, entries=entries, **how)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        (cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        (cv2.IMWRITE_JPEG_RST_INTERVAL, 8),
        (cv2.IMWRITE_JPEG_RST_INTERVAL, 5),
        (cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    ],
    ids=["progressive", "restart markers", "odd restart markers", "optimised"],
)
def test_files_of_every_kind(options: tuple[int, ...], channels: int) -> None:
    data = by_opencv(noise(140, 128), *options)
    for box in boxes(140, 128, 20):
        check(data, box, (24, 30), channels)


def test_gray_files() -> None:
    data = jpeg(noise(90, 70)[..., :1], "Gray")
    for box in boxes(90, 70, 10):
        check(data, box, (20, 31), 1)
        check(data, box, (20, 31), 3)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.int16, np.float64])
def test_a_table_is_looked_up(kind: Any, planar: bool) -> None:
    data, size = jpeg(noise(80, 90)), (32, 24)
    table = np.random.default_rng(0).normal(0, 1000, (3, 256)).astype(kind)
    out = np.empty((3, *size) if planar else (*size, 3), kind)
    box = (3.5, 7, 80, 71.25)
    native.draw_box(data, box, out, max_pixels=LIMIT, table=table, planar=planar)
    pixels = apart(data, box, size)
    expected = np.stack([table[channel][pixels[..., channel]] for channel in range(3)])
    assert np.array_equal(out, expected if planar else expected.transpose(1, 2, 0))


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.int16])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (32, 24)])
def test_rows_of_the_result_need_not_be_adjacent(kind: Any, planar: bool, channels: int, size: tuple[int, int]) -> None:
    data, box = jpeg(noise(80, 90)), (3.5, 7.0, 80.0, 71.25)
    table = np.arange(256 * channels).reshape(channels, 256).astype(kind)
    how: dict[str, Any] = {"table": None if kind is np.uint8 else table, "planar": planar, "flipped": (True, False)}
    height, width = size
    whole = np.full((channels, height + 5, width + 7) if planar else (height + 5, width + 7, channels), 77, kind)
    rows, columns = slice(2, 2 + height), slice(3, 3 + width)
    inside = (slice(None), rows, columns) if planar else (rows, columns)
    expected = np.empty(whole[inside].shape, kind)
    pixels = drawn(data, channels=channels)
    for draw in (
        lambda out: native.draw_box(data, box, out, max_pixels=LIMIT, **how),
        lambda out: native.resize(pixels, box, out, **how),
    ):
        draw(expected)
        draw(whole[inside])
        assert np.array_equal(whole[inside], expected)
        whole[inside] = 77
        assert (whole == 77).all()


class TestRefused:
    data = jpeg(noise(40, 60))

    @pytest.mark.parametrize(
        ("box", "out"),
        [
            ((0, 0, 61, 40), np.empty((8, 8, 3), np.uint8)),
            ((0, 0, 60, 40.5), np.empty((8, 8, 3), np.uint8)),
            ((-1, 0, 60, 40), np.empty((8, 8, 3), np.uint8)),
            ((9, 0, 9, 40), np.empty((8, 8, 3), np.uint8)),
            ((0, 0, float("nan"), 40), np.empty((8, 8, 3), np.uint8)),
            ((0, 0, 60, 40), np.empty((8, 8, 2), np.uint8)),
            ((0, 0, 60, 40), np.empty((8, 8), np.uint8)),
            ((0, 0, 60, 40), np.empty((0, 8, 3), np.uint8)),
            ((0, 0, 60, 40), np.empty((8, 8, 3), np.float32)),
            ((0, 0, 60, 40), np.empty((8, 8, 3), np.uint8)[::-1]),
            ((0, 0, 60, 40), np.empty((8, 8, 3), np.uint8)[:, ::-1]),
            ((0, 0, 60, 40), np.empty((8, 16, 3), np.uint8)[:, ::2]),
            ((0, 0, 60, 40), np.empty((8, 8, 6), np.uint8)[..., ::2]),
            ((0, 0, 60, 40), np.empty((3, 8, 8), np.uint8).transpose(1, 2, 0)),
            ((0, 0, 60, 40), np.lib.stride_tricks.as_strided(np.empty(999, np.uint8), (8, 8, 3), (23, 3, 1))),
        ],
    )
    def test_what_does_not_go_together(self, box: Any, out: np.ndarray) -> None:
        with pytest.raises(IndexError):
            native.draw_box(self.data, box, out, max_pixels=LIMIT)

    @pytest.mark.parametrize("scale", [-1, 3, 5, 16, 1 << 30])
    def test_scales(self, scale: int) -> None:
        how = False, False, (False, False), None, False, True, LIMIT, (0, 0), None
        out = np.zeros((5, 8, 3), np.uint8)
        native._jpeg.draw(self.data, out, (0, 0, 60, 40), *how, 8)
        assert np.array_equal(out, drawn(self.data, (0, 0, 60, 40), scale=8))
        with pytest.raises(IndexError):
            native._jpeg.draw(self.data, out, (0, 0, 60, 40), *how, scale)

    def test_damage_limits_and_another_size(self) -> None:
        out = np.empty((8, 8, 3), np.uint8)
        with pytest.raises(ValueError, match="premature"):
            native.draw_box(self.data[:-40], (0, 0, 60, 40), out, max_pixels=LIMIT)
        with pytest.raises(OverflowError):
            native.draw_box(self.data, (0, 0, 60, 40), out, max_pixels=99)
        with pytest.raises(ValueError, match="ambiguous"):
            native.draw_box(self.data, (0, 0, 60, 40), out, max_pixels=LIMIT, size=(59, 40))
