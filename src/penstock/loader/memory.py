"""Memory without a name, and how much of it may be had.

A memory file (memfd) is passed by descriptor and goes away with its last user: nothing to leak, nothing to collide.
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
"""Bytes from which on it is looked how much there is: a look takes as long as to have some hundred pages made."""


class SharedFile:
    """An anonymous file in memory that worker processes inherit, under every start method.

    Args:
        size: bytes at first.
        ranks: how many programs like this one share the machine's memory.

    Attributes:
        fd: its descriptor; closed with this object.
    """

    def __init__(self, size: int, ranks: int = 1) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
        else:  # macOS: a file that has no name any more
            self.fd, path = tempfile.mkstemp(prefix="penstock-ring-")
            os.unlink(path)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._ranks = ranks
        os.ftruncate(self.fd, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd), self._ranks)

    @property
    def closed(self) -> bool:
        """Whether its descriptor is closed, and perhaps somebody else's by now."""
        return not self._close.alive

    def reserve(self, begin: int, size: int, *, most: float = 1.0) -> None:
        """Have memory set aside for a part of the file, which grows as needed.

        Args:
            most: part of what is left, and falls to this rank, that may be taken.

        Raises:
            OSError: there is not so much.
        """
        left = available_memory() if size >= _WORTH_A_LOOK else None
        if left is not None and size > left / self._ranks * most:
            ranks = f", for {self._ranks} ranks" if self._ranks > 1 else ""
            why = f"{left / 2**20:.0f} MiB are left on this machine or to this container{ranks}"
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
    """Have the kernel set memory aside for a part of the file, which grows as needed.

    Raises:
        OSError: there is not so much.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, size)
    elif os.fstat(fd).st_size < begin + size:
        os.ftruncate(fd, begin + size)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that may be allocated without swapping, or being killed by the limit of a container; None if unknown.

    Args:
        root: where ``proc`` and ``sys`` are found.
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
        if not controllers:  # version 2: one hierarchy
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
    """Bytes that a process shares with no other one; 0 where the system does not say, or it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def _left(folder: Path, limit: str, usage: str) -> int | None:
    """What a control group leaves, counting cached files as free: the kernel drops those first."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
        # Version 1 says by `total_` what `usage` counts: the groups below, too.
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("active_file", "inactive_file"))
        return max(0, int(most) - max(0, used - cached))
    except (OSError, ValueError):
        return None
