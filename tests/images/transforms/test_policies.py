"""AutoAugment, RandAugment, TrivialAugment."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from penstock.errors import ConfigError
from penstock.images.transforms import (
    AutoAugment,
    RandAugment,
    TrivialAugment,
)
from penstock.images.transforms.canvas import ArraySource, Canvas
from penstock.images.transforms.colour import COLOURS
from penstock.images.transforms.policies import _COMMON
from penstock.images.transforms.targets import Targets
from penstock.random import sample_scope

IMAGE = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8), (5, 5), 0)


@pytest.mark.parametrize(
    "kind",
    [
        AutoAugment,
        partial(AutoAugment, "cifar10"),
        partial(AutoAugment, "svhn", fill=(1, 2, 3)),
        RandAugment,
        TrivialAugment,
    ],
)
def test_policies_repeat_and_vary(kind: Any) -> None:
    before = IMAGE.copy()
    found = []
    for key in range(60):
        with sample_scope(key):
            made = kind()(IMAGE)
        with sample_scope(key):
            assert np.array_equal(kind()(IMAGE), made)
        assert made.shape == IMAGE.shape
        assert made.dtype == np.uint8
        found.append(made.tobytes())
    assert len(set(found)) > 15, "several of AutoAugment's pairs do the same, or nothing, to an image"
    assert np.array_equal(IMAGE, before)


@pytest.mark.parametrize(
    ("policy", "probability", "strength", "names"),
    [
        (
            *("imagenet", 31.0, 159),
            "autocontrast 2, color 6, contrast 2, equalize 17, invert 3, posterize 5, rotate 6, sharpness 1, shearx 1, "
            "solarize 7",
        ),
        (
            *("cifar10", 26.5, 187),
            "autocontrast 7, brightness 4, color 5, contrast 2, equalize 9, invert 3, posterize 1, rotate 1, "
            "sharpness 5, sheary 2, solarize 4, translatex 2, translatey 5",
        ),
        (
            *("svhn", 32.9, 143),
            "autocontrast 3, contrast 1, equalize 6, invert 12, rotate 4, shearx 6, sheary 8, solarize 5, "
            "translatex 1, translatey 4",
        ),
    ],
)
def test_tables_are_the_papers(policy: str, probability: float, strength: int, names: str) -> None:
    """Sums over each table of the paper's appendix, with the strengths of operations that have one."""
    pairs = AutoAugment(policy)._pairs
    steps = [step.split() for pair in pairs for step in pair]
    assert len(pairs) == 25
    counts = Counter(name for name, _, _ in steps)
    assert ", ".join(f"{name} {counts[name]}" for name in sorted(counts)) == names
    assert sum(float(share) for _, share, _ in steps) == pytest.approx(probability)
    assert sum(int(number) for _, _, number in steps if number != "-") == strength


def test_a_policy_is_drawn_from_its_own_table() -> None:
    """SVHN's moves almost every second image; ImageNet's turns some, but shifts none up or down."""
    image = np.full((40, 40, 3), 90, np.uint8)
    shifted = {"imagenet": 0, "cifar10": 0, "svhn": 0}
    moved = dict(shifted)
    for policy in shifted:
        for key in range(400):
            with sample_scope(key):
                made = AutoAugment(policy, fill=1)(image)
            moved[policy] += bool((made == 1).all(axis=2).any())
            shifted[policy] += bool((made[0] == 1).all() or (made[-1] == 1).all())
    assert moved["svhn"] > 150
    assert max(moved["imagenet"], moved["cifar10"]) < 90
    assert min(shifted["cifar10"], shifted["svhn"]) > 20
    assert shifted["imagenet"] == 0


@pytest.mark.parametrize(
    ("name", "value", "matrix"),
    [
        ("shearx", 0.29, (1, 0.29, 0, 0, 1, 0)),
        ("shearx", -0.19, (1, -0.19, 0, 0, 1, 0)),
        ("sheary", 0.26, (1, 0, 0, 0.26, 1, 0)),
        ("translatex", 9, (1, 0, -9, 0, 1, 0)),
        ("translatey", -7, (1, 0, 0, 0, 1, 7)),
    ],
)
def test_moves_are_the_papers(name: str, value: float, matrix: Any) -> None:
    """The paper's code is Pillow's `transform`: shears start from the upper left corner."""
    canvas = Canvas(ArraySource(IMAGE))
    RandAugment()._operate(canvas, name, value)
    expected = np.asarray(Image.fromarray(IMAGE).transform((80, 60), Image.Transform.AFFINE, matrix))
    assert (canvas.pixels != expected).any(axis=2).mean() < 0.03, "ties between two pixels go either way"


