"""Rank, world size and worker: the one place that finds them.

Rank and world size come from the arguments, else from an initialised ``torch.distributed`` process group, else from
the environment variables RANK and WORLD_SIZE (set by torchrun), else they are 0 and 1. They are resolved in the main
process and travel as plain numbers to workers, which have no process group.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from penstock.errors import PartitionError

__all__ = ["Worker", "World", "current", "worker"]


class World(NamedTuple):
    """Which rank this is, of how many."""

    rank: int
    world_size: int


class Worker(NamedTuple):
    """Which data-loading worker this is, of how many; ``(0, 1)`` outside of workers."""

    id: int
    count: int


def current(rank: int | None = None, world_size: int | None = None, *, process_group: Any = None) -> World:
    """This process's rank and the job's world size.

    Args:
        rank, world_size: taken as given. Give both or neither.
        process_group: a ``torch.distributed`` group or one-dimensional DeviceMesh whose ranks share out the data (the
            data-parallel rank is not always the global one).

    Raises:
        PartitionError: only one of the two is given, the rank is outside the world, or RANK and WORLD_SIZE are no
            numbers or only one of them is set.

    >>> current(rank=1, world_size=4)
    World(rank=1, world_size=4)
    """
    if (rank is None) != (world_size is None):
        raise PartitionError(f"give both rank and world_size or neither, got rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        if process_group is not None:
            raise PartitionError("give either rank and world_size or process_group, not both")
        return _checked(rank, world_size, "")
    if process_group is not None:
        group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        return World(dist.get_rank(group), dist.get_world_size(group))
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return _from_environment()


def _from_environment() -> World:
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        return World(0, 1)
    if len(given) == 1:
        raise PartitionError(f"of RANK and WORLD_SIZE only {next(iter(given))} is set: set both or neither")
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        raise PartitionError(
            f"RANK and WORLD_SIZE must be integers, got RANK={given['RANK']!r} and WORLD_SIZE={given['WORLD_SIZE']!r}"
        ) from None
    return _checked(rank, world_size, " (from the environment variables RANK and WORLD_SIZE)")


def _checked(rank: int, world_size: int, source: str) -> World:
    if world_size < 1 or not 0 <= rank < world_size:
        raise PartitionError(f"rank {rank} is outside the world of {world_size}{source}")
    return World(rank, world_size)


def worker() -> Worker:
    """The data-loading worker that this code runs in."""
    info = get_worker_info()
    return Worker(0, 1) if info is None else Worker(info.id, info.num_workers)
