"""Processor cores: how many this process may use, and how busy they are, with whatever runs on them."""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["Ticks", "cores", "ticks"]

_ROOT = Path("/")

Ticks = tuple[int, int]
"""Of the cores that this process may use, since the machine started: ticks of the clock with work, and all of them."""


@functools.cache
def cores(root: Path = _ROOT) -> int:
    """Cores that this process may use: those it may run on, or fewer if its container has a quota.

    Args:
        root: where ``proc`` and ``sys`` are found.
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
    """What the cores have done so far; None where the system does not say. A fraction of a millisecond."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    mine = {f"cpu{number}" for number in _mine()}
    busy = everything = 0
    for line in lines:
        name, *numbers = line.split()
        if name in mine:
            spent = [int(number) for number in numbers[:8]]  # the guests' time behind these is in the user's
            everything += sum(spent)
            busy += sum(spent) - spent[3] - spent[4]  # idle, and idle while a disk works
    return (busy, everything) if everything else None


def _mine() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
