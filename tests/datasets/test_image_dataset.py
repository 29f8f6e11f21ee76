"""`ImageDataset`: decoded, resized and mirrored images, over every source, in every executor."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from full_run import full_only
from loader_conformance import check_resume
from loader_support import EXECUTORS, draw_load
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from penstock import DataLoader, ImageDataset, LoadImage, Manifest, MPDataset, RankDataset
from penstock.errors import ConfigError, ImageError, ManifestIOError, PartitionError, StateError
from penstock.images.decode import read_image

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve JPEGs of several sizes, each with a red left and a blue right half, and their meta file."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(N):
        height, width = 20 + number, 30 + 2 * number
        image = np.zeros((height, width, 3), np.uint8)
        image[:, : width // 2] = (0, 0, 200)  # BGR: red
        image[:, width // 2 :] = (200, 0, 0)
        cv2.imwrite(str(folder / f"{number}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 95])
    (folder / "meta.txt").write_text("".join(f"{number}.jpg {number % 3}\n" for number in range(N)))
    return folder


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return Manifest.open(folder / "meta.txt", root=folder)


def sources(manifest: Manifest) -> dict[str, Any]:
    return {
        "manifest": manifest,
        "rank": RankDataset(manifest, rank=0, world_size=2, seed=1),
        "stream": MPDataset(manifest, batch_size=3, rank=0, world_size=2, seed=1),
    }


def test_items(manifest: Manifest) -> None:
    images = ImageDataset(manifest)
    assert len(images) == N
    image, label = images[4]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 24, 38)
    assert image.stride() == (1, 38 * 3, 3), "channels_last in memory"
    assert label == 1
    assert np.array_equal(image.permute(1, 2, 0).numpy(), read_image(manifest[4].path))
    assert image[0, 10, 5] > 150 > image[2, 10, 5], "RGB: the left half is red"
    assert torch.equal(images[-1][0], images[N - 1][0])
    with pytest.raises(IndexError):
        images[N]


@pytest.mark.parametrize(
    ("size", "shape"), [(16, (16, 16)), ((10, 50), (10, 50)), ((64, 48), (64, 48)), ([8, 9], (8, 9))]
)
def test_size(manifest: Manifest, size: Any, shape: tuple[int, int]) -> None:
    for image, _ in ImageDataset(manifest, size=size):  # type: ignore[attr-defined]
        assert image.shape == (3, *shape)
        assert image.dtype == torch.uint8
        assert image.permute(1, 2, 0).is_contiguous()
        left, right = image[:, :, 1].float().mean(1), image[:, :, -2].float().mean(1)
        assert left[0] > 150 > left[2]
        assert right[2] > 150 > right[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_of_several_sizes_say_what_to_do(manifest: Manifest, num_workers: int) -> None:
    """Who leaves `size=` out has torch's words about shapes, and ours about what was forgotten."""
    with pytest.raises(RuntimeError, match="equal size") as caught:
        next(iter(DataLoader(ImageDataset(manifest), batch_size=4, num_workers=num_workers)))
    assert any("size= or transform= of ImageDataset" in note for note in [*caught.value.__notes__, str(caught.value)])


def test_resizing_down_looks_at_all_pixels(tmp_path: Path) -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    image[::4] = 200  # linear interpolation looks at the second and third row of four
    cv2.imwrite(str(tmp_path / "stripes.png"), image)
    (tmp_path / "meta.txt").write_text("stripes.png 0\n")
    made, _ = ImageDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path), size=10)[0]
    assert (made[:, 1:-1] == 50).all()


def mirrored(image: torch.Tensor) -> bool:
    return bool(image[2, 2, 1] > image[0, 2, 1])


