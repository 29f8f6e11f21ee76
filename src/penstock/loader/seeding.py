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
import os
import pickle
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchMetrics

__all__ = ["Seeding"]

T = TypeVar("T")

_WORDS = 624
"""Of a Mersenne Twister, of 32 bits each. Its place among them is another number of 32 bits."""
_BYTES = 4 * (_WORDS + 1)

_PLACE = 16
"""Bytes of the sign of torch's generator before its words: the seed, how many words are left, which is the next."""

_REACH = 512
"""Bytes of torch's generator among which its state begins."""


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
        self._kept = list(self._drawn) if keeps else []  # by `make`, around each batch
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
        before = [(generator, generator.save()) for generator in self._kept]
        try:
            return self._watching(make, metrics, key) if self._quiet else make(metrics)
        finally:
            if self._learns:
                self._settle()
            for generator, saved in before:
                generator.put_back(saved)

    def _watching(self, make: Callable[[BatchMetrics], T], metrics: BatchMetrics, key: int) -> T:
        before = [(generator, generator.watch(key, keeps=self._keeps)) for generator in self._quiet]
        counted = metrics.copy()
        try:
            made = make(metrics)
        except BaseException as error:
            if not self._found(before) or not isinstance(error, Exception) or is_of_signal_handler(error):
                raise
        else:
            if not self._found(before):
                return made
        # Samples drew from a generator that was not seeded for them.
        metrics.become(counted)
        return self.make(make, metrics, key)

    def _found(self, before: Sequence[tuple[GlobalGenerator, Any]]) -> bool:
        """Return whether any of them was moved. Those are seeded from now on, and are where they were before."""
        found = False
        for generator, since in before:
            if generator.moved(since):
                found = True
                self._quiet.remove(generator)
                self._drawn.append(generator)
                if self._keeps and generator is not self._torch:  # which `make` puts back
                    generator.put_back(since)
        if found:
            self._keep()
        return found

    def _keep(self) -> None:
        if self._keeps:  # torch's is seeded in any case
            self._kept = list(dict.fromkeys([*self._drawn, self._torch]))

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
        self._keep()


class _Words:
    """The memory of a Mersenne Twister. It is only read.

    Args:
        address: where it is.
        place: where in it the number is that says how many words were used; the words are before it, or behind.
    """

    def __init__(self, address: int, place: int) -> None:
        self.memory = memoryview((ctypes.c_char * _BYTES).from_address(address)).cast("B")
        first = 4 - place if place < 4 else 0
        self._place, self._first = self.memory[place : place + 4], self.memory[first : first + 8]

    def sign(self) -> bytes:
        """Return what every draw changes, and every other seed: the place and the first words."""
        return self._place.tobytes() + self._first.tobytes()


class _Python:
    """`random`. Its state as a tuple costs twice what seeding costs, so the memory behind it is read, if that is where
    it should be.
    """

    def __init__(self) -> None:
        # The module where a program has put a function of its own in the place of a method.
        self._instance: Any = getattr(random.getstate, "__self__", random)
        self._words = self._found_words()
        self._saved: Any = b"", None  # sign, and the state that was asked for then

    def _found_words(self) -> _Words | None:
        """Return the place and the words in the object of CPython's class, behind its head."""
        base: Any = random.Random.__base__
        if sys.implementation.name != "cpython" or type(self._instance) is not random.Random:
            return None
        if base.__basicsize__ < object.__basicsize__ + _BYTES:
            return None
        found = _Words(id(self._instance) + object.__basicsize__, 0)
        _, (*words, place), _ = self._instance.getstate()
        return found if found.memory.cast("I").tolist() == [place, *words] else None

    def seed(self, key: int) -> None:
        random.seed(key)

    def look(self) -> Any:
        # A normal number that was drawn in advance is beside the memory.
        words, instance = self._words, self._instance
        return (instance.getstate() if words is None else (words.sign(), instance.gauss_next)), None

    def save(self) -> Any:
        look, _ = self.look()
        if look != self._saved[0]:
            self._saved = look, self._instance.getstate()
        return self._saved

    def watch(self, key: int, *, keeps: bool) -> Any:
        return self.save() if keeps else self.look()

    def moved(self, since: Any) -> bool:
        return bool(self.look()[0] != since[0])

    def put_back(self, to: Any) -> None:
        self._instance.setstate(to[1])


