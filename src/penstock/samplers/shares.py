"""Tests whether a sampler yields one rank's share of the data. Splitting a share once more would lose data."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch.utils.data

from penstock.distributed import LateWorld
from penstock.errors import SamplerError
from penstock.samplers.base import EpochSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.draws import DrawingSampler

__all__ = ["layers", "rank_of", "rank_splitter", "refuse_share", "refuse_unseeded"]

_DRAWING = (
    *(DrawingSampler, torch.utils.data.RandomSampler),
    *(torch.utils.data.SubsetRandomSampler, torch.utils.data.WeightedRandomSampler),
)

_COUNTS = ("num_replicas", "world_size", "_world_size")
_RANKS = ("rank", "_rank")
"""Attributes of samplers that split by rank: of torch and its copies, mmengine, detectron2."""


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


def rank_of(sampler: Any, *, ranks: int) -> int | None:
    """Return the rank whose share a sampler yields; None if it does not split by rank, or names no rank.

    >>> rank_of(torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=1), ranks=1)
    1
    """
    layer = rank_splitter(sampler, ranks=ranks)
    found = (getattr(layer, name, None) for name in _RANKS)
    return next((int(rank) for rank in found if isinstance(rank, Integral)), None)


def refuse_share(sampler: Any, samples: int, *, ranks: int, explicit: bool) -> None:
    """Raise if a sampler of Penstock or torch, which will be split among ranks, yields one rank's share, or may do so.

    Args:
        sampler: the sampler of the indices.
        samples: number of samples of the data.
        ranks: number of ranks of the job, as far as it is known.
        explicit: the user said that the sampler is the same on all ranks.

    Raises:
        SamplerError: the message says what to write instead.
    """
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    if rank_splitter(sampler, ranks=ranks) is not None:
        raise SamplerError(
            f"batches are formed from the indices of the whole job, but this {name} has only one rank's share: use "
            "penstock.DistributedSampler, which knows the order of all ranks"
        )
    if ranks > 1 and not explicit and not isinstance(sampler, EpochSampler) and len(sampler) < samples:
        raise SamplerError(
            f"this {name} has {len(sampler)} of {samples} samples, but batches are formed from the indices of the "
            "whole job: if it is one rank's share, use penstock.DistributedSampler, which knows the order of all "
            f"ranks; if it is the same on all ranks, pass world_size={ranks} and rank="
        )


def refuse_unseeded(sampler: Any, ranks: int) -> None:
    """Raise if each of several ranks would draw a different order. All ranks must draw the same one.

    Raises:
        SamplerError: the orders would differ. The message says what to write instead.
    """
    drawing = isinstance(sampler, _DRAWING) and getattr(sampler, "seed", None) is None
    if ranks > 1 and drawing and sampler.generator is None:
        raise SamplerError(
            f"each of the {ranks} ranks would draw a different order from this {type(sampler).__name__}, and samples "
            "would be lost and repeated: use penstock.DistributedSampler, or pass the sampler a seed=, or a generator "
            "with the same seed on all ranks"
        )


def layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the sampler inside it, and so on."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        yield sampler
        seen.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
