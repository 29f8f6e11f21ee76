"""Arguments of the transforms beside those of torchvision.transforms.v2: name, order and default of each; none ignored.

What is expected was written down from torchvision's documentation, 0.28, class by class.
"""

from __future__ import annotations

import enum
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, ImageError
from penstock.images import transforms
from penstock.images.transforms import (
    AutoAugment,
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Rotate,
    SquarePad,
    ToTensor,
)
from penstock.random import generator, sample_scope

needed = inspect.Parameter.empty

# The name it has in torchvision, then its arguments; `*` before those that have to be named.
TORCHVISION: dict[str, tuple[str, list[tuple[str, Any] | str]]] = {
    "AutoAugment": ("AutoAugment", [("policy", "imagenet"), ("interpolation", "nearest"), ("fill", None)]),
    "CenterCrop": ("CenterCrop", [("size", needed)]),
    "ColorJitter": (
        "ColorJitter",
        [("brightness", None), ("contrast", None), ("saturation", None), ("hue", None)],
    ),
    "Compose": ("Compose", [("transforms", needed)]),
    "CutMix": ("CutMix", ["*", ("alpha", 1.0), ("num_classes", None), ("labels_getter", "default")]),
    "HorizontalFlip": ("RandomHorizontalFlip", [("p", 0.5)]),
    "MixUp": ("MixUp", ["*", ("alpha", 1.0), ("num_classes", None), ("labels_getter", "default")]),
    "Normalize": ("Normalize", [("mean", needed), ("std", needed), ("inplace", False)]),
    "RandAugment": (
        "RandAugment",
        [("num_ops", 2), ("magnitude", 9), ("num_magnitude_bins", 31), ("interpolation", "nearest"), ("fill", None)],
    ),
    "RandomCrop": (
        "RandomCrop",
        [("size", needed), ("padding", None), ("pad_if_needed", False), ("fill", 0), ("padding_mode", "constant")],
    ),
    "RandomErasing": (
        "RandomErasing",
        [("p", 0.5), ("scale", (0.02, 0.33)), ("ratio", (0.3, 3.3)), ("value", 0.0), ("inplace", False)],
    ),
    "RandomResizedCrop": (
        "RandomResizedCrop",
        [
            ("size", needed),
            ("scale", (0.08, 1.0)),
            ("ratio", (3 / 4, 4 / 3)),
            ("interpolation", "bilinear"),
            ("antialias", True),
        ],
    ),
    "Resize": (
        "Resize",
        [("size", needed), ("interpolation", "bilinear"), ("max_size", None), ("antialias", True)],
    ),
    "Rotate": (
        "RandomRotation",
        [("degrees", needed), ("interpolation", "nearest"), ("expand", False), ("center", None), ("fill", 0)],
    ),
    "ToTensor": ("ToTensor", []),
    "TrivialAugment": (
        "TrivialAugmentWide",
        [("num_magnitude_bins", 31), ("interpolation", "nearest"), ("fill", None)],
    ),
    "VerticalFlip": ("RandomVerticalFlip", [("p", 0.5)]),
}
OURS_ALONE = {"CoarseDropout", "SquarePad", "Transform"}
IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.mark.parametrize("name", TORCHVISION)
def test_arguments_are_torchvisions(name: str) -> None:
    _, expected = TORCHVISION[name]
    named = "*" in expected
    wanted = [argument for argument in expected if not isinstance(argument, str)]
    found = list(inspect.signature(getattr(transforms, name)).parameters.values())
    assert [(parameter.name, parameter.default) for parameter in found[: len(wanted)]] == wanted
    assert all((parameter.kind is parameter.KEYWORD_ONLY) == named for parameter in found[: len(wanted)])
    assert all(type(a.default) is type(default) for a, (_, default) in zip(found, wanted, strict=False))
    assert all(parameter.default is not needed for parameter in found[len(wanted) :]), "what is ours may be left out"


def test_every_transform_is_looked_at() -> None:
    assert set(transforms.__all__) == set(TORCHVISION) | {theirs for theirs, _ in TORCHVISION.values()} | OURS_ALONE


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvisions_names(name: str) -> None:
    assert getattr(transforms, TORCHVISION[name][0]) is getattr(transforms, name)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("Pad", "SquarePad pads to a square"), ("ToImage", "until ToTensor"), ("GaussianBlur", r"v2\.GaussianBlur\(")],
)
def test_names_of_torchvision_without_a_transform(name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=f"no attribute '{name}'; .*{instead}"):
        exec(f"from penstock.images.transforms import {name}")
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*{instead}"):
        getattr(transforms, name)
    assert not hasattr(transforms, name)


