"""`draw_batch`, `sizes_of` and `uniform`: one call for many images is one call for each of them, bit for bit."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jpeg_support import LIMIT, SUBSAMPLINGS, by_opencv, jpeg, noise, with_frame

from penstock.images import native
from penstock.images.region import outward
from penstock.random import generator_from_key

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

FENCE = 64
PLANS = np.array([((0, 0, 24, 16), (2, 1, 12, 8), (24, 16), (0, 0))] * 6, native.PLAN)
KINDS = (np.uint8, np.int16, np.float32, np.float64)


def places(rng: np.random.Generator, count: int, width: int, height: int) -> np.ndarray:
    """Rectangles (left, top, right, bottom) in a result, none of them empty."""
    ends = [np.sort(rng.choice(side + 1, 2, replace=False)) for _ in range(count) for side in (width, height)]
    return np.array(ends, np.int32).reshape(count, 2, 2).transpose(0, 2, 1).reshape(count, 4)


def boxes_in(rng: np.random.Generator, sizes: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """A box in each image: a fractional one, or one of whole pixels and of the size of its place, if that fits."""
    found = np.empty((len(sizes), 4))
    for box, (width, height), (left, top, right, bottom) in zip(found, sizes, inside, strict=True):
        if rng.random() < 0.5 and right - left <= width and bottom - top <= height:
            x, y = rng.integers(0, width - (right - left) + 1), rng.integers(0, height - (bottom - top) + 1)
            box[:] = x, y, x + right - left, y + bottom - top
        else:
            xs, ys = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
            box[:] = xs[0], ys[0], xs[1], ys[1]
    return found


@given(
    st.integers(0, 1 << 32),
    st.sampled_from(KINDS),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.fixed_dictionaries({"interpolation": st.sampled_from(["bilinear", "bicubic"]), "antialias": st.booleans()}),
    st.sampled_from(["files", "pixels"]),
)
def test_a_batch_is_its_images(
    seed: int, kind: Any, channels: int, planar: bool, size: tuple[int, int], how: dict[str, Any], of: str
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    sizes = rng.integers(1, 60, (count, 2)).astype(np.int32)
    sources: Any
    if of == "files":
        sources = [
            jpeg(noise(height, width, seed + i), SUBSAMPLINGS[(seed + i) % 5])
            for i, (width, height) in enumerate(sizes)
        ]
    else:
        sizes[:] = sizes[0]
        whole = rng.integers(0, 256, (2 * count, sizes[0, 1], sizes[0, 0] + 3, channels), np.uint8)
        sources = whole[::-2, ::-1, :-3]  # images and rows need not be adjacent
    inside = places(rng, count, *size[::-1])
    boxes, flips = boxes_in(rng, sizes, inside), rng.integers(0, 2, (count, 2), np.uint8)
    table = None if kind == np.uint8 else rng.normal(0, 9999, (channels, 256)).astype(kind)
    fill = rng.normal(100, 20, channels).astype(kind)

    shape = (channels, *size) if planar else (*size, channels)
    memory = np.full(count * int(np.prod(shape)) + 2 * FENCE, 77, kind)
    out = memory[FENCE:-FENCE].reshape(count, *shape)
    plans = np.zeros(count, native.PLAN)
    plans["box"], plans["inside"], plans["size"], plans["flips"] = boxes, inside, sizes, flips
    states, _ = native.draw_batch(sources, plans, out, fill=fill, table=table, planar=planar, max_pixels=LIMIT, **how)
    assert states == bytes(count)
    assert (memory[:FENCE] == 77).all()
    assert (memory[-FENCE:] == 77).all()
    for i, (left, top, right, bottom) in enumerate(inside):
        expected = np.empty(shape, kind)
        expected[:] = fill[:, None, None] if planar else fill
        part = expected[:, top:bottom, left:right] if planar else expected[top:bottom, left:right]
        one: dict[str, Any] = {"flipped": tuple(map(bool, flips[i])), "table": table, "planar": planar, **how}
        if of == "files":
            native.draw_box(sources[i], tuple(boxes[i]), part, max_pixels=LIMIT, **one)
        else:
            pixels, box = outward(sources[i], tuple(boxes[i]))
            native.resize(pixels, box, part, **one)
        assert np.array_equal(out[i], expected)


def batch(count: int = 3) -> dict[str, Any]:
    """Arguments that are right, of files of 24 x 16 pixels."""
    return {
        "sources": [jpeg(noise(16, 24, i)) for i in range(count)],
        "plans": PLANS[:1].repeat(count),
        "out": np.full((count, 8, 12, 3), 77, np.float32),
        "fill": np.zeros(3, np.float32),
        "table": np.zeros((3, 256), np.float32),
    }


def draw(arguments: dict[str, Any], max_pixels: int = LIMIT) -> bytes:
    how = dict(arguments)
    states, spent = native.draw_batch(
        how.pop("sources"), how.pop("plans"), how.pop("out"), max_pixels=max_pixels, **how
    )
    assert spent >= 0
    return states


def test_what_can_be_left_out() -> None:
    arguments = batch()
    assert draw(arguments) == bytes(3)
    filled = arguments["out"].copy()
    arguments["plans"]["size"] = 0
    assert draw(arguments) == bytes(3)
    assert np.array_equal(arguments["out"], filled)
    arguments["fill"], arguments["out"][:] = None, 77
    assert draw(arguments) == bytes(3)
    assert np.array_equal(arguments["out"][:, 1:, 2:], filled[:, 1:, 2:])
    assert (arguments["out"][:, 0] == 77).all()
    assert (arguments["out"][:, :, :2] == 77).all()


def test_an_empty_batch() -> None:
    assert draw(batch(0)) == b""


class TestRefused:
    """Nothing is written."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sources", [b""] * 2),
            ("sources", np.zeros((2, 16, 24, 3), np.uint8)),
            ("sources", np.zeros((3, 16, 24, 1), np.uint8)),
            ("sources", np.zeros((3, 16, 24, 4), np.uint8)[..., :3]),
            ("sources", np.zeros((3, 16, 24, 3), np.uint16)),
            ("sources", np.zeros((3, 16, 23, 3), np.uint8)),  # smaller than its box
            ("sources", b"123"),
            ("plans", PLANS[:2]),
            ("plans", PLANS[:3, None]),
            ("plans", PLANS[::2]),
            ("plans", PLANS[:3].astype(native.PLAN.newbyteorder())),
            ("plans", PLANS[:3].view(np.uint64)),
            ("plans", PLANS[:3].tolist()),
            ("plans", None),
            ("out", np.zeros((3, 8, 12, 2), np.float32)),
            ("out", np.zeros((3, 8, 12), np.float32)),
            ("out", np.zeros((3, 8, 12, 3), np.float64)),
            ("out", np.zeros((3, 8, 24, 3), np.float32)[:, :, ::2]),
            ("out", np.zeros((3, 8, 12, 3), np.float32)[:, ::-1]),
            ("out", np.broadcast_to(np.zeros((8, 12, 3), np.float32), (3, 8, 12, 3))),
            ("fill", np.zeros(3, np.uint8)),
            ("fill", np.zeros(1, np.float32)),
            ("table", None),
            ("table", np.zeros((1, 256), np.float32)),
            ("table", np.zeros((3, 255), np.float32)),
        ],
    )
    def test_arrays(self, name: str, value: Any) -> None:
        arguments = batch()
        kept, arguments[name] = arguments["out"], value
        before = np.array(arguments["out"])
        with pytest.raises((ValueError, BufferError)):
            draw(arguments)
        assert (kept == 77).all()
        assert np.array_equal(arguments["out"], before)

    @pytest.mark.parametrize("of", ["files", "pixels"])
    @pytest.mark.parametrize(
        ("name", "column", "value"),
        [
            *(("box", column, value) for column in range(4) for value in (np.nan, np.inf, -np.inf, -0.5, 70000)),
            ("box", 2, 0),
            ("box", 3, 0),
            ("inside", 0, -1),
            ("inside", 1, -1),
            ("inside", 2, 13),
            ("inside", 3, 9),
            ("inside", 0, 13),
            ("inside", 1, 9),
            ("inside", 2, -(1 << 31)),
            ("inside", 3, (1 << 31) - 1),
            ("size", 0, -1),
            ("size", 1, -1),
        ],
    )
    def test_numbers(self, name: str, column: int, value: float, of: str) -> None:
        arguments = batch()
        if of == "pixels":
            arguments["sources"] = np.zeros((3, 16, 24, 3), np.uint8)
        arguments["plans"][name][2, column] = value
        with pytest.raises(ValueError, match="out of range"):
            draw(arguments)
        assert (arguments["out"] == 77).all()

    @pytest.mark.parametrize("of", ["files", "pixels"])
    @pytest.mark.parametrize("kind", [np.complex128, "V3"])
    def test_items_of_other_sizes(self, kind: Any, of: str) -> None:
        arguments = batch()
        if of == "pixels":
            arguments["sources"] = np.zeros((3, 16, 24, 3), np.uint8)
        for name in ("out", "fill", "table"):
            arguments[name] = np.zeros(arguments[name].shape, kind)
        with pytest.raises(ValueError, match="shapes and types"):
            draw(arguments)

    def test_sources_of_other_types(self) -> None:
        for sources in (["text"] * 3, [None] * 3, 5):
            arguments = batch()
            arguments["sources"] = sources
            with pytest.raises(TypeError):
                draw(arguments)
            assert (arguments["out"] == 77).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: b"\xff\xd8",
        lambda data: b"\x89PNG" + data,
        lambda data: with_frame(data, 0xC3),
        lambda data: data[:-60] + bytes(60),
        lambda data: jpeg(noise(16, 25)),  # of another size than it should be
        lambda data: jpeg(noise(400, 400)),
    ],
)
def test_one_file_that_cannot_be_drawn(damage: Any) -> None:
    arguments = batch()
    draw(arguments)
    expected = arguments["out"].copy()
    arguments["sources"][1] = damage(arguments["sources"][1])
    arguments["out"][:] = 77
    assert draw(arguments, max_pixels=16 * 25) == b"\0\1\0"
    assert np.array_equal(arguments["out"][::2], expected[::2])


