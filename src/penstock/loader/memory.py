"""Memory without a name, and how much of it may be had.

A memory file (memfd) is passed by descriptor and goes away with its last user: nothing to leak, nothing to collide.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

__all__ = ["SharedFile", "available_memory", "private_memory", "reserve"]


class SharedFile:
    """An anonymous file in memory that worker processes inherit, under every start method.

    Attributes:
        fd: its descriptor; closed with this object.
    """

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC)
        else:  # macOS: a file that has no name any more
            self.fd, path = tempfile.mkstemp(prefix="penstock-ring-")
            os.unlink(path)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd),)

    def close(self) -> None:
        """Close the descriptor; mappings stay. Idempotent."""
        self._close()


def _inherit(dup: Any) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file.fd = dup.detach()
    file._close = weakref.finalize(file, os.close, file.fd)
    return file


def reserve(fd: int, begin: int, size: int) -> None:
    """Have the kernel set memory aside for a part of the file, which grows as needed.

    Raises:
        OSError: there is not so much.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, size)
    else:
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
