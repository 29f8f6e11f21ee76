"""Which samplers yield one rank's share of the data: dealt to ranks once more, part of the data would never be seen."""

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

__all__ = ["dealer", "is_share", "layers", "rank_of", "refuse_chance", "refuse_share"]

_DRAWING = (
    *(DrawingSampler, torch.utils.data.RandomSampler),
    *(torch.utils.data.SubsetRandomSampler, torch.utils.data.WeightedRandomSampler),
)

_COUNTS = ("num_replicas", "world_size", "_world_size")
_RANKS = ("rank", "_rank")
"""Attributes of samplers that deal: torch's and copies of it, mmengine's, detectron2's."""


def dealer(sampler: Any, *, ranks: int) -> Any:
    """Return the sampler that says it yields one rank's share: the given one, or one inside it; else None.

    Args:
        sampler: of indices or of batches; ours, torch's or anybody's.
        ranks: of the job. It counts for samplers that say their rank, but not of how many.

    >>> type(dealer(torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=0), ranks=1)).__name__
    'DistributedSampler'
    """
    return next((layer for layer in layers(sampler) if _deals(layer, ranks)), None)


def rank_of(sampler: Any, *, ranks: int) -> int | None:
    """Return the rank whose share a sampler yields, as far as it says so; None for one that deals to nobody.

    >>> rank_of(torch.utils.data.DistributedSampler(range(4), num_replicas=2, rank=1), ranks=1)
    1
    """
    layer = dealer(sampler, ranks=ranks)
    found = (getattr(layer, name, None) for name in _RANKS)
    return next((int(rank) for rank in found if isinstance(rank, Integral)), None)


def is_share(sampler: Any, samples: int, *, ranks: int) -> bool | None:
    """Return whether a stream of indices is one rank's share of so many samples; None where nobody can say.

    A share says its rank, or is shorter than the data. A sampler that is not ours and has no length can be either.

    >>> is_share([0, 2, 4], 6, ranks=2), is_share(range(6), 6, ranks=2), is_share((i for i in range(6)), 6, ranks=2)
    (True, False, None)
    """
    if dealer(sampler, ranks=ranks) is not None:
        return True
    if isinstance(sampler, EpochSampler) or ranks == 1:
        return False
    try:
        return len(sampler) < samples
    except (TypeError, NotImplementedError):
        return None


def refuse_share(sampler: Any, samples: int, *, ranks: int, told: bool) -> None:
    """Raise if a stream that is to be dealt to ranks is one rank's share already, or may be.

    Args:
        sampler: of the indices.
        samples: of the data.
        ranks: of the job, as far as that is known.
        told: the user says that the stream is dealt to so many ranks, which counts where nobody can say.

    Raises:
        SamplerError: it says what to write instead.
    """
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    if dealer(sampler, ranks=ranks) is not None:
        raise SamplerError(
            f"batches are formed from the indices of the whole job, and this {name} has only one rank's share: use a "
            "sampler of Penstock's, such as penstock.DistributedSampler, which knows of all ranks, or say "
            "world_size=1 to group each rank's share by itself"
        )
    share = is_share(sampler, samples, ranks=ranks)
    if share is False or told:
        return
    why = f"has {len(sampler)} of {samples} samples" if share else "has no length"
    raise SamplerError(
        f"this {name} {why}, and batches are formed from the indices of the whole job: if it is one rank's share, use "
        "a sampler of Penstock's, such as penstock.DistributedSampler, which knows of all ranks, or say world_size=1 "
        f"to group each rank's share by itself; if it is the same on all ranks, say world_size={ranks} and rank="
    )


def refuse_chance(sampler: Any, ranks: int) -> None:
    """Raise if each of several ranks would draw another order: batches are dealt from one that all draw alike.

    Raises:
        SamplerError: it says what to write instead.
    """
    drawing = isinstance(sampler, _DRAWING) and getattr(sampler, "seed", None) is None
    if ranks > 1 and drawing and sampler.generator is None:
        raise SamplerError(
            f"each of the {ranks} ranks would draw another order from this {type(sampler).__name__}, and samples "
            "would be lost and doubled: use penstock.DistributedSampler, or give the sampler a seed= or a generator "
            "that is seeded alike on all ranks"
        )


def layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one inside it, and so on to the innermost."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        yield sampler
        seen.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _deals(sampler: Any, ranks: int) -> bool:
    if isinstance(sampler, DistributedSampler):
        return True  # of how many ranks, it may learn later
    world = getattr(sampler, "_world", None)
    if isinstance(world, LateWorld):  # of ours, whose properties would settle it
        return world.peek().world_size > 1
    counts = (getattr(sampler, name, None) for name in _COUNTS)
    count = next((count for count in counts if isinstance(count, Integral)), None)
    if count is None:
        return ranks > 1 and any(isinstance(getattr(sampler, name, None), Integral) for name in _RANKS)
    return int(count) > 1
