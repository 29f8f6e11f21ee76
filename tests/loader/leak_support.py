"""What this process has open and uses, for tests of what is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

Left = tuple[set[str], set[str], set[int], set[str]]


def anonymous() -> int:
    """Anonymous memory in bytes, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def mapped() -> int:
    """Maps of shared memory files of ours."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def children() -> set[int]:
    """Processes that this one has started and that have not been waited for."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def left() -> Left:
    """Threads, descriptors by what they refer to, children (zombies too), entries of /dev/shm by us."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            descriptors.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    names = {thread.name for thread in threading.enumerate()}
    shared = {name for name in os.listdir("/dev/shm") if "penstock" in name or str(os.getpid()) in name}
    return names, descriptors, children(), shared


def assert_nothing_more(before: Left, seconds: float = 5) -> None:
    """In time, that is: nothing is left that was not there before."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        more = [now - then for now, then in zip(left(), before, strict=True)]
        if not any(more):
            return
        assert time.monotonic() < end, f"left behind: {more}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Those that still run after so many seconds; on a busy machine they have longer."""
    from busy_support import slowness  # not at the top: programs of tests import this module, too

    for patience in (lambda: seconds, lambda: seconds * (slowness() - 1)):
        deadline = time.monotonic() + patience()
        while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not left:
            break
    return left
