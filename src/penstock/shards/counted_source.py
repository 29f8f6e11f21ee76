"""`CountedSource`: files that are all counted, of which an epoch that began before that may go on in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.order.permutation import Indices
from penstock.plan.windows import Need, split_rows

__all__ = ["CountedSource"]


class CountedSource:
    """What `penstock.plan.windows.WindowPlan` asks for, of files that are counted and there when they are needed."""

    complete = True
    """Whether all files are counted."""

    urls: list[str]
    """The names of the files."""
    starts: Indices
    """First row of each file, and the number of all."""

    def _read(self, numbers: Indices, rows: Indices) -> list[Any]:
        """Return rows of files, in this order. A subclass says how."""
        raise NotImplementedError

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return how many samples some files have."""
        return [int(self.starts[number + 1] - self.starts[number]) for number in shards]

    def join(self, world_size: int) -> None:
        """Do nothing: ranks have nothing to tell each other."""

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Do nothing: every file is there when it is asked for."""

    def advance(self, position: int) -> None:
        """Do nothing: nobody looks ahead."""

    def close(self) -> None:
        """Do nothing: nobody looks ahead."""

    def finish(self, rank: int, world_size: int) -> None:
        """Do nothing: all files are counted."""

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return nothing: every process knows the files."""
        return ()

    def arrived(self, rows: Indices, versions: Iterable[Any]) -> list[Any]:
        """Return the samples at rows of `penstock.plan.windows.pack_rows`, in this order."""
        return self._read(*split_rows(np.asarray(rows, dtype=np.int64)))
