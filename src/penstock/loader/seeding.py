"""`Seeding`: seeds the global generators of Python, NumPy and torch from each sample's key, at almost no cost.

    first batch:      all three are seeded for each sample and checked after it; those that samples use are "drawn"
    later batches:    drawn generators are seeded for each sample; the others are checked once per batch
    unexpected draw:  the batch is made again, and from then on that generator is drawn, too

Invariant: a sample that draws always finds its generator seeded. Most datasets draw from one of the three or from none,
and seeding all three would take 8 µs per sample.

Reading a generator without drawing, or drawing and restoring it, does not count as a draw. Programs do so with
`torch.initial_seed()`: it returns the sample's seed if samples draw from torch, otherwise the batch's.
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

from penstock.loader.messages import BatchMetrics

__all__ = ["Seeding"]

T = TypeVar("T")

_WORDS = 624
"""Number of 32-bit words of a Mersenne Twister. The index of its next word is another 32-bit number."""
_BYTES = 4 * (_WORDS + 1)

_PLACE = 16
"""Bytes of the signature of torch's generator before its words: seed, number of words left, index of the next."""

_REACH = 512
"""Bytes of torch's generator object in which its state begins."""


class GlobalGenerator(Protocol):
    """A global generator of the process. It *moves* when code draws from it, seeds it or sets its state."""

    def seed(self, key: int) -> None:
        """Seed the generator from a sample's key."""

    def look(self) -> Any:
        """Return the argument of `moved` for a generator that was just seeded."""

    def save(self) -> Any:
        """Return the argument of `put_back`."""

    def watch(self, key: int, *, keeps: bool) -> Any:
        """Start a batch, given its first key, during which no draw is expected. Return the argument of `moved`.

        With ``keeps`` the result is also the argument of `put_back`.
        """

    def moved(self, since: Any) -> bool:
        """Return whether the generator has moved since `look` or `watch`."""

    def put_back(self, to: Any) -> None:
        """Restore the generator's state at `save` or `watch`."""


class Seeding:
    """Seeds the global generators of this process.

    Args:
        always: seed all three for each sample, and never make a batch twice: for users' objects with a state.
        keeps: restore them after each batch, since the trainer uses them; False in a worker.
    """

    def __init__(self, *, always: bool, keeps: bool) -> None:
        self._keeps = keeps
        self._torch = _Torch()
        self._drawn: list[GlobalGenerator] = [_Python(), _NumPy(), self._torch]
        self._quiet: list[GlobalGenerator] = []
        # Restored by `make` after each batch.
        self._kept = list(self._drawn) if keeps else []
        self._learns = not always
        # During the first batch: the generators and their state after the last seeding.
        self._seeded: list[tuple[GlobalGenerator, Any]] = []
        self._moved: set[GlobalGenerator] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing has to be seeded for a sample."""
        return not self._drawn

    def seed(self, key: int) -> None:
        """Seed the generators that samples draw from."""
        if self._learns:
            self._learn()
        for generator in self._drawn:
            generator.seed(key)
        if self._learns:
            self._seeded = [(generator, generator.look()) for generator in self._drawn]

    def make(self, make: Callable[[BatchMetrics], T], metrics: BatchMetrics, key: int) -> T:
        """Return the result of ``make``, which calls `seed` for each of its samples.

        Calls ``make`` twice if a generator moved unexpectedly. The metrics then count only the second call.

        Args:
            make: makes a batch.
            metrics: metrics of the batch.
            key: key of the first sample.
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
            if not self._found(before) or not isinstance(error, Exception):
                raise
        else:
            if not self._found(before):
                return made
        # Samples drew from a generator that was not seeded for them.
        metrics.become(counted)
        return self.make(make, metrics, key)

    def _found(self, before: Sequence[tuple[GlobalGenerator, Any]]) -> bool:
        """Return whether any generator moved. Those are seeded from now on, and restored to their earlier state."""
        found = False
        for generator, since in before:
            if generator.moved(since):
                found = True
                self._quiet.remove(generator)
                self._drawn.append(generator)
                # `make` restores torch's generator.
                if self._keeps and generator is not self._torch:
                    generator.put_back(since)
        if found:
            self._keep()
        return found

    def _keep(self) -> None:
        # torch's generator is seeded in any case.
        if self._keeps:
            self._kept = list(dict.fromkeys([*self._drawn, self._torch]))

    def _learn(self) -> None:
        """Note which generators the last sample has moved."""
        self._moved.update(generator for generator, look in self._seeded if generator.moved(look))

    def _settle(self) -> None:
        """Stop seeding the generators that no sample of the first batch has moved."""
        if not self._seeded:
            # The batch had no sample.
            return
        self._learn()
        self._learns, self._seeded = False, []
        self._quiet = [generator for generator in self._drawn if generator not in self._moved]
        self._drawn = [generator for generator in self._drawn if generator in self._moved]
        self._keep()


