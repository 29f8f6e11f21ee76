"""The memory that carries batches from workers to the consumer: reusable slots of one shared file.

    SharedFile   the file: no name, passed by descriptor, freed with its last user, so it cannot leak or collide
    Ring         the consumer's half: lends slots, and notices when a batch is no longer used
    Slot         a worker's half: the tensors of one batch

A slot is lent to a worker for one batch, then leased to that batch: its large tensors are views of one array over the
slot. When nobody refers to this array any more, the slot is free again. Reused pages need no allocation, which makes
the ring fast.

Invariant: a slot is either free, lent, leased or retired; so memory that a tensor still refers to is never overwritten.

    file   | board | slot ====-------- | slot ======------ | slot ...      = memory      - address space without memory

A worker extends its slot as far as the batch needs it. A free slot keeps as much memory as batches usually need, and
slots that have not been used for a while lose theirs.

A child process that user code forks holds the batches of the program. So slots in use at a fork are retired until the
child has ended. A pipe shows when: the child and its descendants hold its other end. Our own forks, which start
workers, do not read batches.

    before the fork   create a pipe, and mark each leased slot
    parent            closes the writing end; end of file means that the child has ended, or started a program
    child             keeps the writing end open
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.distributed import local_ranks
from penstock.errors import PartitionError, RingError
from penstock.loader.sizes import PAGE
from penstock.memory import available_memory

__all__ = ["ALIGNMENT", "BOARD", "NAMES", "SLOTS", "Ring", "SharedFile", "Slot", "fork", "tensor_at", "usual"]

BOARD = 1 << 20
"""Bytes at the head of the file, for the words that `worker` describes."""

SLOTS = 1 << 10
"""Number of parts of the file. The first one is the board; number 0 as a slot means none."""

ALIGNMENT = 64
"""Offsets of tensors in a slot are multiples of it: a cache line, which also suits vector instructions."""

_LAST = 16  # batches whose sizes tell what is usual
_SLACK = 1.25  # free slots may be this much larger than usual, since batches vary
_SWEEP = 64  # batches between sweeps for unused slots
_GROWTH = 8
"""Slots grow by at least this fraction of their size, so that a batch of many tensors extends them rarely."""

_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, which `mmap` does not name

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""The names of torch's dtypes."""

_NUMPY = {name: np.dtype(name) for name in NAMES.values() if name in np.sctypeDict}

_ADDRESS_SPACE = 1 << 42
_LEAST = 1 << 26
_PAGES = 1 << 16
"""Parts of the file begin at multiples of this, whatever the size of a page."""

_WORTH_A_LOOK = 1 << 20
"""Size in bytes from which available memory is checked. A check takes as long as allocating about 100 pages."""


class SharedFile:
    """An anonymous file in memory that worker processes inherit, with every start method, and that each maps whole.

    The file is sparse: it has room for terabytes, and memory only where somebody has called `reserve`.

    Args:
        ranks: number of processes like this one that share the machine's memory.
        inherited: descriptor and size of a file that another process has made.

    Attributes:
        fd: file descriptor; closed with this object.
        size: bytes of address space.
        room: bytes of address space of each slot.
        map: the whole file. Arrays and tensors over it stay valid after `close`.
        mapped: bytes of each slot for which this process has page tables.
        close: closes the descriptor. Idempotent.

    Raises:
        RingError: the system maps no such file.
    """

    def __init__(self, ranks: int = 1, inherited: tuple[int, int] | None = None) -> None:
        if inherited is not None:
            fd, size = inherited
        else:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
            # macOS has no memfd: use a file without a name.
            else:
                fd, path = tempfile.mkstemp(prefix="penstock-ring-")
                os.unlink(path)
            import resource  # missing on Windows, where this module is imported but not used

            # 4 TiB, of which 30 fit, or less if files or address space are limited.
            limits = {resource.RLIMIT_FSIZE: 1, resource.RLIMIT_AS: 4}
            most = [soft // share for name, share in limits.items() if (soft := resource.getrlimit(name)[0]) >= 0]
            size = min([_ADDRESS_SPACE, *most]) // _PAGES * _PAGES
        self.fd, self.size, self._ranks = fd, size, ranks
        self.close = weakref.finalize(self, os.close, fd)
        while True:
            try:
                os.ftruncate(fd, self.size)
                self.map = mmap.mmap(fd, self.size)
                break
            except (OSError, ValueError) as error:
                # Other loaders, or batches of theirs that are kept, may have taken the address space.
                self.size //= 16
                if self.size < _LEAST:
                    raise RingError(
                        f"{size / 2**30:.3g} GiB of address space for the batches of workers cannot be mapped "
                        f"({error}): raise the limits (ulimit -v, ulimit -f), keep batches of fewer loaders, or use "
                        "executor='thread'"
                    ) from error
        self.room = self.size // SLOTS
        self.address: int = np.ndarray(1, np.uint8, self.map).__array_interface__["data"][0]
        self.mapped: dict[int, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd), self._ranks, self.size)

    def reserve(self, begin: int, size: int) -> None:
        """Allocate memory for a part of the file, so that writing there cannot end this process.

        Raises:
            RingError: this machine, or this rank's share of it, has less memory left.
            OSError: the system refuses.
        """
        left = available_memory() if size >= _WORTH_A_LOOK else None
        if left is not None and size > left / self._ranks:
            ranks = f", for {self._ranks} ranks" if self._ranks > 1 else ""
            raise RingError(
                f"a batch needs {size / 2**20:.1f} MiB of shared memory, and {left / 2**20:.0f} MiB are left on this "
                f"machine or in this container{ranks}: lower batch_size; or prefetch_factor, num_workers or "
                "max_bytes_in_flight of the loaders beside it"
            )
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, begin, size)

    def discard(self, begin: int, size: int) -> None:
        """Give the memory of a part of the file back; all processes then read zeros there. Some systems keep it."""
        if self.can_discard and size > 0:
            self.map.madvise(mmap.MADV_REMOVE, begin, size)

    can_discard = hasattr(mmap, "MADV_REMOVE")


