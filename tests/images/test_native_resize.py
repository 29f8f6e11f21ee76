"""The resize in C: Pillow's pixels within one level, the same with AVX2 and without, and nothing beside its memory.

`address_sanitizer.py` runs these too. The oracle makes Pillow's two passes one by one, columns first: Pillow 13 begins
with the rows of pictures that lose many more rows than columns.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import ConfigError
from penstock.images import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

Array = np.ndarray[Any, Any]
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
FENCE = 64


class Case(NamedTuple):
    """A source, a box in it and what becomes of that."""

    source: Array
    box: tuple[float, float, float, float]
    size: tuple[int, int]
    interpolation: Any
    flipped: tuple[bool, bool]


SIDE = st.sampled_from([4, 40, 300]).flatmap(lambda most: st.integers(1, most))


def pixels(kind: str, height: int, width: int, channels: int, seed: int) -> Array:
    """Noise of all levels, of the extremes alone, or stripes: what overshoots, and what adds up."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    if kind == "extremes":
        return np.where(image > 127, np.uint8(255), np.uint8(0))
    return np.repeat(image[:1], height, axis=0) if kind == "stripes" else image


@st.composite
def cases(draw: Any) -> Case:
    """Boxes to an eighth of a pixel (whole ones among them), and results of any size, the box's own among them."""
    height, width, high, wide = (draw(SIDE) for _ in range(4))
    ends = []
    for side in (width, height):
        step = draw(st.sampled_from([1, 8]))
        low = draw(st.integers(0, side * step - 1))
        ends.append((low / step, draw(st.integers(low + 1, side * step)) / step))
    (left, right), (top, bottom) = ends
    if draw(st.booleans()):
        wide = max(1, int(right - left))
    if draw(st.booleans()):
        high = max(1, int(bottom - top))
    kind = draw(st.sampled_from(["noise", "extremes", "stripes"]))
    source = pixels(kind, height, width, draw(st.sampled_from([1, 3])), draw(st.integers(0, 1000)))
    flipped = draw(st.booleans()), draw(st.booleans())
    return Case(source, (left, top, right, bottom), (high, wide), draw(st.sampled_from(list(FILTERS))), flipped)


def made(case: Case, **more: Any) -> Array:
    """The result, with a fence of bytes around it, which must be as they were."""
    channels = case.source.shape[2]
    size = case.size[0] * case.size[1] * channels
    memory = np.full(size + 2 * FENCE, 77, np.uint8)
    out = memory[FENCE : FENCE + size].reshape(*case.size, channels)
    how: dict[str, Any] = {"interpolation": case.interpolation, "flipped": case.flipped, **more}
    native.resize(case.source, case.box, out, **how)
    assert (memory[:FENCE] == 77).all()
    assert (memory[FENCE + size :] == 77).all()
    return out


def by_pillow(case: Case) -> Array:
    left, top, right, bottom = case.box
    (height, _, channels), (high, wide), how = case.source.shape, case.size, FILTERS[case.interpolation]
    image = Image.fromarray(case.source if channels == 3 else case.source[:, :, 0])
    across = image.resize((wide, height), how, box=(left, 0, right, height))
    image = across.resize((wide, high), how, box=(0, top, wide, bottom))
    return mirrored(np.asarray(image).reshape(high, wide, channels), case.flipped)


def mirrored(image: Array, flipped: tuple[bool, bool]) -> Array:
    image = image[:, ::-1] if flipped[0] else image
    return image[::-1] if flipped[1] else image


def distance(one: Array, other: Array) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@settings(max_examples=examples(300, 3000))
@given(cases())
def test_within_one_level_of_pillow_and_the_same_without_avx2(case: Case) -> None:
    result = made(case)
    assert distance(result, by_pillow(case)) <= 1
    assert np.array_equal(result, made(case, simd=False))


