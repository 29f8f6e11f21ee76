"""Transforms of other people in a chain: what they get, that they repeat, and what belongs to the image."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock import DataLoader
from penstock.errors import ConfigError
from penstock.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    MixUp,
    Normalize,
    RandAugment,
    RandomErasing,
    RandomResizedCrop,
    ToTensor,
)
from penstock.random import generator, sample_scope
from penstock.sources.batched import BatchedDataset

IMAGE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)


def noisy(image: Any) -> Any:
    """Draws from all three global generators."""
    level = random.random() + np.random.random() + float(torch.rand(()))
    return (image * (level / 3)).astype(np.uint8)


class Images(BatchedDataset):
    """The chain's results, one by one, as `ImageDataset` has them."""

    def __init__(self, chain: Compose) -> None:
        self.chain = chain
        self.pure = chain.pure

    def __len__(self) -> int:
        return 12

    def load_samples(self, indices: Any, keys: Any) -> list[torch.Tensor]:
        found = []
        for _, key in zip(indices, keys, strict=True):
            with sample_scope(key):
                found.append(torch.from_numpy(self.chain(IMAGE)))
        return found


def test_any_callable_gets_the_array_and_repeats_with_the_sample() -> None:
    seen: list[Any] = []

    def look(image: Any) -> Any:
        seen.append(image)
        return image[::2]

    made = Compose([HorizontalFlip(1), look, HorizontalFlip(1)])(IMAGE)
    assert np.array_equal(seen[0], IMAGE[:, ::-1])
    assert np.array_equal(made, IMAGE[::2])
    chain = Compose([RandomResizedCrop(16), noisy])
    assert not chain.pure
    epochs = [
        torch.cat(list(DataLoader(Images(chain), 4, seed=1, **how)))
        for how in ({}, {"num_workers": 2}, {"num_workers": 1, "executor": "process"})
    ]
    assert len({float(image.float().mean()) for image in epochs[0]}) == 12
    for found in epochs[1:]:
        assert torch.equal(found, epochs[0])


def test_a_callable_that_draws_from_our_generator_may_say_so() -> None:
    class Ours:
        pure = True

        def __call__(self, image: Any) -> Any:
            return image + generator().integers(9)

    assert Compose([Ours()]).pure
    assert not Compose([noisy]).pure


def test_behind_to_tensor_it_gets_the_tensor() -> None:
    made = Compose([ToTensor(), lambda tensor: tensor * 2, HorizontalFlip(1)])(IMAGE)
    assert torch.equal(made, (torch.from_numpy(IMAGE).permute(2, 0, 1).float() / 255 * 2).flip(2))


@pytest.mark.parametrize("returned", [None, "text", np.zeros(3), torch.zeros(3)])
def test_what_is_no_image(returned: Any) -> None:
    with pytest.raises(ConfigError, match="returned"):
        Compose([lambda image: returned])(IMAGE)


def test_floats_of_a_callable_are_normalised_where_the_chain_says_so() -> None:
    def halve(image: Any) -> Any:
        return image.astype(np.float32) / 2

    image = np.full((2, 3, 3), 8, np.uint8)
    normalize = Normalize([1.0], [2.0])
    assert Compose([halve, normalize])(image).tolist() == np.full((2, 3, 3), 1.5).tolist()
    assert Compose([halve, normalize, halve])(image).tolist() == np.full((2, 3, 3), 0.75).tolist()
    with pytest.raises(ConfigError, match=r"torch\.uint8: put ToTensor"):
        Compose([lambda pixels: pixels[::-1], normalize])(image)


def test_masks_are_not_left_behind_silently() -> None:
    with pytest.raises(ConfigError, match="cannot transform masks"):
        Compose([noisy])(IMAGE, {"masks": IMAGE[:, :, 0]})


class TestTorchvision:
    def test_unchanged(self) -> None:
        v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
        made = Compose([v2.RandomHorizontalFlip(1), v2.CenterCrop(20)])(IMAGE)
        assert np.array_equal(made, IMAGE[20:40, 30:50][:, ::-1])
        chain = Compose([v2.RandomRotation(30), v2.ColorJitter(0.5, hue=0.1)])
        one, two = (torch.cat(list(DataLoader(Images(chain), 4, seed=1, num_workers=n))) for n in (0, 2))
        assert torch.equal(one, two)
        for step in (v2.PILToTensor(), v2.ToImage()):
            assert np.array_equal(Compose([step])(IMAGE), IMAGE)


