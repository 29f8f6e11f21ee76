"""`Seeding`: each sample finds Python's, NumPy's and torch's global generators seeded from its key, at next to no cost.

    the first batch: all three are seeded for each sample, and looked at after it; what samples draw from is "drawn"
    later batches:   what is drawn is seeded for each sample; the others are left alone, and looked at once a batch
    moved after all: the batch is made once more, and from now on that generator is drawn, too

Invariant: a sample that draws finds the generator seeded, always. Most data sets draw from one of the three or from
none, and seeding all three takes 8 us of a sample.

A sample that reads a generator without drawing, or draws and puts it back to where it was, draws nothing as far as
anybody can see. `torch.initial_seed()` is where programs do so: it is that of the sample where samples draw from torch,
else that of the batch.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchMetrics

__all__ = ["Seeding"]

T = TypeVar("T")

_WORDS = 624
"""Of a Mersenne Twister, of 32 bits each. Its place among them is another number of 32 bits."""
_BYTES = 4 * (_WORDS + 1)


class GlobalGenerator(Protocol):
    """A generator of the process. A draw moves it, and so do a seed and a state that is set."""

    def seed(self, key: int) -> None:
        """Seed it from a sample's key."""

    def look(self) -> Any:
        """Return what `moved` needs; of one that was just seeded."""

    def save(self) -> Any:
        """Return what `put_back` needs."""

    def watch(self, key: int, *, keeps: bool) -> Any:
        """Begin a batch whose first key this is, in which nobody is expected to draw. Return what `moved` needs, and
        `put_back`, if it is to be kept.
        """

    def moved(self, since: Any) -> bool:
        """Return whether it was moved since `look` or `watch`."""

    def put_back(self, to: Any) -> None:
        """Put it back to where it was at `save` or `watch`."""


class Seeding:
    """Seeds the global generators of this process.

    Args:
        always: seed all three for each sample, and make no batch twice: for objects of users with a state.
        keeps: put them back after each batch, since they are the trainer's; else they are those of a worker.
    """

    def __init__(self, *, always: bool, keeps: bool) -> None:
        self._keeps = keeps
        self._torch = _Torch()
        self._drawn: list[GlobalGenerator] = [_Python(), _NumPy(), self._torch]
        self._quiet: list[GlobalGenerator] = []
        self._learns = not always
        self._seeded: list[tuple[GlobalGenerator, Any]] = []  # while it learns, how they were seeded last
        self._moved: set[GlobalGenerator] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done for a sample."""
        return not self._drawn

    def seed(self, key: int) -> None:
        """Seed what samples draw from."""
        if self._learns:
            self._learn()
        for generator in self._drawn:
            generator.seed(key)
        if self._learns:
            self._seeded = [(generator, generator.look()) for generator in self._drawn]

    def make(self, make: Callable[[BatchMetrics], T], metrics: BatchMetrics, key: int) -> T:
        """Return what ``make`` makes of samples, each of which calls `seed`. It is called twice where a generator was
        moved that nobody expected to be; what it counts is counted once.

        Args:
            make: makes it.
            metrics: counts what it takes.
            key: of the first sample.
        """
        before = [(generator, generator.save()) for generator in self._drawn] if self._keeps else []
        try:
            return self._watching(make, metrics, key) if self._quiet else make(metrics)
        finally:
            if self._learns:
                self._settle()
            for generator, saved in before:
                generator.put_back(saved)

    def _watching(self, make: Callable[[BatchMetrics], T], metrics: BatchMetrics, key: int) -> T:
        before = [(generator, generator.watch(key, keeps=self._keeps)) for generator in self._quiet]
        counted = BatchMetrics()
        try:
            made = make(counted)
        except BaseException as error:
            if not self._found(before) or not isinstance(error, Exception) or is_of_signal_handler(error):
                metrics.add(counted)
                raise
        else:
            if not self._found(before):
                metrics.add(counted)
                return made
        # Samples drew from a generator that was not seeded for them.
        return self.make(make, metrics, key)

    def _found(self, before: Sequence[tuple[GlobalGenerator, Any]]) -> bool:
        """Return whether any of them was moved. Those are seeded from now on; all are where they were before."""
        found = False
        for generator, since in before:
            if moved := generator.moved(since):
                found = True
                self._quiet.remove(generator)
                self._drawn.append(generator)
            if self._keeps and (moved or generator is self._torch):
                generator.put_back(since)
        return found

    def _learn(self) -> None:
        """Note what the last sample has moved."""
        self._moved.update(generator for generator, look in self._seeded if generator.moved(look))

    def _settle(self) -> None:
        """Leave alone from now on what no sample of the first batch has moved."""
        if not self._seeded:
            return  # there was no sample
        self._learn()
        self._learns, self._seeded = False, []
        self._quiet = [generator for generator in self._drawn if generator not in self._moved]
        self._drawn = [generator for generator in self._drawn if generator in self._moved]


def _memory(address: int) -> memoryview:
    """Return a view of a Mersenne Twister's words and place. It is only read."""
    return memoryview((ctypes.c_char * _BYTES).from_address(address)).cast("B")


