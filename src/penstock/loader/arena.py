"""Where a worker's tensors are put: straight into the slot of shared memory that was given for the batch.

`Slot` hands out consecutive, aligned pieces for a whole batch; `Rows` the rows of a chunk within pieces whose place is
known from earlier batches. The collate function asks by `place`, and gets ordinary memory where there is no room.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "Arena",
    "Column",
    "Rows",
    "Shared",
    "Slot",
    "aligned",
    "collating_into",
    "has_place",
    "place",
    "place_ahead",
]

_ALIGNMENT = 64  # a cache line, and what vector instructions like


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena(Protocol):
    """Memory for the tensors of a batch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised contiguous tensor, or None if there is no room for it."""

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The memory that `empty` will give when it is next asked for this; asking changes nothing."""


Grow = Callable[[int, int], npt.NDArray[np.uint8] | None]
"""A larger map of the same memory, by the bytes that there are and those that are needed; None if there is no more."""


class Slot:
    """Memory for one whole batch.

    Args:
        memory: uint8 of shape (capacity,), shared with the consumer's process.
        grow: has more of it; None for no more than there is.

    Attributes:
        address, capacity: of the memory that there is by now.
        grown: whether they have become more.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], grow: Grow | None = None) -> None:
        self.grown = False
        self.used = 0
        self._grow = grow
        self._maps: list[tuple[int, int]] = []  # address and size: all begin at the same memory
        self._use(memory)

    def _use(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.capacity = memory.size
        self.address: int = memory.__array_interface__["data"][0]  # .ctypes.data takes ten times as long
        self._maps.append((self.address, memory.size))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`."""
        count = math.prod(shape)
        offset = self.reserve(count * dtype.itemsize)
        if offset is None:
            return None
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(shape)

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`."""
        used = self.used
        try:
            return self.empty(shape, dtype)
        finally:
            self.used = used

    def reserve(self, nbytes: int) -> int | None:
        """Offset of a piece of this many bytes; None for none at all, and where there is no room."""
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
        """Where in the slot this memory lies; None if it lies elsewhere."""
        for begin, size in self._maps:
            if 0 <= address - begin <= size - nbytes:
                return address - begin
        return None


class Column(NamedTuple):
    """A tensor of a batch: where it begins in the slot, and what one row of it is."""

    offset: int
    dtype: torch.dtype
    row: tuple[int, ...]
    row_bytes: int


class Rows:
    """Memory for rows ``begin`` to ``end`` of every column, asked for in the order of the columns."""

    def __init__(self, memory: npt.NDArray[np.uint8], columns: Sequence[Column], begin: int, end: int) -> None:
        self._memory = memory
        self._columns = columns
        self._begin, self._end = begin, end
        self.addresses: list[int] = []
        """Of what was handed out, in order."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`; None for what does not look like the column whose turn it is."""
        if len(self.addresses) >= len(self._columns):
            return None
        column = self._columns[len(self.addresses)]
        if dtype is not column.dtype or shape[:1] != (self._end - self._begin,) or shape[1:] != column.row:
            return None
        offset = column.offset + self._begin * column.row_bytes
        count = math.prod(shape)
        if not count:
            return None
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
        self.addresses.append(tensor.data_ptr())
        return tensor

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`."""
        tensor = self.empty(shape, dtype)
        if tensor is not None:
            self.addresses.pop()
        return tensor


class Shared:
    """Ordinary memory for the first tensor of a batch, the rows of which several threads fill. One asks, all use it.

    Args:
        size: rows of the batch.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None

    def rows(self, begin: int, end: int) -> Part:
        """Memory for some of its rows."""
        return Part(self, begin, end)

    def whole(self, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory for all rows, of the shape and type that was first asked for."""
        with self._lock:
            if self._tensor is None:
                self._tensor = torch.empty((self._size, *row), dtype=dtype)
            return self._tensor


class Part:
    """Rows of a batch in `Shared` memory: for those who ask ahead."""

    def __init__(self, batch: Shared, begin: int, end: int) -> None:
        self._batch = batch
        self._begin, self._end = begin, end

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`: none, for parts are not collated by themselves."""
        return None

    def ahead(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """As in `Arena`."""
        whole = self._batch.whole(shape[1:], dtype)
        if whole.dtype is not dtype or whole.shape[1:] != shape[1:] or shape[0] != self._end - self._begin:
            return None
        return whole[self._begin : self._end]


class _Current(threading.local):
    arena: Arena | None = None


_current = _Current()


class collating_into:
    """``with collating_into(arena):`` tensors that the default collate function makes in this thread are put there."""

    __slots__ = ("_arena", "_before")

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._before, _current.arena = _current.arena, self._arena

    def __exit__(self, *exc: object) -> None:
        _current.arena = self._before


def has_place() -> bool:
    """Whether there is other memory than ordinary one for the batch at hand."""
    return _current.arena is not None


def place(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Memory for a tensor of the batch at hand; None: take ordinary memory."""
    arena = _current.arena
    return None if arena is None else arena.empty(shape, dtype)


def place_ahead(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the first tensor of the batch at hand, before there is a batch: what is written there by the time that
    the samples are collated needs no copy. Ordinary memory where there is no other.
    """
    arena = _current.arena
    tensor = None if arena is None else arena.ahead(shape, dtype)
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor
