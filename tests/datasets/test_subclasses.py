"""A subclass that overrides ``__getitem__`` alone is honoured by every loader."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.sources.batched import BatchedDataset


class Doubled(ps.RankDataset):
    def __getitem__(self, index: int) -> Any:
        _, label, row = super().__getitem__(index)
        return 2 * label, row


class Noisy(ps.RankDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[2], random.random()


@pytest.mark.filterwarnings("ignore:Doubled does not declare itself pure")
def test_own_getitem_is_used_by_torchs_loader_and_ours(write_manifest: Callable[..., Path]) -> None:
    path = write_manifest(50)

    def make() -> Doubled:
        return Doubled(path, rank=0, world_size=1)

    expected = [make()[i] for i in range(50)]
    assert {label for label, _ in expected} == {0, 2, 4, 6, 8}
    for loader in (
        torch.utils.data.DataLoader(make(), batch_size=8),
        ps.DataLoader(make(), batch_size=8),
        ps.DataLoader(make(), batch_size=8, num_workers=2, executor="thread"),
        ps.DataLoader(make(), batch_size=8, num_workers=2, executor="process"),
    ):
        got = [pair for labels, rows in loader for pair in zip(labels.tolist(), rows.tolist(), strict=True)]
        assert got == expected, type(loader)


def test_own_getitem_is_not_taken_to_be_pure(write_manifest: Callable[..., Path]) -> None:
    """It may draw from the global generators, which a seeded loader then seeds for every sample."""
    dataset = Noisy(write_manifest(20), rank=0, world_size=1, seed=3)
    assert not dataset.pure

    def draws(**options: Any) -> list[float]:
        return [x for _, values in ps.DataLoader(dataset, batch_size=4, **options) for x in values.tolist()]

    dataset.set_epoch(0)
    inline = draws()
    dataset.set_epoch(0)
    assert draws(num_workers=2, executor="process") == inline


def test_a_getitem_over_a_pure_class_has_to_say_so_itself() -> None:
    class Pure(BatchedDataset):
        pure = True

        def load_samples(self, indices: Any, keys: Any) -> list[Any]:
            return list(indices)

    class Own(Pure):
        def __getitem__(self, index: int) -> Any:
            return index

    class Says(Pure):
        pure = True

        def __getitem__(self, index: int) -> Any:
            return index

    assert (Pure.pure, Own.pure, Says.pure) == (True, False, True)
