"""The memory of this machine or container, as far as the system says."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory", "private_memory"]


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
