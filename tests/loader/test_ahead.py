"""Running ahead: while one batch is late, the other workers go on with later ones, as far as memory allows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from torch.utils.data import Dataset

from penstock import DataLoader

LATE = 6
"""The batch that is late. Batches are single samples; its worker makes the even ones."""

pytestmark = pytest.mark.parametrize("pure", [False, True], ids=["undeclared", "pure"])


class Late(Dataset[torch.Tensor]):
    """Each sample leaves a file. One waits until nothing new was begun for a while."""

    def __init__(self, folder: Path, nbytes: int, pure: bool) -> None:
        self.folder, self.nbytes, self.pure = folder, nbytes, pure

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.folder / str(index)).touch()
        time.sleep(0.003)  # batches that are made more quickly are all begun sooner
        if index == LATE:
            begun = 0
            while begun != (begun := len(list(self.folder.iterdir()))):
                time.sleep(0.5)
            (self.folder / "late").write_text(str(max(int(path.name) for path in self.folder.iterdir())))
        return torch.full((self.nbytes,), index, dtype=torch.uint8)


def furthest(folder: Path, nbytes: int, pure: bool, **options: Any) -> int:
    """The last batch that was begun while one was late. All arrive in order."""
    dataset = Late(folder, nbytes, pure)
    with DataLoader(dataset, batch_size=1, num_workers=2, executor="process", timeout=60, **options) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(80))
    return int((folder / "late").read_text())


@full_only("workers for each", but=["pure"])
def test_as_far_as_16_times_as_many(tmp_path: Path, pure: bool) -> None:
    last = furthest(tmp_path, 1 << 10, pure)
    assert LATE + 57 < last < LATE + 64


@full_only("workers for each", but=["undeclared"])
def test_as_far_as_the_bound_allows(tmp_path: Path, pure: bool) -> None:
    last = furthest(tmp_path, 1 << 20, pure, max_bytes_in_flight=10 << 20)
    assert LATE + 7 <= last < LATE + 10


@full_only("much memory for each", but=["pure"])
def test_as_far_as_32_mib_without_one(tmp_path: Path, pure: bool) -> None:
    last = furthest(tmp_path, 4 << 20, pure)
    assert LATE + 5 <= last < LATE + 8


@full_only("workers for each", but=["pure"])
def test_no_further_than_the_user_says(tmp_path: Path, pure: bool) -> None:
    assert furthest(tmp_path, 1 << 10, pure, prefetch_factor=2) < LATE + 4
