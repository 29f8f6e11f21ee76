"""Who deals a loader's samples to the ranks: its dataset, a sampler, or nobody, which a program should know."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from penstock import distributed
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.identity import holds_a_share
from penstock.samplers.random import RandomSampler
from penstock.samplers.shares import layers, rank_splitter

__all__ = ["says_rank", "splits_by_rank", "warn_of_same_batches"]

_warned = False
"""Whether this process has been told."""


def splits_by_rank(loader: TorchDataLoader[Any], *, ranks: int) -> bool:
    """Return whether the loader's dataset, or one of its samplers, gives each of so many ranks a share of its own."""
    return holds_a_share(loader.dataset) or rank_splitter(_outermost(loader), ranks=ranks) is not None


def says_rank(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, says whose share it yields, be it that of the only rank."""
    return _is_told(sampler) or rank_splitter(sampler, ranks=2) is not None


def warn_of_same_batches(loader: TorchDataLoader[Any], source: EpochBatchSampler | None, *, chosen: bool) -> None:
    """Warn, once in a process, if all ranks are about to read the same batches.

    A shuffle without a seed does not count: each rank draws another order, as with torch's loader. Nor does a dataset
    in its own order: programs evaluate on every rank. Nor does a sampler that was told of one rank.

    Args:
        source: of the loader's batches; None where only an iterable dataset knows them.
        chosen: whether the sampler is the loader's own choice, by ``shuffle=``.
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
    instead = "" if chosen else " in place of its shuffle or sampler"
    warnings.warn(
        f"each of the {ranks} ranks reads all of this {name}, in the same batches if data and seed are the same on all "
        f"of them: give the DataLoader {share}{instead}, and each rank reads a share of its "
        f"own. If the data are this rank's share already, or every rank is to read all of them, say so by {everything}",
        stacklevel=5,
    )


def _is_told(sampler: Any) -> bool:
    """Return whether a sampler of ours deals, if only to one rank."""
    return any(isinstance(getattr(layer, "_world", None), distributed.LateWorld) for layer in layers(sampler))


def _what_to_write(loader: TorchDataLoader[Any]) -> tuple[str, str]:
    """Return the arguments that deal the samples to the ranks, and those that keep all of them on every rank."""
    *_, innermost = layers(_outermost(loader))
    if isinstance(innermost, RandomSampler) and not innermost.replacement:
        order = f"shuffle={innermost.shuffle!r}, seed={innermost.seed}"
        name = "sampler=ps.DistributedSampler"
        return f"{name}(dataset, {order})", f"{name}(dataset, num_replicas=1, rank=0, {order})"
    name, groups = "batch_sampler=ps.GroupedBatchSampler", "sampler, [0] * len(dataset), batch_size"
    return f"{name}({groups})", f"{name}({groups}, world_size=1)"


def _outermost(loader: TorchDataLoader[Any]) -> Any:
    """Return the sampler that the loader reads: of batches, or of indices where it batches nothing."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler
