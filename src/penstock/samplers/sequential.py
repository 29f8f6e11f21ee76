"""`SequentialSampler`: 0, 1, 2, ..., or the own order of a dataset that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import partial
from typing import Any

import torch.utils.data

from penstock.order import Partition, make_order
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Bookmark, Draws, Plan
from penstock.samplers.base import EpochSampler
from penstock.samplers.identity import order_identity, own_order

__all__ = ["SequentialSampler", "SequentialSamplerOfShare"]


class SequentialSampler(EpochSampler, torch.utils.data.SequentialSampler):
    """The indices of a dataset in its own order, like ``torch.utils.data.SequentialSampler``.

    Args:
        data_source: anything with a length (read again for every epoch). A dataset with its own order, such as
            `RankDataset`, also has its own epochs and states, and the sampler uses these. A Penstock loader refuses
            the sampler if that order is shuffled: there, omit it, or pass ``shuffle=False``.

    The state over a plain dataset is the number of samples consumed: O(1).

    >>> list(SequentialSampler("abc"))
    [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        super().__init__()
        self.data_source: Any = data_source

    @property
    def inner(self) -> Plan[Any] | None:
        """The plan of a dataset with its own order; None for others."""
        return own_order(self.data_source)

    @property
    def seed(self) -> int | None:
        """Seed of the dataset's own order; None without one."""
        return self.key_seed

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return None if self.inner is None else self.inner.key_seed

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. After `load_state_dict`, setting the state's own epoch keeps the state's position."""
        if self.inner is None:
            super().set_epoch(epoch)
        else:
            self.data_source.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next ``iter()``. A dataset with its own order loads the state itself.

        Raises:
            StateError: the state belongs to other data.
        """
        if self.inner is None:
            super().load_state_dict(state)
        else:
            self.data_source.load_state_dict(state)

    # As a plan.

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where readers begin next."""
        return super().bookmark if self.inner is None else self.inner.bookmark

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Record the position of a reader."""
        show = super().show if self.inner is None else self.inner.show
        show(cursor, loaded=loaded, running=running)

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order from the cursor on."""
        if self.inner is not None:
            run: EpochPlan = self.inner.bind(cursor, draws)
            return run
        n = len(self.data_source)
        partition = Partition(n, remainder="uneven", consumed=cursor.consumed)
        make, identity = partial(make_order, "none", n), partial(order_identity, "none", {}, self.data_source, n)
        return PartitionedOrder(make, partition, identity, seed=None, epoch=cursor.epoch)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        if self.inner is not None:
            return self.inner.read(state)
        n = len(self.data_source)
        identity = order_identity("none", {}, self.data_source, n)
        return Cursor.read(state, of="SequentialSampler", plan=identity, most=n)


class SequentialSamplerOfShare(SequentialSampler, torch.utils.data.DistributedSampler[int]):  # type: ignore[misc]
    """The indices of one rank's share in its own order. For frameworks it is a sampler that splits by rank already."""
