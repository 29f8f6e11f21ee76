"""`SharedIntegers`: a few integers in shared memory, so that running workers see changes of the main process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["SharedIntegers"]


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
