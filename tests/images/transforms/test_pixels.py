"""What changes pixels: conversion to tensors, colours, erasing, borders, and two samples made into one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from penstock import DataLoader
from penstock.errors import ConfigError
from penstock.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandomCrop,
    RandomErasing,
    Resize,
    SquarePad,
    ToTensor,
)
from penstock.images.transforms.colour import brightness, contrast, hue, saturation
from penstock.random import sample_scope

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture
def image() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)


@pytest.mark.parametrize("geometry", [HorizontalFlip(1), CenterCrop(6), Resize(5), RandomCrop(12, 4)], ids=repr)
@pytest.mark.parametrize("change", [Normalize(MEAN, STD), RandomErasing(1)], ids=repr)
def test_geometry_after_a_changed_tensor(change: Any, geometry: Any, image: np.ndarray[Any, Any]) -> None:
    """Steps after it change that tensor, and not the image before it was cropped."""
    before = [Resize(10), CenterCrop(8), ToTensor(), Normalize(MEAN, STD), change]
    with sample_scope(5):
        expected = geometry(Compose(before)(image).permute(1, 2, 0).numpy())
    with sample_scope(5):
        found = Compose([*before, geometry])(image)
    assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(expected))


class TestToTensor:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("last", [True, False])
    @pytest.mark.parametrize("channels", [1, 3, 4])
    def test_is_the_arithmetic_in_float32_rounded_once(self, dtype: torch.dtype, last: bool, channels: int) -> None:
        pixels = np.random.default_rng(1).integers(0, 256, (16, 16, channels), np.uint8)
        mean, std = (0.48, 0.45, 0.4, 0.1)[:channels], (0.2, 0.3, 0.25, 0.5)[:channels]
        made = Compose([ToTensor(dtype, channels_last=last), Normalize(mean, std)])(pixels)
        plain = torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)
        expected = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        assert made.dtype is dtype
        assert torch.equal(made, expected.to(dtype))
        assert made.permute(1, 2, 0).is_contiguous() if last else made.is_contiguous()
        assert torch.equal(ToTensor(dtype)(pixels), plain.to(dtype))

    def test_scales_bytes_and_nothing_else(self, image: np.ndarray[Any, Any]) -> None:
        assert float(ToTensor()(np.full((2, 2, 3), 255, np.uint8)).max()) == 1
        floats = image.astype(np.float32)
        assert torch.equal(ToTensor()(floats), torch.from_numpy(floats).permute(2, 0, 1))

    def test_what_is_not_wanted_stays_uint8(self, image: np.ndarray[Any, Any]) -> None:
        assert HorizontalFlip()(image).dtype == np.uint8
        tensor = torch.from_numpy(image).permute(2, 0, 1)
        assert torch.equal(HorizontalFlip(1)(tensor), tensor.flip(2))

    def test_normalize_belongs_behind_it(self) -> None:
        with pytest.raises(ConfigError, match="put ToTensor"):
            Compose([Resize((8, 8)), Normalize(MEAN, STD)])

    def test_geometry_behind_it(self, image: np.ndarray[Any, Any]) -> None:
        one = Compose([ToTensor(), Normalize(MEAN, STD), CenterCrop(9), HorizontalFlip(1)])(image)
        two = Compose([CenterCrop(9), HorizontalFlip(1), ToTensor(), Normalize(MEAN, STD)])(image)
        assert torch.equal(one, two)
        three = Compose([ToTensor(), RandomErasing(p=0), CenterCrop(9)])(image)
        assert torch.equal(three, Compose([CenterCrop(9), ToTensor()])(image))
        with sample_scope(1):
            erased = Compose([ToTensor(), RandomErasing(p=1), CenterCrop(9)])(image)
        with sample_scope(1):
            assert torch.equal(erased, Compose([ToTensor(), RandomErasing(p=1)])(image)[:, 7:16, 11:20])


class TestColorJitter:
    @pytest.mark.parametrize("value", [0.0, 0.4, 0.9, 1.3, 2.0])
    def test_close_to_pillows(self, image: np.ndarray[Any, Any], value: float) -> None:
        opened = Image.fromarray(image)
        for ours, theirs in (
            (brightness, ImageEnhance.Brightness),
            (contrast, ImageEnhance.Contrast),
            (saturation, ImageEnhance.Color),
        ):
            expected = np.asarray(theirs(opened).enhance(value)).astype(int)
            assert np.abs(ours(image.copy(), value).astype(int) - expected).max() <= 3, ours

    def test_hue_turns_colours(self) -> None:
        red = np.zeros((2, 2, 3), np.uint8)
        red[:, :, 0] = 250
        green = hue(red.copy(), 1 / 3)
        assert green[0, 0, 1] > 240 > 20 > max(green[0, 0, 0], green[0, 0, 2])
        blue = hue(red.copy(), -1 / 3)
        assert blue[0, 0, 2] > 240 > 20 > max(blue[0, 0, 0], blue[0, 0, 1])

    @pytest.mark.parametrize("how", [{}, {"hue": 0}, {"brightness": (1, 1)}, {"p": 0, "brightness": 1, "hue": 0.5}])
    def test_what_asks_for_nothing_is_identity(self, image: np.ndarray[Any, Any], how: Any) -> None:
        for key in range(5):
            with sample_scope(key):
                assert np.array_equal(ColorJitter(**how)(image), image)

    def test_hue_alone_leaves_brightness(self, image: np.ndarray[Any, Any]) -> None:
        for key in range(10):
            with sample_scope(key):
                made = ColorJitter(hue=0.5)(image)
            assert np.abs(made.max(axis=2).astype(int) - image.max(axis=2)).max() <= 2

    def test_factors_are_within_what_was_asked_for(self) -> None:
        grey = np.full((4, 4, 3), 100, np.uint8)
        values = set()
        for key in range(200):
            with sample_scope(key):
                values.add(int(ColorJitter(brightness=0.2)(grey)[0, 0, 0]))
        assert min(values) in range(80, 84)
        assert max(values) in range(117, 121)

    def test_does_not_touch_the_callers_image(self, image: np.ndarray[Any, Any]) -> None:
        before = image.copy()
        ColorJitter(0.5, 0.5, 0.5, 0.5)(image)
        assert np.array_equal(image, before)

    def test_says_where_it_belongs(self, image: np.ndarray[Any, Any]) -> None:
        chain = Compose([ToTensor(), Normalize(MEAN, STD), ColorJitter(0.5)])
        with pytest.raises(ConfigError, match="put it before Normalize"):
            chain(image)


class TestRandomErasing:
    @pytest.mark.parametrize("chain", [[], [ToTensor()], [ToTensor(torch.float16, channels_last=False)]])
    def test_a_rectangle_of_the_size_asked_for(self, chain: list[Any]) -> None:
        image = np.full((100, 80, 3), 200, np.uint8)
        for key in range(50):
            with sample_scope(key):
                made = Compose([*chain, RandomErasing(p=1)])(image)
            array = made if isinstance(made, np.ndarray) else made.permute(1, 2, 0).float().numpy()
            gone = (array == 0).all(axis=2)
            rows, columns = np.nonzero(gone)
            tall, wide = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
            assert gone.sum() == tall * wide
            assert 0.015 < tall * wide / 8000 < 0.34
            assert 0.25 < tall / wide < 4

    def test_p_and_values(self, image: np.ndarray[Any, Any]) -> None:
        assert np.array_equal(RandomErasing(p=0)(image), image)
        with sample_scope(3):
            made = RandomErasing(p=1, value=(1, 2, 3))(image)
        changed = (made != image).any(axis=2)
        assert (made[changed] == (1, 2, 3)).all()
        with sample_scope(3):
            noise = Compose([ToTensor(), RandomErasing(p=1, value="random")])(image)
        assert float(noise.min()) < 0
        with pytest.raises(ConfigError):
            RandomErasing(p=1, value=(1, 2))(image)


class TestSquarePad:
    @pytest.mark.parametrize(("position", "top"), [("center", 4), ("top_left", 0), ("bottom_right", 8)])
    def test_positions(self, image: np.ndarray[Any, Any], position: Any, top: int) -> None:
        made = SquarePad(position, fill=(9, 8, 7))(image)
        assert made.shape == (31, 31, 3)
        assert np.array_equal(made[top : top + 23], image)
        border = np.ones(31, bool)
        border[top : top + 23] = False
        assert (made[border] == (9, 8, 7)).all()

    def test_modes_masks_and_p(self, image: np.ndarray[Any, Any]) -> None:
        made = SquarePad(padding_mode="edge")(image)
        assert np.array_equal(made[0], image[0])
        _, found = SquarePad()(image, {"masks": np.ones((23, 31)), "boxes": np.array([[0, 0, 31, 23]])})
        assert found["masks"].sum() == 23 * 31
        assert found["boxes"].tolist() == [[0, 4, 31, 27]]
        assert np.array_equal(SquarePad(p=0)(image), image)
        chain = Compose([SquarePad(), SquarePad()])
        assert chain(image).shape == chain(np.ascontiguousarray(image.transpose(1, 0, 2))).shape == (31, 31, 3)


class TestMixing:
    @settings(max_examples=30)
    @given(st.integers(0, 2**32), st.sampled_from([torch.uint8, torch.float32]))
    def test_mixup(self, key: int, dtype: torch.dtype) -> None:
        images = torch.arange(4 * 3 * 6 * 5).view(4, 3, 6, 5).remainder(251).to(dtype)
        labels = torch.tensor([0, 1, 2, 0])
        with sample_scope(key):
            mixed, columns = MixUp(num_classes=3)((images, labels))
        share = float(columns[1, 1])
        assert torch.allclose(columns.sum(1), torch.ones(4))
        assert float(columns[1, 0]) == pytest.approx(1 - share, abs=1e-6)
        expected = images.float() * share + images.roll(1, 0).float() * (1 - share)
        assert mixed.dtype is dtype
        assert float((mixed.float() - expected).abs().max()) <= (0.51 if dtype is torch.uint8 else 1e-3)

    @settings(max_examples=30)
    @given(st.integers(0, 2**32))
    def test_cutmix(self, key: int) -> None:
        images = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 32, 40).contiguous()
        with sample_scope(key):
            mixed, columns = CutMix(num_classes=4)((images, torch.arange(4)))
        share = float((mixed[2] == 2).float().mean())
        assert float(columns[2, 2]) == pytest.approx(share, abs=1e-6)
        assert float(columns[2, 1]) == pytest.approx(1 - share, abs=1e-6)
        assert set(mixed[2].unique().tolist()) <= {1, 2}

    @pytest.mark.parametrize("kind", [MixUp, CutMix])
    def test_as_a_collate_function_it_repeats(self, kind: Any) -> None:
        samples = [(torch.full((3, 32, 32), number, dtype=torch.uint8), number % 3) for number in range(12)]
        found = [list(DataLoader(samples, 4, seed=3, collate_fn=kind(num_classes=3), num_workers=n)) for n in (0, 2)]
        for one, two in zip(*found, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])
        assert len({float(labels[1].max()) for _, labels in found[0]}) > 1, "each batch has a share of its own"

    def test_images_as_arrays(self) -> None:
        samples = [(np.full((3, 4, 4), number, np.uint8), number) for number in range(2)]
        images, columns = MixUp(num_classes=2, p=0)(samples)
        assert images[:, 0, 0, 0].tolist() == [0, 1]
        assert columns.tolist() == [[1, 0], [0, 1]]

    def test_labels_that_do_not_fit(self) -> None:
        images = torch.zeros(2, 3, 4, 4)
        for kind, labels in ((MixUp(), torch.tensor([0, 1])), (MixUp(num_classes=2), torch.tensor([0, 2]))):
            with pytest.raises(ConfigError):
                kind((images, labels))
        _, columns = MixUp(p=0)((images, torch.eye(2)))
        assert torch.equal(columns, torch.eye(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColorJitter(brightness=-1),
        lambda: ColorJitter(hue=0.6),
        lambda: ColorJitter(contrast=(2, 1)),
        lambda: ColorJitter(p=2),
        lambda: RandomErasing(scale=(0, 1)),
        lambda: RandomErasing(value="noise"),  # type: ignore[arg-type]
        lambda: SquarePad("left"),  # type: ignore[arg-type]
        lambda: SquarePad(padding_mode="wrap"),  # type: ignore[arg-type]
        lambda: MixUp(alpha=0),
        lambda: CutMix(num_classes=0),
        lambda: Normalize((0.5,), (0,)),
        lambda: Normalize((0.5, 0.5), (1,)),
        lambda: ToTensor(torch.int64),
    ],
)
def test_bad_arguments(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_normalize_says_how_many_channels_it_is_for() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    for chain in (
        [ToTensor(), Normalize((0.5, 0.5), (0.5, 0.5))],
        [ToTensor(), Normalize((0.5,), (1,)), Normalize((0.5, 0.5), (1, 1))],
    ):
        with pytest.raises(ConfigError, match="2 means, and the image 3 channels"):
            Compose(chain)(image)
    assert Compose([ToTensor(), Normalize((0.5,), (0.5,))])(image).tolist() == torch.full((3, 4, 4), -1.0).tolist()


@pytest.mark.parametrize("mix", [MixUp, CutMix])
def test_labels_that_are_no_tensor(mix: type) -> None:
    with pytest.raises(ConfigError, match="not dict"):
        mix(num_classes=3)((torch.zeros(4, 3, 8, 8), {"a": 1}))