class _Words:
    """The memory of a Mersenne Twister, read only.

    Args:
        address: address of the memory.
        place: offset of the index of the next word; the words are before or after it.
    """

    def __init__(self, address: int, place: int) -> None:
        self.memory = memoryview((ctypes.c_char * _BYTES).from_address(address)).cast("B")
        first = 4 - place if place < 4 else 0
        self._place, self._first = self.memory[place : place + 4], self.memory[first : first + 8]

    def sign(self) -> bytes:
        """Return a signature that every draw and every other seed changes: the index and the first words."""
        return self._place.tobytes() + self._first.tobytes()


class _Python:
    """Python's `random`. Getting its state takes twice as long as seeding, so its memory is read if possible."""

    def __init__(self) -> None:
        # The module, if a program has replaced one of its functions.
        self._instance: Any = getattr(random.getstate, "__self__", random)
        self._words = self._found_words()
        # Signature and state at the last `save`.
        self._saved: Any = b"", None

    def _found_words(self) -> _Words | None:
        """Return the memory of CPython's object, after its header; None if it is not as expected."""
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
        # A normal number drawn in advance is not part of that memory.
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
    """The functions of `np.random`. Getting their state takes 40 µs, so its memory is read directly.

    NumPy provides the address.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._words: _Words | None = None
        # Signature and state at the last `save`.
        self._saved: Any = b"", None

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)

    def look(self) -> Any:
        words = self._found_words()
        return (b"", _numpy_state()) if words is None else (words.sign(), None)

    def save(self) -> Any:
        sign, state = self.look()
        if state is not None:
            return sign, state
        # A normal number drawn in advance is not part of that memory, and exists only after another draw.
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
        """Return the memory of NumPy's own generator; None if the program has set another kind."""
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
    """The state that torch returns as bytes."""

    _fields_: ClassVar = [
        ("seed", ctypes.c_uint64),
        ("left", ctypes.c_int32),
        ("seeded", ctypes.c_int32),
        ("next", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * _WORDS),
        # Normal numbers drawn in advance; not used here.
        ("normals", ctypes.c_byte * 40),
    ]


class _TorchTwister(ctypes.Structure):
    """The same state in torch's own memory."""

    _fields_: ClassVar = [
        ("seed", ctypes.c_uint64),
        ("left", ctypes.c_int32),
        ("seeded", ctypes.c_bool),
        ("next", ctypes.c_uint32),
        ("words", ctypes.c_uint32 * _WORDS),
    ]


class _Torch:
    """torch's CPU generator. Seeding and restoring are so cheap that every batch does both.

    Getting its state takes as long as seeding, so its memory is read directly if possible.
    """

    def __init__(self) -> None:
        # The signature's index right after seeding.
        self._fresh = b""
        self._memory = _torch_memory()

    def seed(self, key: int) -> None:
        # A hundred times cheaper than `torch.manual_seed`.
        torch.default_generator.manual_seed(key)

    def look(self) -> Any:
        return self._sign(), None

    def _sign(self) -> bytes:
        """Return seed and index, which every draw changes, and two words."""
        memory = self._memory
        if memory is not None:
            # The bytes in between are not always initialized.
            return memory[:12].tobytes() + memory[16:28].tobytes()
        state = torch.default_generator.get_state()
        seed, left, _, following, *words = struct.unpack("=QiiQ2Q", ctypes.string_at(state.data_ptr(), 40))
        return struct.pack("=QiI2I", seed, left, *(word & 0xFFFFFFFF for word in (following, *words)))

    def save(self) -> Any:
        # Never cached: a normal number drawn in advance leaves no trace in that memory.
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
    """Return the memory of torch's twister up to its second word; None if it is not found.

    The memory is read through the operating system, so an unexpected address cannot crash the process.
    """
    generator = torch.default_generator
    state = generator.get_state()
    if sys.implementation.name != "cpython" or state.nbytes != ctypes.sizeof(_TorchState):
        return None
    known = _torch_state(state)
    words = struct.pack(f"={_WORDS}I", *known.words)
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            # After its header, torch's Python object has a pointer to the C++ object.
            (address,) = struct.unpack("P", os.pread(memory.fileno(), 8, id(generator) + object.__basicsize__))
            found = os.pread(memory.fileno(), _REACH, address).find(words[:32]) - _TorchTwister.words.offset
            if found < 0:
                return None
            address += found
            twister = _TorchTwister.from_buffer_copy(os.pread(memory.fileno(), ctypes.sizeof(_TorchTwister), address))
    # The file does not exist, or nothing is mapped at such an address.
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    if bytes(twister.words) != words or (twister.seed, twister.left, twister.next) != (
        known.seed,
        known.left,
        known.next,
    ):
        return None
    begin = ctypes.c_char * (_TorchTwister.words.offset + 8)
    return memoryview(begin.from_address(address)).cast("B")
