"""The sample's own random generator: a function of (seed, epoch, position) and of nothing else.

Inside a transform, `generator()` gives a `numpy.random.Generator` that belongs to the sample being made. It does not
depend on the executor, the worker, the number of ranks or on what was drawn for other samples, so augmentation repeats
bit for bit. It is made on the first call of a sample, which costs a few microseconds.

The 256-bit seed of its PCG64 is SplitMix64 in counter mode over the sample's key. NumPy may change the *methods* of
Generator between versions, so augmentation is identical for one NumPy version; the order of samples always is.

Only the thread that makes a sample has its generator: shared by several threads, it would give each of them draws that
depend on who came first. Threads that a data set starts get children of it, by `use_generator`.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISpawnableSeedSequence

from penstock.errors import ConfigError
from penstock.hashing import derive_key, mix, mix_array, splitmix64

__all__ = [
    "Samples",
    "call_in_scope",
    "current_key",
    "generator",
    "generator_from_key",
    "in_sample",
    "load_each",
    "packed_sample_keys",
    "sample_key",
    "sample_keys",
    "sample_scope",
    "show_samples",
    "shown_record",
    "use_generator",
]

R = TypeVar("R")
T = TypeVar("T")


class _Keyed(Protocol):
    @property
    def keys(self) -> Sequence[int]: ...


class Samples:
    """Samples that a thread makes one after the other: at hand is the one behind those that are made. So nothing is to
    be done for a sample that draws nothing.

    Args:
        batch: has their ``keys``, which are asked for if one draws.
        made: is appended to.
    """

    __slots__ = ("batch", "drawing", "made")

    def __init__(self, batch: _Keyed, made: list[Any]) -> None:
        self.batch = batch
        self.made = made
        self.drawing = -1  # the sample that has a generator

    def key(self) -> int:
        """Return that of the sample at hand."""
        return self.batch.keys[len(self.made)]


class _Scope:
    """The sample that a thread is making."""

    __slots__ = ("__weakref__", "board", "generator", "key")

    def __init__(self) -> None:
        self.key: int | Samples | None = None
        self.generator: np.random.Generator | None = None
        self.board: memoryview | None = None

    def move(self, key: int) -> None:
        """From now on the sample is that with this key."""
        self.key, self.generator = key, None
        if self.board is not None:
            self.board[0] = key


_scopes: set[weakref.ref[_Scope]] = set()
"""Those of all threads. Sets add, discard and copy themselves in one step, so no lock is needed."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.scope = _Scope()
        _scopes.add(weakref.ref(self.scope, _scopes.discard))


_here = _Here()


def _forget_other_threads() -> None:
    """Forget what other threads made: a fork does not have them."""
    _scopes.clear()
    _scopes.add(weakref.ref(_here.scope, _scopes.discard))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def _scopes_of_others() -> list[_Scope]:
    """Return the scopes of the other threads of this process."""
    mine = _here.scope
    return [scope for ref in list(_scopes) if (scope := ref()) is not None and scope is not mine]


class _Words(ISpawnableSeedSequence):
    """Hands PCG64 its 256 bits as they are: cheaper than NumPy's SeedSequence, and frozen by us."""

    def __init__(self, key: int) -> None:
        # Four words are too few for NumPy to pay: plain integers take a quarter of the time.
        self.words = np.array([splitmix64(key ^ word) for word in (1, 2, 3, 4)], dtype=np.uint64)
        self._children = 0

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        return self.words if dtype == np.uint64 else self.words.view(np.uint32)[:n_words]

    def spawn(self, n_children: int) -> list[_Words]:
        """For ``generator().spawn(n)``: seeds that are functions of this one and of how many came before."""
        begin, self._children = self._children, self._children + n_children
        key = int(self.words[0])
        return [_Words(mix(key, number)) for number in range(begin, self._children)]