class Mode(enum.Enum):
    """As torchvision's InterpolationMode."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


class Resampling(enum.IntEnum):
    """As Pillow's."""

    NEAREST = 0
    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3


class Policy(enum.Enum):
    """As torchvision's AutoAugmentPolicy."""

    IMAGENET = "imagenet"
    CIFAR10 = "cifar10"
    SVHN = "svhn"


@pytest.mark.parametrize("name", ["NEAREST", "BILINEAR", "BICUBIC"])
def test_filters_by_every_name(name: str) -> None:
    given = [name.lower(), Mode[name], Resampling[name], int(Resampling[name])]
    made = [Resize((7, 9), interpolation=how)(IMAGE) for how in given]
    assert all(np.array_equal(found, made[0]) for found in made)
    assert {RandomResizedCrop(4, interpolation=how).interpolation for how in given} == {name.lower()}


@pytest.mark.parametrize("policy", Policy)
def test_policies_by_every_name(policy: Policy) -> None:
    assert repr(AutoAugment(policy)) == repr(AutoAugment(policy.value))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Resize(8, interpolation=Mode.LANCZOS),
        lambda: Resize(8, interpolation=Resampling.LANCZOS),
        lambda: Resize(8, antialias=None),  # type: ignore[arg-type]
        lambda: Resize(8, antialias="warn"),  # type: ignore[arg-type]
        lambda: Resize(None),
        lambda: Resize(None, max_size=(8, 9)),  # type: ignore[arg-type]
        lambda: Resize(None, max_size=0),
        lambda: Resize((8, 9), max_size=10),
        lambda: RandomResizedCrop(8, antialias=None),  # type: ignore[arg-type]
        lambda: RandomCrop(8, -1),
        lambda: RandomCrop(8, (1, 2, 3)),
        lambda: RandomCrop(8, pad_if_needed=1),  # type: ignore[arg-type]
        lambda: RandomCrop(8, fill={torch.Tensor: 0}),  # type: ignore[arg-type]
        lambda: RandomCrop(8, fill=float("nan")),
        lambda: RandomCrop(8, fill=(0, float("inf"), 0)),
        lambda: RandomCrop(8, fill=1e30),
        lambda: RandomCrop(8, fill=()),
        lambda: RandomCrop(8, fill=(1, 2, 3, 4, 5)),
        lambda: RandomCrop(8, padding_mode="wrap"),  # type: ignore[arg-type]
        lambda: Normalize((0.5,), (0.5,), inplace=None),  # type: ignore[arg-type]
        lambda: RandomErasing(inplace="no"),  # type: ignore[arg-type]
        lambda: Rotate(10, expand=True),
        lambda: Rotate(10, center=(3, 4)),
        lambda: Rotate(-10),
        lambda: Rotate(10, fill={}),  # type: ignore[arg-type]
        lambda: SquarePad(fill="red"),  # type: ignore[arg-type]
        lambda: AutoAugment(["imagenet"]),
        lambda: AutoAugment("cifar100"),
        lambda: MixUp(num_classes=3, labels_getter=lambda batch: batch[1]),  # type: ignore[arg-type]
        lambda: CutMix(num_classes=3, labels_getter=None),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_offered_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_nothing_asked_for_is_none_or_zero() -> None:
    assert repr(ColorJitter(None, None, None, None)) == repr(ColorJitter(0, 0, 0, 0)) == repr(ColorJitter())
    assert np.array_equal(ColorJitter()(IMAGE), IMAGE)


@pytest.mark.parametrize("inplace", [False, True])
def test_inplace_changes_neither_result_nor_what_was_given(inplace: bool) -> None:
    chain = Compose([ToTensor(), Normalize((0.5,) * 3, (0.2,) * 3, inplace), RandomErasing(1, inplace=inplace)])
    plain = Compose([ToTensor(), Normalize((0.5,) * 3, (0.2,) * 3), RandomErasing(1)])
    given = torch.from_numpy(IMAGE.copy()).permute(2, 0, 1)
    with sample_scope(1):
        made = chain(given)
    with sample_scope(1):
        assert torch.equal(made, plain(given))
    assert np.array_equal(given.permute(1, 2, 0).numpy(), IMAGE)


