"""Datasets of `loader_policies`, apart from it: a worker imports the module of its dataset, with all its imports."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.utils.data import Dataset

__all__ = ["Far", "FarTogether", "Slow", "SlowTogether", "Tiny"]


class Tiny(Dataset[int]):
    """Samples that take no time."""

    pure = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Slow(Tiny):
    """Samples that take ``seconds``; one in ``rare`` takes 20 times that."""

    def __init__(self, length: int, seconds: float, rare: int | None = None) -> None:
        super().__init__(length)
        self.seconds, self.rare = seconds, rare

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds * (20 if self.rare and index % self.rare == 0 else 1))
        return index


class SlowTogether(Slow):
    """The same, one after the other all the same, but it cannot be divided."""

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [self[index] for index in indices]


class Far(Tiny):
    """Rows of a storage that takes ``seconds`` to answer a request."""

    def __init__(self, length: int, seconds: float) -> None:
        super().__init__(length)
        self.seconds = seconds

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class FarTogether(Far):
    """The same, asked for all rows of a batch by one request."""

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        time.sleep(self.seconds)
        return list(indices)
