"""Anonymous shared memory, and the amount of memory that is available.

A memory file (memfd) has no name. It is passed by descriptor and freed with its last user, so it cannot leak or
collide.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

__all__ = ["SharedFile", "available_memory", "private_memory", "reserve"]


_WORTH_A_LOOK = 1 << 20
"""Size in bytes from which available memory is checked. A check takes as long as allocating about 100 pages."""


class SharedFile:
    """An anonymous file in memory that worker processes inherit, with every start method.

    Args:
        size: initial size in bytes.
        ranks: number of processes like this one that share the machine's memory.

    Attributes:
        fd: file descriptor; closed with this object.
    """

    def __init__(self, size: int, ranks: int = 1) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
        # macOS has no memfd: use a file without a name.
        else:
            self.fd, path = tempfile.mkstemp(prefix="penstock-ring-")
            os.unlink(path)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._ranks = ranks
        os.ftruncate(self.fd, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd), self._ranks)

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed. Its number may already be reused."""
        return not self._close.alive

    def reserve(self, begin: int, size: int, *, most: float = 1.0) -> None:
        """Allocate memory for a part of the file, and enlarge the file if necessary.

        Args:
            begin: offset in bytes.
            size: size in bytes.
            most: largest share of this rank's available memory to take.

        Raises:
            OSError: there is not enough memory.
        """
        left = available_memory() if size >= _WORTH_A_LOOK else None
        if left is not None and size > left / self._ranks * most:
            ranks = f", for {self._ranks} ranks" if self._ranks > 1 else ""
            why = f"{left / 2**20:.0f} MiB are left on this machine or in this container{ranks}"
            raise OSError(errno.ENOMEM, why)
        try:
            reserve(self.fd, begin, size)
        except OSError as error:
            raise OSError(error.errno, f"the system refuses: {error.strerror}") from error

    def close(self) -> None:
        """Close the descriptor; mappings stay. Idempotent."""
        self._close()


def _inherit(dup: Any, ranks: int) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file.fd = dup.detach()
    file._ranks = ranks
    file._close = weakref.finalize(file, os.close, file.fd)
    return file


def reserve(fd: int, begin: int, size: int) -> None:
    """Make the kernel allocate memory for a part of a file, and enlarge the file if necessary.

    Raises:
        OSError: there is not enough memory.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, size)
    elif os.fstat(fd).st_size < begin + size:
        os.ftruncate(fd, begin + size)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or exceeding a container's limit; None if unknown.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return min(found, default=None)
    for group in groups:
        _, controllers, path = group.split(":", 2)
        # Version 2 of control groups has one hierarchy.
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.strip("/")
        for level in (folder, *folder.parents):
            if level == top.parent:
                break
            left = _left(level, *names)
            if left is not None:
                found.append(left)
    return min(found, default=None)


def private_memory(pid: int) -> int:
    """Return the bytes that a process shares with no other; 0 if unknown or if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def _left(folder: Path, limit: str, usage: str) -> int | None:
    """Return the bytes left in a control group. Cached files count as free, since the kernel drops them first."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
        # In version 1 `usage` includes the groups below, and so do the `total_` fields.
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("active_file", "inactive_file"))
        return max(0, int(most) - max(0, used - cached))
    except (OSError, ValueError):
        return None
