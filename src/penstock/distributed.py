"""Determine rank, world size and data-loading worker; no other module does.

The first of these that exists decides:

1. ``mesh=``: the dimensions of a ``DeviceMesh`` that split data. Ranks along the others get the same batches.
2. ``process_group=``: the rank in this group, and its size.
3. ``rank=`` and ``world_size=``, as given.
4. ``torch.distributed``, if it is initialised.
5. The environment variables RANK and WORLD_SIZE, which torchrun sets.
6. Rank 0 of 1.

They are resolved in the main process and sent as plain numbers to workers, which have no process group. Another process
that gets a pickled object, such as a rank that the program starts, resolves them by itself, unless an argument did.
"""

from __future__ import annotations

import operator
import os
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from penstock.errors import PartitionError

__all__ = ["LateWorld", "Worker", "World", "current", "local_ranks", "ranks", "worker"]


_VARIABLES = ("RANK", "WORLD_SIZE")

_DATA = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "data", "data_parallel", "batch")
"""Dimensions of a mesh that split data: the names of torchtitan, Accelerate, Lightning and torch's own tutorials."""

_SAME_BATCH = ("tp", "tensor", "tensor_parallel", "cp", "sp", "pp")
"""Dimensions whose ranks work on the same batch: of tensor, context, sequence and pipeline parallelism."""


class World(NamedTuple):
    """The rank of this process and the number of ranks."""

    rank: int
    world_size: int


class Worker(NamedTuple):
    """The number of this data-loading worker and the number of workers; ``(0, 1)`` outside of workers."""

    id: int
    total: int


def current(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    mesh: dist.device_mesh.DeviceMesh | None = None,
) -> World:
    """Return the rank of this process among the ranks that split the data, and their number.

    Args:
        rank, world_size: used unchanged. Give both or neither.
        process_group: a ``torch.distributed`` group among whose ranks the data is split (the data-parallel rank is not
            always the global rank).
        mesh: a ``DeviceMesh``. Its dimensions dp, dp_replicate, dp_shard, replicate, shard, data, data_parallel and
            batch split the data, and their sizes multiply. The ranks along tp, tensor, tensor_parallel, cp, sp and pp
            get the same batches. Dimensions without names, or with another name in a part of the job's mesh, such as
            ``mesh["workers"]``, split the data, too.

    Raises:
        PartitionError: only one of rank and world_size is given; the rank is outside the world; RANK and WORLD_SIZE
            are not integers, or only one of them is set; this process is not in the group or mesh; the mesh has
            dimensions with other names; or more than one of ranks, group and mesh is given.

    >>> current(rank=1, world_size=4)
    World(rank=1, world_size=4)
    """
    if (rank is None) != (world_size is None):
        raise PartitionError(f"give both rank and world_size or neither, got rank={rank}, world_size={world_size}")
    ways = {"mesh": mesh, "process_group": process_group, "rank and world_size": rank}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise PartitionError(f"give either {given[0]} or {given[1]}, not both")
    if mesh is not None:
        return _of_mesh(mesh)
    if process_group is not None:
        if hasattr(process_group, "get_group"):
            raise PartitionError("process_group takes a group of torch.distributed: pass the DeviceMesh as mesh=")
        if dist.get_rank(process_group) < 0:
            raise PartitionError("this process is not in process_group: create the dataset only in ranks of the group")
        return World(dist.get_rank(process_group), dist.get_world_size(process_group))
    if rank is not None and world_size is not None:
        return _checked(_integer(rank), _integer(world_size), "")
    if _has_group():
        return World(dist.get_rank(), dist.get_world_size())
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if not found:
        return World(0, 1)
    if len(found) == 1:
        raise PartitionError(
            f"only {next(iter(found))} is set of RANK and WORLD_SIZE: set both or neither, "
            "or initialise torch.distributed first"
        )
    try:
        numbers = int(found["RANK"]), int(found["WORLD_SIZE"])
    except ValueError:
        raise PartitionError(
            f"RANK and WORLD_SIZE must be integers, got RANK={found['RANK']!r} and WORLD_SIZE={found['WORLD_SIZE']!r}"
        ) from None
    return _checked(*numbers, " (from the environment variables RANK and WORLD_SIZE)")


def _of_mesh(mesh: dist.device_mesh.DeviceMesh) -> World:
    if not hasattr(mesh, "mesh_dim_names"):
        raise PartitionError(f"mesh takes a DeviceMesh of torch.distributed, got {mesh!r}")
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names or ("data",) * mesh.ndim
    if coordinate is None:
        raise PartitionError("this process is not in mesh: create the dataset only in ranks of the mesh")
    unknown = [name for name in names if name not in (*_DATA, *_SAME_BATCH)]
    # A smaller mesh is one that the program took out of the job's mesh for its data.
    if unknown and mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        raise PartitionError(
            f"it is unknown whether the dimension {unknown[0]!r} of this mesh splits data. These do: "
            f"{', '.join(_DATA)}. The ranks along {', '.join(_SAME_BATCH)} get the same batches. Pass the dimension "
            'that splits data, as in mesh=mesh["dp"], or its group as process_group='
        )
    rank, world_size = 0, 1
    for name, at, size in zip(names, coordinate, mesh.shape, strict=True):
        if name not in _SAME_BATCH:
            rank, world_size = rank * size + at, world_size * size
    return World(rank, world_size)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def ranks() -> int:
    """Return the number of ranks, also where this process does not know its own rank yet.

    Child processes of Lightning have WORLD_SIZE without RANK until the process group exists.

    Raises:
        PartitionError: WORLD_SIZE is not a positive integer.
    """
    return dist.get_world_size() if _has_group() else _from_variable("WORLD_SIZE") or 1


