"""The ring: reusable slots of shared memory that carry batches from workers to the consumer.

A slot is lent to a worker for one batch, then leased to that batch: the batch's large tensors are views of arrays over
the slot. When the last of these arrays is garbage-collected, the lease ends and the slot is reused. Reused pages need
no allocation, which makes the ring fast.

Invariant: a slot is either free, lent, leased or retired; so memory that a tensor still refers to is never overwritten.

    file   | head | slot ========------ | slot =====------ | slot ...      = memory      - room: offsets without memory

A slot has as much memory as batches usually need, and room to grow. If a batch needs more, its worker extends the slot,
which shrinks to the usual size when it is free again. Slots are created as needed, and unused ones lose their memory.

A slot in use while user code forks is retired until the child has ended: see `forks`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError, RingError
from penstock.loader.executors.process.forks import Child, watch
from penstock.loader.executors.process.region import Region, paged
from penstock.loader.memory import SharedFile
from penstock.loader.sizes import RecentSizes

__all__ = ["AHEAD", "LIGHT", "SPARE", "Address", "Ring", "Slot", "slots_for"]

SPARE = 3
"""Batches that the consumer may keep before further ones are copied: the current, the previous, and one more."""

LIGHT = 1 << 18
"""Maximum bytes of a small batch. More small batches are made ahead, if they are also quick to make."""

AHEAD = 1 << 25
"""Maximum total bytes when more than the usual number of batches are in flight and the user set no limit. This happens
for small batches, and when a slow batch leaves workers idle.
"""

_SLACK = 1.25  # slots may be this much larger than usual, since batches vary
_ROOM = 1 << 40  # bytes between slots in the file
_SWEEP = 64  # batches between sweeps for unused slots


Address = tuple[int, int, int]
"""The offset of a slot in the file, its size, and its maximum size."""


def slots_for(
    nbytes: int, depth: int, light: int, *, max_bytes: int | None = None, largest: int = 0
) -> tuple[int, int]:
    """Return size in bytes and maximum number of slots for batches of ``nbytes`` bytes.

    Args:
        nbytes: bytes of the large tensors of a usual batch, 1 or more.
        depth, light, max_bytes: as for `Ring`.
        largest: bytes of the largest batch, which may be in flight.

    >>> slots_for(10_000_000, depth=4, light=32)
    (10002432, 7)
    """
    size = paged(nbytes)
    if max_bytes is not None:
        count = max(1, min(light, max_bytes // max(nbytes, largest)))
    else:
        count = max(depth, min(light, AHEAD // size))
    return size, count + SPARE


class Slot:
    """A part of the file, for one batch.

    Attributes:
        begin: its offset in the file.
        room: its maximum size in bytes.
        size: its size in bytes.
        children: child processes that were forked while it was leased.
    """

    __slots__ = ("begin", "children", "leases", "refs", "region", "room", "size")

    def __init__(self, begin: int, room: int) -> None:
        self.begin = begin
        self.room = room
        self.size = 0
        self.region: Region | None = None
        self.leases = 0
        self.refs: list[weakref.ref[Any]] = []
        self.children: list[Child] = []

    @property
    def address(self) -> Address:
        """The address by which a worker finds and extends it."""
        return self.begin, self.size, self.room


class Ring:
    """The consumer's side of the ring. It starts without slots; the first batch determines their size.

    Args:
        depth: maximum number of batches in flight.
        light: the same for small batches.
        head: bytes at the beginning of the file before the slots.
        max_bytes: limit of the batches in flight; None for no limit. One batch is always allowed.

    Attributes:
        slot_bytes: the size of a lent slot, 0 until a batch was seen.
        in_flight: maximum number of lent slots.
        count: maximum number of lent or leased slots.
    """

    def __init__(self, depth: int, light: int, *, head: int, max_bytes: int | None = None) -> None:
        self.depth = depth
        self._light = light
        self.file = SharedFile(head, _ranks())
        self.pid = os.getpid()
        self.slot_bytes = 0
        self.in_flight, self.count = depth, depth + SPARE
        self._spare = SPARE
        self._head = self._end = head
        self._room = _room(head, self.count)
        self._max_bytes = max_bytes
        self._sizes = RecentSizes()
        self._seen = 0  # number of batches
        self._free: list[Slot] = []  # a stack: the last used slot is still in the CPU cache
        self._least_free = 0  # minimum since the last sweep: the number of unused slots
        self._out = 0  # lent or leased slots
        self._leased: set[Slot] = set()
        self._returned: deque[Slot] = deque()
        self._retired: list[Slot] = []
        self._most: int | None = None  # limit of slots, after the system refused more
        watch(self)

    # Size and number of slots.

    def learn(self, nbytes: int) -> None:
        """Record the size of a batch, 1 byte or more.

        Raises:
            RingError: too little memory for the first slot.
        """
        changed = self._sizes.add(nbytes)
        self._seen += 1
        if changed:
            self.slot_bytes = paged(self._sizes.usual)
        if changed or self._max_bytes is not None:
            self._bound()
        if self._end == self._head:
            self._begin()
        if changed:
            self._fit()
        if not self._seen % _SWEEP:
            self._sweep()

    def _begin(self) -> None:
        """Create the first slot."""
        try:
            self._add(1.0)
        except OSError as error:
            size, self.slot_bytes, self._sizes = self.slot_bytes, 0, RecentSizes()
            raise RingError(
                f"a batch needs {size / 2**20:.1f} MiB of shared memory, and {error.strerror}: lower batch_size; and "
                "prefetch_factor, num_workers or max_bytes_in_flight of the loaders beside it"
            ) from error

    def _bound(self) -> None:
        """Limit the number of slots to what the settings and the memory allow."""
        _, count = slots_for(
            *(self._sizes.usual, self.depth, self._light), max_bytes=self._max_bytes, largest=self._sizes.largest
        )
        most = self._most
        self.in_flight = count - SPARE if most is None else max(1, min(count - SPARE, most - SPARE))
        self._spare = SPARE if most is None else max(0, min(SPARE, most - self.in_flight))
        self.count = self.in_flight + self._spare

    def _fit(self) -> None:
        """Shrink free slots that are larger than usual, and free surplus slots completely."""
        free, most, beyond = self._free, self.slot_bytes * _SLACK, len(self._free) + self._out - self.count
        for number, slot in enumerate(free):
            if number < beyond:
                self._trim(slot, 0)
            elif slot.size > most:
                self._trim(slot, self.slot_bytes)

    def _sweep(self) -> None:
        """Free the memory of recently unused slots; retry refused allocations."""
        for slot in self._free[: self._least_free]:
            self._trim(slot, 0)
        self._least_free = len(self._free)
        if self._most is not None:
            self._most = None
            self._bound()

    def _trim(self, slot: Slot, size: int) -> None:
        """Shrink an unused slot to ``size`` bytes."""
        if slot.size <= size or self.file.closed or self.pid != os.getpid() or not Region.can_discard:
            return
        if slot.region is None or slot.region.size < slot.size:
            slot.region = Region(self.file.fd, slot.begin, slot.size)
        slot.region.discard(size)
        slot.region, slot.size = None, size

    def _add(self, share: float) -> None:
        """Create one more slot, of at most a share of the free memory.

        Raises:
            OSError: too little memory.
        """
        slot = Slot(self._end, self._room)
        self._extend(slot, self.slot_bytes, share)
        self._end += slot.room
        self._free.append(slot)

    def _extend(self, slot: Slot, size: int, share: float) -> None:
        if size > slot.room:
            raise OSError(errno.EFBIG, f"the system refuses: {os.strerror(errno.EFBIG)}")
        self.file.reserve(slot.begin + slot.size, size - slot.size, most=share)
        slot.size = size

    # Free, lent, leased, free.

    @property
    def has_free(self) -> bool:
        """Return whether a slot can be lent."""
        self._reclaim()
        if not self.slot_bytes or self._out >= self.count:
            return False
        if not self._free:
            try:
                self._add(0.5)
            except OSError:  # continue with fewer slots
                self._most = self._out
                self._bound()
        return bool(self._free)

    def lend(self, least: int = 0) -> Slot | None:
        """Return a free slot for a worker; None if there is none.

        Args:
            least: minimum size in bytes.
        """
        if not self.has_free:
            return None
        slot = self._free.pop()
        self._least_free = min(self._least_free, len(self._free))
        size = max(self.slot_bytes, paged(least))
        if slot.size < size:
            try:
                self._extend(slot, size, 1.0)
            except OSError:
                if slot.size < max(1, least):
                    self._free.append(slot)
                    return None
        self._out += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free a lent slot without a lease."""
        self._out -= 1
        if slot.children and any(not child.gone for child in slot.children):
            self._retired.append(slot)
            return
        slot.children.clear()
        if slot.size > self.slot_bytes * _SLACK:
            self._trim(slot, self.slot_bytes)
        self._free.append(slot)

    def take_back(self, slot: Slot) -> None:
        """Free a slot of a dead worker, which may have extended it without a report."""
        if Region.can_discard and not self.file.closed and self.pid == os.getpid():
            size = paged(min(slot.room, os.fstat(self.file.fd).st_size - slot.begin))
            if size > slot.size:
                with contextlib.suppress(OSError):  # no address space: the slot keeps memory that is not accounted for
                    Region(self.file.fd, slot.begin, size).discard(slot.size)
        self.give_back(slot)

    @property
    def short(self) -> bool:
        """Return whether the consumer holds too many batches, so that the next one must be copied."""
        self._reclaim()
        return len(self._leased) >= self._spare

    def memory(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Return the memory of a slot."""
        region = slot.region
        if region is None or region.size < slot.size:
            region = slot.region = Region(self.file.fd, slot.begin, slot.size)
        return region.memory

    def lease(self, slot: Slot, pieces: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.uint8]]:
        """Return arrays over ranges (offset, size) of a slot, which becomes free when the last array is gone.

        Tensors keep these arrays alive; NumPy views do not, since their base is the array's base: see `unpack`.
        """
        arrays = []
        base = self.memory(slot)
        returned = self._returned.append
        for begin, nbytes in pieces:
            array = base[begin : begin + nbytes]
            slot.refs.append(weakref.ref(array, lambda _, slot=slot: returned(slot)))  # type: ignore[misc]
            arrays.append(array)
        slot.leases += len(arrays)
        self._leased.add(slot)
        return arrays

    def copy(self, slot: Slot, pieces: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.uint8]]:
        """Return copies of ranges of a slot, and free the slot at once."""
        memory = self.memory(slot)
        arrays = [memory[begin : begin + nbytes].copy() for begin, nbytes in pieces]
        del memory
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
        if self._retired:
            self._revive()

    # Forks.

    def mark(self, child: Child) -> None:
        """Protect the slots that are leased now: they are not reused while a child may read them."""
        for slot in list(self._leased):
            if child not in slot.children and any(ref() is not None for ref in list(slot.refs)):
                slot.children.append(child)

    def _revive(self) -> None:
        """Free slots whose children have ended, to be used last."""
        for slot in [slot for slot in self._retired if all(child.gone for child in slot.children)]:
            self._retired.remove(slot)
            slot.children.clear()
            self._trim(slot, 0)
            self._free.insert(0, slot)

    def close(self) -> None:
        """Close the file. Tensors stay valid, since they own the map."""
        self.file.close()


def _room(head: int, count: int) -> int:
    """Return the bytes between slots; if file sizes are limited, ``count`` slots must fit below the limit."""
    import resource  # missing on Windows, where this module is imported but not used

    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return _ROOM if most == resource.RLIM_INFINITY else (most - head) // count // paged(1) * paged(1)


def _ranks() -> int:
    """Return how many ranks share this machine; 1 if the environment is invalid, which is reported elsewhere."""
    from penstock.distributed import local_ranks  # imported late: it imports torch, which planning does not need

    try:
        return local_ranks()
    except PartitionError:
        return 1
