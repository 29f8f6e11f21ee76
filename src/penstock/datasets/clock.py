"""Which epoch an iterable data set's next iteration is, for each worker, in memory that all of them share.

Worker processes that end with every epoch leave it there for those that come after them, so the order changes every
epoch under torch's loader too, without anybody telling it. Workers of loaders with other numbers of workers count for
themselves. The main process knows of the last epoch that began anywhere: a loader asks it for the state of workers that
have delivered nothing yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

__all__ = ["Clock"]

_MAIN = 0
_TRIANGLE = 64  # loaders with up to so many workers have entries of their own
_LARGER = 1024
_ENTRIES = 1 + _TRIANGLE * (_TRIANGLE + 1) // 2 + _LARGER


class Clock:
    """The epoch that comes next, how often it was set, and whether one has begun since, by worker."""

    def __init__(self) -> None:
        self._tensor = torch.zeros((3, _ENTRIES), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @staticmethod
    def _entry() -> int:
        info = get_worker_info()
        if info is None:
            return _MAIN
        if info.num_workers <= _TRIANGLE:
            return 1 + info.num_workers * (info.num_workers - 1) // 2 + info.id
        return _ENTRIES - _LARGER + info.id % _LARGER

    def peek(self) -> tuple[int, int]:
        """The epoch of the next iteration, and how often it was set."""
        epoch, times, _ = self._tensor[:, self._entry()].tolist()
        return int(epoch), int(times)

    def now(self) -> int:
        """The epoch that is being read, or was last, in the main process by anybody; before that the one that comes."""
        epoch, _, begun = self._tensor[:, self._entry()].tolist()
        return int(epoch) - int(begun)

    def next(self) -> tuple[int, int]:
        """The same, and the epoch after it comes next."""
        epoch, times = self.peek()
        self.resumed(epoch)
        return epoch, times

    def set(self, epoch: int) -> None:
        """The epoch that comes next: in the main process for all, in a worker for this one."""
        where: Any = slice(None) if get_worker_info() is None else self._entry()
        self._tensor[0, where] = epoch
        self._tensor[1, where] += 1
        self._tensor[2, where] = 0

    def resumed(self, epoch: int) -> None:
        """An iteration goes on in this epoch; the one after it comes next."""
        self._tensor[0, self._entry()] = self._tensor[0, _MAIN] = epoch + 1
        self._tensor[2, self._entry()] = self._tensor[2, _MAIN] = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tensor = state["_tensor"]
        if not self._tensor.is_shared():  # out of a file
            self._tensor = self._tensor.share_memory_()
