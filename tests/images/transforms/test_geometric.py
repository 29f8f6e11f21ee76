"""Crops, resizes and flips: one resampling, the right pixels, masks and boxes along."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import ConfigError
from penstock.images.transforms import (
    CenterCrop,
    Compose,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
)
from penstock.images.transforms.view import View, render
from penstock.random import generator, sample_scope


def gradient(height: int, width: int) -> np.ndarray[Any, Any]:
    """Every pixel tells where it was: red by column, green by row."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, :, 0] = np.arange(width)
    image[:, :, 1] = np.arange(height)[:, None]
    return image


def psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    error = float(((a.astype(np.float64) - b) ** 2).mean())
    return 10 * float(np.log10(255**2 / max(error, 1e-9)))


@settings(max_examples=60)
@given(st.data())
def test_crops_and_flips_in_any_order_are_those_of_the_array(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(4, 40)), data.draw(st.integers(4, 40))
    image = gradient(height, width)
    expected, view = image, View.of((height, width))
    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(st.sampled_from(["crop", "flip", "down"]))
        if step == "crop":
            top, left = data.draw(st.integers(0, view.size[0] - 1)), data.draw(st.integers(0, view.size[1] - 1))
            high, wide = data.draw(st.integers(1, view.size[0] - top)), data.draw(st.integers(1, view.size[1] - left))
            view = view.crop(top, left, high, wide)
            expected = expected[top : top + high, left : left + wide]
        else:
            view = view.mirror(upside_down=step == "down")
            expected = expected[::-1] if step == "down" else expected[:, ::-1]
    assert np.array_equal(render(image, view.box, view), expected)
    left, top = view.points(np.array([[0.0, 0.0]]))[0]
    assert isinstance(float(left + top), float)


def test_the_callers_image_is_never_written_to() -> None:
    image = gradient(20, 30)
    before = image.copy()
    made = Compose([HorizontalFlip(1), VerticalFlip(1)])(image)
    made[:] = 0
    assert np.array_equal(image, before)


@pytest.mark.parametrize(
    ("box", "least"),
    [
        ((0, 0, 500, 375), 40.5),
        ((37, 21, 261, 245), 90.0),
        ((10, 20, 310, 290), 43.0),
        ((37.25, 21.5, 301.75, 290.25), 43.5),
        ((3.5, 0.75, 499.5, 370.125), 40.5),
    ],
)
def test_against_pillows_antialiased_boxes(data_dir: Path, box: tuple[float, ...], least: float) -> None:
    """Of photographs: about as near as averages over pixel areas, and a fractional box nearer than a rounded one."""
    files = sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:40]
    found, rounded, areas = [], [], []
    for file in files:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        if image.width < 500 or image.height < 375:
            continue
        pixels = np.asarray(image)
        expected = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box=box))
        view = View(box, (224, 224))  # type: ignore[arg-type]
        found.append(psnr(render(pixels, view.box, view), expected))
        near = View(tuple(float(round(v)) for v in box), (224, 224))  # type: ignore[arg-type]
        rounded.append(psnr(render(pixels, near.box, near), expected))
        left, top, right, bottom = map(int, near.box)
        areas.append(
            psnr(cv2.resize(pixels[top:bottom, left:right], (224, 224), interpolation=cv2.INTER_AREA), expected)
        )
    assert len(found) > 5
    assert np.mean(found) > least
    assert np.mean(found) > np.mean(areas) - 3
    if any(not float(v).is_integer() for v in box):
        assert np.mean(found) > np.mean(rounded)


@pytest.mark.parametrize("factor", [2.5, 3.0, 7.3])
def test_shrinking_by_more_than_two_looks_at_all_pixels(factor: float) -> None:
    """Fine stripes become grey; without antialiasing they become other stripes."""
    image = np.zeros((int(40 * factor), int(40 * factor), 3), np.uint8)
    image[::2] = 200
    made = Resize((40, 40))(image)
    assert np.abs(made.astype(int) - 100).max() <= 60
    assert made.std() < Resize((40, 40), antialias=False)(image).std() or factor == 3.0