def _inherit(dup: Any, ranks: int, size: int) -> SharedFile:
    return SharedFile(ranks, (dup.detach(), size))


def usual(sizes: Collection[int]) -> int:
    """Return the bytes that three quarters of some batches do not exceed; of two or three, all but the largest.

    >>> usual([4, 240, 4, 4])
    4
    """
    ranked = sorted(sizes, reverse=True) or [0]
    return ranked[max(len(ranked) // 4, min(1, len(ranked) - 1))]


class _Lease(weakref.ref[Any]):
    """Ends with the array over a slot."""

    __slots__ = ("slot",)
    slot: int


class Ring:
    """The consumer's half.

    Attributes:
        file: the memory; the first `BOARD` bytes are the board.

    Raises:
        RingError: the system refuses memory.
    """

    def __init__(self) -> None:
        try:
            ranks = local_ranks()
        except PartitionError:  # an invalid environment, which is reported elsewhere
            ranks = 1
        self.file = SharedFile(ranks)
        try:
            self.file.reserve(0, BOARD)
        except OSError as error:
            raise RingError(
                f"no shared memory for worker processes ({error.strerror}): raise the limit of the size of files "
                "(ulimit -f) to 1 GiB or more, or use executor='thread'"
            ) from error
        self.pid = os.getpid()
        self._extents: dict[int, int] = {}
        """Bytes of memory of each slot that was ever lent."""
        self._free: list[int] = []  # a stack: the last used slot is still in the CPU cache
        self._least_free = 0  # minimum since the last sweep: the number of unused slots
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()  # appended to wherever an array dies, in any thread
        self._sizes: deque[int] = deque(maxlen=_LAST)
        self._usual = 0
        """Bytes of memory that free slots keep."""
        self._until_sweep = _SWEEP  # batches
        self._children: dict[int, list[Child]] = {}
        """Processes that user code forked while a slot was leased, by slot."""
        self._retired: list[int] = []
        _rings.add(self)

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
            slot = len(self._extents) + -(-BOARD // self.file.room)
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
        self._until_sweep -= 1
        if not self._until_sweep:
            self._sweep()
        memory = np.ndarray(used, np.uint8, self.file.map, slot * self.file.room)
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
        self._extents[slot] = self.file.room if extent is None else extent
        if slot in self._children:
            if not all(map(has_ended, self._children[slot])):
                self._retired.append(slot)
                return
            del self._children[slot]
        if self._extents[slot] > max(self._usual * _SLACK, PAGE):
            # Larger than usual, unless batches have become larger. Sorting takes long, so it is not done for each.
            self._usual = usual(self._sizes)
            if self._extents[slot] > self._usual * _SLACK:
                self._trim(slot, self._usual)
        self._free.append(slot)

    def _trim(self, slot: int, size: int) -> None:
        """Give the memory of a free slot back from ``size`` bytes on, in whole pages."""
        size, extent = -(-size // PAGE) * PAGE, self._extents[slot]
        if extent > size and self.file.can_discard and self.pid == os.getpid():
            self.file.discard(slot * self.file.room + size, extent - size)
            self._extents[slot] = size

    def _sweep(self) -> None:
        """Give the memory of slots back that were not used since the last sweep."""
        self._until_sweep, self._usual = _SWEEP, usual(self._sizes)
        for slot in self._free[: self._least_free]:
            self._trim(slot, 0)
        self._least_free = len(self._free)

    # Forks.

    def mark(self, child: Child) -> None:
        """Protect the slots that are leased now until a child has ended. May be called repeatedly."""
        for slot, lease in list(self._leases.items()):
            if lease() is not None:
                others = (other for other in self._children.get(slot, ()) if other is not child)
                self._children[slot] = [child, *(other for other in others if not has_ended(other))]

    def _revive(self) -> None:
        """Free slots whose children have ended, to be used last."""
        for slot in [slot for slot in self._retired if all(map(has_ended, self._children[slot]))]:
            self._retired.remove(slot)
            del self._children[slot]
            self._trim(slot, 0)
            self._free.insert(0, slot)


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


Child = Connection | None
"""The reading end of a pipe whose other end a process and its descendants hold. None if too many files were open."""


def has_ended(child: Child) -> bool:
    """Return whether a process that user code forked, and its descendants, have ended; False if nobody knows."""
    return child is not None and child.poll()


class _Fork(threading.local):
    """The fork in progress in this thread.

    Attributes:
        ours: whether it starts a worker, which reads no batch.
        ends: of the pipe, for reading and writing; empty if the child reads no batch.
    """

    ours = False
    ends: tuple[Child, ...] = ()


fork = _Fork()
_held: list[Child] = []
"""The writing ends that this process holds as long as it runs."""


def _before_fork() -> None:
    fork.ends = ()
    if not fork.ours and _rings:
        fork.ends = None, None
        with contextlib.suppress(OSError):
            fork.ends = Pipe(duplex=False)
        _mark()  # before another thread drops a batch that the child inherits


def _mark() -> None:
    for ring in list(_rings):
        ring.mark(fork.ends[0])


def _in_parent() -> None:
    if fork.ends:
        _mark()  # batches that another thread received meanwhile
    fork.ends = ()  # closes the writing end


def _in_child() -> None:
    _held.extend(fork.ends[1:])
    fork.ends = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class Slot:
    """Memory for the tensors of one batch: a worker's half. `empty` is a `penstock.loader.collate.Arena`.

    Args:
        file: the memory of all slots.
        number: number of the slot; 0 has no memory.
        extent: bytes of memory it has.

    Attributes:
        extent: bytes of memory it has now.
        used: bytes up to the end of the last tensor.
        refused: whether the system refused memory.

    Raises:
        RingError: from `empty`, if the machine has less memory left than a tensor needs.
    """

    __slots__ = ("_begin", "_file", "_mapped", "extent", "number", "refused", "used")

    def __init__(self, file: SharedFile, number: int, extent: int) -> None:
        self._file = file
        self._begin = number * file.room
        self.number = number
        self.extent = extent
        self.used = 0
        self.refused = False
        # The consumer may have given memory back.
        self._mapped = file.mapped[number] = min(extent, file.mapped.get(number, 0))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor; None if it has no bytes, or there is no memory for it."""
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        nbytes = math.prod(shape) * dtype.itemsize
        end = begin + nbytes
        if not nbytes or not self.number or (end > self._mapped and not self._extend(end)):
            return None
        self.used = end
        return tensor_at(self._file.map, self._begin + begin, NAMES[dtype], shape)

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int | None:
        """See `penstock.loader.executors.process.transport.Target`."""
        offset = address - self._file.address - self._begin
        if 0 <= offset < self.used:
            # The collate function has put it there.
            return offset
        copy = self.empty((nbytes,), torch.uint8)
        if copy is None:
            return None
        copy.numpy()[:] = read()
        return self.used - nbytes

    def _extend(self, needed: int) -> bool:
        """Return whether the slot has so many bytes of memory, after it was extended if necessary."""
        file = self._file
        if needed > self.extent:
            larger = max(needed, self.extent + self.extent // _GROWTH)
            larger = min(-(-larger // PAGE) * PAGE, file.room)
            if needed > larger:
                return False
            try:
                file.reserve(self._begin + self.extent, larger - self.extent)
            except OSError:
                self.refused = True
                return False
            self.extent = larger
        # In one system call, instead of by a page fault for each page; older kernels cannot.
        with contextlib.suppress(OSError):
            file.map.madvise(_POPULATE_WRITE, self._begin + self._mapped, self.extent - self._mapped)
        self._mapped = file.mapped[self.number] = self.extent
        return True


def tensor_at(memory: Any, offset: int, kind: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over memory, which it keeps alive."""
    if kind in _NUMPY:
        # A third of the time of the other way.
        return torch.from_numpy(np.ndarray(shape, _NUMPY[kind], memory, offset))
    dtype, count = getattr(torch, kind), math.prod(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
