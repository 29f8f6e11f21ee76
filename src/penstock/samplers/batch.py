"""`BatchSampler`: torch's batch sampler over the plan of its sampler. Also: the plan of a sampler of any library, and
which sampler splits the data by rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch.utils.data

from penstock.distributed import LateWorld
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import BatchEpochPlan, Batches
from penstock.plan.reader import Draws, OuterPlan
from penstock.samplers.base import EpochBatchSampler, EpochSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.external import ExternalSampler
from penstock.samplers.identity import own_order
from penstock.samplers.orders import flag, positive
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.torch_samplers import TORCH_PLANS
from penstock.wording import kind_text

__all__ = [
    "RANKS",
    "BatchSampler",
    "batch_plan_of",
    "has_own_order",
    "has_rank",
    "layers",
    "plan_of",
    "rank_splitter",
    "sampler_of",
    "why_not_computable",
]

_COUNTS = ("num_replicas", "world_size", "_world_size")
RANKS = ("rank", "_rank")
"""Attributes of samplers that split by rank: of torch and its copies, mmengine, detectron2."""


class BatchSampler(OuterPlan[BatchEpochPlan], EpochBatchSampler, torch.utils.data.BatchSampler):
    """Consecutive indices of a sampler, ``batch_size`` at a time.

    Args:
        sampler: a Penstock sampler, or any iterable of indices.
        batch_size: positive.
        drop_last: leave out the last batch if it is not full.

    Raises:
        SamplerError: the batch size is not a positive integer, or drop_last is not a bool (torch's messages).

    The state is the state of the sampler, counted in samples, so it also resumes exactly with another batch size.
    For the samplers of Penstock and torch it is a few integers. It is elastic if the sampler's state is. For any other
    iterable see `penstock.samplers.external`.

    >>> list(BatchSampler(range(10), batch_size=4, drop_last=False))
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        super().__init__()
        self.sampler = sampler
        self.batch_size = positive("batch_size", batch_size)
        self.drop_last = flag("drop_last", drop_last)
        # The sampler that was read last, and its plan: programs may assign another one.
        self._read: tuple[Iterable[Any], EpochSampler | ExternalSampler] | None = None

    @property
    def inner(self) -> EpochSampler | ExternalSampler:
        """The plan of the sampler, or of its batches for a sampler of another library."""
        sampler = self.sampler
        if self._read is None or self._read[0] is not sampler:
            plan = plan_of(sampler)
            self._read = sampler, ExternalSampler(sampler, self.source) if plan is None else plan
        return self._read[1]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self.inner.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next ``iter()``. It is the state of the sampler.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        self.inner.load_state_dict(state)

    def bind(self, cursor: Cursor, draws: Draws) -> BatchEpochPlan:
        """Return the batches of the cursor's epoch, from the cursor on."""
        run = self.inner.bind(cursor, draws)
        return run if isinstance(run, BatchEpochPlan) else Batches(run, self.batch_size, self.drop_last)


class TorchBatchSampler(BatchSampler):
    """The plan of torch's batch sampler. It reads the attributes there, which programs may assign."""

    sampler = property(operator.attrgetter("source.sampler"))
    batch_size = property(operator.attrgetter("source.batch_size"))
    drop_last = property(operator.attrgetter("source.drop_last"))
    source: Any = None
    """torch's batch sampler."""

    def __init__(self, batches: torch.utils.data.BatchSampler) -> None:
        EpochBatchSampler.__init__(self)
        self.source = batches
        self._read = None


def plan_of(sampler: Iterable[Any]) -> EpochSampler | None:
    """Return the plan of a sampler of indices; None if Penstock cannot compute its order.

    >>> type(plan_of(torch.utils.data.RandomSampler(range(3)))).__name__
    'TorchPlan'
    """
    if isinstance(sampler, EpochSampler):
        # A user's subclass with its own __iter__ may yield other indices than the plan.
        return sampler if type(sampler).__iter__ is EpochSampler.__iter__ else None
    kind = next((kind for kind in TORCH_PLANS if _orders_like(sampler, kind)), None)
    if kind is None:
        return None
    if isinstance(sampler, torch.utils.data.SubsetRandomSampler):
        indices = np.asarray(sampler.indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            return None
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        # Subclasses and programs assign other lengths of shares than torch's.
        samples, ranks = len(cast(Sized, sampler.dataset)), sampler.num_replicas
        share = samples // ranks if sampler.drop_last else -(-samples // ranks)
        if sampler.num_samples != share or sampler.total_size != share * ranks:
            return None
    return TORCH_PLANS[kind](sampler)


def _orders_like(sampler: Any, kind: type) -> bool:
    """Return whether a sampler is of a torch class, or of a subclass with the same order."""
    return isinstance(sampler, kind) and all(
        getattr(type(sampler), name, None) is getattr(kind, name, None)
        for name in ("__iter__", "__len__", "set_epoch", "num_samples")
    )


def batch_plan_of(batches: Iterable[Any]) -> EpochBatchSampler:
    """Return the plan of a batch sampler: of Penstock, of torch, or of another library (an `ExternalSampler`).

    >>> inner = torch.utils.data.SequentialSampler(range(3))
    >>> type(batch_plan_of(torch.utils.data.BatchSampler(inner, 2, False))).__name__
    'TorchBatchSampler'
    """
    # A user's subclass with its own __iter__ may yield other batches than the plan.
    if isinstance(batches, EpochBatchSampler) and type(batches).__iter__ is EpochBatchSampler.__iter__:
        return batches
    if type(batches) is torch.utils.data.BatchSampler:
        return TorchBatchSampler(batches)
    return ExternalSampler(batches)


def sampler_of(plan: EpochBatchSampler) -> Any:
    """Return the sampler inside a plan of batches, or the plan itself if it is a batch sampler."""
    return plan.sampler if isinstance(plan, BatchSampler) else plan


def has_own_order(plan: EpochBatchSampler, samples: Any) -> bool:
    """Return whether a plan uses the dataset's own order."""
    return own_order(samples) is not None and isinstance(sampler_of(plan), SequentialSampler)


def why_not_computable(plan: EpochBatchSampler | None, samples: Any) -> str | None:
    """Return why the order of a loader's batches cannot be computed; None if it can.

    Args:
        plan: plan of the batches.
        samples: the map-style dataset.
    """
    if plan is None:
        return "a ledger needs an order that can be computed, and the order of a stream is known only by reading it"
    if has_own_order(plan, samples):
        return None
    sampler = sampler_of(plan)
    if own_order(samples) is not None or not isinstance(sampler, EpochSampler | EpochBatchSampler):
        return f"a ledger does not know the order of {kind_text(sampler)}"
    if plan.key_seed is None and not isinstance(sampler, SequentialSampler | DistributedSampler):
        return "without a seed the rows of an epoch cannot be computed: pass seed= to the sampler"
    return None


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
            if not count and any(isinstance(getattr(layer, name, None), Integral) for name in RANKS):
                count = ranks
        if count > 1:
            return layer
    return None


def has_rank(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, belongs to a particular rank, even if it is the only rank."""
    penstocks = any(isinstance(getattr(layer, "_world", None), LateWorld) for layer in layers(sampler))
    return penstocks or rank_splitter(sampler, ranks=2) is not None


def layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the sampler inside it, and so on."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        yield sampler
        seen.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
