"""`SourceStream`: one iteration of any iterable as a stream, for streams that read other streams.

A cursor takes the position from the first of these that has one:

    a Penstock dataset (`ResumableDataset`)     {"had": 3, "cursor": {...}}      opened at the cursor
    an iterator with a state                    {"had": 3, "iterator": ...}      loaded after ``iter()``
    a dataset with a state                      {"had": 3, "dataset": ...}       loaded before ``iter()``
    none of them                                {"had": 3}                       read again from the start

A subclass of a Penstock dataset with its own ``__iter__`` counts as a dataset with a state, and is iterated.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from penstock.errors import StateError, escaped
from penstock.plan.cursor import State, read_int, read_mapping
from penstock.plan.stream import Stream, is_opened
from penstock.plan.user_states import has_state

__all__ = ["SourceStream", "check_pass", "drop", "keeps_position", "loads_stream"]

_END = object()
_HELD = {"cursor": "a cursor", "iterator": "one of the iterator", "dataset": "a state"}


class SourceStream(Stream):
    """One iteration of a source, which is opened at the first item, or by `begin`.

    Args:
        source: the iterable.
        name: name of the source, for messages.
        epoch: to set on the source, or on the dataset of a loader of an iterable dataset. None leaves it to the source.
        cursor: cursor of an iteration of the same source, checked by `check_pass`; None begins at the start.
        iterate: returns the iterator of a source that is not a Penstock dataset.
        warn: whether to warn if the source must be read again from the start.
    """

    def __init__(
        self,
        source: Any,
        *,
        name: str,
        epoch: int | None,
        cursor: Mapping[str, Any] | None = None,
        iterate: Callable[[Any], Iterator[Any]] = iter,
        warn: bool = True,
    ) -> None:
        self._source, self._name, self._epoch, self._iterate, self._warn = source, name, epoch, iterate, warn
        # Until the first item, the position is where the stream was opened.
        self._opened_at: Mapping[str, Any] | None = {"had": 0} if cursor is None else cursor
        self.delivered = 0 if cursor is None else int(cursor["had"])
        self._items: Iterator[Any] | None = None

    def begin(self) -> None:
        """Open the source now. From then on a cursor holds the state of the source, even before the first item.

        So a source that counts its own epochs resumes in the same epoch. A generator is an exception: it has not run
        yet, and its dataset may still have the state of the last iteration, so its state is taken after the first item.
        """
        self._items = self._open()
        if not isinstance(self._items, GeneratorType):
            self._opened_at = None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._open()
        item = next(self._items)
        self.delivered += 1
        self._opened_at = None
        return item

    def cursor(self) -> State:
        if self._opened_at is not None:
            return copy.deepcopy(dict(self._opened_at))
        if is_opened(self._source):
            assert isinstance(self._items, Stream)
            return {"had": self.delivered, "cursor": self._items.cursor()}
        owners: dict[str, Any] = {"iterator": self._items, "dataset": self._source}
        for kind, owner in owners.items():
            if has_state(owner) and (state := owner.state_dict()) is not None:
                return {"had": self.delivered, kind: copy.deepcopy(state)}
        return {"had": self.delivered}

    def _open(self) -> Iterator[Any]:
        """Return the items of the source, from where this stream is opened."""
        source, name, cursor = self._source, self._name, self._opened_at
        assert cursor is not None
        try:
            if is_opened(source):
                return source.open(cursor["cursor"]) if "cursor" in cursor else source.open(epoch=self._epoch)
            # torch's loader has no ``set_epoch``, but its dataset may.
            told = source.dataset if loads_stream(source) else source
            if self._epoch is not None and hasattr(told, "set_epoch"):
                (source if hasattr(source, "set_epoch") else told).set_epoch(self._epoch)
            if "dataset" in cursor:
                source.load_state_dict(copy.deepcopy(cursor["dataset"]))
            items: Any = self._iterate(source)
            if "iterator" in cursor:
                if not has_state(items):
                    raise StateError(_missing("iterator", name))
                items.load_state_dict(copy.deepcopy(cursor["iterator"]))
            elif cursor["had"] and "dataset" not in cursor:
                if self._warn:
                    warnings.warn(
                        f"{name} has no state_dict: its first {cursor['had']} samples are read again and dropped, "
                        "which is exact only if it repeats its order",
                        stacklevel=4,
                    )
                drop(items, cursor["had"], name)
        except StopIteration as stop:
            raise escaped(stop) from stop
        return items  # type: ignore[no-any-return]


def check_pass(cursor: Any, source: Any, *, name: str, of: str) -> None:
    """Raise unless a cursor belongs to an iteration of a source. Users' objects check their own states.

    Args:
        cursor: to load; entries that `SourceStream` does not use are ignored.
        source, name: of the iteration.
        of: class of the object that loads the state, for messages.

    Raises:
        StateError: the cursor is damaged, or of another source.
    """
    if not isinstance(cursor, Mapping):
        raise StateError(f"the state of this {of} is damaged: for {name} it has {cursor!r}")
    had = read_int(cursor, "had", of=of)
    held = _HELD.keys() & cursor.keys()
    if len(held) > 1:
        raise StateError(f"the state of this {of} is damaged: for {name} it has {sorted(held)}")
    if is_opened(source):
        if had or held:
            source.check_cursor(read_mapping(cursor, "cursor", of=of))
    elif "cursor" in held or ("dataset" in held and not has_state(source)):
        raise StateError(_missing(held.pop(), name))


def keeps_position(source: Any) -> bool:
    """Return whether a source holds its own position, so that it allows only one iteration at a time."""
    return has_state(source) and not is_opened(source)


def loads_stream(source: Any) -> bool:
    """Return whether a source is a loader of an iterable dataset, so that its epoch is the dataset's epoch."""
    return isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset)


def drop(items: Iterator[Any], count: int, name: str) -> None:
    """Read ``count`` items and drop them.

    Raises:
        StateError: the iterator has fewer items.
    """
    for had in range(count):
        if next(items, _END) is _END:
            raise StateError(
                f"{name} had yielded {count} items when this state was taken, but now it has only {had}: it is another "
                "source, or its data have changed"
            )


def _missing(held: str, name: str) -> str:
    return f"this state holds {_HELD[held]} of {name}, which has none: the state belongs to other sources"