class _Python:
    """`random`. Its state as a tuple costs twice what seeding costs, so the memory behind it is read, if that is where
    it should be.
    """

    def __init__(self) -> None:
        self._instance: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._memory = self._found_memory()

    def _found_memory(self) -> memoryview | None:
        """Return the place and the words in the object of CPython's class, behind its head."""
        base: Any = random.Random.__base__
        if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _BYTES:
            return None
        memory = _memory(id(self._instance) + object.__basicsize__)
        _, (*words, place), _ = self._instance.getstate()
        return memory if memory.cast("I").tolist() == [place, *words] else None

    def seed(self, key: int) -> None:
        random.seed(key)

    def look(self) -> Any:
        # A normal number that was drawn in advance is beside the memory.
        memory, instance = self._memory, self._instance
        return instance.getstate() if memory is None else (memory.tobytes(), instance.gauss_next)

    save = look

    def watch(self, key: int, *, keeps: bool) -> Any:
        return self.look()

    def moved(self, since: Any) -> bool:
        return bool(self.look() != since)

    def put_back(self, to: Any) -> None:
        if self._memory is not None:
            place, *words = memoryview(to[0]).cast("I").tolist()
            to = self._instance.VERSION, (*words, place), to[1]
        self._instance.setstate(to)


class _NumPy:
    """`np.random`'s functions. To ask for their state costs 40 us, so the memory behind it is read, whose address NumPy
    tells.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._memory: memoryview | None = None
        self._saved: Any = b"", None  # words, and the state that was asked for then

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)

    def look(self) -> Any:
        memory = self._found_memory()
        return (b"", _numpy_state()) if memory is None else (memory.tobytes(), None)

    def save(self) -> Any:
        words, state = self.look()
        if state is None:
            # A normal number that was drawn in advance is beside the memory, and only behind another draw.
            known, state = self._saved
            if words != known or state["has_gauss"]:
                state = _numpy_state()
                self._saved = words, state
        return words, state

    def watch(self, key: int, *, keeps: bool) -> Any:
        return self.save() if keeps else self.look()

    def moved(self, since: Any) -> bool:
        words, state = since
        memory = self._found_memory()
        if memory is None or not words or (state is not None and state["has_gauss"]):
            return pickle.dumps(_numpy_state()) != pickle.dumps(state)
        return bool(memory.tobytes() != words)

    def put_back(self, to: Any) -> None:
        np.random.set_state(to[1])

    def _found_memory(self) -> memoryview | None:
        """Return the words and the place of NumPy's own generator; None if the program has set another kind."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:
            twister = isinstance(source, np.random.MT19937)
            self._memory = _memory(source.ctypes.state_address) if twister else None
            self._source, self._saved = source, (b"", None)
        return self._memory


def _numpy_state() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return state


class _Torch:
    """torch's generator of the processor. It is so cheap to seed and to put back that each batch does."""

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)  # a hundred times cheaper than `torch.manual_seed`

    def look(self) -> Any:
        return torch.default_generator.get_state(), None

    def save(self) -> Any:
        return None, torch.default_generator.get_state()

    def watch(self, key: int, *, keeps: bool) -> Any:
        saved = torch.default_generator.get_state() if keeps else None
        self.seed(key)
        return torch.default_generator.get_state(), saved

    def moved(self, since: Any) -> bool:
        return not torch.equal(torch.default_generator.get_state(), since[0])

    def put_back(self, to: Any) -> None:
        torch.default_generator.set_state(to[1])