class _NumPy:
    """`np.random`'s functions. To ask for their state costs 40 us, so the memory behind it is read, whose address NumPy
    tells.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._words: _Words | None = None
        self._saved: Any = b"", None  # sign, and the state that was asked for then

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)

    def look(self) -> Any:
        words = self._found_words()
        return (b"", _numpy_state()) if words is None else (words.sign(), None)

    def save(self) -> Any:
        sign, state = self.look()
        if state is not None:
            return sign, state
        # A normal number that was drawn in advance is beside the memory, and only behind another draw.
        known, saved = self._saved
        if sign != known or saved["has_gauss"]:
            self._saved = sign, _numpy_state()
        return self._saved

    def watch(self, key: int, *, keeps: bool) -> Any:
        return self.save() if keeps else self.look()

    def moved(self, since: Any) -> bool:
        sign, state = since
        words = self._found_words()
        if words is None or not sign or (state is not None and state["has_gauss"]):
            return pickle.dumps(_numpy_state()) != pickle.dumps(state)
        return bool(words.sign() != sign)

    def put_back(self, to: Any) -> None:
        np.random.set_state(to[1])

    def _found_words(self) -> _Words | None:
        """Return the words and the place of NumPy's own generator; None if the program has set another kind."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:
            twister = isinstance(source, np.random.MT19937)
            self._words = _Words(source.ctypes.state_address, 4 * _WORDS) if twister else None
            self._source, self._saved = source, (b"", None)
        return self._words


def _numpy_state() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return state


class _TorchState(ctypes.Structure):
    """torch's state as bytes."""

    _fields_: ClassVar = [
        ("seed", ctypes.c_uint64),
        ("left", ctypes.c_int32),
        ("seeded", ctypes.c_int32),
        ("next", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * _WORDS),
        ("normals", ctypes.c_byte * 40),  # that were drawn in advance; not looked at
    ]


class _TorchTwister(ctypes.Structure):
    """The same in torch's own memory."""

    _fields_: ClassVar = [
        ("seed", ctypes.c_uint64),
        ("left", ctypes.c_int32),
        ("seeded", ctypes.c_bool),
        ("next", ctypes.c_uint32),
        ("words", ctypes.c_uint32 * _WORDS),
    ]


class _Torch:
    """torch's generator of the processor. It is so cheap to seed and to put back that each batch does.

    To ask for its state costs as much as to seed it, so the memory behind it is read, if that is where it should be.
    """

    def __init__(self) -> None:
        self._fresh = b""  # the place right after seeding
        self._memory = _torch_memory()

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)  # a hundred times cheaper than `torch.manual_seed`

    def look(self) -> Any:
        return self._sign(), None

    def _sign(self) -> bytes:
        """Return the seed and the place among the words, which every draw changes; and two words."""
        memory = self._memory
        if memory is not None:
            return memory[:12].tobytes() + memory[16:28].tobytes()  # what is between them is not always written
        state = torch.default_generator.get_state()
        seed, left, _, following, *words = struct.unpack("=QiiQ2Q", ctypes.string_at(state.data_ptr(), 40))
        return struct.pack("=QiI2I", seed, left, *(word & 0xFFFFFFFF for word in (following, *words)))

    def save(self) -> Any:
        # Asked for each time: a normal number that was drawn in advance comes and goes without a trace in that memory.
        return None, torch.default_generator.get_state()

    def watch(self, key: int, *, keeps: bool) -> Any:
        self.seed(key)
        if not self._fresh:
            self._fresh = self._sign()[8:_PLACE]
        return key.to_bytes(8, sys.byteorder) + self._fresh, None

    def moved(self, since: Any) -> bool:
        sign = since[0]
        return bool(self._sign()[: len(sign)] != sign)

    def put_back(self, to: Any) -> None:
        torch.default_generator.set_state(to[1])


def _torch_state(state: torch.Tensor) -> _TorchState:
    return _TorchState.from_buffer_copy(ctypes.string_at(state.data_ptr(), ctypes.sizeof(_TorchState)))


def _torch_memory() -> memoryview | None:
    """Return the memory of torch's twister, up to its second word; None where it is not found. Nothing is read that may
    not be there: the system is asked for it.
    """
    generator = torch.default_generator
    state = generator.get_state()
    if sys.implementation.name != "cpython" or state.nbytes != ctypes.sizeof(_TorchState):
        return None
    known = _torch_state(state)
    words = struct.pack(f"={_WORDS}I", *known.words)
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            # Behind its head, torch's object of Python has a pointer to that of C++.
            (address,) = struct.unpack("P", os.pread(memory.fileno(), 8, id(generator) + object.__basicsize__))
            found = os.pread(memory.fileno(), _REACH, address).find(words[:32]) - _TorchTwister.words.offset
            if found < 0:
                return None
            address += found
            twister = _TorchTwister.from_buffer_copy(os.pread(memory.fileno(), ctypes.sizeof(_TorchTwister), address))
    except (OSError, ValueError, OverflowError, struct.error):  # there is no such file, or nothing at such an address
        return None
    if bytes(twister.words) != words or (twister.seed, twister.left, twister.next) != (
        known.seed,
        known.left,
        known.next,
    ):
        return None
    begin = ctypes.c_char * (_TorchTwister.words.offset + 8)
    return memoryview(begin.from_address(address)).cast("B")
