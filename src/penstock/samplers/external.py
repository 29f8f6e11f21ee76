"""`ExternalSampler`: a plan over a sampler of another library, which is any iterable of indices or of lists of them.

Penstock cannot compute the order of such a sampler. So a state holds enough to draw the rest of the epoch again in
another process:

* If the sampler or its iterator has ``state_dict`` and ``load_state_dict``: its state at a batch, and the number of
  items drawn since.
* Otherwise the number of items. A resume draws that many items again and drops them, with a warning, unless the sampler
  is a sequence: it is exact only if the sampler repeats its order.

Size: a few numbers, or the states of the user's objects.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch.utils.data

from penstock.plan.cursor import Cursor, State, read_ints, read_mapping
from penstock.plan.epoch import Batch, BatchEpochPlan
from penstock.plan.reader import Bookmark, Draws
from penstock.plan.user_states import freeze, has_state, load_states, states_of, thaw
from penstock.samplers.base import E, EpochBatchSampler, PlanSampler, T
from penstock.wording import counted

__all__ = ["ExternalSampler", "ForeignSampler"]

_KEPT_MARKS = 128
"""Batches after which the state is kept. The state after an earlier batch counts from the epoch's start."""
_AMORTISE = 1 << 16
"""Bytes of states per batch. Larger states are taken less often, to keep the average below this."""


class ForeignSampler(PlanSampler[T, E]):
    """The plan of a sampler of torch or of another library, with the epochs of that sampler, if it has any.

    It has epochs if it has ``set_epoch``. If it also reports its epoch, a loader never advances it.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__()
        self.items: Any = items
        self._told = 0
        """The epoch last set, for a sampler that does not report its own."""
        self._moved_to: int | None = None
        """The epoch to which the sampler advanced by itself when it was last read."""
        self._seen: int | None = None
        """The epoch that the sampler reported when the bookmark was last read."""

    @property
    def source(self) -> Any:
        """The sampler that this plan reads."""
        return self.items

    @property
    def _reported_epoch(self) -> int | None:
        epoch: Any = getattr(self.items, "epoch", None)
        if not hasattr(self.items, "set_epoch") or isinstance(epoch, bool):
            return None
        try:
            return operator.index(epoch)  # NumPy's and torch's integers, too
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, also on the sampler."""
        super().set_epoch(epoch)
        self.tell(epoch, again=True)

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where readers begin next: in the sampler's epoch, if it reports one."""
        mark, epoch = self._bookmark, self._reported_epoch
        mark.advances = epoch is None
        if epoch is not None and epoch != self._seen:
            self._seen = epoch
            moved = epoch != mark.cursor.epoch
            mark.set_epoch(epoch)
            mark.by_itself = moved and epoch == self._moved_to
        return mark

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Record an epoch to which the sampler advances by itself while items are drawn. The user did not set it."""
        before = self._reported_epoch
        yield
        if (now := self._reported_epoch) != before:
            self._moved_to = now

    def chosen(self, cursor: Cursor) -> None:
        """Set the epoch of the sampler."""
        # Only a cursor of a state names its plan. A sampler that does not report its epoch may have been set by the
        # user, which the state does not know: for a state, call set_epoch only if the epoch differs.
        self.tell(cursor.epoch, again=not cursor.plan)
        super().chosen(cursor)

    def tell(self, epoch: int, *, again: bool = False) -> None:
        """Set the sampler's epoch, if it has epochs, unless it is already set (``again`` sets it once more)."""
        reported = self._reported_epoch
        known = self._told if reported is None else reported
        if (again or known != epoch) and hasattr(self.items, "set_epoch"):
            self.items.set_epoch(epoch)
            self._told = epoch


