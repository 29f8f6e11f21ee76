"""`Rotate` and `CoarseDropout`: pixels, masks, boxes, and the sample's own draws in every executor."""

from __future__ import annotations

import pickle
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from penstock import DataLoader
from penstock.errors import ConfigError
from penstock.images.transforms import CoarseDropout, Compose, HorizontalFlip, RandomErasing, Rotate, ToTensor
from penstock.random import generator, sample_scope
from penstock.sources.batched import BatchedDataset

IMAGE = cv2.GaussianBlur(np.random.default_rng(0).integers(1, 256, (60, 80, 3), np.uint8), (5, 5), 0)


class Images(BatchedDataset):
    """One image, transformed for each sample."""

    pure = True

    def __init__(self, chain: Compose) -> None:
        self.chain = chain

    def __len__(self) -> int:
        return 12

    def load_samples(self, indices: Any, keys: Any) -> list[torch.Tensor]:
        found = []
        for _, key in zip(indices, keys, strict=True):
            with sample_scope(key):
                found.append(torch.from_numpy(self.chain(IMAGE)))
        return found


def test_repeat_in_every_executor() -> None:
    chain = Compose([Rotate(30), CoarseDropout(p=0.9)])
    assert chain.pure
    epochs = [
        torch.cat(list(DataLoader(Images(chain), 4, seed=1, **how)))
        for how in ({}, {"num_workers": 2}, {"num_workers": 2, "executor": "thread"})
    ]
    assert len({image.numpy().tobytes() for image in epochs[0]}) == 12
    assert all(torch.equal(found, epochs[0]) for found in epochs)


class TestRotate:
    def test_turns_counterclockwise_around_the_centre(self) -> None:
        square = IMAGE[:, :60]
        assert np.array_equal(Rotate((90, 90))(square), np.rot90(square))
        assert np.array_equal(Rotate((180, 180))(IMAGE), IMAGE[::-1, ::-1])
        assert np.array_equal(Rotate(0)(IMAGE), IMAGE)
        assert np.array_equal(Rotate(90, p=0)(IMAGE), IMAGE)

    @pytest.mark.parametrize("degrees", [40, (-10, 70.5)])
    def test_angles_are_drawn_from_the_interval(self, degrees: Any) -> None:
        low, high = (-40, 40) if degrees == 40 else degrees
        for key in range(20):
            with sample_scope(key):
                made = Rotate(degrees)(IMAGE)
            with sample_scope(key):
                angle = generator().uniform(low, high)
            expected = np.asarray(Image.fromarray(IMAGE).rotate(angle))
            assert (made != expected).any(axis=2).mean() < 0.03, "ties between two pixels go either way"

    @pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
    def test_pixels_from_outside_are_the_fill(self, interpolation: Any) -> None:
        made = Rotate((45, 45), interpolation, fill=(1, 2, 3))(np.full((40, 40, 3), 200, np.uint8))
        assert made[0, 0].tolist() == made[-1, -1].tolist() == [1, 2, 3]
        assert made[20, 20].tolist() == [200] * 3
        with pytest.raises(ConfigError, match="2 values, and the image 3 channels"):
            Rotate(10, fill=(1, 2))(IMAGE)

    @pytest.mark.parametrize(
        ("interpolation", "method"),
        [("nearest", cv2.INTER_NEAREST), ("bilinear", cv2.INTER_LINEAR), ("bicubic", cv2.INTER_CUBIC)],
    )
    def test_pixels_are_albumentations(self, interpolation: Any, method: int) -> None:
        A = pytest.importorskip("albumentations")
        for angle in (7.5, -60, 135):
            theirs = A.Rotate((angle, angle), interpolation=method, fill=(1, 2, 3), p=1)
            made = Rotate((angle, angle), interpolation, fill=(1, 2, 3))(IMAGE)
            assert np.array_equal(made, theirs(image=IMAGE)["image"])

    @pytest.mark.parametrize("size", [(40, 30), (40, 31), (41, 30), (41, 31)])
    @pytest.mark.parametrize("angle", [90, -90, 45, 7.3])
    def test_masks_are_moved_as_pixels_are(self, size: tuple[int, int], angle: float) -> None:
        """By 90 degrees in 40 x 31 pixels every position is between two pixels."""
        image = np.random.default_rng(0).integers(1, 256, (*size, 3), np.uint8)
        made, found = Rotate((angle, angle))(image, {"masks": image[:, :, 0].astype(np.int64)})
        assert np.array_equal(found["masks"], made[:, :, 0])

    @pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "uint16", "float16", "float32"])
    def test_masks_keep_their_type(self, dtype: str) -> None:
        mask = np.zeros((40, 30), dtype)
        mask[10:20, 5:25] = 1
        _, found = Rotate((90, 90))(np.zeros((40, 30, 3), np.uint8), {"masks": mask})
        assert found["masks"].dtype == mask.dtype
        assert sorted(np.unique(found["masks"])) == [0, 1]

    def test_boxes_follow(self) -> None:
        image = np.zeros((60, 60, 3), np.uint8)
        image[20:35, 30:50] = 255
        target = {"boxes": np.array([[30, 20, 50, 35.0], [0, 0, 2, 2]]), "labels": ["middle", "corner"]}
        for angle in range(-40, 41, 7):
            made, found = Rotate((angle, angle))(image, target)
            rows, columns = np.nonzero(made[:, :, 0])
            edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(found["boxes"][0] - edges).max() <= 1.5
            assert found["labels"] == (["middle"] if abs(angle) > 2 else ["middle", "corner"])

    def test_boxes_beyond_the_edge_and_no_objects(self) -> None:
        _, target = Rotate((0, 0))(IMAGE, {"boxes": np.array([[-3, 0, 95, 20.0]])})
        assert target["boxes"].tolist() == [pytest.approx([0, 0, 80, 20])]
        none = {"masks": np.zeros((0, 60, 80), np.uint8), "boxes": np.zeros((0, 4))}
        _, target = Rotate(10)(IMAGE, none)
        assert target["masks"].shape == (0, 60, 80)
        assert target["boxes"].shape == (0, 4)

    def test_what_was_erased_from_the_tensor_turns_too(self) -> None:
        with sample_scope(3):
            plain = Compose([ToTensor(), RandomErasing(1)])(IMAGE)
        with sample_scope(3):
            assert torch.equal(Compose([ToTensor(), RandomErasing(1), Rotate((180, 180))])(IMAGE), plain.flip(1, 2))

    def test_can_be_pickled_and_shows_its_settings(self) -> None:
        chain = Compose([Rotate(30), HorizontalFlip()])
        with sample_scope(1):
            one = chain(IMAGE)
        with sample_scope(1):
            assert np.array_equal(pickle.loads(pickle.dumps(chain))(IMAGE), one)
        assert "degrees=(-30.0, 30.0)" in repr(chain)

    @pytest.mark.parametrize("degrees", [-10, (10, -10), (1, 2, 3), float("nan")])
    def test_bad_angles(self, degrees: Any) -> None:
        with pytest.raises(ConfigError, match="degrees must be one number of 0 or more"):
            Rotate(degrees)


