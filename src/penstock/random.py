"""The random generator of a sample: a function of only (seed, epoch, position).

Inside a transform, `generator()` returns the `numpy.random.Generator` of the sample that is being loaded. It does not
depend on the executor, the worker, the number of ranks or the draws of other samples, so augmentation repeats bit for
bit. The first call for a sample creates it, which costs a few microseconds.

The 256-bit seed of its PCG64 is SplitMix64 in counter mode over the sample's key. NumPy may change the *methods* of
Generator between versions, so augmentation is identical within one NumPy version; the order of samples always is.

A sample's generator belongs to the thread that loads the sample. If threads shared it, their draws would depend on
their timing. Threads that a dataset starts use children of it, see `use_generator`.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISpawnableSeedSequence

from penstock.errors import ConfigError
from penstock.hashing import GOLDEN, M1, M2, MASK64, mix, splitmix64

__all__ = [
    "Scope",
    "call_in_scope",
    "current_key",
    "generator",
    "generator_from_key",
    "in_sample",
    "load_each",
    "loading",
    "sample_scope",
    "show_samples",
    "shown_record",
    "use_generator",
]

R = TypeVar("R")
T = TypeVar("T")


class Scope:
    """The sample that a thread loads, and its generator.

    Attributes:
        inside: whether it loads one.
        board: ``board[0]`` is the sample's key. A loop over samples with different keys only writes it, so a sample
            that draws nothing costs nothing.
        generator: the generator of the sample with the key ``of``.
    """

    __slots__ = ("__weakref__", "board", "generator", "inside", "of")

    def __init__(self) -> None:
        self.inside = False
        self.board: Any = [0]
        self.generator: np.random.Generator | None = None
        self.of = 0

    def move(self, key: int) -> None:
        """Make the sample with this key the current one, with a new generator."""
        self.inside, self.generator, self.board[0] = True, None, key


_scopes: set[weakref.ref[Scope]] = set()
"""The scopes of all threads. Sets add, discard and copy atomically, with the GIL and without it, so
no lock is needed."""


class _ThreadScope(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()
        _scopes.add(weakref.ref(self.scope, _scopes.discard))


loading = _ThreadScope()
"""``loading.scope`` is the sample of the calling thread."""


def _forget_other_threads() -> None:
    """Forget the scopes of other threads, which a forked process does not have, and leave the parent its board."""
    loading.scope.board = [loading.scope.board[0]]
    _scopes.clear()
    _scopes.add(weakref.ref(loading.scope, _scopes.discard))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def _scopes_of_others() -> list[Scope]:
    """Return the scopes of the other threads of this process."""
    mine = loading.scope
    return [scope for ref in list(_scopes) if (scope := ref()) is not None and scope is not mine]


class _Words(ISpawnableSeedSequence):
    """The 256 seed bits of PCG64, from a key: cheaper than NumPy's SeedSequence, and fixed by Penstock."""

    def __init__(self, key: int) -> None:
        # For four words, Python integers take a quarter of the time of NumPy arrays. This is `splitmix64(key ^ word)`
        # four times, without its calls: a small image takes as long as a few of them.
        words = []
        for word in (1, 2, 3, 4):
            x = ((key ^ word) + GOLDEN) & MASK64
            x = ((x ^ (x >> 30)) * M1) & MASK64
            x = ((x ^ (x >> 27)) * M2) & MASK64
            words.append(x ^ (x >> 31))
        self.words = np.array(words, dtype=np.uint64)
        self._children = 0

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        return self.words if dtype == np.uint64 else self.words.view(np.uint32)[:n_words]

    def spawn(self, n_children: int) -> list[_Words]:
        """Return the seeds for ``generator().spawn(n)``. They depend on this seed and on how many came before."""
        begin, self._children = self._children, self._children + n_children
        key = int(self.words[0])
        return [_Words(mix(key, number)) for number in range(begin, self._children)]


def generator_from_key(key: int) -> np.random.Generator:
    """Return a new generator, a pure function of a 64-bit key."""
    return np.random.Generator(np.random.PCG64(cast(np.random.SeedSequence, _Words(key))))


class sample_scope:
    """Make `generator()` in this thread return the generator of the sample with this key, within a ``with`` block.

    ``with sample_scope(key) as scope: ... scope.move(other)`` continues with another sample, for a fifth of the cost.
    """

    __slots__ = ("_before", "_key", "_scope")

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> Scope:
        self._scope = scope = loading.scope
        self._before = scope.inside, scope.generator, scope.of, scope.board[0]
        scope.move(self._key)
        return scope

    def __exit__(self, *exc: object) -> None:
        scope = self._scope
        scope.inside, scope.generator, scope.of, scope.board[0] = self._before


def call_in_scope(key: int | None, function: Callable[[R], T], argument: R) -> T:
    """Return ``function(argument)``, called in the scope of a sample (None: in the current scope).

    The scope always ends. With `sample_scope`, a signal handler may run at the start of ``__exit__``, and an exception
    raised there, such as Ctrl-C, would leave this thread in the scope. This function makes no call at its end.
    """
    scope = loading.scope
    before = scope.inside, scope.generator, scope.of, scope.board[0]
    try:
        if key is not None:
            scope.move(key)
        return function(argument)
    finally:
        scope.inside, scope.generator, scope.of, scope.board[0] = before


