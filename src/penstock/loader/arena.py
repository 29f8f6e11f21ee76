"""Memory for the tensors of a batch, such as a slot of memory that processes share.

The collate function calls `place`, and uses ordinary memory if it returns None. Datasets that fill the rows of a batch
themselves call `place_ahead` before.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

__all__ = ["Arena", "Shared", "collating_into", "place", "place_ahead"]


class Arena(Protocol):
    """Memory for the tensors of a batch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor; None if there is no room for it."""

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory that `empty` will return for the same arguments, without allocating it."""


class Shared:
    """Memory for the first tensor of a batch, whose rows several threads fill.

    The first thread allocates it, and all use it.

    Args:
        size: number of rows of the batch.
        arena: memory of the batch; None for ordinary memory.
    """

    def __init__(self, size: int, arena: Arena | None = None) -> None:
        self._size = size
        self._arena = arena
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None

    def rows(self, begin: int, end: int) -> SharedRows:
        """Return an arena for some of the rows."""
        return SharedRows(self, begin, end)

    def whole(self, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory for all rows, with the shape and dtype of the first call."""
        with self._lock:
            if self._tensor is None:
                shape = (self._size, *row)
                tensor = None if self._arena is None else self._arena.ahead(shape, dtype)
                self._tensor = torch.empty(shape, dtype=dtype) if tensor is None else tensor
            return self._tensor


class SharedRows:
    """Some rows of a batch in `Shared` memory, only for allocation ahead."""

    def __init__(self, batch: Shared, begin: int, end: int) -> None:
        self._batch = batch
        self._begin, self._end = begin, end

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`. Always None, since parts are not collated by themselves."""
        return None

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`."""
        whole = self._batch.whole(shape[1:], dtype)
        if whole.dtype is not dtype or whole.shape[1:] != shape[1:] or shape[0] != self._end - self._begin:
            return None
        return whole[self._begin : self._end]


class _Current(threading.local):
    arena: Arena | None = None


_current = _Current()


class collating_into:
    """Context manager: the default collate function allocates this thread's tensors in an arena."""

    __slots__ = ("_arena", "_before")

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._before, _current.arena = _current.arena, self._arena

    def __exit__(self, *exc: object) -> None:
        _current.arena = self._before


def place(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return memory for a tensor of the current batch; None means ordinary memory."""
    arena = _current.arena
    return None if arena is None else arena.empty(shape, dtype)


def place_ahead(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the first tensor of the current batch before collation.

    Rows that are written there need no copy at collation. Without an arena it is ordinary memory.
    """
    arena = _current.arena
    tensor = None if arena is None else arena.ahead(shape, dtype)
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor
