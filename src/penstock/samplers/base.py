"""What all samplers share: each is a plan, and has torch's interface and three verbs on top.

    plan     bind(cursor) -> the order of an epoch      what a loader reads; it holds its own position
    torch    iter(sampler), len(sampler)                for everybody else
    verbs    set_epoch, state_dict, load_state_dict     a wish for whoever reads next; where the last iterator is

A sampler holds no position of a loader. What `iter(sampler)` gives counts by itself.
"""

from __future__ import annotations

import abc
import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import Sampler

from penstock.distributed import LateWorld
from penstock.errors import SamplerError
from penstock.order.permutation import MAX_N
from penstock.plan.cursor import Cursor, State, checked_epoch
from penstock.plan.epoch import BatchEpochPlan, CountedIterable, EpochPlan, length_of
from penstock.plan.iteration import IndexIterator
from penstock.plan.reader import Plan, PlanReader, Wish

__all__ = ["EpochBatchSampler", "EpochSampler", "OfRank", "PlanSampler"]

E = TypeVar("E", bound=EpochPlan | BatchEpochPlan)
T = TypeVar("T")


class PlanSampler(Sampler[T], Plan[E], Generic[T, E]):
    """A plan with torch's interface.

    Subclasses implement `bind` and `read`; `_iterate` says how a bound plan is walked. Length and state are exact at
    any time: ``len(sampler)`` is what the iterator made last, or else the next one, yields.
    """

    def __init__(self) -> None:
        self._epoch = self._shown = 0
        self._cursor: Cursor | None = None  # of a loaded state that nobody has begun with
        self._times_set = 0
        self._reader: PlanReader[E] = PlanReader(self)
        self._iterator: CountedIterable[T] | None = None

    @property
    def source(self) -> Any:
        """The sampler that this plan reads: itself, or one of another library."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch that a reader began or chose last, or that somebody set since: for programs that look."""
        return self._epoch_shown()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator, and of the next pass of every loader over this sampler.

        The epoch of a state just loaded keeps its position.

        Raises:
            SamplerError: no integer, a negative epoch, or one of 2**62 or more.
        """
        epoch, wish = checked_epoch(epoch, SamplerError), self.wish()
        self._times_set += 1
        self._shown = epoch
        if not (wish.loaded and wish.cursor.epoch == epoch):
            self._epoch, self._cursor = epoch, None

    def state_dict(self) -> State:
        """Return where the iterator that was made last has got to: a few integers, JSON-serialisable.

        A Penstock loader has a position of its own: ask that for its `DataLoader.state_dict`.
        """
        had = 0 if self._iterator is None else self._iterator.had
        return self._reader.cursor(had).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, in its epoch.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        cursor = self.read(state)
        self._times_set += 1
        self._epoch, self._cursor, self._shown = cursor.epoch, cursor, cursor.epoch
        self.chosen(cursor)

    def __iter__(self) -> Iterator[T]:
        # As with torch's samplers, an epoch begins when its first item is asked for. The rest runs in C.
        return itertools.chain.from_iterable(self._begin())

    def _begin(self) -> Iterator[Iterator[T]]:
        run = self._reader.start(advance=False)
        self._iterator = self._iterate(run)
        yield iter(self._iterator)

    def __len__(self) -> int:
        return len(self._reader.peek())

    def __getstate__(self) -> dict[str, Any]:
        # An iterator does not travel: the next iter() of a copy is a whole epoch, or goes on from a loaded state.
        return {**self.__dict__, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A shallow copy would else read the plan that it was copied from, and share its reader.
        self._reader = copy.copy(self._reader)
        self._reader.plan = self

    def _epoch_shown(self) -> int:
        return self._shown

    # As a plan.

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._times_set

    def wish(self) -> Wish:
        """Return where the next reader should begin."""
        cursor = self._cursor
        return Wish(cursor or Cursor(epoch=self._epoch), cursor is not None)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Take note of where a reader is. One that begins with a loaded state uses it up."""
        self._shown = cursor.epoch
        if running and cursor is self._cursor:
            self._cursor = None

    @abc.abstractmethod
    def _iterate(self, run: E) -> CountedIterable[T]: ...


class EpochSampler(PlanSampler[int, EpochPlan]):
    """Base of the samplers that yield indices."""

    def _iterate(self, run: EpochPlan) -> CountedIterable[int]:
        length = length_of(run)
        return IndexIterator(run.indices, None if length == MAX_N else length, at_end=run.exhaust)


class EpochBatchSampler(PlanSampler[list[int], BatchEpochPlan]):
    """Base of the samplers that yield lists of indices."""

    @property
    def length_varies(self) -> bool:
        """Whether epochs can have different numbers of batches."""
        return False

    def _iterate(self, run: BatchEpochPlan) -> CountedIterable[list[int]]:
        return run.lists()


class OfRank:
    """A sampler that gives the share of one rank."""

    _world: LateWorld

    @property
    def world_size(self) -> int:
        """World size; asking settles it."""
        return self._world.get().world_size

    @property
    def rank(self) -> int:
        """Which rank this is; asking settles it."""
        return self._world.get().rank
