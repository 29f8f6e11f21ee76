"""What earlier systems got wrong, through the whole of `ImageDataset`: colours in the order red, green, blue whoever
decodes and whatever stands in the chain, transforms that keep nothing of an image, probabilities that are honoured.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock import DataLoader, ImageDataset, Manifest
from penstock.images import decode as decoding
from penstock.images import native
from penstock.images.backends import BACKENDS, installed
from penstock.images.transforms import (
    AutoAugment,
    CenterCrop,
    CoarseDropout,
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Rotate,
    SquarePad,
    ToTensor,
    TrivialAugment,
    VerticalFlip,
)
from penstock.random import sample_scope

COLOUR = (220, 110, 30)
"""Of every pixel: each channel tells which it is."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An orange image in each format, and a list of it for each."""
    folder = tmp_path_factory.mktemp("orange")
    image = Image.new("RGB", (48, 40), COLOUR)
    for kind, more in (("jpg", {"quality": 98}), ("png", {}), ("bmp", {}), ("webp", {"lossless": True})):
        image.save(folder / f"a.{kind}", **more)
        (folder / f"{kind}.txt").write_text(f"a.{kind} 1\n" * 3)
    return folder


def images(folder: Path, transform: Any, kind: str = "jpg") -> torch.Tensor:
    dataset = ImageDataset(Manifest.open(folder / f"{kind}.txt", root=folder), transform=transform)
    found, _ = next(iter(DataLoader(dataset, 3, seed=1)))
    return found


def is_orange(image: Any, *, scale: float = 1.0) -> bool:
    """Whether the image, (height, width, channels), is all of that colour."""
    array = np.asarray(image, np.float64) / scale
    return array.shape[2] == 3 and bool((np.abs(array - COLOUR) <= 3).all())


class Looks:
    """A callable that notes what it gets."""

    pure = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, image: Any) -> Any:
        self.seen.append(image)
        return image


class LikeTorchvision(Looks):
    """What `adapt` takes for one of torchvision's."""


LikeTorchvision.__module__ = "torchvision.transforms.v2._looks"