def test_buffers_that_another_thread_changes() -> None:
    """Whatever comes of it, no memory beside them is read or written (address_sanitizer.py)."""
    arguments, files = batch(8), [bytearray(jpeg(noise(16, 24, i))) for i in range(8)]
    originals = [bytes(file) for file in files]
    arguments["sources"], stop = files, threading.Event()

    def change() -> None:
        rng = random.Random(0)
        while not stop.is_set():
            file, original = rng.choice(list(zip(files, originals, strict=True)))
            at = rng.randrange(len(file))
            file[at] = rng.choice((original[at], rng.randrange(256)))
            row = rng.randrange(8)
            arguments["plans"]["box"][row, 2] = rng.choice((9.5, 20, 24, np.nan))
            arguments["plans"]["inside"][row, 3] = rng.choice((2, 5, 8, 99))
            arguments["plans"]["box"][row, 2], arguments["plans"]["inside"][row, 3] = 24, 8

    thread = threading.Thread(target=change)
    thread.start()
    drawn = 0
    try:
        for _ in range(20_000):  # many of them, if the other thread pauses between its two changes
            with suppress(ValueError):  # out of range
                draw(arguments)
                drawn += 1
            if drawn == 2000:
                break
    finally:
        stop.set()
        thread.join()
    assert drawn


