"""Shuffling in a buffer, whose choices are a function of a key and a count.

So the state is two counts, without data: they determine which items the buffer held, and these are read again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.hashing import mix_array
from penstock.wds.pipeline import Context, IteratorStep, Stage, Step, default_context, read_count

_CHUNK = 1024


class Shuffle(Stage):
    """A stage that shuffles items in a buffer.

    Args:
        bufsize: items in the buffer; below 1 the order does not change.
        initial: items in the buffer before the first one is returned; the buffer then grows by one item at a time.
        rng: a ``random.Random``, from which one draw seeds the order, together with the epoch.
        seed: replaces the pipeline's seed.
        handler: for compatibility; a shuffle raises no errors.

    Shards get the same order on all ranks and workers, so that stages after it split the same list; samples get a
    different order in each worker. Both orders change every epoch.
    """

    def __init__(
        self,
        bufsize: int = 1000,
        initial: int = 100,
        rng: random.Random | None = None,
        seed: int | None = None,
        handler: Any = None,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed must be an integer or None, got {seed!r}")
        self.bufsize, self.initial = bufsize, min(initial, bufsize)
        self.seed = rng.getrandbits(63) if rng is not None else seed

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        return _ShuffleStep(source, self, context, own)


class _ShuffleStep(Step):
    """A running shuffle.

    Invariant: the ordinals in the buffer are a function of the key, ``draws`` and ``inputs``.
    """

    def __init__(self, source: Step, how: Shuffle, context: Context, own: Any) -> None:
        self._source, self._how, self._context = source, how, context
        self._buffer: list[tuple[int, Any]] = []
        self._draws = self._inputs = self._at = 0
        self._ended = False
        self._stride = max(64, how.bufsize // 4)
        self._common = False
        self._marks: deque[tuple[int, list[Any]]] = deque()
        self._choices: Iterator[int] | None = None
        if own is not None and how.bufsize > 0:
            self._restore(own)

    def __next__(self) -> Any:
        if self._how.bufsize < 1:
            return next(self._source)
        if self._choices is None:
            self._begin()
        self._fill()
        if not self._buffer:
            raise StopIteration
        item = _pick(self._buffer, next(self._choices))  # type: ignore[arg-type]
        self._draws += 1
        return item[1]

    def _begin(self) -> None:
        if not self._inputs:
            self._pull()
            first = self._buffer[0][1] if self._buffer else None
            self._common = isinstance(first, dict) and "url" in first and "__key__" not in first
        self._choices = _choices(self._key(), self._draws)

    def _key(self) -> int:
        return self._context.key("shuffle", common=self._common, seed=self._how.seed)

    def _fill(self) -> None:
        buffer, how = self._buffer, self._how
        for count in wanted(len(buffer), self._draws, self._inputs, how.bufsize, how.initial):
            for _ in range(count):
                self._pull()

    def _pull(self) -> None:
        if self._ended:
            return
        if self._inputs % self._stride == 0:
            self._mark()
        try:
            item = next(self._source)
        except StopIteration:
            self._ended = True
            return
        self._buffer.append((self._inputs, item))
        self._inputs += 1

    def _mark(self) -> None:
        marks = self._marks
        marks.append((self._inputs, self._source.cursor()))
        oldest = min((ordinal for ordinal, _ in self._buffer), default=self._inputs)
        while len(marks) > 1 and marks[1][0] <= oldest:
            marks.popleft()

    def cursor(self) -> list[Any]:
        if not self._marks:
            return [*self._source.cursor(), None]
        at, before = self._marks[0]
        return [
            *before,
            {"draws": self._draws, "inputs": self._inputs, "at": at, "common": self._common, "size": self._how.bufsize},
        ]

    def _restore(self, own: Any) -> None:
        try:
            draws, inputs, at = (read_count(own[name]) for name in ("draws", "inputs", "at"))
            self._common, size = bool(own["common"]), own["size"]
        except (TypeError, KeyError):
            raise StateError(f"this state is damaged: expected the state of a shuffle, got {own!r}") from None
        if size != self._how.bufsize:
            raise StateError(
                f"this state belongs to a shuffle with bufsize={size}, but this one has bufsize={self._how.bufsize}"
            )
        if not draws <= inputs or not at <= inputs:
            raise StateError(
                f"this state is damaged: a shuffle cannot have {draws} draws from {inputs} items starting at {at}"
            )
        held = _simulate(self._key(), draws, inputs, self._how)
        wanted_items = dict.fromkeys(held)
        self._inputs = at
        self._draws = draws
        for ordinal in range(at, inputs):
            if ordinal == at or ordinal % self._stride == 0:
                self._marks.append((ordinal, self._source.cursor()))
            try:
                item = next(self._source)
            except StopIteration:
                raise StateError(
                    f"a shuffle had read {inputs} items when this state was taken, but its source now has only "
                    f"{ordinal}: the shards have changed"
                ) from None
            if ordinal in wanted_items:
                wanted_items[ordinal] = item
        self._inputs = inputs
        if not self._marks:
            self._marks.append((at, self._source.cursor()))
        self._buffer = [(ordinal, wanted_items[ordinal]) for ordinal in held]


def wanted(size: int, draws: int, inputs: int, bufsize: int, initial: int) -> Iterator[int]:
    """Yield the number of items to pull before each draw: one, one more until the buffer is full, first ``initial``."""
    if inputs <= 1 and not draws:
        yield max(initial, 1) - size
    else:
        yield 1
        if size + 1 < bufsize:
            yield 1


def _choices(key: int, start: int) -> Iterator[int]:
    """Yield 32 random bits for each draw from ``start`` on."""
    while True:
        words = np.arange(start, start + _CHUNK, dtype=np.uint64)
        yield from (mix_array(key, words) >> np.uint64(32)).tolist()
        start += _CHUNK


def _pick(buffer: list[Any], choice: int) -> Any:
    index = choice * len(buffer) >> 32
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


def _simulate(key: int, draws: int, inputs: int, how: Shuffle) -> list[int]:
    """Return the ordinals in the buffer after ``draws`` draws and ``inputs`` pulled items."""
    buffer: list[int] = []
    pulled = 0
    choices = _choices(key, 0)
    for draw in range(draws):
        for count in wanted(len(buffer), draw, pulled, how.bufsize, how.initial):
            stop = min(inputs, pulled + count)
            buffer.extend(range(pulled, stop))
            pulled = stop
        if not buffer:
            raise StateError(f"this state is damaged: a shuffle cannot have {draws} draws from {inputs} items")
        _pick(buffer, next(choices))
    if inputs - pulled > how.bufsize + 2:
        raise StateError(
            f"this state is damaged: a shuffle with bufsize={how.bufsize} cannot have {inputs} items after {draws} "
            "draws"
        )
    buffer.extend(range(pulled, inputs))
    return buffer


class detshuffle(Shuffle):
    """A shuffle with its own seed.

    Args:
        bufsize, initial: see `Shuffle`.
        seed: seed of the order.
        epoch: the epoch before the first run, if used outside a pipeline; a pipeline sets the epoch itself.
    """

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        super().__init__(bufsize, initial, seed=seed)
        self.epoch = epoch

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        self.epoch = context.epoch
        return super().begin(source, context, own)

    def run(self, src: Any = None) -> Iterator[Any]:
        """Shuffle an iterator, outside a pipeline: every run is the next epoch."""
        self.epoch += 1
        return self.begin(IteratorStep(src), default_context()._replace(epoch=self.epoch), None)


shuffle = Shuffle