@settings(max_examples=examples(300, 3000))
@given(cases(), st.sampled_from([1, 3]), st.sampled_from([np.uint8, np.uint16, np.float32, np.float64]), st.booleans())
def test_a_box_of_whole_pixels_into_a_result_of_its_size_is_a_copy(
    case: Case, channels: int, kind: Any, planar: bool
) -> None:
    left, top = int(case.box[0]), int(case.box[1])
    right, bottom = max(left + 1, int(case.box[2])), max(top + 1, int(case.box[3]))
    source = pixels("noise", *case.source.shape[:2], channels, 5)
    expected = mirrored(source[top:bottom, left:right], case.flipped)
    size = expected.shape[:2]
    box = (float(left), float(top), float(right), float(bottom))
    if kind == np.uint8 and not planar:
        assert np.array_equal(made(Case(source, box, size, case.interpolation, case.flipped)), expected)
    table = np.random.default_rng(0).normal(0, 1000, (channels, 256)).astype(kind)
    expected = np.stack([table[channel][expected[..., channel]] for channel in range(channels)])
    out = np.empty((channels, *size) if planar else (*size, channels), kind)
    native.resize(source, box, out, flipped=case.flipped, table=table, planar=planar)
    assert np.array_equal(out, expected if planar else expected.transpose(1, 2, 0))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(250, 300), (375, 500), (90, 110), (224, 300), (226, 250), (1500, 1800)])
def test_within_one_level_of_one_call_of_pillow(interpolation: Any, size: tuple[int, int]) -> None:
    source = pixels("noise", *size, 3, 0)
    case = Case(source, (1.5, 0, size[1], size[0] - 2.25), (224, 224), interpolation, (False, False))
    expected = Image.fromarray(source).resize((224, 224), FILTERS[interpolation], box=case.box)
    assert distance(made(case), np.asarray(expected)) <= 1


@settings(max_examples=examples(60, 600))
@given(cases(), st.sampled_from([np.uint8, np.int16, np.float32, np.float64]), st.booleans(), st.booleans())
def test_a_table_is_looked_up_in_either_layout(case: Case, dtype: Any, planar: bool, simd: bool) -> None:
    channels = case.source.shape[2]
    table = np.random.default_rng(1).integers(0, 256, (channels, 256)).astype(dtype)
    plain = made(case)
    expected = np.stack([table[c][plain[:, :, c]] for c in range(channels)], axis=0 if planar else 2)
    how: dict[str, Any] = {"interpolation": case.interpolation, "flipped": case.flipped, "planar": planar, "simd": simd}
    out = np.empty(expected.shape, dtype)
    native.resize(case.source, case.box, out, table=table, **how)
    assert np.array_equal(out, expected)
    bare = np.empty(expected.shape, np.uint8)
    native.resize(case.source, case.box, bare, **how)
    assert np.array_equal(bare, plain.transpose(2, 0, 1) if planar else plain)


@settings(max_examples=examples(60, 600))
@given(cases(), st.booleans())
def test_rows_need_not_be_adjacent(case: Case, simd: bool) -> None:
    source, (height, width, channels) = case.source, case.source.shape
    apart = np.full((2 * height, width + 3, channels), 99, np.uint8)
    apart[::-2, 1 : width + 1] = source
    for view in (apart[::-2, 1 : width + 1], np.asfortranarray(source)):
        assert np.array_equal(made(case._replace(source=view), simd=simd), made(case))


@settings(max_examples=examples(60, 600))
@given(cases())
def test_without_antialiasing_shrinking_looks_at_the_nearest_pixels_alone(case: Case) -> None:
    left, top, right, bottom = case.box
    high, wide = case.size
    if right - left <= wide and bottom - top <= high:
        assert np.array_equal(made(case, antialias=False), made(case))
        return
    result = made(case, antialias=False)
    assert np.array_equal(result, made(case, antialias=False, simd=False))
    if case.interpolation == "bilinear":
        rows = top + (np.arange(high) + 0.5) * ((bottom - top) / high) - 0.5
        columns = left + (np.arange(wide) + 0.5) * ((right - left) / wide) - 0.5
        across = _between(case.source.astype(np.float64), columns, 1)
        expected = _between(np.floor(across + 0.5), rows, 0)
        assert np.abs(result - mirrored(expected, case.flipped)).max() <= 1.6