EDGES = (0.0, -0.0, 1e-320, 0.5, 15.999999, 16, 23.5, 24, 24.000001, 65535.9, 65536, 2.0**31, 2.0**63, 1e308, -1.0)
PLACES = (0, 1, 5, 8, 9, 12, 13, -1, (1 << 31) - 1, -(1 << 31))


@pytest.mark.parametrize("of", ["files", "pixels"])
def test_any_numbers(of: str) -> None:
    """None of them is cast to what it does not fit in, and nothing is written beside the result."""
    rng, arguments = random.Random(5), batch(1)
    memory = np.full(8 * 12 * 3 + 2 * FENCE, 77, np.float32)
    arguments["out"] = memory[FENCE:-FENCE].reshape(1, 8, 12, 3)
    if of == "pixels":
        arguments["sources"] = np.zeros((1, 16, 24, 3), np.uint8)
    drawn = 0
    for _ in range(20_000):
        for name, usual, unusual in (
            ("box", (0, 0, 24, 16), EDGES),
            ("inside", (0, 0, 12, 8), PLACES),
            ("size", (24, 16), PLACES),
        ):
            arguments["plans"][name][0] = [rng.choice(unusual) if rng.random() < 0.3 else number for number in usual]
        try:
            drawn += draw(arguments) == b"\0"
        except ValueError:
            continue
    assert drawn > 1000, drawn
    assert (memory[:FENCE] == 77).all()
    assert (memory[-FENCE:] == 77).all()