class TestRedGreenBlue:
    """Data were BGR by default, AutoAugment and the means of Normalize took them for RGB."""

    @pytest.fixture(
        params=[
            (name, kind)
            for name in installed()
            for kind in ("jpg", "png", "bmp", "webp")
            if BACKENDS[name].reads({"jpg": "jpeg"}.get(kind, kind))
        ],
        ids="-".join,
    )
    def kind(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """A format, which one back end decodes from here on."""
        name, kind = request.param
        if name != "native":
            monkeypatch.setattr(native, "is_available", lambda: False)
        monkeypatch.setattr(decoding, "choose", lambda *_: BACKENDS[name])
        return str(kind)

    def test_each_back_end(self, folder: Path, kind: str) -> None:
        for transform in (
            None,
            [Resize(24)],
            [RandomResizedCrop((30, 20)), HorizontalFlip(0.5)],
            [SquarePad("center")],
        ):
            found = images(folder, transform, kind)
            assert found.dtype is torch.uint8
            found = found[:, :, 4:-4]  # inside of the border of SquarePad
            assert all(is_orange(image.permute(1, 2, 0)) for image in found)
        scaled = images(folder, [ToTensor()], kind)
        assert scaled.dtype is torch.float32
        assert is_orange(scaled[0].permute(1, 2, 0), scale=1 / 255)

    def test_each_kind_of_step(self, folder: Path, kind: str) -> None:
        A: Any = pytest.importorskip("albumentations")
        theirs: list[Any] = []

        def look(image: Any, **_: Any) -> Any:
            theirs.append(image)
            return image

        callable_, torchvision = Looks(), LikeTorchvision()
        pipeline = A.Compose([A.Lambda(image=look, p=1)])
        images(folder, [CenterCrop(20), callable_, torchvision, pipeline, HorizontalFlip(1)], kind)
        assert callable_.seen
        assert all(isinstance(image, np.ndarray) and is_orange(image) for image in callable_.seen)
        assert torchvision.seen
        assert all(isinstance(image, torch.Tensor) and image.shape == (3, 20, 20) for image in torchvision.seen)
        assert all(is_orange(image.permute(1, 2, 0)) for image in torchvision.seen)
        assert theirs
        assert all(is_orange(image) for image in theirs)


def test_means_are_of_red_green_and_blue(folder: Path) -> None:
    found = images(folder, [ToTensor(), Normalize(MEAN, STD)])[0].mean(dim=(1, 2))
    expected = [(value / 255 - mean) / std for value, mean, std in zip(COLOUR, MEAN, STD, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=0.06)


def test_colours_of_policies_and_fills_are_in_that_order(folder: Path) -> None:
    """Grey is the eye's grey: of blue taken for red it would be darker."""
    bright = np.dot(COLOUR, (0.299, 0.587, 0.114))
    found = images(folder, [ColorJitter(saturation=(0, 0))])[0].permute(1, 2, 0).numpy()
    assert np.abs(found - bright).max() <= 3
    for step in (SquarePad(fill=COLOUR), RandomCrop(40, padding=9, fill=COLOUR), RandomErasing(1, value=COLOUR)):
        assert is_orange(images(folder, [step])[0].permute(1, 2, 0))


class TestSquarePad:
    """The original kept the border of one image for the next."""

    @pytest.mark.parametrize("position", ["center", "top_left", "bottom_right"])
    @pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
    def test_nothing_is_kept_of_an_image(self, position: Any, mode: Any) -> None:
        step = SquarePad(position, mode, fill=(1, 2, 3))
        before = repr(step), pickle.dumps(step)
        shapes = [(20, 31), (31, 20), (20, 20), (7, 30), (30, 7), (20, 31)]
        for number, shape in enumerate(shapes):
            image = np.random.default_rng(number).integers(0, 256, (*shape, 3), np.uint8)
            side = max(shape)
            made = step(image)
            ends = []
            for length in shape:
                lacks = side - length
                first = {"center": lacks // 2, "top_left": 0, "bottom_right": lacks}[position]
                ends.append((first, lacks - first))
            if mode == "constant":
                planes = [np.pad(image[:, :, c], ends, constant_values=c + 1) for c in range(3)]
                expected = np.stack(planes, axis=2)
            else:
                expected = np.pad(image, (*ends, (0, 0)), mode=mode)
            assert np.array_equal(made, expected)
        assert (repr(step), pickle.dumps(step)) == before


def with_probability() -> dict[str, Any]:
    """Everything that has a probability, at a given one."""
    return {
        "CenterCrop": lambda p: CenterCrop(8, p=p),
        "CoarseDropout": lambda p: CoarseDropout(p=p),
        "ColorJitter": lambda p: ColorJitter(1, 1, 1, 0.5, p=p),
        "HorizontalFlip": lambda p: HorizontalFlip(p),
        "RandomCrop": lambda p: RandomCrop(8, p=p),
        "RandomErasing": lambda p: RandomErasing(p),
        "Rotate": lambda p: Rotate((20, 30), p=p),
        "SquarePad": lambda p: SquarePad(p=p),
        "VerticalFlip": lambda p: VerticalFlip(p),
    }


class TestProbability:
    """Crops ignored theirs, ColorJitter took a hue of 0 for 0.2."""

    IMAGE = np.random.default_rng(3).integers(0, 256, (30, 40, 3), np.uint8)

    @pytest.mark.parametrize("name", with_probability())
    def test_is_honoured(self, name: str) -> None:
        changed = {}
        for p in (0.0, 0.5, 1.0):
            step = with_probability()[name](p)
            changed[p] = 0
            for key in range(100):
                with sample_scope(key):
                    changed[p] += not np.array_equal(step(self.IMAGE), self.IMAGE)
        assert changed[0.0] == 0
        assert 30 < changed[0.5] < 70
        assert changed[1.0] > 95

    def test_every_class_that_has_one_is_looked_at(self) -> None:
        import inspect

        from penstock.images import transforms

        kinds = {getattr(transforms, name) for name in transforms.__all__}  # some have two names
        having = {kind.__name__ for kind in kinds if "p" in inspect.signature(kind).parameters}
        assert having == set(with_probability()) | {CutMix.__name__, MixUp.__name__}

    @pytest.mark.parametrize("kind", [MixUp, CutMix])
    def test_of_batches(self, kind: Any) -> None:
        batch, labels = torch.arange(4 * 3 * 16 * 16).view(4, 3, 16, 16).float(), torch.arange(4)
        changed = dict.fromkeys((0.0, 0.5, 1.0), 0)
        for p in changed:
            for key in range(60):
                with sample_scope(key):
                    mixed, columns = kind(num_classes=4, p=p)((batch, labels))
                changed[p] += not torch.equal(mixed, batch)
                assert columns.shape == (4, 4)
        assert changed[0.0] == 0
        assert 15 < changed[0.5] < 45
        assert changed[1.0] > 50

    @pytest.mark.parametrize("hue", [0, None, (0, 0)])
    @pytest.mark.parametrize("others", [{}, {"brightness": 0, "contrast": 0, "saturation": 0}])
    def test_no_hue_is_no_hue(self, hue: Any, others: Any) -> None:
        step = ColorJitter(**others, hue=hue)
        assert "hue=(0.0, 0.0)" in repr(step)
        for key in range(30):
            with sample_scope(key):
                assert np.array_equal(step(self.IMAGE), self.IMAGE)

    def test_no_strength_of_a_policy(self) -> None:
        """Only operations that know no strength, or start at half the levels, may change an image then."""
        same = 0
        for key in range(200):
            with sample_scope(key):
                same += np.array_equal(RandAugment(num_ops=1, magnitude=0)(self.IMAGE), self.IMAGE)
        assert 200 * 11 / 14 * 0.8 < same < 200


def test_what_leaves_is_bytes_or_scaled_as_documented() -> None:
    """The original ToTensor left 0..255. Here nothing is scaled but by ToTensor, and that always."""
    white = np.full((12, 12, 3), 255, np.uint8)
    steps: list[Any] = [Resize(10), CenterCrop(8), RandomCrop(8, 1), HorizontalFlip(1), SquarePad(), ColorJitter(0.1)]
    for step in [*steps, AutoAugment(), RandAugment(), TrivialAugment(), RandomErasing(0), RandomResizedCrop(9)]:
        with sample_scope(1):
            assert step(white).dtype == np.uint8
            made = Compose([step, ToTensor()])(white)
        assert made.dtype is torch.float32
        assert float(made.max()) <= 1
    assert float(Compose([ToTensor(), ToTensor()])(white).max()) == 1


def test_resize_by_one_number_is_the_shorter_side_in_the_whole_path(folder: Path) -> None:
    """`Resize(int)` was a TypeError, and documentation and configuration disagreed on which side it is."""
    assert images(folder, [Resize(20)]).shape == (3, 3, 20, 24)
    assert images(folder, [Resize((20, 20))]).shape == (3, 3, 20, 20)


def test_draws_are_the_samples_own() -> None:
    """Nothing draws from a global generator, so nothing else in the program changes what an image becomes."""
    image = TestProbability.IMAGE
    jitter = ColorJitter(0.3, 0.3, 0.3, 0.1)
    chain = Compose([RandomResizedCrop(16), HorizontalFlip(), jitter, RandAugment(), RandomErasing(1, value="random")])
    made, states = [], []
    for _ in range(2):
        with sample_scope(5):
            made.append(chain(image))
        states.append((np.random.get_state()[2], torch.get_rng_state(), random.getstate()))
    assert np.array_equal(*made)
    assert torch.equal(states[0][1], states[1][1])
    assert states[0][::2] == states[1][::2]
