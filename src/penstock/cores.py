"""CPU cores: how many this process may use, and how busy they are."""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["Ticks", "cores", "ticks"]

_ROOT = Path("/")

Ticks = tuple[int, int]
"""Busy clock ticks and all clock ticks since boot, for the cores that this process may use."""


@functools.cache
def cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use: its CPU affinity, limited by the quota of its container.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    count = len(_mine()) or os.cpu_count() or 1
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return count
    path = next((group.split(":", 2)[2] for group in groups if group.startswith("0::")), "").strip("/")
    folder = root / "sys/fs/cgroup" / path
    for level in (folder, *folder.parents):
        quota = level / "cpu.max"
        if quota.is_file():
            most, period = quota.read_text().split()
            count = count if most == "max" else min(count, max(1, -(-int(most) // int(period))))
    return count


def ticks(root: Path = _ROOT) -> Ticks | None:
    """Return busy ticks and all ticks so far, or None if the system does not report them. Takes less than 1 ms."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    mine = {f"cpu{number}" for number in _mine()}
    busy = everything = 0
    for line in lines:
        name, *numbers = line.split()
        if name in mine:
            # User time already includes the later columns, the time of virtual machines.
            spent = [int(number) for number in numbers[:8]]
            everything += sum(spent)
            busy += sum(spent) - spent[3] - spent[4]  # idle, and idle while a disk works
    return (busy, everything) if everything else None


def _mine() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
