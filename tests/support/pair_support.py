"""A data set of pairs: the row, and the first draw of its generator."""

from __future__ import annotations

from typing import Any

import torch

from penstock import generator

__all__ = ["Pairs"]


class Pairs(torch.utils.data.Dataset[Any]):
    """``n`` rows, numbered from ``base`` on."""

    pure = True

    def __init__(self, n: int, *, base: int = 0) -> None:
        self.base, self.n = base, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self.base + row, int(generator().integers(1 << 40))