def packed_sample_keys(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The 64-bit keys of the samples at these global positions of an epoch."""
    return mix_array(derive_key(seed, epoch, "sample"), positions.astype(np.uint64))


def sample_keys(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
    """The same as a list."""
    keys: list[int] = packed_sample_keys(seed, epoch, positions).tolist()
    return keys


def sample_key(seed: int, epoch: int, position: int) -> int:
    """The key of one sample; equal to that of `sample_keys`."""
    return splitmix64(derive_key(seed, epoch, "sample") ^ position)


def generator_from_key(key: int) -> np.random.Generator:
    """A new generator, a pure function of a 64-bit key."""
    return np.random.Generator(np.random.PCG64(cast(np.random.SeedSequence, _Words(key))))


class sample_scope:
    """``with sample_scope(key):`` `generator()` in this thread belongs to the sample with this key.

    ``with sample_scope(key) as scope: ... scope.move(other)`` goes on to another sample, for a fifth of the cost.
    """

    __slots__ = ("_before", "_key", "_scope")

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> _Scope:
        self._scope = scope = _here.scope
        self._before = scope.key, scope.generator
        scope.move(self._key)
        return scope

    def __exit__(self, *exc: object) -> None:
        self._scope.key, self._scope.generator = self._before


def call_in_scope(key: int | None, function: Callable[[R], T], argument: R) -> T:
    """``function(argument)`` in the scope of a sample (None: in that which is there), which ends whatever happens.

    A signal's handler may run where `sample_scope.__exit__` begins, and an error of it, Ctrl-C above all, would leave
    this thread in the scope. Here nothing is called at the end.
    """
    scope = _here.scope
    before = scope.key, scope.generator
    try:
        if key is not None:
            scope.move(key)
        return function(argument)
    finally:
        scope.key, scope.generator = before


def show_samples(board: memoryview | None) -> None:
    """From now on this thread writes the key of each sample it begins to ``board[0]`` (unsigned 64 bits), where another
    process can see what this one hangs at. None ends that.
    """
    _here.scope.board = board


def in_sample() -> bool:
    """Whether a loader or data set has said which sample this thread is making."""
    return _here.scope.key is not None


def current_key() -> int | None:
    """The key of the sample that this thread is making, None outside of samples."""
    key = _here.scope.key
    return key.key() if isinstance(key, Samples) else key


def generator() -> np.random.Generator:
    """The generator of the sample being made.

    Inside a Penstock loader or data set it depends on (seed, epoch, position) only, and calling it twice within one
    sample gives the same object. Anywhere else (under a foreign loader, or by hand) it is a new generator seeded by one
    draw from torch's global generator, which repeats as torch's own transforms do.

    A thread that a data set starts for itself makes no sample, and there it does not repeat. Hand the thread a child,
    ``generator().spawn(1)``, to draw from directly or by `use_generator`.

    Warns:
        RuntimeWarning: this is not the main thread, it makes no sample, and another thread of this process makes one.

    >>> with sample_scope(7):
    ...     a = generator().integers(100)
    >>> with sample_scope(7):
    ...     b = generator().integers(100)
    >>> a == b
    np.True_
    """
    scope = _here.scope
    key = scope.key
    if key is None:
        if threading.current_thread() is not threading.main_thread():
            _warn_of_own_thread()
        draw = int(torch.empty((), dtype=torch.int64).random_().item())
        return generator_from_key(splitmix64(draw))
    if isinstance(key, Samples):
        if key.drawing != len(key.made):
            key.drawing, scope.generator = len(key.made), generator_from_key(key.key())
    elif scope.generator is None:
        scope.generator = generator_from_key(key)
    assert scope.generator is not None
    return scope.generator


def _warn_of_own_thread() -> None:
    """Warn if this thread may be a data set's own, which draws for a sample that another thread makes."""
    if any(scope.key is not None for scope in _scopes_of_others()):
        # A warning, no error: it may as well be the thread that trains, while a loader's threads make batches.
        warnings.warn(
            "penstock.generator() was called in a thread that makes no sample, while another thread makes one. What "
            "it draws for that sample does not repeat. Give each thread a generator of its own: in __getitem__ take "
            "`children = penstock.generator().spawn(n)`, and in the thread draw from its child, directly or under "
            "`with penstock.use_generator(child):`",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def use_generator(generator: np.random.Generator) -> Iterator[None]:
    """Make a generator the one that `penstock.generator` returns in this thread.

    It carries the randomness of a sample to threads that a data set starts for itself. Each thread, or each piece of
    work, gets a child of the sample's generator, so its draws are a function of (seed, epoch, position) and of its
    number, whichever thread does the work, and when:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def part(child):
    ...     with use_generator(child):
    ...         return generator().integers(100)
    >>> def item():
    ...     with ThreadPoolExecutor() as pool:
    ...         return list(pool.map(part, generator().spawn(3)))
    >>> with sample_scope(7):
    ...     a = item()
    >>> with sample_scope(7):
    ...     b = item()
    >>> a == b
    True

    It serves as well to repeat a transform by hand: ``with penstock.use_generator(np.random.default_rng(0)): ...``.

    Raises:
        ConfigError: it is no generator of NumPy's; or another thread uses it, such as the one that makes the sample.
            Their draws would depend on who comes first.
    """
    if not isinstance(generator, np.random.Generator):
        raise ConfigError(
            f"use_generator takes a numpy.random.Generator, such as generator().spawn(1)[0], got {generator!r}"
        )
    scope = _here.scope
    before = scope.key, scope.generator
    scope.key, scope.generator = current_key() or 0, generator
    try:
        # Looked for after the generator is set here, so that of two threads at once at least one sees the other.
        if any(other.generator is generator for other in _scopes_of_others()):
            raise ConfigError(
                "this generator is in use in another thread, and draws of both would depend on who comes first: give "
                "each thread a child of it, by generator.spawn(n)"
            )
        yield
    finally:
        scope.key, scope.generator = before


def load_each(load: Callable[[R], T], records: Sequence[R], keys: Sequence[int] | None) -> list[T]:
    """``load`` of every record, each in the scope of its key (without keys, in the scope that is there)."""
    if keys is None:
        return [load(record) for record in records]
    items: list[T] = []
    with sample_scope(0) as scope:
        for record, key in zip(records, keys, strict=True):
            scope.move(key)
            try:
                items.append(load(record))
            except Exception as error:
                error.add_note(f"while loading {shown_record(record)}")
                raise
    return items


def shown_record(record: Any) -> Any:
    """What messages call a record: no signature of an address, and of a sample of a shard not all of its bytes."""
    from penstock.storage.urls import shown  # only where something is wrong

    if isinstance(record, dict) and "__key__" in record:
        return f"sample {record['__key__']!r} of {shown(str(record.get('__url__')))}"
    path = getattr(record, "path", None)
    return record._replace(path=shown(path)) if isinstance(path, str) and hasattr(record, "_replace") else record