def show_samples(board: memoryview) -> None:
    """From now on, keep the key of the sample that this thread loads in ``board[0]``, a uint64.

    If this process hangs, another process can then see at which sample.
    """
    loading.scope.board = board


def in_sample() -> bool:
    """Return whether this thread is loading a sample, as announced by a loader or dataset."""
    return loading.scope.inside


def current_key() -> int | None:
    """Return the key of the sample that this thread loads, or None outside of samples."""
    scope = loading.scope
    return scope.board[0] if scope.inside else None


def generator() -> np.random.Generator:
    """Return the random generator of the sample that is being loaded.

    Inside a Penstock loader or dataset it depends on (seed, epoch, position) alone, and two calls within one sample
    return the same object. Elsewhere (in another library's loader, or by hand) it is a new generator, seeded by one
    draw from torch's global generator, so it repeats as torch's own transforms do.

    In a thread that a dataset starts, no sample is current and the draws do not repeat. Pass the thread a child,
    ``generator().spawn(1)``, and draw from the child, directly or through `use_generator`.

    Warns:
        RuntimeWarning: this is not the main thread, it loads no sample, and another thread of this process loads one.

    >>> with sample_scope(7):
    ...     a = generator().integers(100)
    >>> with sample_scope(7):
    ...     b = generator().integers(100)
    >>> a == b
    np.True_
    """
    scope = loading.scope
    if not scope.inside:
        if threading.current_thread() is not threading.main_thread():
            _warn_of_own_thread()
        draw = int(torch.empty((), dtype=torch.int64).random_().item())
        return generator_from_key(splitmix64(draw))
    key = scope.board[0]
    if scope.generator is None or scope.of != key:
        scope.generator, scope.of = generator_from_key(key), key
    return scope.generator


def _warn_of_own_thread() -> None:
    """Warn if this thread may belong to a dataset, and draw for a sample that another thread loads."""
    if any(scope.inside for scope in _scopes_of_others()):
        # Not an error: this may be the training thread, while a loader's threads load batches.
        warnings.warn(
            "penstock.generator() was called in a thread that loads no sample, while another thread loads one. Its "
            "draws for that sample will not repeat. Give each thread its own generator: in __getitem__ call "
            "`children = penstock.generator().spawn(n)`, and in each thread draw from its child, directly or under "
            "`with penstock.use_generator(child):`",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def use_generator(generator: np.random.Generator) -> Iterator[None]:
    """Make `penstock.generator` return this generator in this thread, within a ``with`` block.

    It carries the randomness of a sample to threads that a dataset starts. Give each thread or task a child of the
    sample's generator: its draws are then a function of (seed, epoch, position) and of the child's number, no matter
    which thread runs the task, or when:

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

    It also repeats a transform by hand: ``with penstock.use_generator(np.random.default_rng(0)): ...``.

    Raises:
        ConfigError: it is not a NumPy generator; or another thread uses it, such as the one that loads the sample.
            The draws of both would depend on their timing.
    """
    if not isinstance(generator, np.random.Generator):
        raise ConfigError(
            f"use_generator takes a numpy.random.Generator, such as generator().spawn(1)[0], got {generator!r}"
        )
    scope = loading.scope
    before = scope.inside, scope.generator, scope.of, scope.board[0]
    key = current_key() or 0
    scope.inside, scope.generator, scope.of, scope.board[0] = True, generator, key, key
    try:
        # Checked after the generator is set here: if two threads enter at once, at least one of them sees the other.
        if any(other.generator is generator for other in _scopes_of_others()):
            raise ConfigError(
                "this generator is in use in another thread, so the draws of both would depend on their timing: give "
                "each thread a child of it, by generator.spawn(n)"
            )
        yield
    finally:
        scope.inside, scope.generator, scope.of, scope.board[0] = before


def load_each(
    load: Callable[[R], T],
    records: Sequence[R],
    keys: Sequence[int] | None,
    name: Callable[[int], str] | None = None,
) -> list[T]:
    """Return ``load(record)`` of each record, in the scope of its key; without keys, in the current scope.

    ``name(k)`` names record k in the note of an error; by default the note shows the record.
    """
    if keys is None:
        return [load(record) for record in records]
    items: list[T] = []
    with sample_scope(0) as scope:
        for record, key in zip(records, keys, strict=True):
            scope.move(key)
            try:
                items.append(load(record))
            except Exception as error:
                error.add_note(f"while loading {shown_record(record) if name is None else name(len(items))}")
                raise
    return items


def shown_record(record: Any) -> Any:
    """Return a record as messages show it: URLs without their signature, samples of shards without their bytes."""
    from penstock.storage.urls import shown  # import only on an error

    if isinstance(record, dict) and "__key__" in record:
        return f"sample {record['__key__']!r} of {shown(str(record.get('__url__')))}"
    path = getattr(record, "path", None)
    return record._replace(path=shown(path)) if isinstance(path, str) and hasattr(record, "_replace") else record
