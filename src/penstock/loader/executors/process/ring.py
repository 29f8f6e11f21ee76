"""The ring: slots of shared memory that carry batches from workers to the consumer, and come back.

A slot is lent to a worker for one batch, then leased to that batch: every large tensor of it is a view of an array over
the slot, and when the last of these arrays is gone, so is the lease, and the slot is used again. Pages that are used
again cost nothing, which is where the speed comes from.

Invariant: a slot is free, lent or leased, never two of these; so memory that anything aliases is never written to.

The ring begins without slots. `fit` makes them once the size of a batch is known, and larger ones if batches grow; the
map of old slots goes away with the last tensor over it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import RingError
from penstock.loader.memory import SharedFile, available_memory, reserve

__all__ = ["LIGHT", "SPARE", "Region", "Ring", "Slot", "slots_for"]

SPARE = 3
"""Batches that the consumer may hold on to before they are copied: the one at hand, the one before, and another."""

_PAGE = mmap.ALLOCATIONGRANULARITY
LIGHT = 1 << 18
"""Bytes up to which batches are small: of these more are made ahead, if they are made quickly, too."""

_ROOM = 1.25  # slots are so much larger than the batch that they were made for


def slots_for(nbytes: int, depth: int, light: int, *, max_bytes: int | None = None, had: int = 0) -> tuple[int, int]:
    """Size in bytes and number of the slots for batches of so many bytes.

    Args:
        nbytes: of the large tensors of a batch, 1 or more.
        depth, light, max_bytes: as for `Ring`.
        had: size of the slots so far, which grow by half at least.

    >>> slots_for(1_000_000, depth=4, light=32)
    (1253376, 7)
    """
    size = -(-int(nbytes * _ROOM) // _PAGE) * _PAGE
    if had:
        size = max(size, had + had // 2 // _PAGE * _PAGE)
    count = light if size <= LIGHT else depth
    if max_bytes is not None:
        count = max(1, min(count, max_bytes // nbytes))
    return size, count + SPARE


class Region:
    """A part of the shared file, mapped. Workers map it when a slot in it is first lent to them."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self.begin = begin
        self.size = size
        self._map = mmap.mmap(fd, size, offset=begin)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def discard(self) -> None:
        """Give the memory back to the system. Whoever has it mapped sees zeros."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)


class Slot:
    """A piece of a region, for one batch."""

    __slots__ = ("begin", "capacity", "leases", "refs", "region")

    def __init__(self, region: Region, begin: int, capacity: int) -> None:
        self.region = region
        self.begin = begin  # within the region
        self.capacity = capacity
        self.leases = 0
        self.refs: list[weakref.ref[Any]] = []

    @property
    def address(self) -> tuple[int, int, int, int]:
        """What a worker needs to find it: begin and size of the region, begin and capacity of the slot."""
        return self.region.begin, self.region.size, self.begin, self.capacity


class Ring:
    """The consumer's side.

    Args:
        depth: batches in flight at most.
        light: the same for small ones.
        head: bytes at the beginning of the file that are not slots.
        max_bytes: of the batches in flight; None for no limit. One batch is always allowed.
    """

    def __init__(self, depth: int, light: int, *, head: int, max_bytes: int | None = None) -> None:
        self.depth = depth
        self._light = light
        self.file = SharedFile(head)
        self.pid = os.getpid()
        self.slot_bytes = 0
        self._end = head
        self._max_bytes = max_bytes
        self._region: Region | None = None
        self._free: list[Slot] = []  # a stack: what was used last is still in the cache
        self._old: dict[int, list[int | Region]] = {}
        self._leased: set[Slot] = set()
        self._returned: deque[Slot] = deque()
        self._count = 0
        self._refused: int | None = None

    def fit(self, nbytes: int) -> bool:
        """Have slots that a batch of so many bytes fits into; whether that is so.

        Raises:
            RingError: there is too little memory, and there are no slots yet.
        """
        if nbytes <= self.slot_bytes:
            return True
        if self._refused is not None and nbytes >= self._refused:
            return False
        size, count = slots_for(nbytes, self.depth, self._light, max_bytes=self._max_bytes, had=self.slot_bytes)
        try:
            self._make(size, count)
        except RingError:
            if not self.slot_bytes:
                raise
            self._refused = nbytes
            return False
        return True

    def _make(self, size: int, count: int) -> None:
        left = available_memory()
        if left is not None and size * count > left:
            raise RingError(
                _too_little(size, count, f"{left / 2**20:.0f} MiB are left on this machine or to this container")
            )
        try:
            reserve(self.file.fd, self._end, size * count)
        except OSError as error:
            raise RingError(_too_little(size, count, f"the system refuses: {error.strerror}")) from error
        region = Region(self.file.fd, self._end, size * count)
        old, self._region = self._region, region
        self._end += size * count
        if old is not None:
            self._retire(old)
        self.slot_bytes, self._count = size, count
        self._free = [Slot(region, number * size, size) for number in reversed(range(count))]

    def _retire(self, region: Region) -> None:
        self._old[region.begin] = [region, self._count - len(self._free)]
        self._free = []
        self._drop_old(region, 0)

    def _drop_old(self, region: Region, count: int) -> None:
        """So many more of an old region's slots have come back; with the last one its memory goes."""
        entry = self._old[region.begin]
        entry[1] = int(entry[1]) - count  # type: ignore[arg-type]
        if not entry[1]:
            del self._old[region.begin]
            region.discard()

    @property
    def in_flight(self) -> int:
        """How many slots may be lent at a time."""
        return self._count - SPARE if self._count else self.depth

    @property
    def has_free(self) -> bool:
        """Whether a slot can be lent."""
        self._reclaim()
        return bool(self._free)

    def lend(self) -> Slot | None:
        """A free slot, for a worker; None if there is none."""
        self._reclaim()
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        """A slot that was lent, and is not leased, is free again."""
        if slot.region is self._region:
            self._free.append(slot)
        else:
            self._drop_old(slot.region, 1)

    @property
    def short(self) -> bool:
        """Whether the consumer holds as many batches as it may: the next one should be copied."""
        self._reclaim()
        return len(self._leased) >= SPARE

    def lease(self, slot: Slot, pieces: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.uint8]]:
        """Arrays over pieces (offset, size) of a slot. When the last one is gone, the slot is free.

        Tensors over them keep them; NumPy's views do not, as their base is the base of the array: see `unpack`.
        """
        arrays = []
        base = slot.region.memory
        returned = self._returned.append
        for offset, nbytes in pieces:
            begin = slot.begin + offset
            array = base[begin : begin + nbytes]
            slot.refs.append(weakref.ref(array, lambda _, slot=slot: returned(slot)))  # type: ignore[misc]
            arrays.append(array)
        slot.leases += len(arrays)
        self._leased.add(slot)
        return arrays

    def copy(self, slot: Slot, pieces: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.uint8]]:
        """The same as arrays of their own; the slot is free at once."""
        begin = slot.begin
        arrays = [slot.region.memory[begin + o : begin + o + n].copy() for o, n in pieces]
        self.give_back(slot)
        return arrays

    def _reclaim(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            slot.leases -= 1
            if not slot.leases:
                slot.refs.clear()
                self._leased.discard(slot)
                self.give_back(slot)

    def close(self) -> None:
        """Close the file. Tensors stay valid, as the map is theirs."""
        self.file.close()


def _too_little(size: int, count: int, why: str) -> str:
    mib = size / 2**20
    return (
        f"the batches in flight need {count} slots of {mib:.1f} MiB, {count * mib:.0f} MiB of shared memory, and "
        f"{why}: lower prefetch_factor, num_workers or batch_size, or set max_bytes_in_flight"
    )
