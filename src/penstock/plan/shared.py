"""`SharedIntegers`: integers in shared memory, so that running workers see changes of the main process. `SharedEpoch`:
the next epoch of an iterable dataset, in such integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import get_worker_info

__all__ = ["SharedEpoch", "SharedIntegers"]

_CURRENT, _NEXT, _TIMES_SET = range(3)
_MAIN = 0
_WORKERS = 4096
"""Entries of workers: one for each worker of each number of workers up to 90. Larger numbers share theirs."""
_ENTRIES = 1 + _WORKERS


class SharedIntegers:
    """64-bit integers in shared memory. A plain pickle (to a file, to another machine) contains a copy of them.

    >>> numbers = SharedIntegers([1, 2])
    >>> numbers.set([3, 4])
    >>> numbers.get()
    [3, 4]
    """

    def __init__(self, values: Iterable[int]) -> None:
        self._tensor = torch.tensor(list(values), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._view = self._tensor.numpy()

    def get(self) -> list[int]:
        """Return the current integers."""
        values: list[int] = self._view.tolist()
        return values

    def set(self, values: Iterable[int]) -> None:
        """Set the integers for all processes that share them."""
        self._view[:] = list(values)

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tensor = state["tensor"]
        # Workers forked from this process must see changes of a copy, too.
        if not self._tensor.is_shared():
            self._tensor.share_memory_()
        self._view = self._tensor.numpy()


class SharedEpoch(SharedIntegers):
    """For each worker: the current epoch, the next epoch, and how often it was set. Always 96 KB.

    It is for iterations that are not told their epoch: by the loaders of other libraries, and by ``iter(dataset)``.
    torch's loader does not tell its workers the epoch, so there is one entry for each worker of each number of workers:

    - Workers may exit after every epoch, so each stores the number of the next epoch for its successor. With a single
      entry, a worker could not tell whether another worker has just begun an epoch, or has finished it.
    - Reading a few samples with one worker must not advance one worker of a loader with two, whose workers would then
      read different epochs.
    - A worker's seed does not identify the iteration, because programs use the same torch seed for several iterations.

    The entry of the main process has the epoch that was begun last in any process. Two torch loaders with the same
    number of workers share entries, so begin them one after the other. Penstock's loaders tell their workers the epoch
    (`StreamPlan`), and share nothing.
    """

    def __init__(self) -> None:
        super().__init__([0] * (3 * _ENTRIES))

    @property
    def _table(self) -> Any:
        return self._view.reshape(3, _ENTRIES)

    @staticmethod
    def _entry() -> int:
        info = get_worker_info()
        if info is None:
            return _MAIN
        return 1 + (info.num_workers * (info.num_workers - 1) // 2 + info.id) % _WORKERS

    @property
    def current(self) -> int:
        """The current or last epoch; in the main process, of any process. Before the first epoch, the next one."""
        return int(self._table[_CURRENT, self._entry()])

    @property
    def next(self) -> int:
        """The epoch of the next iteration in this process."""
        return int(self._table[_NEXT, self._entry()])

    @property
    def times_set(self) -> int:
        """How often `set_next` was called for this process."""
        return int(self._table[_TIMES_SET, self._entry()])

    def set_next(self, epoch: int) -> None:
        """Set the epoch of the next iteration: in the main process for all processes, in a worker for itself."""
        where: Any = slice(None) if get_worker_info() is None else self._entry()
        self._table[:_TIMES_SET, where] = epoch
        self._table[_TIMES_SET, where] += 1

    def begin(self, epoch: int) -> None:
        """Record that an iteration of this epoch begins in this process, and set the next epoch after it."""
        for entry in {_MAIN, self._entry()}:
            self._table[:_TIMES_SET, entry] = epoch, epoch + 1

    def show(self, epoch: int) -> None:
        """Set `current` of the main process. The next epoch does not change."""
        self._table[_CURRENT, _MAIN] = epoch
