"""Samplers of other people, read as plans: any iterable of indices, or of lists of them.

We do not own their order, so a state is what it takes to draw the rest of an epoch again in another process:

* with ``state_dict`` and ``load_state_dict``, on the sampler or on its iterator: what they said at the last batch, and
  how much was had since;
* otherwise a count, and a hash of what was counted. The count is drawn again and dropped. If that hashes to something
  else, the sampler does not repeat its order, and the resume is refused.

Cost: a few numbers, or whatever the user's states take. The hash takes 1 us for a batch of 32 integers and 5 us for
256. Other types take 2 us an index.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from penstock.distributed import current
from penstock.errors import StateError
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor, State, read_ints, read_mapping
from penstock.plan.epoch import Batch, BatchEpochPlan
from penstock.plan.reader import Wish
from penstock.plan.user_states import Frozen, freeze, states_of, thaw
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.shares import rank_of
from penstock.wording import counted

__all__ = ["ExternalSampler", "said_epoch"]

_KEPT = 4096
"""Marks of batches that were drawn ahead. Behind the oldest one batches are drawn again from the beginning."""
_KEPT_STATES = 128
_AMORTISE = 1 << 16  # bytes of states per batch: larger ones are taken every so many batches


class ExternalSampler(EpochBatchSampler):
    """The plan of a sampler that is not ours.

    Args:
        items: an iterable of indices of any type; of lists of them where ``batch_size`` is None.
        batch_size, drop_last: how indices become batches.
    """

    def __init__(self, items: Iterable[Any], batch_size: int | None = None, drop_last: bool = False) -> None:
        super().__init__()
        self.items = items
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.left: ReplayPoint | None = None
        """Where the object that draws was left: a position of its own, which its next epoch begins behind."""
        self._told = 0  # the epoch that a sampler which does not say its own is in, as far as this plan knows
        self._moved_to: int | None = None
        """The epoch that the sampler went on to by itself, when it was drawn from last."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "left": None}

    @property
    def source(self) -> Iterable[Any]:
        """The sampler that this plan reads."""
        return self.items

    @property
    def unit(self) -> str:
        """What a cursor counts."""
        return "batch" if self.batch_size is None else "sample"

    @property
    def draws_late(self) -> bool:
        """Whether drawing may move generators that others draw from."""
        return not isinstance(self.items, Sequence)

    @property
    def _said_epoch(self) -> int | None:
        return said_epoch(self.items)

    @property
    def advances(self) -> bool:  # type: ignore[override]
        """Whether a loader goes on to the next epoch by itself: not where the sampler says its own."""
        return self._said_epoch is None

    def _epoch_shown(self) -> int:
        epoch = self._said_epoch
        return super()._epoch_shown() if epoch is None else epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, of the sampler too."""
        super().set_epoch(epoch)
        self.chosen(Cursor(epoch=epoch))

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._times_set, self._said_epoch

    def wish(self) -> Wish:
        """Return where the next reader should begin: in the sampler's epoch, if it says one."""
        wish, epoch = super().wish(), self._said_epoch
        if epoch is None or wish.cursor.epoch == epoch:
            return wish
        return Wish(Cursor(epoch=epoch), False, later=epoch == self._moved_to)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While items are drawn, a sampler may go on to another epoch by itself. That is nobody's wish for this run."""
        before = self._said_epoch
        yield
        if (now := self._said_epoch) != before:
            self._moved_to = now

    def chosen(self, cursor: Cursor) -> None:
        """Tell the sampler the epoch."""
        # A cursor of a state says what its plan is. One that takes epochs without saying which one it is in may have
        # been told by its user, and the state does not know.
        if cursor.plan:
            self.tell(cursor.epoch)
        else:
            self._say(cursor.epoch)

    def tell(self, epoch: int) -> None:
        """Tell the sampler the epoch that begins, if it takes epochs and is not in that one already."""
        said = self._said_epoch
        if (self._told if said is None else said) != epoch:
            self._say(epoch)

    def _say(self, epoch: int) -> None:
        if hasattr(self.items, "set_epoch"):
            self.items.set_epoch(epoch)
            self._told = epoch

    def bind(self, cursor: Cursor, entropy: Any) -> BatchEpochPlan:
        """Return the batches from the cursor on. They are drawn while they are iterated."""
        return _Drawn(self, cursor)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds."""
        of = type(self.items).__name__
        cursor = Cursor.read(state, of=of, plan=self._identity(), unit=self.unit)
        if "states" in cursor.entropy:
            read_mapping(cursor.entropy, "states", of=of)
            pulls = cursor.entropy.get("pulls")
            read_ints(cursor.entropy, "pulls", max(1, len(pulls)) if isinstance(pulls, list) else 1, of=of)
        elif not isinstance(cursor.entropy.get("hash", ""), str):
            raise StateError(f"the state of this {of} is damaged: hash is {cursor.entropy['hash']!r}, which is no text")
        return cursor

    def _identity(self) -> State:
        size = {"samples": len(self.items)} if isinstance(self.items, Sequence | np.ndarray) else {}
        return {"order": type(self.items).__name__, **size}


def said_epoch(sampler: Any) -> int | None:
    """Return the epoch that a sampler of others says it is in; None if it says none, or takes none."""
    epoch: Any = getattr(sampler, "epoch", None)
    if not hasattr(sampler, "set_epoch") or isinstance(epoch, bool):
        return None
    try:
        return operator.index(epoch)  # of NumPy's and torch's integers, too
    except TypeError:
        return None


class ReplayPoint(NamedTuple):
    """How a sampler's object is brought to where it was: its states, and how often it was asked for an item since.

    ``pulls`` has an entry for each epoch since the states were taken. An epoch that was read to its end was asked once
    more than it has items: code behind its last ``yield`` has run then.
    """

    states: Frozen
    pulls: list[int]


class _Mark(NamedTuple):
    """What was known behind a batch."""

    batches: int
    consumed: int
    states: Frozen | None
    hash: str | None


class _Drawn(BatchEpochPlan):
    """One epoch of a sampler that is not ours, drawn as it is iterated."""

    per_rank = True
    one_by_one = True

    def __init__(self, plan: ExternalSampler, cursor: Cursor) -> None:
        self._plan = plan
        self._items = plan.items
        self._size = plan.batch_size
        self._cursor = cursor
        self._identity = plan._identity()
        self.epoch = cursor.epoch
        self.first_batch = cursor.consumed if self._size is None else cursor.consumed // self._size
        self._begun: ReplayPoint | None = None
        self._marks: deque[_Mark] = deque(maxlen=_KEPT)
        self._drawn = 0, cursor.consumed  # batches of this plan, and what the epoch has had with them
        self._hash: xxhash.xxh3_64 | None = xxhash.xxh3_64()
        self._rank = rank_of(self._items, ranks=current().world_size)

    def __len__(self) -> int:
        left = max(0, len(cast(Sized, self._items)) - self._cursor.consumed)
        if self._size is None:
            return left
        return left // self._size if self._plan.drop_last else -(-left // self._size)

    def __iter__(self) -> Iterator[Batch]:
        self._plan.tell(self.epoch)
        self._begun = point = self._where_it_begins()
        with self._plan.drawing():
            iterator = self._open(point)
        consumed, wait = self._cursor.consumed, 0
        for number in itertools.count(1):
            with self._plan.drawing():
                batch, pulls = self._next(iterator)
            point = self._plan.left = _longer(point, pulls)
            if batch is None:
                return
            positions = self._positions(consumed, len(batch))
            consumed += 1 if self._size is None else len(batch)
            states: Frozen | None = None
            ended = self._size is not None and len(batch) < self._size
            if wait:
                wait -= 1
            # At its end a sampler is somewhere else already.
            elif not ended and (found := states_of(sampler=self._items, iterator=iterator)):
                states = freeze(found)
                point = self._plan.left = ReplayPoint(states, [0])
                wait = len(states) // _AMORTISE if isinstance(states, bytes) else 0
            self._mark(_Mark(number, consumed, states, self._hashed(batch) if point is None else None))
            self._drawn = number, consumed
            yield batch, positions

    def cursor(self, count: int) -> Cursor:
        consumed = self._cursor.consumed + count * (1 if self._size is None else self._size)
        if count >= self._drawn[0] > 0:
            consumed = self._drawn[1]
        return Cursor(
            epoch=self.epoch,
            consumed=consumed,
            unit=self._plan.unit,
            plan=self._identity,
            entropy=self._entropy(count, consumed),
        )

    def _entropy(self, count: int, consumed: int) -> State:
        mark = next((mark for mark in reversed(self._marks) if mark.batches <= count), None)
        if mark is not None and mark.states is not None:
            return {"states": thaw(mark.states), "pulls": [consumed - mark.consumed]}
        point = self._begun or self._where_it_begins()
        if point is not None:
            *before, last = point.pulls
            return {"states": thaw(point.states), "pulls": [*before, last + consumed - self._cursor.consumed]}
        if mark is None:
            return self._cursor.entropy if consumed == self._cursor.consumed else {}
        if mark.hash is None or mark.consumed != consumed:
            return {}
        return {"hash": mark.hash, **({} if self._rank is None else {"rank": self._rank})}

    def _mark(self, mark: _Mark) -> None:
        if mark.states is not None or mark.hash is not None:
            self._marks.append(mark)
        if mark.states is not None and len(self._marks) > _KEPT_STATES:
            self._marks.popleft()

    def _where_it_begins(self) -> ReplayPoint | None:
        """Return the point of the epoch's beginning; None for a sampler without states."""
        entropy = self._cursor.entropy
        if "states" in entropy:
            return ReplayPoint(freeze(dict(entropy["states"])), list(entropy["pulls"]))
        if self._cursor.consumed:
            return None
        if self._plan.left is not None:
            return ReplayPoint(self._plan.left.states, [*self._plan.left.pulls, 0])
        states = states_of(sampler=self._items)
        return ReplayPoint(freeze(states), [0]) if states else None

    def _open(self, point: ReplayPoint | None) -> Iterator[Any]:
        """Return an iterator of the sampler that stands at the cursor."""
        if "states" in self._cursor.entropy and point is not None:
            return self._reopen(point)
        iterator = iter(self._items)
        if self._cursor.consumed:
            self._check(_take(iterator, self._cursor.consumed))
        return iterator

    def _reopen(self, point: ReplayPoint) -> Iterator[Any]:
        states = thaw(point.states)
        self._restore(self._items, states.get("sampler"))
        iterator = iter(self._items)
        self._restore(iterator, states.get("iterator"))
        for pulls in point.pulls[:-1]:
            _pull(iterator, pulls)
            iterator = iter(self._items)
        _pull(iterator, point.pulls[-1])
        return iterator

    def _restore(self, item: Any, state: Any) -> None:
        if state is None:
            return
        if not hasattr(item, "load_state_dict"):
            raise StateError(
                f"there is a state of the sampler, and {type(item).__name__} has no load_state_dict: resume with the "
                "same objects, or start anew without the state"
            )
        item.load_state_dict(state)

    def _check(self, dropped: list[Any]) -> None:
        """Raise if what was drawn again is not what the state counted."""
        name, count, entropy = type(self._items).__name__, self._cursor.consumed, self._cursor.entropy
        if len(dropped) == count and entropy.get("rank", self._rank) != self._rank:
            # The hash is that of another rank's share. Shares of one job are counted alike.
            self._hash = None
            return
        expected = entropy.get("hash")
        found = self._hashed([index for batch in dropped for index in batch] if self._size is None else dropped)
        if len(dropped) < count or (expected is not None and found is not None and found != expected):
            raise StateError(
                f"{name} does not repeat its order. It has no state_dict and load_state_dict, so the first "
                f"{counted(count, self._plan.unit)} are drawn again on a resume, and they are not those that the "
                f"state counts (hash {expected} in the state, {found} here). Seed it as the first run did, give it a "
                "state_dict and load_state_dict, or begin the epoch anew without the state"
            )
        if expected is None or found is None:
            warnings.warn(
                f"{name} has no state_dict and load_state_dict: its first {counted(count, self._plan.unit)} are "
                "drawn again and dropped, which is exact only if it repeats its order",
                stacklevel=2,
            )

    def _hashed(self, indices: Sequence[Any]) -> str | None:
        """Add indices to the hash; return it, or None where they are of types that cannot be compared that way."""
        if self._hash is None:
            return None
        try:
            self._hash.update(array("q", indices).tobytes())
        except (TypeError, OverflowError):
            if not all(map(_is_plain, indices)):
                self._hash = None
                return None
            # One by one: a resume hashes at once what the first run hashed batch by batch.
            for index in indices:
                self._hash.update(_bytes_of(index))
        return self._hash.hexdigest()

    def _next(self, iterator: Iterator[Any]) -> tuple[list[Any] | None, int]:
        """Return the next batch, None behind the last; and how often the sampler was asked for it."""
        if self._size is None:
            batches = _take(iterator, 1)
            return list(batches[0]) if batches else None, 1
        batch = _take(iterator, self._size)
        ended = len(batch) < self._size
        return None if not batch or (self._plan.drop_last and ended) else batch, len(batch) + ended

    def _positions(self, consumed: int, count: int) -> Indices:
        """Return places in the batches of this rank's epoch, as the number of the batch and the place in it."""
        if self._size is None:
            return (np.int64(consumed) << 24) + np.arange(count, dtype=np.int64)
        batches, places = np.divmod(np.arange(consumed, consumed + count, dtype=np.int64), self._size)
        return (batches << 24) + places


def _is_plain(index: Any) -> bool:
    """Return whether an index is written the same way in every process."""
    if isinstance(index, tuple | list):
        return all(map(_is_plain, index))
    return index is None or isinstance(index, str | bytes | int | float | np.integer | np.floating)


def _bytes_of(index: Any) -> bytes:
    try:
        return array("q", [index]).tobytes()
    except (TypeError, OverflowError):
        return repr(index).encode() + b"\0"


def _longer(point: ReplayPoint | None, pulls: int) -> ReplayPoint | None:
    if point is None:
        return None
    *before, last = point.pulls
    return ReplayPoint(point.states, [*before, last + pulls])


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Return the next so many items, or those that are left."""
    # Not by a slice, which calls iter() on the iterator once more: Lightning's begins anew then.
    taken: list[Any] = []
    for _ in range(count):
        try:
            taken.append(next(iterator))
        except StopIteration:
            break
    return taken


def _pull(iterator: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(iterator, None)
