"""`SequentialSampler`: 0, 1, 2, ...; over a data set with an order of its own, that order."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch.utils.data

from penstock.order import ORDER_VERSION, Partition, make_order
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Plan, Wish
from penstock.samplers.base import EpochSampler
from penstock.samplers.identity import data_identity, own_order

__all__ = ["SequentialSampler"]


class SequentialSampler(EpochSampler, torch.utils.data.SequentialSampler):
    """The indices of a data set in its own order, like ``torch.utils.data.SequentialSampler``.

    Args:
        data_source: anything with a length (read at every pass). A data set that has an order of its own, such as
            `RankDataset`, has its own epochs and states: the sampler reads that plan.

    The state over a plain data set is a count: O(1).

    >>> list(SequentialSampler("abc"))
    [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        super().__init__()
        self.data_source = data_source

    @property
    def inner(self) -> Plan[EpochPlan] | None:
        """The data set's own plan, if it has one."""
        return own_order(self.data_source)

    @property
    def seed(self) -> int | None:
        """Seed of the data set's own order."""
        return self.key_seed

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return None if self.inner is None else self.inner.key_seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position."""
        if self.inner is None:
            super().set_epoch(epoch)
        else:
            self._source.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``; it is the data set's own where that has an order.

        Raises:
            StateError: the state belongs to other data.
        """
        if self.inner is None:
            super().load_state_dict(state)
        else:
            self._source.load_state_dict(state)

    @property
    def _source(self) -> Any:
        return self.data_source

    def _epoch_shown(self) -> int:
        return super()._epoch_shown() if self.inner is None else int(self._source.epoch)

    # As a plan.

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._times_set if self.inner is None else self.inner.times_set

    def wish(self) -> Wish:
        """Return where the next reader should begin."""
        return super().wish() if self.inner is None else self.inner.wish()

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the order from the cursor on."""
        if self.inner is not None:
            return self.inner.bind(cursor, entropy)
        n = len(self.data_source)
        partition = Partition(n, remainder="uneven", consumed=cursor.consumed)
        return PartitionedOrder(
            lambda: make_order("none", n), partition, self._identity(), seed=None, epoch=cursor.epoch
        )

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds."""
        if self.inner is not None:
            return self.inner.read(state)
        return Cursor.read(state, of="SequentialSampler", plan=self._identity(), most=len(self.data_source))

    @property
    def draws_late(self) -> bool:
        """Whether reading the plan moves a generator that others draw from."""
        return self.inner is not None and self.inner.draws_late

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Any:
        """Return the source of chance of the data set's own order."""
        return None if self.inner is None else self.inner.draw(cursor, held, seed)

    def read_grown(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor of a state over data to which rows were appended since."""
        return self.read(state) if self.inner is None else self.inner.read_grown(state)

    def whole(self, cursor: Cursor) -> Cursor:
        """Return the beginning of the cursor's epoch."""
        return super().whole(cursor) if self.inner is None else self.inner.whole(cursor)

    def again(self, run: EpochPlan) -> Cursor:
        """Return the beginning of the epoch of a plan that was bound."""
        return super().again(run) if self.inner is None else self.inner.again(run)

    def after(self, run: EpochPlan, had: int) -> Cursor:
        """Return the next epoch, or the next mini-epoch of a data set that has them."""
        return super().after(run, had) if self.inner is None else self.inner.after(run, had)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Take note of where a reader is."""
        if self.inner is None:
            super().show(cursor, loaded=loaded, running=running)
        else:
            self.inner.show(cursor, loaded=loaded, running=running)

    def _identity(self) -> State:
        return {"order_version": ORDER_VERSION, "shuffle": "none", **data_identity(self.data_source)}
