"""`LruCache`: the most recently used decoded parts of tables, limited in bytes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from numbers import Real
from threading import Lock
from typing import Any, Generic, TypeVar

from penstock.errors import ConfigError

__all__ = ["LruCache"]

T = TypeVar("T")


class LruCache(Generic[T]):
    """Caches values by key; ``get(key, make)`` computes a missing one with ``make() -> (value, bytes)``.

    Args:
        limit: total bytes. At least one value is cached.

    Thread-safe: one thread computes each value. Safe after a fork. A pickle is an empty cache.
    """

    def __init__(self, limit: int) -> None:
        given: Any = limit
        if not isinstance(given, Real) or given < 1:
            raise ConfigError(f"cache_bytes must be a positive number of bytes, not {limit!r}")
        self.limit = limit
        self.made = 0
        """The number of values computed so far."""
        self._held = 0
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._new_locks()

    def _new_locks(self) -> None:
        self._pid, self._lock = os.getpid(), Lock()
        self._turns: dict[Hashable, Lock] = {}

    def _locked(self) -> Lock:
        if self._pid != os.getpid():
            self._new_locks()
        return self._lock

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """Return the value of a key."""
        with self._locked():
            found = self._look(key)
            if found is not None:
                return found[0]
            turn = self._turns.setdefault(key, Lock())
        with turn:
            with self._lock:
                found = self._look(key)
            if found is not None:
                return found[0]
            try:
                value, size = make()
            except BaseException:
                self._turns.pop(key, None)
                raise
            with self._lock:
                self._turns.pop(key, None)  # last, so that other threads find either the turn or the value
                self.made += 1
                # After a failure, waiting and later threads may each have computed a value.
                self._held += size - self._values.pop(key, (None, 0))[1]
                self._values[key] = value, size
                while self._held > self.limit and len(self._values) > 1:
                    self._held -= self._values.popitem(last=False)[1][1]
            return value

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Remove values."""
        with self._locked():
            for key in keys:
                self._held -= self._values.pop(key, (None, 0))[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self.limit,)

    def _look(self, key: Hashable) -> tuple[T, int] | None:
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found
