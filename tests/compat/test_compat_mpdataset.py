"""Programs written for MPDataset (indices) and ZCls' image data set of that name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pairwise import each_value
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler

import penstock as ps
from penstock.compat.mpdataset import DistributedSampler, MPDataset
from penstock.errors import ConfigError, ImageError, ManifestError, PartitionError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def indices(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


class TestIndices:
    @pytest.mark.parametrize(("workers", "shuffle"), each_value([0, 1, 2, 5], [False, True]))
    def test_the_loop_of_the_original(self, workers: int, shuffle: bool) -> None:
        """Built once; per epoch ``set_epoch``; no sampler."""
        parts: list[list[list[int]]] = []
        for rank in range(3):
            dataset = MPDataset(100, shuffle=shuffle, num_gpus=3, rank_id=rank)
            loader = DataLoader(dataset, num_workers=workers, batch_size=8, persistent_workers=workers > 0)
            epochs = []
            for epoch in range(2):
                dataset.set_epoch(epoch)
                epochs.append(indices(loader))
            assert len(dataset) == 34
            parts.append(epochs)
        for epoch in range(2):
            assert {len(part[epoch]) for part in parts} == {34}
            assert {index for part in parts for index in part[epoch]} == set(range(100))
        assert (parts[0][0] == parts[0][1]) == (not shuffle)

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_with_batch_size_workers_do_not_show(self, drop_last: bool) -> None:
        found = []
        for workers in (0, 1, 2, 5):
            dataset = MPDataset(29, True, 4, 1, 3, drop_last, batch_size=3)
            loader = DataLoader(dataset, num_workers=workers, batch_size=3, drop_last=False)
            found.append([batch.tolist() for batch in loader])
            assert sum(map(len, found[-1])) == len(dataset) == (6 if drop_last else 8)
        assert all(batches == found[0] for batches in found)

    def test_epoch_and_drop_last_count_on_one_gpu(self) -> None:
        first, second = (list(MPDataset(11, shuffle=True, epoch=epoch)) for epoch in (0, 1))
        assert first != second
        assert sorted(first) == sorted(second) == list(range(11))
        assert len(list(MPDataset(11, drop_last=True, batch_size=4))) == 8
        moved = MPDataset(11, shuffle=True)
        moved.set_epoch(1)
        assert list(moved) == second

    @pytest.mark.parametrize(("length", "gpus"), [(0, 1), (0, 3), (1, 1), (3, 8)])
    def test_few(self, length: int, gpus: int) -> None:
        for shuffle in (False, True):
            seen = [index for rank in range(gpus) for index in MPDataset(length, shuffle, gpus, rank)]
            assert set(seen) == set(range(length))
            assert sum(len(list(MPDataset(length, shuffle, gpus, rank, 0, True))) for rank in range(gpus)) == (
                length // gpus * gpus
            )

    def test_pickles(self) -> None:
        dataset = pickle.loads(pickle.dumps(MPDataset(10, True, 2, 1, 5)))
        assert list(dataset) == list(MPDataset(10, True, 2, 1, 5))
        assert isinstance(dataset, MPDataset)

    def test_bad_input(self) -> None:
        with pytest.raises(PartitionError):
            MPDataset(-1)
        with pytest.raises(PartitionError, match="rank 2 is outside"):
            MPDataset(10, num_gpus=2, rank_id=2)
        with pytest.raises(PartitionError):
            MPDataset(10, num_gpus=0)
        with pytest.raises(ConfigError, match="batch_size must be positive"):
            MPDataset(10, batch_size=0)

    def test_distributed_sampler_over_a_number(self) -> None:
        for shuffle in (False, True):
            for rank in range(3):
                ours = DistributedSampler(10, 3, rank, shuffle, 5)
                theirs = TorchDistributedSampler(range(10), 3, rank, shuffle, 5)  # type: ignore[arg-type]
                for epoch in (0, 2):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    assert list(ours) == list(theirs)
                    assert len(ours) == len(theirs)


class TestImages:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "cls.csv").write_text("red\nblue\n")
        for number in range(10):
            image = np.zeros((8, 8, 3), np.uint8)
            image[:] = (0, 0, 250) if number % 2 == 0 else (250, 0, 0)  # BGR
            cv2.imwrite(str(tmp_path / f"{number}.png"), image)
        (tmp_path / "data.csv").write_text("".join(f"{number}.png,,{number % 2}\n" for number in range(10)))
        return tmp_path

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_loop_of_zcls(self, root: Path, workers: int) -> None:
        seen = []
        for rank in range(2):
            dataset: Any = MPDataset(
                str(root),
                transform=Halve(),
                target_transform=str,
                top_k=(1, 2),
                keep_rgb=False,
                shuffle=True,
                num_gpus=2,
                rank_id=rank,
                drop_last=False,
            )
            assert dataset.classes == ["red", "blue"]
            assert len(dataset) == 5
            loader = DataLoader(dataset, num_workers=workers, batch_size=1, persistent_workers=workers > 0)
            orders = []
            for epoch in range(2):
                dataset.set_epoch(epoch)
                order = []
                for image, target in loader:
                    assert image.shape == (1, 8, 8, 3)
                    channel = 2 if target == ("0",) else 0  # BGR, as the original
                    assert image[0, 4, 4, channel] == 125
                    order.append(target)
                orders.append(order)
            seen += orders
        assert len(seen) == 4

    def test_keep_rgb(self, root: Path) -> None:
        image, target = next(iter(MPDataset(root=root, keep_rgb=True)))
        assert target == 0
        assert image[0, 0].tolist() == [250, 0, 0]

    def test_under_the_penstock_loader(self, root: Path) -> None:
        dataset: Any = MPDataset(root, shuffle=True, batch_size=4)
        for how in ({}, {"num_workers": 2}):
            targets = torch.cat([target for _, target in ps.DataLoader(dataset, batch_size=4, **how)])  # type: ignore[arg-type]
            assert sorted(targets.tolist()) == [0] * 5 + [1] * 5

    def test_bad_input(self, root: Path, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match=r"cls\.csv: cannot be read"):
            MPDataset(str(tmp_path / "nowhere"))
        (root / "data.csv").write_text("0.png,,0\nmissing.png,,1\n")
        dataset = iter(MPDataset(root))
        next(dataset)
        with pytest.raises(ImageError, match=r"missing\.png"):
            next(dataset)
        (root / "data.csv").write_text("0.png,,zero\n")
        with pytest.raises(ManifestError, match="zero"):
            next(iter(MPDataset(root)))


class Halve:
    def __call__(self, image: Any) -> Any:
        return image // 2


def test_folder_with_drop_last_repeats_nothing(tmp_path: Path) -> None:
    (tmp_path / "cls.csv").write_text("only\n")
    (tmp_path / "data.csv").write_text("".join(f"{i}.jpg,,0\n" for i in range(10)))
    shares = [MPDataset(tmp_path, num_gpus=3, rank_id=rank, drop_last=True) for rank in range(3)]
    rows = [row for share in shares for row in share.samples.rows(range(len(share))).tolist()]  # type: ignore[attr-defined]
    assert len(rows) == len(set(rows)) == 9
