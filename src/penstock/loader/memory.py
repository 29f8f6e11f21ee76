"""Anonymous shared memory.

A memory file (memfd) has no name. It is passed by descriptor and freed with its last user, so it cannot leak or
collide.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from typing import Any

from penstock.errors import RingError
from penstock.memory import available_memory

__all__ = ["SharedFile"]

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

    Attributes:
        fd: file descriptor; closed with this object.
        size: bytes of address space.
        map: the whole file. Arrays and tensors over it stay valid after `close`.
        close: closes the descriptor. Idempotent.

    Raises:
        RingError: the system maps no such file.
    """

    def __init__(self, ranks: int = 1) -> None:
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
        self._open(fd, ranks, min([_ADDRESS_SPACE, *most]) // _PAGES * _PAGES)

    def _open(self, fd: int, ranks: int, size: int) -> None:
        self.fd, self.size, self._ranks = fd, size, ranks
        self.close = weakref.finalize(self, os.close, fd)
        while True:
            try:
                os.ftruncate(fd, self.size)
                self.map = mmap.mmap(fd, self.size)
                return
            except (OSError, ValueError) as error:
                # Other loaders, or batches of theirs that are kept, may have taken the address space.
                self.size //= 16
                if self.size < _LEAST:
                    raise RingError(
                        f"{size / 2**30:.3g} GiB of address space for the batches of workers cannot be mapped "
                        f"({error}): raise the limits (ulimit -v, ulimit -f), keep batches of fewer loaders, or use "
                        "executor='thread'"
                    ) from error

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
    file = SharedFile.__new__(SharedFile)
    file._open(dup.detach(), ranks, size)
    return file