@full_only("workers for each", but=["inline", "thread", "rank-process"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("source", ["manifest", "rank", "stream"])
def test_batches_and_flips_are_the_same_everywhere(manifest: Manifest, executor: str, source: str) -> None:
    def passes(executor: str) -> list[Any]:
        dataset = ImageDataset(sources(manifest)[source], size=16, flip=True)
        loader = DataLoader(dataset, batch_size=3, executor=executor, num_workers=EXECUTORS[executor], seed=1)
        assert len(loader) == (4 if source == "manifest" else 2)
        return [batch for _ in range(3) for batch in loader]

    found, expected = passes(executor), passes("inline")
    flips = set()
    for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert labels.tolist() == expected_labels.tolist()
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.shape == (3, 3, 16, 16)
        assert images.is_contiguous(memory_format=torch.channels_last)
        flips |= {mirrored(image) for image in images}
    assert flips == {True, False}


def test_flips_change_with_the_epoch_and_repeat_with_the_seed(manifest: Manifest) -> None:
    def flips(seed: int, epoch: int) -> list[bool]:
        loader = DataLoader(ImageDataset(manifest, size=8, flip=True), batch_size=N, seed=seed)
        loader.set_epoch(epoch)
        return [mirrored(image) for image in next(iter(loader))[0]]

    assert flips(0, 0) == flips(0, 0)
    assert len({tuple(flips(seed, epoch)) for seed in range(3) for epoch in range(3)}) >= 8


def test_by_hand_over_a_rank_data_set_the_flips_are_the_loaders(manifest: Manifest) -> None:
    images = ImageDataset(RankDataset(manifest, rank=1, world_size=2, seed=5), size=8, flip=True)
    by_hand = [mirrored(images[index][0]) for index in range(len(images))]
    loader = DataLoader(
        ImageDataset(RankDataset(manifest, rank=1, world_size=2, seed=5), size=8, flip=True), batch_size=2
    )
    assert [mirrored(image) for batch, _ in loader for image in batch] == by_hand
    under_torch = TorchDataLoader(images, 4, num_workers=1)
    assert [mirrored(image) for batch, _ in under_torch for image in batch] == by_hand


def test_under_torchs_loader(manifest: Manifest) -> None:
    for source in ("manifest", "rank", "stream"):
        dataset = ImageDataset(sources(manifest)[source], size=8)
        labels = [TorchDataLoader(dataset, 3, num_workers=workers) for workers in (0, 2)]
        first, second = ([label for _, batch in loader for label in batch.tolist()] for loader in labels)
        assert first == second
        assert len(first) == (N if source == "manifest" else N // 2)


@pytest.mark.parametrize("source", ["rank", "stream"])
def test_epoch_and_state_are_the_sources(manifest: Manifest, source: str) -> None:
    def make() -> DataLoader[Any]:
        images = ImageDataset(sources(manifest)[source], size=8, flip=True)
        return DataLoader(images, batch_size=3, collate_fn=torch.utils.data.default_collate)

    check_resume(make)
    images = ImageDataset(sources(manifest)[source])
    assert images.epoch == 0
    images.set_epoch(3)
    assert images.epoch == images.source.epoch == 3  # type: ignore[attr-defined]


def test_splitting_twice_is_refused_through_the_images(manifest: Manifest) -> None:
    images = ImageDataset(RankDataset(manifest, rank=0, world_size=2))
    with pytest.raises(PartitionError, match="would split it again"):
        DataLoader(images, sampler=torch.utils.data.DistributedSampler(images, 2, 0))
    DataLoader(ImageDataset(manifest), sampler=torch.utils.data.DistributedSampler(ImageDataset(manifest), 2, 0))


def test_loader_states_know_the_manifest(manifest: Manifest, folder: Path) -> None:
    state = DataLoader(ImageDataset(manifest), shuffle="global").state_dict()
    other = Manifest.open(folder / "meta.txt", root=folder)[::-1]
    with pytest.raises(StateError, match="fingerprint"):
        DataLoader(ImageDataset(other), shuffle="global").load_state_dict(state)


def test_pickles(manifest: Manifest) -> None:
    for source in sources(manifest).values():
        dataset = ImageDataset(source, size=8, flip=True)
        copy = pickle.loads(pickle.dumps(dataset))
        assert type(copy) is type(dataset)
        assert len(copy) == len(dataset)
        one, two = (next(iter(TorchDataLoader(which, 3)))[1].tolist() for which in (dataset, copy))
        assert one == two
    assert isinstance(ImageDataset(sources(manifest)["stream"]), IterableDataset)


def test_load_image_serves_other_data_sets(manifest: Manifest) -> None:
    dataset = RankDataset(manifest, seed=1, load=LoadImage(size=8, flip=True))
    assert dataset.pure
    image, label = dataset[0]
    assert image.shape == (3, 8, 8)
    assert label == dataset.records([0])[0].label
    pickle.loads(pickle.dumps(dataset))


class TestBadInput:
    @pytest.mark.parametrize("size", [0, -3, (0, 5), (5, -1), (1, 2, 3), "32", 3.5, "ab", (None, 3), True])
    def test_sizes(self, manifest: Manifest, size: Any) -> None:
        with pytest.raises(ConfigError, match="size must be a positive int"):
            ImageDataset(manifest, size=size)

    def test_sources(self, manifest: Manifest, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="needs a source of records"):
            ImageDataset([1, 2, 3])
        for dataset in (RankDataset(manifest, load=draw_load), MPDataset(manifest, batch_size=2, load=draw_load)):
            with pytest.raises(ConfigError, match="has its own load="):
                ImageDataset(dataset)
        with pytest.raises(ManifestIOError, match=r"nowhere\.txt"):
            ImageDataset(tmp_path / "nowhere.txt")

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_images(self, folder: Path, tmp_path: Path, executor: str) -> None:
        """Every error names the path, and the others come through."""
        good = (folder / "0.jpg").read_bytes()
        (tmp_path / "good.jpg").write_bytes(good)
        (tmp_path / "cut.jpg").write_bytes(good[: len(good) // 2])
        (tmp_path / "empty.jpg").write_bytes(b"")
        (tmp_path / "text.jpg").write_text("not an image")
        (tmp_path / "folder.jpg").mkdir()
        names = ["good.jpg", "cut.jpg", "empty.jpg", "text.jpg", "folder.jpg", "missing.jpg", "good.jpg"]
        (tmp_path / "meta.txt").write_text("".join(f"{name} 1\n" for name in names))
        images = ImageDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path), size=8)
        loader = DataLoader(images, executor=executor, num_workers=min(1, EXECUTORS[executor]))
        iterator = iter(loader)
        for name in names:
            if name == "good.jpg":
                assert next(iterator)[0].shape == (1, 3, 8, 8)
                continue
            with pytest.raises(ImageError, match=name):
                next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_real_photographs(data_dir: Path, tmp_path: Path) -> None:
    """ImageNet files, through every source; the same pixels as the decoder gives alone."""
    files = sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:16]
    if not files:
        pytest.skip("no imagenet-sample")
    path = tmp_path / "meta.txt"
    path.write_text("".join(f"{file.name} {number}\n" for number, file in enumerate(files)))
    manifest = Manifest.open(path, root=files[0].parent)
    whole = ImageDataset(manifest)
    for number, file in enumerate(files):
        image, label = whole[number]
        assert label == number
        assert np.array_equal(image.permute(1, 2, 0).numpy(), read_image(file))
    make: list[Callable[[], Any]] = [
        lambda: ImageDataset(manifest, size=64, flip=True),
        lambda: ImageDataset(RankDataset(manifest, seed=2), size=64, flip=True),
        lambda: ImageDataset(MPDataset(manifest, batch_size=4, seed=2), size=64, flip=True),
    ]
    for source in make:
        found = []
        for how in ({}, {"executor": "thread", "num_workers": 2}, {"num_workers": 2}):
            found.append(list(DataLoader(source(), batch_size=4, seed=2, **how)))  # type: ignore[call-overload]
        assert sorted(label for _, labels in found[0] for label in labels.tolist()) == list(range(len(files)))
        for batches in found[1:]:
            assert all(
                torch.equal(a[0], b[0]) and a[1].tolist() == b[1].tolist()
                for a, b in zip(batches, found[0], strict=True)
            )