class TestRandomResizedCrop:
    def test_boxes_are_inside_of_the_area_and_shape_asked_for(self) -> None:
        crop = RandomResizedCrop(8, scale=(0.2, 0.5), ratio=(0.5, 2))
        boxes = set()
        for key in range(300):
            with sample_scope(key):
                top, left, height, width = crop._box(200, 300, generator().random)
            assert top >= 0
            assert left >= 0
            assert top + height <= 200
            assert left + width <= 300
            assert 0.19 < height * width / 60000 < 0.51
            assert 0.48 < width / height < 2.1
            boxes.add((top, left, height, width))
        assert len(boxes) > 290

    def test_draws_spread_evenly(self) -> None:
        crop = RandomResizedCrop(8)
        areas, lefts = [], []
        for key in range(2000):
            with sample_scope(key):
                _, left, height, width = crop._box(300, 300, generator().random)
            areas.append(height * width / 90000)
            lefts.append(left / max(1, 300 - width))
        assert abs(np.mean(lefts) - 0.5) < 0.03
        assert 0.45 < np.mean(areas) < 0.54, "uniform over 0.08 to 1, less what does not fit"

    @pytest.mark.parametrize("size", [(3, 400), (400, 3), (1, 1)])
    def test_what_never_fits_is_the_middle(self, size: tuple[int, int]) -> None:
        with sample_scope(1):
            top, left, height, width = RandomResizedCrop(8, scale=(1, 1))._box(*size, generator().random)
        assert 1 <= height <= size[0]
        assert 1 <= width <= size[1]
        assert top == (size[0] - height) // 2
        assert left == (size[1] - width) // 2

    def test_after_a_resize_it_looks_at_the_resized_pixels(self) -> None:
        image = gradient(200, 200)
        chain = Compose([Resize((4, 4)), RandomResizedCrop(64, scale=(0.5, 1), interpolation="nearest")])
        with sample_scope(1):
            made = chain(image)
        assert len(np.unique(made.reshape(-1, 3), axis=0)) <= 16


class TestCrops:
    def test_center_crop_is_the_middle(self) -> None:
        image = gradient(21, 31)
        assert np.array_equal(CenterCrop(11)(image), image[5:16, 10:21])
        assert np.array_equal(CenterCrop((21, 5))(image), image[:, 13:18])

    def test_a_small_image_gets_a_border(self) -> None:
        image = gradient(10, 30) + 1
        made = CenterCrop(20)(image)
        assert made.shape == (20, 20, 3)
        assert not made[:5].any()
        assert not made[15:].any()
        assert np.array_equal(made[5:15], image[:, 5:25])

    @pytest.mark.parametrize("kind", [RandomCrop, CenterCrop])
    def test_p_is_honoured(self, kind: Any) -> None:
        image = gradient(30, 40)
        assert np.array_equal(kind(8, p=0)(image), image)
        shapes = [kind(8, p=0.5)(image).shape[0] for _ in range(100)]
        assert set(shapes) == {8, 30}
        assert 25 < shapes.count(8) < 75

    def test_random_crops_reach_every_corner(self) -> None:
        image = gradient(10, 12)
        corners = {tuple(RandomCrop(8)(image)[0, 0, :2].tolist()) for _ in range(400)}
        assert corners == {(x, y) for x in range(5) for y in range(3)}


class TestResize:
    @pytest.mark.parametrize(
        ("size", "more", "shape"),
        [(50, {}, (50, 75)), ((20, 90), {}, (20, 90)), ([40], {}, (40, 60)), (50, {"max_size": 60}, (40, 60))],
    )
    def test_one_int_is_the_shorter_side(self, size: Any, more: Any, shape: tuple[int, int]) -> None:
        assert Resize(size, **more)(gradient(100, 150)).shape == (*shape, 3)
        if not isinstance(size, tuple):
            assert Resize(size, **more)(gradient(150, 100)).shape == (*shape[::-1], 3)

    def test_then_center_crop_is_one_resampling(self, data_dir: Path) -> None:
        """Resize(256) and CenterCrop(224), as everybody evaluates: close to Pillow's two steps."""
        found = []
        for file in sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:12]:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
            scale = 256 / min(image.size)
            size = int(256 * image.width / min(image.size)), int(256 * image.height / min(image.size))
            whole = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
            top, left = round((size[1] - 224) / 2), round((size[0] - 224) / 2)
            made = Compose([Resize(256), CenterCrop(224)])(np.asarray(image))
            assert made.shape == (224, 224, 3)
            if scale < 1:
                found.append(psnr(made, whole[top : top + 224, left : left + 224]))
        assert np.mean(found) > 34

    def test_torchvisions_names_of_filters(self) -> None:
        class Mode:
            value = "nearest"

        assert Resize(5, interpolation=Mode()).interpolation == "nearest"