def test_rotations_are_pillows() -> None:
    canvas = Canvas(ArraySource(IMAGE))
    RandAugment()._operate(canvas, "rotate", 20)
    expected = np.asarray(Image.fromarray(IMAGE).rotate(20))
    assert (canvas.pixels != expected).any(axis=2).mean() < 0.03


@pytest.mark.parametrize(("share", "width", "pixels"), [(8 / 9, 32, 12), (1.0, 32, 14), (1.0, 331, 150), (0.0, 32, 0)])
def test_translations_are_whole_pixels(share: float, width: int, pixels: int) -> None:
    """As in torchvision: a part of the side, 150 of 331 at most, without what is behind the point."""
    image = np.full((20, width, 3), 200, np.uint8)
    found = set()
    for key in range(20):
        canvas = Canvas(ArraySource(image))
        with sample_scope(key):
            AutoAugment()._operate_share(canvas, "translatex", share)
        found.add(int((canvas.pixels[0, :, 0] == 0).sum()))
    assert found == {pixels}


@pytest.mark.parametrize(
    ("name", "value", "theirs", "far"),
    [
        ("invert", 0, ImageOps.invert, 0),
        ("posterize", 3, lambda image: ImageOps.posterize(image, 3), 0),
        ("solarize", 100, lambda image: ImageOps.solarize(image, 100), 0),
        ("autocontrast", 0, ImageOps.autocontrast, 1),
        ("equalize", 0, ImageOps.equalize, 0),
        ("sharpness", 0.7, lambda image: ImageEnhance.Sharpness(image).enhance(1.7), 2),
        ("color", -0.5, lambda image: ImageEnhance.Color(image).enhance(0.5), 2),
    ],
)
def test_operations_are_pillows(name: str, value: float, theirs: Any, far: int) -> None:
    made = COLOURS[name](IMAGE.copy(), value)
    expected = np.asarray(theirs(Image.fromarray(IMAGE))).astype(int)
    assert np.abs(made.astype(int) - expected).max() <= far


@pytest.mark.parametrize("name", [name for name in _COMMON if "e" in name])
def test_no_strength_is_identity(name: str) -> None:
    canvas = Canvas(ArraySource(IMAGE))
    none = {"posterize": 8, "solarize": 256}.get(name, 0)
    RandAugment()._operate(canvas, name, none)
    if name not in ("equalize", "autocontrast"):
        assert np.array_equal(canvas.pixels, IMAGE)


@pytest.mark.parametrize(
    ("name", "value"), [("rotate", 20), ("shearx", 0.3), ("sheary", -0.2), ("translatex", 9), ("translatey", -7)]
)
def test_masks_and_boxes_follow(name: str, value: float) -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    image[20:35, 30:50] = 255
    targets = Targets({}, ((image[:, :, 0] > 0).astype(np.int64),), np.array([[30, 20, 50, 35]]))
    canvas = Canvas(ArraySource(image), targets)
    RandAugment()._operate(canvas, name, value)
    there = canvas.pixels[:, :, 0] > 0
    assert not np.array_equal(there, image[:, :, 0] > 0)
    assert (there == targets.masks[0]).mean() > 0.99
    rows, columns = np.nonzero(there)
    assert targets.boxes is not None
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert np.abs(targets.boxes[0] - edges).max() <= 1.5


def test_translations_go_right_and_down() -> None:
    canvas = Canvas(ArraySource(IMAGE))
    RandAugment(fill=(1, 2, 3))._operate(canvas, "translatex", 5)
    assert np.array_equal(canvas.pixels[:, 5:], IMAGE[:, :-5])
    assert (canvas.pixels[:, :5] == (1, 2, 3)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandAugment(magnitude=31),
        lambda: RandAugment(num_ops=-1),
        lambda: TrivialAugment(1),
        lambda: AutoAugment("cifar"),
        lambda: AutoAugment(interpolation="area"),
    ],
)
def test_bad_arguments(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