class TestCoarseDropout:
    @pytest.mark.parametrize("chain", [[], [ToTensor()], [ToTensor(), RandomErasing(0)]])
    def test_number_and_size_of_rectangles(self, chain: list[Any]) -> None:
        image = np.full((300, 400, 3), 200, np.uint8)
        sizes, counts = set(), set()
        for key in range(60):
            with sample_scope(key):
                made = Compose([*chain, CoarseDropout(3, 9, 7, min_holes=1, min_height=5, p=1)])(image)
            array = made if isinstance(made, np.ndarray) else made.permute(1, 2, 0).numpy()
            gone = (array == 0).all(axis=2).astype(np.uint8)
            count, _, stats, _ = cv2.connectedComponentsWithStats(gone, connectivity=4)
            counts.add(count - 1)
            if gone.sum() == (stats[1:, cv2.CC_STAT_WIDTH] * stats[1:, cv2.CC_STAT_HEIGHT]).sum():  # none overlap
                sizes |= {(int(stat[cv2.CC_STAT_HEIGHT]), int(stat[cv2.CC_STAT_WIDTH])) for stat in stats[1:]}
        assert counts == {1, 2, 3}
        assert {(height, 7) for height in range(5, 10)} <= sizes

    def test_reaches_every_corner(self) -> None:
        covered = np.zeros((12, 10), bool)
        for key in range(200):
            with sample_scope(key):
                covered |= CoarseDropout(1, 3, 2, p=1)(np.ones((12, 10, 3), np.uint8))[:, :, 0] == 0
        assert covered.all()

    @pytest.mark.parametrize(("channels", "value"), [(1, 7), (3, (1, 2, 3)), (3, 300), (4, 9)])
    def test_values(self, channels: int, value: Any) -> None:
        image = np.full((30, 40, channels), 200, np.uint8)
        with sample_scope(1):
            made = CoarseDropout(fill_value=value, p=1)(image)
        changed = (made != image).any(axis=2)
        assert 64 <= changed.sum() <= 8 * 64
        assert (made[changed] == np.minimum(value, 255)).all()
        assert (image == 200).all()
        with pytest.raises(ConfigError, match=f"2 values, and the image {channels} channels"):
            CoarseDropout(fill_value=(1, 2), p=1)(image)

    def test_an_image_that_is_smaller(self) -> None:
        assert not CoarseDropout(p=1)(np.ones((5, 4, 3), np.uint8)).any()

    def test_boxes_shrink_to_the_visible_part_and_masks_stay(self) -> None:
        image, mask = np.ones((8, 40, 3), np.uint8), np.ones((8, 40), np.uint8)
        boxes = np.array([[0.5, 0, 39.5, 8], [12.25, 1, 20, 7], [-3, 0, 2, 8], [5, 2, 5, 6]])
        for key in range(40):
            with sample_scope(key):
                made, found = CoarseDropout(1, 8, 16, p=1)(image, {"masks": mask, "boxes": boxes, "labels": range(4)})
            hole = np.flatnonzero(made[0, :, 0] == 0)
            begin, end = int(hole[0]), int(hole[-1]) + 1
            expected, labels = [], []
            for number, (left, top, right, bottom) in enumerate(boxes.clip(0)[:3]):
                left, right = end if begin <= left < end else left, begin if begin < right <= end else right
                if left < right:
                    expected.append([left, top, right, bottom])
                    labels.append(number)
            assert found["boxes"].tolist() == expected
            assert found["labels"] == labels
            assert found["masks"].all()

    def test_bad_arguments(self) -> None:
        for options in ({"max_holes": 0}, {"min_height": 9}, {"p": 2}, {"fill_value": {}}):
            with pytest.raises(ConfigError):
                CoarseDropout(**options)  # type: ignore[arg-type]
