"""Samplers of one rank's share of the data, and which samplers yield one. Splitting a share again would lose data.

The samplers over a share that is split already, by the dataset or a batch sampler, are subclasses of torch's
``DistributedSampler``, so no framework splits them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.distributed import LateWorld
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

__all__ = ["RandomSamplerOfShare", "SequentialSamplerOfShare", "layers", "rank_of", "rank_splitter"]

_COUNTS = ("num_replicas", "world_size", "_world_size")
_RANKS = ("rank", "_rank")
"""Attributes of samplers that split by rank: of torch and its copies, mmengine, detectron2."""

if TYPE_CHECKING:
    # torch annotates its attributes more narrowly than it documents them.
    class _Torch: ...

else:
    _Torch = torch.utils.data.DistributedSampler


class SequentialSamplerOfShare(SequentialSampler, _Torch):
    """The indices of one rank's share in its own order."""


class RandomSamplerOfShare(RandomSampler, _Torch):
    """The indices of one rank's share in random order."""


def rank_splitter(sampler: Any, *, ranks: int) -> Any:
    """Return the sampler that splits the data by rank: the argument, or a sampler inside it; else None.

    Args:
        sampler: a sampler or batch sampler of any library.
        ranks: number of ranks of the job, for samplers that have a rank but no world size.

    >>> type(rank_splitter(torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=0), ranks=1)).__name__
    'DistributedSampler'
    """
    for layer in layers(sampler):
        if isinstance(layer, DistributedSampler):
            return layer  # even on one rank so far: a process group may be made later
        world = getattr(layer, "_world", None)
        if isinstance(world, LateWorld):
            # A Penstock sampler: its `rank` and `world_size` properties would fix the world.
            count = world.ranks
        else:
            counts = (getattr(layer, name, None) for name in _COUNTS)
            count = next((int(count) for count in counts if isinstance(count, Integral)), 0)
            if not count and any(isinstance(getattr(layer, name, None), Integral) for name in _RANKS):
                count = ranks
        if count > 1:
            return layer
    return None


def rank_of(splitter: Any) -> int | None:
    """Return the rank of a sampler that splits by rank; None if it names none.

    >>> rank_of(torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=1))
    1
    """
    found = (getattr(splitter, name, None) for name in _RANKS)
    return next((int(rank) for rank in found if isinstance(rank, Integral)), None)


def layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the sampler inside it, and so on."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        yield sampler
        seen.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