def _between(image: Array, at: Array, axis: int) -> Array:
    """Of each position the weighted mean of the two pixels around it; beyond the edge is what is at the edge."""
    low = np.floor(at).astype(int)
    part = (at - low).reshape(-1, *([1] * (image.ndim - 1 - axis)))
    first, second = (np.take(image, (low + k).clip(0, image.shape[axis] - 1), axis) for k in (0, 1))
    return np.asarray(first * (1 - part) + second * part)


@pytest.mark.parametrize("channels", [1, 3])
def test_cubic_weights_of_zero_do_not_end_rows_too_early(channels: int) -> None:
    """The middle one of three rows is right on a pixel, where the weights of its neighbours are 0."""
    for height in range(6, 12):
        for seed in range(20):
            source = pixels("noise", height, 1, channels, seed)
            case = Case(source, (0, 4.875, 1, 5.625), (3, 1), "bicubic", (False, False))
            assert distance(made(case), by_pillow(case)) <= 1


def test_a_box_of_its_own_size_is_copied() -> None:
    source = pixels("noise", 40, 50, 3, 2)
    for interpolation in FILTERS:
        case = Case(source, (7, 5, 37, 29), (24, 30), interpolation, (True, True))
        assert np.array_equal(made(case), source[5:29, 7:37][::-1, ::-1])


def test_threads_do_not_meet() -> None:
    found = [
        Case(pixels("noise", 90 + n, 70 + n, 3, n), (0, 0, 70 + n, 90 + n), (64, 64), "bilinear", (n % 2 == 0, False))
        for n in range(16)
    ]
    expected = [made(case) for case in found]
    with ThreadPoolExecutor(4) as pool:
        for result, wanted in zip(pool.map(made, found * 8), expected * 8, strict=True):
            assert np.array_equal(result, wanted)


SOURCE = np.zeros((10, 20, 3), np.uint8)
WHOLE = (0, 0, 20, 10)


@pytest.mark.parametrize(
    ("source", "box", "out", "more"),
    [
        (SOURCE, (0, 0, 20.001, 10), np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE, (-0.001, 0, 20, 10), np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE, (5, 0, 5, 10), np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE, (5, float("nan"), 6, 10), np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE, (5, 0, float("inf"), 10), np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE, WHOLE, np.empty((5, 5, 1), np.uint8), {}),
        (SOURCE, WHOLE, np.empty((0, 5, 3), np.uint8), {}),
        (SOURCE, WHOLE, np.empty((5, 5), np.uint8), {}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.uint8), {"planar": True}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.float32), {}),
        (SOURCE, WHOLE, np.empty((5, 10, 3), np.uint8)[:, ::2], {}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.float32), {"table": np.zeros((3, 256), np.float64)}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.float32), {"table": np.zeros((3, 255), np.float32)}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.float32), {"table": np.zeros((1, 256), np.float32)}),
        (SOURCE, WHOLE, np.empty((5, 5, 3), np.uint8), {"interpolation": "nearest"}),
        (SOURCE[:, :, :2], WHOLE, np.empty((5, 5, 2), np.uint8), {}),
        (SOURCE[:0], WHOLE, np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE.astype(np.float32), WHOLE, np.empty((5, 5, 3), np.uint8), {}),
        (SOURCE[0], WHOLE, np.empty((5, 5, 3), np.uint8), {}),
        (np.zeros((10, 20, 4), np.uint8), WHOLE, np.empty((5, 5, 3), np.uint8), {}),
    ],
)
def test_what_does_not_go_together_is_refused(source: Array, box: Any, out: Array, more: Any) -> None:
    with pytest.raises(ConfigError):
        native.resize(source, box, out, **more)


def test_what_is_read_only_is_not_written_to() -> None:
    out = np.zeros((5, 5, 3), np.uint8)
    out.flags.writeable = False
    with pytest.raises(ConfigError):
        native.resize(SOURCE, WHOLE, out)


def test_a_source_that_is_read_only_will_do() -> None:
    source = pixels("noise", 10, 20, 3, 0)
    source.flags.writeable = False
    out = np.empty((10, 20, 3), np.uint8)
    native.resize(source, WHOLE, out)
    assert np.array_equal(out, source)
