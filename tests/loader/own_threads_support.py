"""Data sets that have threads of their own draw for a sample, in a module that worker processes can import."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import Dataset

import penstock as ps

PARTS = 3


class OwnThreads(Dataset[Any]):
    """The index, a draw of the sample's own, and draws of its threads, which all draw at the same time."""

    pure = True

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        together = threading.Barrier(PARTS)

        def part(child: np.random.Generator) -> list[float]:
            with ps.use_generator(child):
                together.wait()
                return [float(ps.generator().random()) for _ in range(50)]

        with ThreadPoolExecutor(PARTS) as pool:
            parts = list(pool.map(part, ps.generator().spawn(PARTS)))
        return index, float(ps.generator().random()), np.array(parts)


class Forgetful(OwnThreads):
    """Its threads were given no generator: the sample is what a draw in one of them raises, or nothing."""

    def __getitem__(self, index: int) -> Any:
        def part() -> str:
            try:
                ps.generator()
            except RuntimeWarning as warning:
                return str(warning)
            return ""

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(part).result()


def raise_warnings(number: int) -> None:
    """A ``worker_init_fn``: warnings are errors in this process."""
    warnings.simplefilter("error", RuntimeWarning)
