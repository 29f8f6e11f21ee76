"""The options of all of Penstock's map-style datasets, and their checks.

A dataset checks its options before it opens its source, so a wrong one is reported at once, with the name of the class.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any, Literal, SupportsIndex, TypedDict

import torch.distributed as dist

from penstock.errors import ConfigError

__all__ = ["NO_NODES", "NO_PRELOAD", "PartitionOptions", "ShareOptions", "check_share", "wrong_share_option"]

NO_NODES = "locality='node' needs no number of nodes, because its order is the same on any: leave nodes= out"
NO_PRELOAD = (
    "there is no preload=: copy a manifest on a slow file system to a local disk and open the copy, or read it from a "
    "server (RankServerDataset); one in a store is copied to the cache by itself"
)


class PartitionOptions(TypedDict, total=False):
    """Options of the partition among ranks and mini-epochs.

    Keys:
        rank, world_size: by default those of the job, see `penstock.distributed`. They are read at the first use and
            fixed from then on.
        process_group: the group that splits the data, if it is not the default group.
        mesh: a DeviceMesh whose data dimensions split the data, see `penstock.distributed.current`.
        mini_epochs: number of mini-epochs (sub-epochs) of an epoch. All have the same length, with padding at the end
            of the epoch.
        seed: the order is a function of (seed, epoch); the same on all ranks. 0 by default.
        remainder: ``"pad"`` (default), ``"drop"`` or ``"uneven"``, see `penstock.order.Partition`. For exact evaluation
            use ``shuffle="none", remainder="uneven"``; for all rows on every rank ``world_size=1, rank=0``.
    """

    rank: int | None
    world_size: int | None
    process_group: dist.ProcessGroup | None
    mesh: dist.device_mesh.DeviceMesh | None
    mini_epochs: int
    seed: int
    remainder: Literal["pad", "drop", "uneven"]


class ShareOptions(PartitionOptions, total=False):
    """Options of a rank's samples and their order, which all of Penstock's map-style datasets have.

    Keys:
        shuffle: ``"global"`` (default), ``"block"`` or ``"none"``.
        block_size, window: of ``"block"``, see `penstock.order.make_order`.
        group: number of blocks; permutes the blocks and the rows in each block (short for ``shuffle="block"`` with the
            matching block size and ``window=1``).
        exclude: rows of the source to leave out, such as damaged ones found during a run; at most 100,000. Other rows
            replace them, drawn from (seed, epoch, excluded row). All other positions keep their rows, so older states
            still load. To load a state saved with excluded rows, exclude at least the same rows.
        locality: ``"node"``: each rank reads the same rows in every epoch, so the caches of k nodes together hold k
            times as much, if the number of ranks divides 192. Every epoch is a permutation of all rows, the same on any
            number of ranks; see `penstock.order.NodeShuffle`. ``"none"`` (default) splits all rows among all ranks
            again in each epoch.
    """

    shuffle: Literal["global", "block", "none"]
    group: int | None
    block_size: int | None
    window: int | None
    exclude: Any
    locality: Literal["none", "node"]


def check_share(
    owner: type,
    share: Mapping[str, Any],
    load: Callable[[Any], Any] | None = None,
    *,
    known: Collection[str] = ShareOptions.__annotations__,
) -> None:
    """Raise for unknown options of a dataset, and for values of a wrong type.

    Args:
        owner: the class that was called.
        share: its ``**share`` keyword arguments.
        load: its argument of this name.
        known: the options that may be in ``share``.

    Raises:
        TypeError: an option is unknown, as for any function.
        ConfigError: a value has a wrong type, or ``nodes`` is an option.
    """
    if "nodes" in share:
        raise ConfigError(f"{owner.__name__}: {NO_NODES}")
    for name, value in share.items():
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *inspect.signature(owner).parameters], 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{owner.__name__}() got an unexpected keyword argument {name!r}{hint}")
        wanted = wrong_share_option(name, value)
        if wanted is not None:
            raise ConfigError(f"{owner.__name__}: {name}= takes {wanted}, got {value!r}")
    if load is not None and not callable(load):
        raise ConfigError(f"{owner.__name__}: load= takes a function, or None, got {load!r}")


def wrong_share_option(name: str, value: Any) -> str | None:
    """Return a description of the values that an option takes, if the value is of a wrong type; else None.

    >>> wrong_share_option("seed", "a"), wrong_share_option("seed", 3)
    ('an integer', None)
    """
    if name not in _TAKES:
        return None
    kinds, wanted = _TAKES[name]
    # True is an int, and arrays of several integers have __index__, too.
    fits = isinstance(value, kinds) and not isinstance(value, bool) and not getattr(value, "ndim", 0)
    return None if fits else wanted


_TAKES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("mini_epochs", "seed"), ((SupportsIndex,), "an integer")),
    **dict.fromkeys(
        ("rank", "world_size", "group", "block_size", "window"), ((SupportsIndex, NoneType), "an integer, or None")
    ),
    "shuffle": ((str,), "the name of an order: 'global', 'block' or 'none'"),
    "remainder": ((str,), "'pad', 'drop' or 'uneven'"),
    "locality": ((str,), "'none' or 'node'"),
}
