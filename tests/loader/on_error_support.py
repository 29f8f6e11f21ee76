"""Data sets with bad samples, in a module that worker processes can import."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from loader_support import Squares

import penstock as ps
from penstock.loader.on_error import Failure


class BadDraws(Squares):
    """Item, what `penstock.generator` draws for it; it is drawn from before a bad sample raises."""

    pure = True

    def __init__(self, n: int, bad: Sequence[int], error: type[BaseException] = ValueError) -> None:
        super().__init__(n)
        self.bad = frozenset(bad)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        drawn = float(ps.generator().random())
        if index in self.bad:
            ps.generator().random(index % 5)
            raise self.error(f"sample {index} is bad")
        return index, drawn


class BadGlobalDraws(BadDraws):
    """Draws from the global generators too."""

    pure = False

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        return *super().__getitem__(index), *drawn


class BadBatches(BadDraws):
    """A data set of somebody's that makes whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Lengthless:
    """Map-style, for a sampler that knows which indices there are."""

    pure = True

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("three is bad")
        return index


def bad_load(record: ps.Record) -> tuple[int, float]:
    """Every fifth row is bad."""
    drawn = float(ps.generator().random())
    if record.row % 5 == 0:
        raise ValueError(f"row {record.row} is bad")
    return record.row, drawn


bad_load.pure = True  # type: ignore[attr-defined]


def skip_even(failure: Failure) -> str:
    """For even indices; others are replaced."""
    assert isinstance(failure.index, int)
    return "replace" if failure.index % 2 else "skip"
