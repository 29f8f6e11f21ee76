"""Datasets of `loader_policies`, apart from it: a worker imports the module of its dataset, with all its imports."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torch.utils.data import Dataset, get_worker_info

import penstock as ps

__all__ = ["Deadly", "Far", "FarTogether", "Slow", "SlowTogether", "Timed", "Tiny"]


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
    """Samples that take ``seconds``; one in ``rare``, and all in one worker, 20 and 10 times that."""

    def __init__(self, length: int, seconds: float, rare: int | None = None) -> None:
        super().__init__(length)
        self.seconds, self.rare = seconds, rare
        self.slow_worker = -1

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        slower = 10 if info is not None and info.id == self.slow_worker else 1
        time.sleep(self.seconds * slower * (20 if self.rare and index % self.rare == 0 else 1))
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


class Timed(Dataset[tuple[int, float]]):
    """Samples that take ``seconds``, and a draw with each of them."""

    pure = True

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        time.sleep(self.seconds)
        return index, ps.generator().normal()


class Deadly(Tiny):
    """The ``bad`` sample ends its worker."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.bad = -1

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            os._exit(1)
        return index