class ExternalSampler(ForeignSampler[list[Any], BatchEpochPlan], EpochBatchSampler):
    """The plan of a sampler of another library.

    Args:
        items: an iterable of indices of any type; without ``face``, an iterable of lists of them.
        face: has the current ``batch_size`` and ``drop_last`` for indices.
    """

    def __init__(self, items: Iterable[Any], face: torch.utils.data.BatchSampler | None = None) -> None:
        super().__init__(items)
        self.face = face
        self.unit = "batch" if face is None else "sample"
        self.left: ReplayPoint | None = None
        """Where the last reader left the sampler, which may have a position of its own. Its next epoch begins there."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "left": None}

    def bind(self, cursor: Cursor, draws: Draws) -> BatchEpochPlan:
        """Return the batches from the cursor on. They are drawn as they are iterated."""
        return _Drawn(self, cursor)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        of = type(self.items).__name__
        cursor = Cursor.read(state, of=of, plan=self._identity(), unit=self.unit)
        if "states" in cursor.entropy:
            read_mapping(cursor.entropy, "states", of=of)
            pulls = cursor.entropy.get("pulls")
            read_ints(cursor.entropy, "pulls", max(1, len(pulls)) if isinstance(pulls, list) else 1, of=of)
        return cursor

    def _identity(self) -> State:
        size = {"samples": len(self.items)} if isinstance(self.items, Sequence | np.ndarray) else {}
        return {"order": type(self.items).__name__, **size}


class ReplayPoint(NamedTuple):
    """A position of a sampler: its states, and how many times next() was called since they were taken.

    ``pulls`` has one number for each epoch since then. An epoch that was read to its end counts one more call than it
    has items, because the code behind its last ``yield`` has run.
    """

    states: bytes
    pulls: list[int]

    def after(self, pulls: int) -> ReplayPoint:
        """Return the position after more calls of next()."""
        *before, last = self.pulls
        return ReplayPoint(self.states, [*before, last + pulls])


class _Mark(NamedTuple):
    """The items consumed after a number of batches, and the replay point there, if the sampler has states."""

    batches: int
    consumed: int
    point: ReplayPoint | None


class _Drawn(BatchEpochPlan):
    """One epoch of another library's sampler, drawn as it is iterated."""

    per_rank = True
    one_by_one = True

    def __init__(self, plan: ExternalSampler, cursor: Cursor) -> None:
        self._plan, self._cursor = plan, cursor
        self._items: Iterable[Any] = plan.items
        # Without a face the sampler yields batches, and a cursor counts them.
        self._size = 1 if plan.face is None else plan.face.batch_size
        self._drop_last = plan.face is not None and plan.face.drop_last
        self._identity = plan._identity()
        self.epoch = cursor.epoch
        # The start, the last batches of a sampler with states, and the end of the epoch.
        self._marks: list[_Mark] = []
        self._drawn = 0
        """Number of batches drawn here."""

    def __len__(self) -> int:
        left = max(0, len(cast(Sized, self._items)) - self._cursor.consumed)
        return left // self._size if self._drop_last else -(-left // self._size)

    def __iter__(self) -> Iterator[Batch]:
        plan, size = self._plan, self._size
        plan.tell(self.epoch)
        consumed, wait = self._cursor.consumed, 0
        point = plan.left = self._where_it_begins()
        self._marks = [_Mark(0, consumed, point)]
        with plan.drawing():
            iterator = self._open(point)
        for number in itertools.count(1):
            with plan.drawing():
                taken = _take(iterator, size)
            ended = len(taken) < size
            if point is not None:
                point = point.after(len(taken))
                plan.left = point.after(1) if ended else point
            if not taken or (ended and self._drop_last):
                return
            # Positions in this rank's epoch: the number of the batch in the upper bits, the index in it below.
            if plan.face is None:
                batch = list(taken[0])
                positions = (np.int64(consumed) << 24) + np.arange(len(batch), dtype=np.int64)
            else:
                batch = taken
                batches, places = np.divmod(np.arange(consumed, consumed + len(batch), dtype=np.int64), size)
                positions = (batches << 24) + places
            consumed += len(taken)
            self._drawn = number
            if wait:
                wait -= 1
            # After its last batch the sampler's state may already be of the next epoch.
            elif not ended and (found := states_of(sampler=self._items, iterator=iterator)):
                states = freeze(found)
                point = plan.left = ReplayPoint(states, [0])
                wait = len(states) // _AMORTISE
            if point is not None or ended:
                self._marks.append(_Mark(number, consumed, point))
                del self._marks[1:-_KEPT_MARKS]
            yield batch, positions

    def cursor(self, count: int) -> Cursor:
        marks = self._marks or [_Mark(0, self._cursor.consumed, self._where_it_begins())]
        mark = next(mark for mark in reversed(marks) if mark.batches <= count)
        pulls = (count - mark.batches) * self._size
        if count > self._drawn and isinstance(self._items, Sized):
            # Batches were skipped, perhaps with a last one that is partial.
            pulls = min(pulls, max(0, len(self._items) - mark.consumed))
        point = None if mark.point is None else mark.point.after(pulls)
        return Cursor(
            epoch=self.epoch,
            consumed=mark.consumed + pulls,
            unit=self._plan.unit,
            plan=self._identity,
            entropy={} if point is None else {"states": thaw(point.states), "pulls": point.pulls},
        )

    def _where_it_begins(self) -> ReplayPoint | None:
        """Return the replay point of the start of this plan; None for a sampler without states."""
        entropy, left = self._cursor.entropy, self._plan.left
        if "states" in entropy:
            return ReplayPoint(freeze(dict(entropy["states"])), list(entropy["pulls"]))
        if self._cursor.consumed:
            return None
        if left is not None:
            return ReplayPoint(left.states, [*left.pulls, 0])
        states = states_of(sampler=self._items)
        return ReplayPoint(freeze(states), [0]) if states else None

    def _open(self, point: ReplayPoint | None) -> Iterator[Any]:
        """Return an iterator of the sampler at the cursor."""
        if "states" in self._cursor.entropy and point is not None:
            states, (first, *later) = thaw(point.states), point.pulls
            load_states(states, sampler=self._items)
            iterator = iter(self._items)
            load_states(states, iterator=iterator)
            _take(iterator, first)
            for pulls in later:
                iterator = iter(self._items)
                _take(iterator, pulls)
            return iterator
        iterator = iter(self._items)
        if consumed := self._cursor.consumed:
            name = type(self._items).__name__
            if not (isinstance(self._items, Sequence | np.ndarray) or has_state(iterator)):
                warnings.warn(
                    f"{name} has no state_dict and load_state_dict, so the resume draws "
                    f"{counted(consumed, self._plan.unit)} again and drops them: it is exact only if the sampler "
                    "repeats its order",
                    stacklevel=2,
                )
            # Imported here because few programs need it.
            from penstock.plan.source_stream import drop

            drop(iterator, consumed, name)
        return iterator


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Return the next ``count`` items, or fewer at the end."""
    # islice would call iter() on the iterator, and Lightning's iterators start again then.
    taken: list[Any] = []
    for _ in range(count):
        try:
            taken.append(next(iterator))
        except StopIteration:
            break
    return taken