class TestAlbumentations:
    def test_repeats_in_every_executor(self) -> None:
        A = pytest.importorskip("albumentations")
        chain = Compose([RandomResizedCrop(32), A.Compose([A.Rotate(30, p=1), A.RandomBrightnessContrast(p=1)])])
        assert chain.pure
        epochs = [
            torch.cat(list(DataLoader(Images(chain), 4, seed=1, **how)))
            for how in ({}, {"num_workers": 2}, {"num_workers": 2, "executor": "thread"})
        ]
        assert len({float(image.float().mean()) for image in epochs[0]}) == 12
        assert all(torch.equal(found, epochs[0]) for found in epochs)
        with sample_scope(1):
            one = chain(IMAGE)
        with sample_scope(1):
            assert np.array_equal(pickle.loads(pickle.dumps(chain))(IMAGE), one)

    def test_masks_and_boxes(self) -> None:
        A = pytest.importorskip("albumentations")
        mask = np.zeros((60, 80), np.uint8)
        mask[10:20, 30:40] = 1
        target = {"masks": mask, "boxes": np.array([[30, 10, 40, 20], [0, 0, 3, 3]]), "labels": [1, 2]}
        for step in (A.CenterCrop(40, 40), A.Compose([A.CenterCrop(40, 40)])):
            _, found = Compose([step, HorizontalFlip(1)])(IMAGE, target)
            assert found["labels"] == [1]
            assert np.allclose(found["boxes"], [[20, 0, 30, 10]], atol=1e-3)
            assert found["masks"][0:10, 20:30].all()
            assert found["masks"].sum() == 100

    def test_masks_that_become_tensors(self) -> None:
        A = pytest.importorskip("albumentations")
        mask = np.zeros((60, 80), np.uint8)
        mask[:, :10] = 1
        chain = Compose([A.Compose([A.HorizontalFlip(p=1), A.ToTensorV2()])])
        _, target = chain(IMAGE, {"masks": mask})
        assert np.array_equal(target["masks"], mask[:, ::-1])

    @pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "uint16", "float16", "float32"])
    def test_masks_keep_their_type(self, dtype: str) -> None:
        A = pytest.importorskip("albumentations")
        mask = np.zeros((60, 80), dtype)
        mask[10:20, 5:25] = 1
        _, target = Compose([A.Rotate((90, 90), p=1)])(IMAGE, {"masks": mask})
        assert target["masks"].dtype == mask.dtype
        assert sorted(np.unique(target["masks"])) == [0, 1]

    def test_boxes_that_are_empty_are_removed(self) -> None:
        A = pytest.importorskip("albumentations")
        target = {"boxes": np.array([[5, 2, 5, 6], [1, 1, 9, 9.0]]), "labels": [1, 2]}
        _, found = Compose([A.HorizontalFlip(p=1)])(IMAGE, target)
        assert found["labels"] == [2]
        assert np.allclose(found["boxes"], [[71, 1, 79, 9]], atol=1e-3)

    def test_what_was_erased_from_the_tensor_moves_too(self) -> None:
        A = pytest.importorskip("albumentations")
        steps = [ToTensor(), RandomErasing(1)]
        with sample_scope(3):
            plain = Compose(steps)(IMAGE)
        with sample_scope(3):
            assert torch.equal(Compose([*steps, A.HorizontalFlip(p=1)])(IMAGE), plain.flip(2))

    def test_a_pipeline_with_parameters_of_boxes(self) -> None:
        A = pytest.importorskip("albumentations")
        params = A.BboxParams("pascal_voc")
        chain = Compose([A.Compose([A.HorizontalFlip(p=1)], bbox_params=params)])
        assert np.array_equal(chain(IMAGE), IMAGE[:, ::-1])
        with pytest.raises(ConfigError, match="leave bbox_params out"):
            chain(IMAGE, {"boxes": np.zeros((1, 4))})

    def test_boxes_beyond_the_edge_and_no_objects(self) -> None:
        A = pytest.importorskip("albumentations")
        chain = Compose([A.HorizontalFlip(p=1)])
        _, target = chain(IMAGE, {"boxes": np.array([[-3, 0, 95, 20.0]])})
        assert target["boxes"].tolist() == [pytest.approx([0, 0, 80, 20])]
        _, target = chain(IMAGE, {"masks": np.zeros((0, 60, 80), np.uint8), "boxes": np.zeros((0, 4))})
        assert target["masks"].shape == (0, 60, 80)
        assert target["boxes"].shape == (0, 4)


BACK = np.full((60, 80, 3), 7, np.uint8)
RETURNED = {
    "pillow": lambda image: Image.fromarray(image),
    "mirrored": lambda image: image[:, ::-1],
    "turned": np.rot90,
    "swapped": lambda image: image[:, :, ::-1],
    "read-only": lambda image: np.broadcast_to(np.uint8(7), (60, 80, 3)),
    "gray": lambda image: image[:, :, 0],
    "kept": lambda image: BACK,
}


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("step", [ColorJitter(0.9), RandomErasing(1), RandAugment(), HorizontalFlip(1)], ids=repr)
def test_what_a_callable_returns_is_not_written_to(returned: str, step: Any) -> None:
    image = IMAGE.copy()
    with sample_scope(3):
        made = Compose([RETURNED[returned], step])(image)
    with sample_scope(3):
        expected = step(np.array(np.asarray(RETURNED[returned](IMAGE.copy())), order="C"))
    assert np.array_equal(np.squeeze(made), expected)
    assert np.array_equal(image, IMAGE)
    assert (BACK == 7).all()


def test_targets_that_make_no_sense_and_those_that_do() -> None:
    for boxes in ([[5, 0, 1, 9.0]], [[0, 0, float("nan"), 9.0]]):
        with pytest.raises(ConfigError, match="left, top, right, bottom"):
            HorizontalFlip(1)(IMAGE, {"boxes": np.array(boxes)})
    with pytest.raises(ConfigError, match="masks is None"):
        HorizontalFlip(1)(IMAGE, {"masks": None})
    boxes = np.array([[0, 0, 5, 5], [30, 20, 50, 40], [35, 25, 45, 35.0]])
    _, target = CenterCrop(20)(IMAGE, {"boxes": boxes, "labels": (1, 2, 3), "scores": range(3)})
    assert target["labels"] == (2, 3)
    assert target["scores"] == [1, 2]


def test_arguments_of_the_wrong_kind() -> None:
    for make in (lambda: Compose(5), lambda: Compose(HorizontalFlip()), lambda: RandomResizedCrop(8, scale=0.5)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            make()
    assert RandomResizedCrop(np.int64(8)).size == (8, 8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes batches"):
        MixUp(num_classes=2)({"images": torch.zeros(2, 3, 4, 4)})
    assert MixUp(num_classes=3)((torch.zeros(2, 3, 4, 4), torch.tensor([1, 2], dtype=torch.uint16)))[1].shape == (2, 3)
