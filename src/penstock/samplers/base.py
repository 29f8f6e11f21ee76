"""Base classes of the samplers: a plan with torch's interface.

    plan     bind(cursor) -> the order of an epoch      for a Penstock loader, which holds its own position
    torch    iter(sampler), len(sampler)                for every other reader
    state    set_epoch, load_state_dict                 choose where the next reader begins
             state_dict                                 the position of the last iterator

A sampler never holds the position of a loader. Each ``iter(sampler)`` counts its own position.
"""

from __future__ import annotations

import abc
import copy
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import Sampler

from penstock.distributed import LateWorld
from penstock.errors import SamplerError
from penstock.plan.cursor import State, checked_epoch, pack, unpack
from penstock.plan.epoch import BatchEpochPlan, Batches, EpochPlan, length_of
from penstock.plan.reader import Bookmark, Plan, PlanReader

__all__ = ["EpochBatchSampler", "EpochSampler", "PlanSampler", "RankMixin"]

_FIRST_BLOCK = 256
_LARGEST_BLOCK = 32768
_LIST = 1024
"""Lists of this many ints stay in the CPU's cache until they are yielded."""

E = TypeVar("E", bound=EpochPlan | BatchEpochPlan)
T = TypeVar("T")


class PlanSampler(Sampler[T], Plan[E], Generic[T, E]):
    """A plan with torch's interface.

    Subclasses implement `bind`, `read` and `_lists`, which yields the items of a bound plan in lists. Length and state
    are always exact: ``len(sampler)`` counts the items of the iterator made last, or of the next one if none was made.
    """

    _bookmark: Bookmark
    bookmark = property(operator.attrgetter("_bookmark"))
    """Where readers begin next. Some subclasses first look where another sampler is."""

    def __init__(self) -> None:
        self._bookmark = Bookmark()
        self._reader: PlanReader[E] = PlanReader(self)
        # Of the iterator made last: its current list, and the number of items up to the end of that list. In one entry,
        # so that another thread always reads a consistent pair.
        self._current: list[tuple[Iterator[T], int]] = [(iter(()), 0)]

    @property
    def source(self) -> Any:
        """The sampler that this plan reads: itself, or a sampler of another library."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch that was begun or set last."""
        return int(self.bookmark.epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator, and the next epoch of every loader over this sampler.

        After `load_state_dict`, setting the state's own epoch keeps the position of the state.

        Raises:
            SamplerError: the epoch is not an integer from 0 to 2**62 - 1.
        """
        self.bookmark.set_epoch(checked_epoch(epoch, SamplerError))

    def state_dict(self) -> State:
        """Return the position of the iterator made last, as text under one key: some 200 characters.

        A Penstock loader has its own position: save `DataLoader.state_dict` instead.
        """
        items, end = self._current[0]
        return pack(self._reader.cursor(end - operator.length_hint(items)).state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next ``iter()``, in the state's epoch.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        cursor = self.read(unpack(state, of=type(self.source).__name__))
        self.bookmark.write(cursor, loaded=True)
        self.chosen(cursor)

    def __iter__(self) -> Iterator[T]:
        # As in torch's samplers, an epoch begins at the first next(), not at iter(). No Python code runs per item, not
        # even a counter: the count is computed from the rest of the current list.
        return itertools.chain.from_iterable(self._begin())

    def _begin(self) -> Iterator[Iterator[T]]:
        run = self._reader.start(advance=False)
        current: list[tuple[Iterator[T], int]] = [(iter(()), 0)]
        self._current = current
        for one in self._lists(run):
            items = iter(one)
            current[0] = items, current[0][1] + len(one)
            yield items

    def __len__(self) -> int:
        return len(self._reader.peek())

    def __getstate__(self) -> dict[str, Any]:
        # An iterator is not pickled: the next iter() of a copy is a whole epoch, or begins at a loaded state.
        return {**self.__dict__, "_current": [(iter(()), 0)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Otherwise a shallow copy would share the original's position.
        self._bookmark = copy.copy(self._bookmark)
        self._reader = copy.copy(self._reader)
        self._reader.plan = self

    @abc.abstractmethod
    def _lists(self, run: E) -> Iterator[list[T]]: ...


class EpochSampler(PlanSampler[int, EpochPlan]):
    """Base of the samplers that yield indices."""

    def _lists(self, run: EpochPlan) -> Iterator[list[int]]:
        """Yield the indices in lists of Python ints. The plan is exhausted after the last one.

        The first block is small, so that the first item is ready soon. Later blocks grow until NumPy's cost per call is
        negligible. Memory is constant.
        """
        begin, size, length = 0, _FIRST_BLOCK, length_of(run)
        while begin < length:
            stop = min(begin + size, length)
            block, _ = run.block(begin, stop)
            for first in range(0, stop - begin, _LIST):
                yield block[first : first + _LIST].tolist()
            begin, size = stop, min(size * 4, _LARGEST_BLOCK)
        run.exhaust()


class EpochBatchSampler(PlanSampler[list[int], BatchEpochPlan]):
    """Base of the samplers that yield lists of indices."""

    def _lists(self, run: BatchEpochPlan) -> Iterator[list[list[int]]]:
        if isinstance(run, Batches):
            return (rows.tolist() for rows, _ in run.blocks())
        return ([indices] for indices, _ in run)


class RankMixin:
    """Mixin of the samplers that yield the share of one rank."""

    _world: LateWorld

    @property
    def world_size(self) -> int:
        """Number of ranks. Reading it fixes rank and world size."""
        return self._world.get().world_size

    @property
    def rank(self) -> int:
        """This rank's number. Reading it fixes rank and world size."""
        return self._world.get().rank
