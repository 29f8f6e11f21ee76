"""The ring: reusable slots of shared memory that carry batches from workers to the consumer.

A slot is lent to a worker for one batch, then leased to that batch: its large tensors are views of one array over the
slot. When nobody refers to this array any more, the slot is free again. Reused pages need no allocation, which makes
the ring fast.

Invariant: a slot is either free, lent, leased or retired; so memory that a tensor still refers to is never overwritten.

    file   | board | slot ====-------- | slot ======------ | slot ...      = memory      - address space without memory

A worker extends its slot as far as the batch needs it. A free slot keeps as much memory as batches usually need, and
slots that have not been used for a while lose theirs.

A slot in use while user code forks is retired until the child has ended: see `forks`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError, RingError
from penstock.loader.executors.process.forks import Child, watch
from penstock.loader.memory import SharedFile

__all__ = ["BOARD", "SLOTS", "Ring", "paged", "slot_bytes", "usual"]

BOARD = 1 << 20
"""Bytes at the head of the file, for the words that `worker` describes."""

SLOTS = 1 << 10
"""Number of parts of the file. The first one is the board; number 0 as a slot means none."""

_LAST = 16  # batches whose sizes tell what is usual
_SLACK = 1.25  # free slots may be this much larger than usual, since batches vary
_SWEEP = 64  # batches between sweeps for unused slots
_PAGE = 1 << 12


def paged(nbytes: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def slot_bytes(file: SharedFile) -> int:
    """Return the bytes of address space of each slot."""
    return file.size // SLOTS


def usual(sizes: Collection[int]) -> int:
    """Return the bytes that three quarters of some batches do not exceed; of two or three, all but the largest.

    >>> usual([4, 240, 4, 4])
    4
    """
    ranked = sorted(sizes, reverse=True)
    return ranked[max(len(ranked) // 4, min(1, len(ranked) - 1))]


class _Lease(weakref.ref[Any]):
    """Ends with the array over a slot."""

    __slots__ = ("slot",)
    slot: int


class Ring:
    """The consumer's side of the ring.

    Attributes:
        file: the memory; the first `BOARD` bytes are the board.

    Raises:
        RingError: the system refuses memory.
    """

    def __init__(self) -> None:
        self.file = SharedFile(_ranks())
        try:
            self.file.reserve(0, BOARD)
        except OSError as error:
            raise RingError(
                f"no shared memory for worker processes ({error.strerror}): raise the limit of the size of files "
                "(ulimit -f) to 1 GiB or more, or use executor='thread'"
            ) from error
        self.pid = os.getpid()
        self._room = slot_bytes(self.file)
        self._extents: dict[int, int] = {}
        """Bytes of memory of each slot that was ever lent."""
        self._free: list[int] = []  # a stack: the last used slot is still in the CPU cache
        self._least_free = 0  # minimum since the last sweep: the number of unused slots
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()  # appended to wherever an array dies, in any thread
        self._sizes: deque[int] = deque(maxlen=_LAST)
        self._usual = 0
        """Bytes of memory that free slots keep."""
        self._batches = 0
        self._children: dict[int, list[Child]] = {}
        """Child processes that were forked while a slot was leased, by slot."""
        self._retired: list[int] = []
        watch(self)

    def lend(self) -> tuple[int, int]:
        """Return a slot for a worker, and the bytes of memory it has; slot 0 if the consumer holds all of them."""
        while self._ended:
            slot = self._ended.popleft().slot
            del self._leases[slot]
            self.give_back(slot, self._extents[slot])
        if self._retired:
            self._revive()
        if not self._free:
            # Where files are limited, the board takes several parts.
            slot = len(self._extents) + -(-BOARD // self._room)
            if slot >= SLOTS:
                return 0, 0
            self._extents[slot] = 0
            self._free.append(slot)
        slot = self._free.pop()
        self._least_free = min(self._least_free, len(self._free))
        return slot, self._extents[slot]

    def lease(self, slot: int, extent: int, used: int) -> npt.NDArray[np.uint8]:
        """Return the memory of a batch, and free its slot when nobody refers to this very array any more.

        Arrays over this one refer to it, and so do tensors over them. It is an array, because NumPy looks through a
        memoryview, and its base is no array, where NumPy stops looking.

        Args:
            slot: the slot, which was lent.
            extent: bytes of memory it has now.
            used: bytes that the batch uses, 1 or more.
        """
        self._extents[slot] = extent
        self._sizes.append(used)
        self._batches += 1
        # Sorting takes long, so later not for each batch.
        if self._batches <= _LAST or not self._batches % 4:
            self._usual = paged(usual(self._sizes))
        if not self._batches % _SWEEP:
            self._sweep()
        memory = np.ndarray(used, np.uint8, self.file.map, slot * self._room)
        self._leases[slot] = lease = _Lease(memory, self._ended.append)
        lease.slot = slot
        return memory

    def give_back(self, slot: int, extent: int | None) -> None:
        """Free a slot that nobody refers to.

        Args:
            slot: the slot; 0 does nothing.
            extent: bytes of memory it has; None if only a dead worker knew.
        """
        if not slot:
            return
        self._extents[slot] = self._room if extent is None else extent
        if any(not child.gone for child in self._children.get(slot, ())):
            self._retired.append(slot)
            return
        self._children.pop(slot, None)
        if extent is None or extent > max(self._usual * _SLACK, _PAGE):
            self._trim(slot, self._usual)
        self._free.append(slot)

    def _trim(self, slot: int, size: int) -> None:
        """Give the memory of a free slot back from ``size`` bytes on."""
        extent = self._extents[slot]
        if extent > size and self.file.can_discard and self.pid == os.getpid():
            self.file.discard(slot * self._room + size, extent - size)
            self._extents[slot] = size

    def _sweep(self) -> None:
        """Give the memory of slots back that were not used since the last sweep."""
        for slot in self._free[: self._least_free]:
            self._trim(slot, 0)
        self._least_free = len(self._free)

    # Forks.

    def mark(self, child: Child) -> None:
        """Protect the slots that are leased now: they are not reused while a child may read them."""
        for slot, lease in list(self._leases.items()):
            if lease() is not None:
                alive = [other for other in self._children.get(slot, ()) if other is not child and not other.gone]
                self._children[slot] = [*alive, child]

    def _revive(self) -> None:
        """Free slots whose children have ended, to be used last."""
        for slot in [slot for slot in self._retired if all(child.gone for child in self._children[slot])]:
            self._retired.remove(slot)
            del self._children[slot]
            self._trim(slot, 0)
            self._free.insert(0, slot)


def _ranks() -> int:
    """Return how many ranks share this machine; 1 if the environment is invalid, which is reported elsewhere."""
    from penstock.distributed import local_ranks  # imported late: it imports torch, which planning does not need

    try:
        return local_ranks()
    except PartitionError:
        return 1
