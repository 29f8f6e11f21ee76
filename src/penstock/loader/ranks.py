"""Checks whether a loader's dataset or sampler splits the samples among ranks, with a warning if nothing does."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from penstock import distributed
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.identity import holds_a_share
from penstock.samplers.random import RandomSampler
from penstock.samplers.shares import layers, rank_splitter

__all__ = ["has_rank", "splits_by_rank", "warn_of_same_batches"]

_warned = False
"""Whether this process has warned."""


def splits_by_rank(loader: TorchDataLoader[Any], *, ranks: int) -> bool:
    """Return whether the loader's dataset or one of its samplers gives each of ``ranks`` ranks a separate share."""
    return holds_a_share(loader.dataset) or rank_splitter(_outermost(loader), ranks=ranks) is not None


def has_rank(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, belongs to a particular rank, even if it is the only rank."""
    return _is_told(sampler) or rank_splitter(sampler, ranks=2) is not None


def warn_of_same_batches(loader: TorchDataLoader[Any], source: EpochBatchSampler | None, *, chosen: bool) -> None:
    """Warn once per process if all ranks are about to read the same batches.

    There is no warning for an unseeded shuffle, since each rank draws another order, as with torch's loader; for a
    dataset in its own order, since programs evaluate on every rank; or for a sampler that was created for one rank.

    Args:
        source: plan of the loader's batches; None if only an iterable dataset knows them.
        chosen: whether the loader itself chose the sampler, for ``shuffle=``.
    """
    global _warned
    ranks = distributed.current().world_size
    if _warned or ranks == 1 or source is None or splits_by_rank(loader, ranks=ranks) or _is_told(_outermost(loader)):
        return
    if source.key_seed is None:
        return
    _warned = True
    name = type(loader.dataset).__name__
    share, everything = ("split=True", "split=False") if chosen else _what_to_write(loader)
    instead = "" if chosen else " instead of its shuffle or sampler"
    warnings.warn(
        f"each of the {ranks} ranks reads all of this {name}, and the same batches if data and seed are the same "
        f"everywhere. To split the data among the ranks, pass {share}{instead} to the DataLoader. "
        f"If the data already are this rank's share, or if every rank should read all of them, pass {everything}",
        stacklevel=5,
    )


def _is_told(sampler: Any) -> bool:
    """Return whether a sampler is a Penstock sampler that splits by rank, even with a single rank."""
    return any(isinstance(getattr(layer, "_world", None), distributed.LateWorld) for layer in layers(sampler))


def _what_to_write(loader: TorchDataLoader[Any]) -> tuple[str, str]:
    """Return the arguments that split the samples among ranks, and those with which each rank reads all."""
    *_, innermost = layers(_outermost(loader))
    if isinstance(innermost, RandomSampler) and not innermost.replacement:
        order = f"shuffle={innermost.shuffle!r}, seed={innermost.seed}"
        name = "sampler=ps.DistributedSampler"
        return f"{name}(dataset, {order})", f"{name}(dataset, num_replicas=1, rank=0, {order})"
    name, groups = "batch_sampler=ps.GroupedBatchSampler", "sampler, [0] * len(dataset), batch_size"
    return f"{name}({groups})", f"{name}({groups}, world_size=1)"


def _outermost(loader: TorchDataLoader[Any]) -> Any:
    """Return the sampler that the loader reads: the batch sampler, or the sampler of indices without batching."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler
