"""`CountedSource`: counted files; an epoch that began before they were counted can continue in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.order.permutation import Indices
from penstock.plan.windows import Need, split_rows

__all__ = ["CountedSource"]


class CountedSource:
    """The interface of `penstock.plan.windows.WindowPlan` for files that are counted and available."""

    complete = True
    """Whether all files are counted."""

    urls: list[str]
    """The names of the files."""
    starts: Indices
    """The first row of each file, and the number of all rows."""

    def _read(self, numbers: Indices, rows: Indices) -> list[Any]:
        """Return rows of files, in this order. Subclasses implement it."""
        raise NotImplementedError

    def counts_of(self, shards: Sequence[int]) -> list[int]:
        """Return the sample counts of files."""
        return [int(self.starts[number + 1] - self.starts[number]) for number in shards]

    def identities(self, shards: Sequence[int]) -> list[str]:
        """Return the identity of each file's content, see `Facts.identity`. Subclasses implement it."""
        raise NotImplementedError

    def join(self, world_size: int) -> None:
        """Do nothing: ranks need no exchange."""

    def expect(self, needs: Sequence[Need], *, position: int = 0) -> None:
        """Do nothing: every file is available."""

    def advance(self, position: int) -> None:
        """Do nothing: nothing is prefetched."""

    def close(self) -> None:
        """Do nothing: nothing is prefetched."""

    def finish(self, rank: int, world_size: int) -> None:
        """Do nothing: all files are counted."""

    def versions(self, shards: Sequence[int]) -> tuple[Any, ...]:
        """Return an empty tuple: every process knows the files."""
        return ()

    def arrived(self, rows: Indices, versions: Iterable[Any]) -> list[Any]:
        """Return the samples at rows of `penstock.plan.windows.pack_rows`, in this order."""
        return self._read(*split_rows(np.asarray(rows, dtype=np.int64)))
