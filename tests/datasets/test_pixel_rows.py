"""`ImageDataset` over rows of arrays: the same items one by one, in a batch, and for torch's loader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import ArrayDataset, DataLoader, ImageDataset, Subset
from penstock.errors import ConfigError, ImageError
from penstock.images import native
from penstock.images.transforms import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from penstock.random import sample_scope
from penstock.stages import collect

N = 30
CHAINS: dict[str, Any] = {
    "none": None,
    "crop": [RandomCrop(10, padding=4, fill=(1, 2, 3)), HorizontalFlip()],
    "tensor": [RandomResizedCrop((9, 8)), ToTensor(torch.float16, channels_last=False), Normalize([0.5], [0.2])],
    "some twice resized": [RandomResizedCrop((14, 10), scale=(0.5, 1.0)), Resize((14, 9))],
    "not planned": [RandomCrop(9), ColorJitter(0.4)],
}


@pytest.fixture
def pixels(tmp_path: Path) -> np.ndarray[Any, Any]:
    made = np.random.default_rng(0).integers(0, 256, (N, 14, 10, 3), np.uint8)
    np.save(tmp_path / "images.npy", made)
    np.save(tmp_path / "labels.npy", np.arange(N, dtype=np.uint8))
    np.save(tmp_path / "boxes.npy", np.arange(4 * N, dtype=np.float32).reshape(N, 4))
    return made


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("chain", CHAINS)
def test_items(
    chain: str, extension: bool, pixels: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension:
        monkeypatch.setattr(native, "_jpeg", None)
    source = ArrayDataset(str(tmp_path / "images.npy"), labels=str(tmp_path / "labels.npy"), seed=3)
    dataset = ImageDataset(source, transform=CHAINS[chain])
    steps = Compose(CHAINS[chain] or [])
    rows, keys = source.rows(range(N)), source.keys(range(N))
    images, labels = next(iter(DataLoader(dataset, N)))
    assert labels.dtype is torch.int64
    for index, (row, key) in enumerate(zip(rows.tolist(), keys, strict=True)):
        with sample_scope(key):
            expected = steps(torch.from_numpy(pixels[row]).permute(2, 0, 1))
        image, label = dataset[index]
        assert (label, int(labels[index])) == (row, row)
        assert torch.equal(image, expected)
        assert torch.equal(images[index], expected)
        assert images[index].stride() == image.stride()
    for loader in (TorchDataLoader(dataset, 7), DataLoader(dataset, 7, num_workers=1)):
        assert torch.equal(torch.cat([batch[0] for batch in loader]), images)
    items = next(iter(DataLoader(pickle.loads(pickle.dumps(dataset)), N, collate_fn=list)))
    assert torch.equal(torch.stack([image for image, _ in items]), images)


@pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
def test_a_batch_has_no_items(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    dataset = ImageDataset(ArrayDataset(str(tmp_path / "images.npy"), seed=3), transform=[RandomCrop(8)])
    dataset.load_samples = None  # type: ignore[method-assign, assignment]
    assert next(iter(DataLoader(dataset, 5))).shape == (5, 3, 8, 8)
    assert next(iter(DataLoader(Subset(dataset, [3, 4, 9]), 3))).shape == (3, 3, 8, 8)


@pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
def test_a_worker_without_the_extension(
    pixels: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ImageDataset(ArrayDataset(str(tmp_path / "images.npy"), seed=3), transform=CHAINS["crop"])
    expected = next(iter(DataLoader(dataset, 5)))
    monkeypatch.setattr(native, "_jpeg", None)
    assert torch.equal(next(iter(DataLoader(dataset, 5))), expected)


@pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
def test_nothing_is_decoded(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    source = ArrayDataset(str(tmp_path / "images.npy"), seed=3)
    dataset = ImageDataset(source, transform=[RandomResizedCrop(8), ToTensor()])
    collect()
    dataset.fetch_batch(range(N), source.keys(range(N)), lambda shape, dtype: torch.empty(shape, dtype=dtype))
    stages = collect()
    assert stages.keys() == {"read", "augment", "resize"}
    assert min(stages.values()) > 0


@pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
def test_steps_that_change(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    crop = RandomCrop(8)
    dataset = ImageDataset(ArrayDataset(str(tmp_path / "images.npy")), transform=[crop])
    crop.size = 9, 9
    with pytest.raises(ConfigError, match="steps of transform= were changed"):
        next(iter(DataLoader(dataset, 3)))


def test_labels(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "images.npy")
    alone = ImageDataset(ArrayDataset(path, shuffle="none"))
    assert np.array_equal(alone[4].permute(1, 2, 0), pixels[4])
    assert torch.equal(next(iter(DataLoader(alone, 3)))[2], alone[2])
    with pytest.raises(ConfigError, match="row=True needs labels"):
        ImageDataset(ArrayDataset(path), row=True)
    boxes = ImageDataset(ArrayDataset(path, labels=str(tmp_path / "boxes.npy"), shuffle="none"), row=True)
    np.save(tmp_path / "waves.npy", np.full(N, 1 + 2j, np.complex64))
    waves = ImageDataset(ArrayDataset(path, labels=str(tmp_path / "waves.npy")))
    assert (waves[0][1], next(iter(DataLoader(waves, 3)))[1][2]) == (1 + 2j, 1 + 2j)
    image, box, row = boxes[5]
    assert (box.tolist(), row) == ([20, 21, 22, 23], 5)
    found = next(iter(DataLoader(boxes, 6)))
    assert [part.dtype for part in found] == [torch.uint8, torch.float32, torch.int64]
    assert torch.equal(found[1][5], box)
    assert torch.equal(found[0][5], image)


@pytest.mark.parametrize("shape", [(14, 10), (14, 10, 1)])
def test_grey_images(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = np.random.default_rng(0).integers(0, 256, (N, *shape), np.uint8)
    np.save(tmp_path / "images.npy", made)
    crop = RandomCrop((8, 12), padding=2, fill=(7,))
    for chain in ([crop], [crop, ToTensor(channels_last=False), Normalize([0.5], [0.2])]):
        dataset = ImageDataset(ArrayDataset(str(tmp_path / "images.npy"), seed=1), transform=chain)
        assert dataset.makes_batches == native.is_available()
        batch = next(iter(DataLoader(dataset, 6)))
        assert batch.shape == (6, 1, 8, 12)
        assert batch.is_contiguous()
        assert torch.equal(batch, torch.stack([dataset[index] for index in range(6)]))
    for wrong in (RandomCrop(9, padding=9, fill=(1, 2, 3)), Compose([ToTensor(), Normalize([0.5] * 3, [0.2] * 3)])):
        dataset = ImageDataset(ArrayDataset(str(tmp_path / "images.npy"), seed=1), transform=[wrong])
        with pytest.raises(ConfigError, match="the image 1 channels"):
            next(iter(DataLoader(dataset, 6)))


def test_size_and_flip(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    source = ArrayDataset(str(tmp_path / "images.npy"), seed=1)
    plain = ImageDataset(source, size=(20, 6), flip=True)
    chain = ImageDataset(source, transform=[Resize((20, 6)), HorizontalFlip()])
    assert torch.equal(next(iter(DataLoader(plain, N))), next(iter(DataLoader(chain, N))))
    assert ImageDataset(source, size=7)[0].shape == (3, 7, 7)
    with pytest.raises(ConfigError, match="size must be a positive int"):
        ImageDataset(source, size=True)


@pytest.mark.parametrize("row", [False, True])
def test_a_target_takes_the_place_of_labels(row: bool, pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    def target(record: Any) -> dict[str, Any]:
        return {"masks": pixels[record.row, :, :, 0], "number": record.row}

    source = ArrayDataset(str(tmp_path / "images.npy"), shuffle="none")
    dataset = ImageDataset(source, transform=[RandomCrop(9)], target=target, row=row)
    for item in (dataset[4], dataset.__getitems__([3, 4])[1], next(iter(DataLoader(dataset, 5, collate_fn=list)))[4]):
        assert np.array_equal(item[0][0], item[1]["masks"])
        assert item[1]["number"] == 4
        assert item[2:] == ((4,) if row else ())


def test_errors(pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    source = ArrayDataset(str(tmp_path / "images.npy"), labels=str(tmp_path / "labels.npy"), seed=1)
    with pytest.raises(ConfigError, match=r"uint8 rows of .*float32"):
        ImageDataset(ArrayDataset(str(tmp_path / "boxes.npy")))
    with pytest.raises(ConfigError, match="index="):
        ImageDataset(source, index=True)
    with pytest.raises(ConfigError, match=r"14 x 10 pixels .*max_pixels=139"):
        ImageDataset(source, max_pixels=139)
    for shape in ((2, 0, 4, 3), (2, 1, 65536, 3)):
        np.save(tmp_path / "sides.npy", np.zeros(shape, np.uint8))
        with pytest.raises(ConfigError, match="1 to 65,535 pixels a side"):
            ImageDataset(ArrayDataset(str(tmp_path / "sides.npy")))
    with pytest.raises(ImageError, match=r"images\.npy \.\.\.: row \d+.*smaller than the crop"):
        next(iter(DataLoader(ImageDataset(source, transform=[RandomCrop(40)]), 4)))
