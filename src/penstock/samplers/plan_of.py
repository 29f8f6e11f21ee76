"""`plan_of`: the plan of a sampler of Penstock or torch."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, cast

import numpy as np
import torch.utils.data

from penstock.samplers.base import EpochSampler
from penstock.samplers.torch_samplers import TORCH_PLANS

__all__ = ["plan_of"]


def plan_of(sampler: Iterable[Any]) -> EpochSampler | None:
    """Return the plan of a sampler of indices; None if Penstock cannot compute its order.

    >>> type(plan_of(torch.utils.data.RandomSampler(range(3)))).__name__
    'TorchRandom'
    """
    if isinstance(sampler, EpochSampler):
        # A user's subclass with its own __iter__ may yield other indices than the plan.
        return sampler if type(sampler).__iter__ is EpochSampler.__iter__ else None
    kind = next((kind for kind in TORCH_PLANS if _orders_like(sampler, kind)), None)
    if kind is None or (isinstance(sampler, torch.utils.data.SubsetRandomSampler) and not _integers(sampler.indices)):
        return None
    if isinstance(sampler, torch.utils.data.DistributedSampler) and not _splits_as_torch(sampler):
        return None
    return TORCH_PLANS[kind](sampler)


def _orders_like(sampler: Any, kind: type) -> bool:
    """Return whether a sampler is of a torch class, or of a subclass with the same order."""
    return isinstance(sampler, kind) and all(
        getattr(type(sampler), name, None) is getattr(kind, name, None)
        for name in ("__iter__", "__len__", "set_epoch", "num_samples")
    )


def _splits_as_torch(sampler: torch.utils.data.DistributedSampler[Any]) -> bool:
    """Return whether shares have torch's lengths: subclasses and programs assign others."""
    samples, ranks = len(cast(Sized, sampler.dataset)), sampler.num_replicas
    share = samples // ranks if sampler.drop_last else -(-samples // ranks)
    return sampler.num_samples == share and sampler.total_size == share * ranks


def _integers(indices: Any) -> bool:
    found = np.asarray(indices)
    return found.ndim == 1 and found.dtype.kind in "iu"
