"""The epoch that an iterable data set's next iteration begins, in memory that all processes share.

It is for iterations that nobody tells their epoch: those of other libraries' loaders, and those of the data set itself.
There is an entry for each worker of each number of workers, because torch's loader tells workers nothing of the epoch:

- Workers may end with every epoch, so each leaves the number of the next one to its successor; with one cell for all, a
  worker could not tell an epoch that its neighbour has just begun from one that is over.
- A look at the data through a loader with one worker must not move one worker of a loader with two, whose workers
  would deal out the shards of two epochs.
- A worker's seed does not tell which iteration it belongs to, since programs seed torch alike for several of them.

The entry of the main process has the last epoch that began anywhere, for whoever asks there. Two loaders of torch's
with equally many workers share their entries, so let one begin after the other has begun. Our loaders tell their
workers (`StreamPlan`), and share nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

__all__ = ["SharedEpoch"]

_CURRENT, _NEXT, _TIMES_SET = range(3)
_MAIN = 0
_TRIANGLE = 64  # loaders with up to so many workers have entries of their own
_LARGER = 1024
_ENTRIES = 1 + _TRIANGLE * (_TRIANGLE + 1) // 2 + _LARGER


class SharedEpoch:
    """By worker: the epoch that is read, the one that comes next, and how often that was set. 75 KB, whatever the data.

    A plain pickle (to a file, to another machine) carries a copy.
    """

    def __init__(self) -> None:
        self._table = torch.zeros((3, _ENTRIES), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @staticmethod
    def _entry() -> int:
        info = get_worker_info()
        if info is None:
            return _MAIN
        if info.num_workers <= _TRIANGLE:
            return 1 + info.num_workers * (info.num_workers - 1) // 2 + info.id
        return _ENTRIES - _LARGER + info.id % _LARGER

    @property
    def current(self) -> int:
        """The epoch that is read, or was last; in the main process by anybody. Before the first one: the next epoch."""
        return int(self._table[_CURRENT, self._entry()])

    @property
    def next(self) -> int:
        """The epoch of the next iteration here."""
        return int(self._table[_NEXT, self._entry()])

    @property
    def times_set(self) -> int:
        """How often somebody has chosen the epoch of the next iteration here."""
        return int(self._table[_TIMES_SET, self._entry()])

    def set(self, epoch: int) -> None:
        """Choose the epoch of the next iteration: in the main process for all, in a worker for this one."""
        where: Any = slice(None) if get_worker_info() is None else self._entry()
        self._table[_CURRENT, where] = self._table[_NEXT, where] = epoch
        self._table[_TIMES_SET, where] += 1

    def begin(self, epoch: int) -> None:
        """Note that an iteration of this epoch begins here; the epoch after it comes next."""
        for entry in {_MAIN, self._entry()}:
            self._table[_CURRENT, entry], self._table[_NEXT, entry] = epoch, epoch + 1

    def show(self, epoch: int) -> None:
        """Let `current` be an epoch in the main process. What comes next stays as it is."""
        self._table[_CURRENT, _MAIN] = epoch

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = state["table"]
        if not self._table.is_shared():  # out of a file
            self._table = self._table.share_memory_()