def test_threads() -> None:
    arguments = [batch() for _ in range(4)]
    for i, one in enumerate(arguments):
        one["sources"] = [jpeg(noise(16, 24, 9 * i + k), SUBSAMPLINGS[i % 3]) for k in range(3)]
        draw(one)
    expected = [one["out"].copy() for one in arguments]

    def repeat(i: int) -> None:
        for _ in range(200):
            arguments[i]["out"][:] = 77
            assert draw(arguments[i]) == bytes(3)
            assert np.array_equal(arguments[i]["out"], expected[i])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(repeat, range(4)))


def test_a_box_that_is_not_inside_its_file() -> None:
    arguments = batch()
    arguments["plans"]["box"][1, 2] = 25
    assert draw(arguments) == b"\0\1\0"


def test_an_empty_place() -> None:
    arguments = batch()
    arguments["plans"]["inside"][1] = 4, 3, 9, 3
    assert draw(arguments) == b"\0\1\0"


@pytest.mark.parametrize("option", [cv2.IMWRITE_JPEG_PROGRESSIVE, cv2.IMWRITE_JPEG_OPTIMIZE])
def test_other_kinds_of_files(option: int) -> None:
    arguments = batch()
    arguments["sources"] = [by_opencv(noise(16, 24, i), option, 1) for i in range(3)]
    assert draw(arguments) == bytes(3)


class TestSizes:
    def test_files_of_every_kind(self) -> None:
        files = [jpeg(noise(7 + i, 50 - i), kind) for i, kind in enumerate(SUBSAMPLINGS)]
        files.append(jpeg(noise(31, 5)[..., :1], "Gray"))
        taken = [0, 1, 2, 5]  # other sampling factors are libjpeg's
        found = native.sizes_of([memoryview(file) for file in files])
        assert found.dtype == np.int32
        assert found[taken].tolist() == [[50, 7], [49, 8], [48, 9], [5, 31]]

    def test_files_that_are_none_of_ours(self) -> None:
        good = jpeg(noise(8, 9))
        files = [b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\x89PNG\r\n", good[:30], with_frame(good, 0xC3), good]
        files.append(by_opencv(noise(8, 9), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
        assert native.sizes_of(files).tolist() == [[0, 0]] * 6 + [[9, 8], [0, 0]]

    def test_no_files(self) -> None:
        assert native.sizes_of([]).shape == (0, 2)


class TestUniform:
    @given(st.lists(st.integers(0, (1 << 64) - 1), max_size=9), st.integers(0, 9))
    def test_numbers_are_those_of_numpy(self, keys: list[int], count: int) -> None:
        found = native.uniform(np.array(keys, np.uint64), count)
        assert found.shape == (len(keys), count)
        for row, key in zip(found, keys, strict=True):
            assert np.array_equal(row, generator_from_key(key).random(count))

    def test_many(self) -> None:
        """Every way in which a product of 128 bits carries."""
        keys = np.random.default_rng(0).integers(0, 1 << 64, 2000, np.uint64)
        expected = [generator_from_key(int(key)).random(20) for key in keys]
        assert np.array_equal(native.uniform(keys, 20), expected)

    @pytest.mark.parametrize(
        "keys", [np.zeros(3, np.int32), np.zeros(3, np.int64), np.zeros((3, 1), np.uint64), np.zeros(3, ">u8")]
    )
    def test_refused(self, keys: Any) -> None:
        with pytest.raises(ValueError, match="keys must be uint64"):
            native.uniform(keys, 2)

    @pytest.mark.parametrize("count", [-1, -(2**61), 2**59, 2**60, 2**61, 2**62, 2**63 - 1])
    def test_counts_out_of_range(self, count: int) -> None:
        with pytest.raises((ValueError, MemoryError)):
            native.uniform(np.zeros(2, np.uint64), count)