def local_ranks() -> int:
    """Return how many ranks of the job run on this machine: LOCAL_WORLD_SIZE, which torchrun sets.

    Without it all ranks count as local, so a rank may use too little of the machine, but never too much.

    Raises:
        PartitionError: LOCAL_WORLD_SIZE or WORLD_SIZE is not a positive integer.
    """
    count = ranks()
    local = None if count == 1 else _from_variable("LOCAL_WORLD_SIZE")
    return count if local is None else min(count, local)


def _from_variable(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and (not value.isdecimal() or int(value) < 1):
        raise PartitionError(f"{name} must be a positive integer, got {value!r}")
    return None if value is None else int(value)


def _integer(given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise PartitionError(f"rank and world size (num_replicas) must be integers, got {given!r}") from None


def _checked(rank: int, world_size: int, source: str) -> World:
    if world_size < 1 or not 0 <= rank < world_size:
        raise PartitionError(f"rank {rank} is outside the world of {world_size}{source}")
    return World(rank, world_size)


def worker() -> Worker:
    """Return the data-loading worker that this code runs in."""
    info = get_worker_info()
    return Worker(0, 1) if info is None else Worker(info.id, info.num_workers)


class LateWorld:
    """Rank and world size of an object that may be created before the process group: resolved at first use, then fixed.

    A pickle contains what the process that wrote it knew. A worker process uses that, since it has no process group.
    Any other process does only if neither a process group nor RANK and WORLD_SIZE say more there.

    Args:
        rank, world_size: used unchanged. A missing one is determined at first use.
        process_group, mesh: as in `current`. They are read immediately and not stored, since they cannot be pickled.
        each: allow rank without world_size or the reverse, as torch does.
        of: name of the object that this belongs to, for error messages.

    Raises:
        PartitionError: as `current`, for the given arguments.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
        each: bool = False,
        of: str,
    ) -> None:
        self._rank = None if rank is None else _integer(rank)
        self._world_size = None if world_size is None else _integer(world_size)
        self._of = of
        numbers = rank is not None and world_size is not None
        self.given = numbers or process_group is not None or mesh is not None
        """Whether arguments determine rank and world size."""
        # From the process that pickled this object.
        self._sent: World | None = None
        self._world: World | None = None
        if self.given or (not each and (rank is not None or world_size is not None)):
            self._world = current(rank, world_size, process_group=process_group, mesh=mesh)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": self._world if self.given else None, "_sent": self.known()}

    def __deepcopy__(self, memo: dict[int, Any]) -> LateWorld:
        # Copies in this process have the same rank. Copying must not resolve it.
        return self

    def __str__(self) -> str:
        world = self.known()
        return f"rank not known yet, of {self.ranks}" if world is None else f"rank {world.rank} of {world.world_size}"

    @property
    def ranks(self) -> int:
        """The world size as of now, without fixing it, also where the rank is not known yet."""
        world = self.known()
        return world.world_size if world is not None else self._world_size or ranks()

    def known(self) -> World | None:
        """Return rank and world size as of now, without fixing them; None if only one of RANK and WORLD_SIZE is set."""
        if self._world is not None:
            return self._world
        half = not self._uses_sent and not _has_group() and len(os.environ.keys() & _VARIABLES) == 1
        return None if half else self._find()

    def get(self) -> World:
        """Return rank and world size, and fix them.

        Raises:
            PartitionError: a process group was created since the first call, and disagrees with its result.
        """
        if self._world is None:
            self._world = self._find()
        elif not self.given and _has_group():
            found = self._find()
            if found != self._world:
                raise PartitionError(
                    f"this {self._of} was first used as rank {self._world.rank} of {self._world.world_size}, and now "
                    f"the process group says rank {found.rank} of {found.world_size}: initialise torch.distributed "
                    "first, or pass the rank and the world size"
                )
        return self._world

    @property
    def _uses_sent(self) -> bool:
        # torch's variable is set in worker processes, also of torch's loader, but not in threads.
        in_worker = getattr(_torch_worker, "_worker_info", None) is not None
        return self._sent is not None and (in_worker or not (_has_group() or os.environ.keys() & _VARIABLES))

    def _find(self) -> World:
        rank, world_size = self._rank, self._world_size
        if rank is None or world_size is None:
            found = self._sent if self._sent is not None and self._uses_sent else current()
            rank = found.rank if rank is None else rank
            world_size = found.world_size if world_size is None else world_size
        return _checked(rank, world_size, "")
