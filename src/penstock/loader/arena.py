"""Memory for a worker's tensors: the slot of shared memory that is reserved for a batch.

`Slot` allocates consecutive, aligned blocks. The collate function calls `place`, and uses ordinary memory if it returns
None.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "Arena",
    "Shared",
    "Slot",
    "aligned",
    "collating_into",
    "has_place",
    "place",
    "place_ahead",
]

# A cache line, which also suits vector instructions.
_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return a size rounded up to a multiple of the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena(Protocol):
    """Memory for the tensors of a batch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor; None if there is no room for it."""

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory that `empty` will return for the same arguments, without allocating it."""


Grow = Callable[[int, int], npt.NDArray[np.uint8] | None]
"""Returns a larger mapping of the same memory, from the present and the required size; None if it cannot grow."""


class Slot:
    """Memory for one whole batch.

    Args:
        memory: uint8 of shape (capacity,), shared with the consumer's process.
        grow: returns a larger mapping; None if the slot cannot grow.

    Attributes:
        address, capacity: address and size of the current mapping.
        grown: whether the slot has grown.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], grow: Grow | None = None) -> None:
        self.grown = False
        self.used = 0
        self._grow = grow
        # Address and size of each mapping. All begin at the same memory.
        self._maps: list[tuple[int, int]] = []
        self._use(memory)

    def _use(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.capacity = memory.size
        # .ctypes.data takes ten times as long.
        self.address: int = memory.__array_interface__["data"][0]
        self._maps.append((self.address, memory.size))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`."""
        count = math.prod(shape)
        offset = self.reserve(count * dtype.itemsize)
        if offset is None:
            return None
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(shape)

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Arena`."""
        used = self.used
        try:
            return self.empty(shape, dtype)
        finally:
            self.used = used

    def reserve(self, nbytes: int) -> int | None:
        """Return the offset of a new block of ``nbytes``; None for 0 bytes, and if there is no room."""
        if nbytes <= 0:
            return None
        end = self.used + nbytes
        if end > self.capacity:
            memory = None if self._grow is None else self._grow(self.capacity, end)
            if memory is None:
                return None
            self.grown = True
            self._use(memory)
        offset, self.used = self.used, aligned(end)
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of some memory in the slot; None if it is outside."""
        for begin, size in self._maps:
            if 0 <= address - begin <= size - nbytes:
                return address - begin
        return None


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
            if self._tensor is None and self._arena is not None:
                self._tensor = self._arena.ahead((self._size, *row), dtype)
            if self._tensor is None:
                self._tensor = torch.empty((self._size, *row), dtype=dtype)
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


def has_place() -> bool:
    """Return whether the current batch has an arena."""
    return _current.arena is not None


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
