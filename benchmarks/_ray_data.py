"""Datasets of `ray_executor`, apart from it: a worker imports the module of its dataset, and all that it imports."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Cheap(Dataset[Any]):
    """28 x 28 pixels to a tensor, as in MNIST's examples."""

    pure = True

    def __init__(self, n: int) -> None:
        self.n = n
        self.pixels = np.random.default_rng(0).integers(0, 256, (100, 28, 28), dtype=np.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.pixels[index % 100]).to(torch.float32).div_(255)[None], index % 10


class Large(Dataset[Any]):
    """Rows of 150 kB: 64 of them are 9.6 MB."""

    pure = True

    def __init__(self, n: int) -> None:
        self.n = n
        self.row = torch.arange(150_000, dtype=torch.int64).to(torch.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row


class Sleepy(Dataset[Any]):
    """A sample that waits, as for storage."""

    pure = True

    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index