class TestFlips:
    def test_p(self) -> None:
        image = gradient(5, 6)
        assert np.array_equal(HorizontalFlip(0)(image), image)
        assert np.array_equal(VerticalFlip(0)(image), image)
        assert np.array_equal(HorizontalFlip(1)(image), image[:, ::-1])
        assert np.array_equal(VerticalFlip(1)(image), image[::-1])
        flipped = sum(not np.array_equal(HorizontalFlip()(image), image) for _ in range(200))
        assert 60 < flipped < 140

    def test_repeat_with_the_key(self) -> None:
        image = gradient(40, 50)
        chain = Compose([RandomResizedCrop(16), HorizontalFlip(), VerticalFlip()])
        for key in range(20):
            with sample_scope(key):
                one = chain(image)
                after = generator().random()
            with sample_scope(key):
                assert np.array_equal(chain(image), one)
                assert generator().random() == after


class TestMasksAndBoxes:
    def test_follow_the_pixels(self) -> None:
        """A red square, its mask and its box end up in the same place."""
        image = np.zeros((80, 100, 3), np.uint8)
        image[20:44, 30:60] = (255, 0, 0)
        mask = (image[:, :, 0] > 0).astype(np.int64)
        target = {"masks": mask, "boxes": np.array([[30, 20, 60, 44]]), "labels": ["square"], "name": "a"}
        chain = Compose([RandomResizedCrop(64, scale=(0.6, 1)), HorizontalFlip(), VerticalFlip()])
        for key in range(30):
            with sample_scope(key):
                made, found = chain(image, target)
            assert found["name"] == "a"
            assert found["masks"].dtype == np.int64
            assert found["masks"].shape == (64, 64)
            inside = found["masks"] > 0
            assert np.mean(inside == (made[:, :, 0] > 127)) > 0.98
            if not inside.any():
                continue
            rows, columns = np.nonzero(inside)
            edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert np.abs(found["boxes"][0] - edges).max() <= 1.5

    def test_boxes_that_are_cropped_away_take_their_labels_along(self) -> None:
        boxes = np.array([[0, 0, 5, 5], [40, 40, 60, 60], [90, 90, 100, 100]], np.float32)
        _, found = CenterCrop(40)(gradient(100, 100), {"boxes": boxes, "labels": np.array([7, 8, 9])})
        assert found["boxes"].tolist() == [[10, 10, 30, 30]]
        assert found["labels"].tolist() == [8]

    def test_padding_moves_them(self) -> None:
        mask = np.ones((10, 10), np.uint8)
        _, found = CenterCrop(20)(gradient(10, 10), {"masks": (mask,), "boxes": np.array([[0.0, 0, 10, 10]])})
        assert found["boxes"].tolist() == [[5, 5, 15, 15]]
        assert found["masks"][0].sum() == 100
        assert found["masks"][0][5:15, 5:15].all()

    @pytest.mark.parametrize(
        "target", [{"masks": np.zeros((3, 3))}, {"masks": [np.zeros(10)]}, {"boxes": np.zeros((2, 3))}]
    )
    def test_what_does_not_belong_to_the_image(self, target: Any) -> None:
        with pytest.raises(ConfigError):
            HorizontalFlip()(gradient(10, 10), target)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomResizedCrop(0),
        lambda: RandomResizedCrop((1, 2, 3)),  # type: ignore[arg-type]
        lambda: RandomResizedCrop(8, scale=(1, 0.5)),
        lambda: RandomResizedCrop(8, ratio=(0, 1)),
        lambda: Resize(8, interpolation="lanczos"),
        lambda: Resize((8, 8), max_size=10),
        lambda: Resize(8, max_size=8),
        lambda: CenterCrop(-1),
        lambda: HorizontalFlip(1.5),
        lambda: Compose([HorizontalFlip]),
        lambda: Compose([3]),  # type: ignore[list-item]
        lambda: HorizontalFlip()(np.zeros(5)),
    ],
)
def test_bad_arguments(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_an_image_of_pillow_will_do() -> None:
    buffer = io.BytesIO()
    Image.fromarray(gradient(20, 20)).save(buffer, "png")
    assert np.array_equal(HorizontalFlip(1)(Image.open(buffer)), cv2.flip(gradient(20, 20), 1))
