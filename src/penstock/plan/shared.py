"""`SharedIntegers`: a few integers in shared memory, so that workers that run see what the main process writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["SharedIntegers"]


class SharedIntegers:
    """Integers of 64 bits. A plain pickle (to a file, to another machine) carries a copy of them.

    >>> numbers = SharedIntegers([1, 2])
    >>> numbers.set([3, 4])
    >>> numbers.get()
    [3, 4]
    """

    def __init__(self, values: Iterable[int]) -> None:
        self._tensor = torch.tensor(list(values), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._view = self._tensor.numpy()

    def get(self) -> list[int]:
        """Return the integers as they are now."""
        values: list[int] = self._view.tolist()
        return values

    def set(self, values: Iterable[int]) -> None:
        """Change them, for all processes that share them."""
        self._view[:] = list(values)

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tensor = state["tensor"]
        # A copy, or one from a file: workers forked from here must see its changes, too.
        if not self._tensor.is_shared():
            self._tensor.share_memory_()
        self._view = self._tensor.numpy()