class TestRandomCrop:
    def test_as_everybody_trains_on_cifar(self) -> None:
        """``RandomCrop(32, padding=4)``: a black border of 4, then any of 81 places."""
        row, column = np.mgrid[1:33, 1:33]
        image = np.stack([row, column, np.full_like(row, 99)], axis=2).astype(np.uint8)
        bordered = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        places = set()
        for key in range(900):
            with sample_scope(key):
                made = RandomCrop(32, 4)(image)
            top, left = made[16, 16, 0] - 13, made[16, 16, 1] - 13
            assert np.array_equal(made, bordered[top : top + 32, left : left + 32])
            places.add((int(top), int(left)))
        assert places == {(top, left) for top in range(9) for left in range(9)}

    @pytest.mark.parametrize(
        ("padding", "ends"),
        [(2, (2, 2, 2, 2)), ([3], (3, 3, 3, 3)), ((1, 4), (1, 4, 1, 4)), ((1, 2, 3, 4), (1, 2, 3, 4))],
    )
    @pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
    def test_borders(self, padding: Any, ends: tuple[int, ...], mode: Any) -> None:
        left, top, right, bottom = ends
        whole = (20 + top + bottom, 30 + left + right)
        made = RandomCrop(whole, padding, fill=(9, 8, 7), padding_mode=mode)(IMAGE)
        around = ((top, bottom), (left, right), (0, 0))
        if mode == "constant":
            expected = np.stack([np.pad(IMAGE[:, :, c], around[:2], constant_values=9 - c) for c in range(3)], axis=2)
        else:
            expected = np.pad(IMAGE, around, mode=mode)
        assert np.array_equal(made, expected)

    @pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
    @pytest.mark.parametrize("boxes", [False, True])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_any_part_of_image_and_border(self, mode: Any, boxes: bool, channels: int) -> None:
        """Of the border alone as well, and mirrored afterwards."""
        image = IMAGE[:, :, :channels]
        bordered = np.pad(image, ((19, 19), (19, 19), (0, 0)), mode=mode)
        target: Any = {"masks": IMAGE[:, :, 0], **({"boxes": np.array([[1.0, 2.0, 9.0, 8.0]])} if boxes else {})}
        mask = np.pad(IMAGE[:, :, 0], 19)
        chain, alone = Compose([RandomCrop((7, 9), 19, padding_mode=mode), HorizontalFlip(1)]), 0
        for key in range(300):
            with sample_scope(key):
                top, left = int(generator().random() * 52), int(generator().random() * 60)
            with sample_scope(key):
                made, found = chain(image, target)
            rows, columns = slice(top, top + 7), slice(left, left + 9)
            assert np.array_equal(made, bordered[rows, columns][:, ::-1])
            assert np.array_equal(found["masks"], mask[rows, columns][:, ::-1])
            alone += top + 7 <= 19 or top >= 39 or left + 9 <= 19 or left >= 49
        assert alone > 50

    @pytest.mark.parametrize("mode", ["constant", "edge"])
    def test_a_fill_for_other_channels(self, mode: Any) -> None:
        with pytest.raises(ConfigError, match="2 values, and the image 3 channels"):
            RandomCrop((24, 36), (3, 2), fill=(1, 2), padding_mode=mode)(IMAGE)

    def test_a_fill_of_numpy(self) -> None:
        made = RandomCrop((24, 36), (3, 2), fill=(np.uint8(3), np.float32(4.4), 5))(IMAGE)  # type: ignore[arg-type]
        assert made[0, 0].tolist() == [3, 4, 5]

    def test_a_small_image(self) -> None:
        with pytest.raises(ImageError, match=r"\(20, 30\).*smaller than the crop of \(25, 25\).*pad_if_needed=True"):
            RandomCrop(25)(IMAGE)
        with pytest.raises(ImageError):
            RandomCrop(25, padding=2)(IMAGE)
        places = set()
        for key in range(200):
            with sample_scope(key):
                made = RandomCrop((25, 30), pad_if_needed=True)(IMAGE)
            rows = np.nonzero(made.any(axis=(1, 2)))[0]
            assert np.array_equal(made[rows[0] : rows[0] + 20], IMAGE)
            places.add(int(rows[0]))
        assert places == set(range(6)), "as much border above as below: any place"

    def test_boxes_and_masks_move_along(self) -> None:
        target = {"masks": np.ones((20, 30), np.uint8), "boxes": np.array([[2.0, 3.0, 12.0, 13.0]])}
        made, found = RandomCrop((24, 36), (3, 2), fill=7)(IMAGE, target)
        assert found["boxes"].tolist() == [[5, 5, 15, 15]]
        assert found["masks"].sum() == 600
        assert np.array_equal(made[5:15, 5:15], IMAGE[3:13, 2:12])


@pytest.mark.parametrize("turned", [False, True])
def test_the_longer_side_alone(turned: bool) -> None:
    image = IMAGE.transpose(1, 0, 2) if turned else IMAGE
    for longest, shape in ((15, (10, 15)), (60, (40, 60)), (30, (20, 30))):
        expected = shape[::-1] if turned else shape
        assert Resize(None, max_size=longest)(image).shape[:2] == expected
