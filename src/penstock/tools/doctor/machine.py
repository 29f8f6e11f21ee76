"""The cores, memory, /dev/shm and open files that this process may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.cores import cores as usable_cores
from penstock.memory import available_memory
from penstock.tools.doctor.result import Advice

__all__ = ["Cores", "Memory", "OpenFiles", "SharedMemory", "cores", "memory", "open_files", "shared_memory"]

_ROOT = Path("/")
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED = 1 << 30  # Docker's default is 64 MiB
_FEW_FILES = 4096


@dataclass(frozen=True)
class Cores:
    """Cores of the machine, cores that the process may run on, and how many it may use under a container's quota."""

    machine: int
    affinity: int
    usable: int


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: of the machine, free, and available to a process under a container's limit."""

    total: int | None
    available: int | None
    usable: int | None


@dataclass(frozen=True)
class SharedMemory:
    """Size of /dev/shm and its free space, in bytes."""

    size: int
    free: int


@dataclass(frozen=True)
class OpenFiles:
    """The limit of open file descriptors, and the largest limit that a process can set for itself. None: no limit."""

    soft: int | None
    hard: int | None


def cores(root: Path = _ROOT) -> tuple[Cores, list[Advice]]:
    """Return the number of cores that this process may use."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    found = Cores(machine, affinity, min(affinity, usable_cores(root)))
    if found.usable > 1:
        return found, []
    what = "there is one core, which workers and the training loop share"
    return found, [Advice("cores", what, "use more cores, or store smaller images (penstock shards pack)")]


def memory(root: Path = _ROOT) -> tuple[Memory, list[Advice]]:
    """Return the memory that can be used without swapping or exceeding a container's limit."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        said = {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}
    except (OSError, ValueError):
        said = {}
    available, usable = said.get("MemAvailable"), available_memory(root)
    if available is not None and usable is not None:
        usable = min(usable, available)  # a later reading of the same number may be larger
    found = Memory(said.get("MemTotal"), available, usable)
    if found.usable is None or found.usable >= _LITTLE_MEMORY:
        return found, []
    what = f"{found.usable / 1e9:.1f} GB can be used: torch takes about 0.2 GB in each rank, and batches need more"
    return found, [Advice("memory", what, "use fewer workers or smaller batches, or raise the container's limit")]


def shared_memory(folder: str = "/dev/shm") -> tuple[SharedMemory | None, list[Advice]]:
    """Check the folder that torch's own loader needs for tensors. Penstock uses anonymous memory instead."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None, []
    found = SharedMemory(state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail)
    if found.free >= _LITTLE_SHARED:
        return found, []
    what = (
        f"{found.free / 1e6:,.0f} MB are free: workers of torch's own DataLoader die of a bus error if batches do not "
        "fit, and Ray puts its object store on disk. penstock.DataLoader does not use it"
    )
    do = "docker run --shm-size=8g; in Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    return found, [Advice("/dev/shm", what, do)]


def open_files() -> tuple[OpenFiles | None, list[Advice]]:
    """Return the limit of open file descriptors; None on Windows."""
    try:
        import resource
    except ImportError:
        return None, []
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    found = OpenFiles(soft, hard)
    if soft is None or soft >= _FEW_FILES:
        return found, []
    what = (
        f"a process may open {soft:,} files: at most {soft // 8:,} shards stay open, and a server, or torch's own "
        "loader with its descriptor for each tensor, may run out"
    )
    wanted = 65536 if hard is None else min(65536, hard)
    do = f"ulimit -n {wanted}" if wanted > soft else "raise the hard limit: LimitNOFILE in systemd, --ulimit in Docker"
    return found, [Advice("open files", what, do)]
