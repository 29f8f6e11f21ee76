"""`Seeding`: seeds the global generators of Python, NumPy and torch from each sample's key, at almost no cost.

    first batch:      all three are seeded for each sample; those that samples use are "drawn"
    later batches:    drawn generators are seeded for each sample; the others are checked once per batch
    unexpected draw:  the batch is made again, and from then on that generator is drawn, too

Invariant: a sample that draws always finds its generator seeded. Most datasets draw from one of the three or from none.
Seeding all three takes 6 µs per sample, the checks 5 µs per batch, and saving the trainer's states 55 µs per batch.

A generator is checked by drawing a number from it and from a twin, which has drawn the same numbers before; torch's by
its state. Drawing by a sample and restoring the state, or only reading it, is not noticed. Programs do so with
`torch.initial_seed()`: it returns the sample's seed if samples draw from torch, otherwise the batch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["Seeding"]

_REST = 0xB5AC7173
"""The seed of generators from which no draw is expected; arbitrary, so that no program uses it, too."""

_CHECKS = 8
"""Number of samples of the first batch after which generators are checked, before the last one."""


class Seeding:
    """Seeds the global generators of this process.

        while True:
            seeding.start(first_key)
            ... for seed in seeding.seeds: seed(key) before each sample and before the collate function ...
            again = seeding.moved()
            if keeps: seeding.restore()
            if not again:
                break

    Args:
        always: seed all three for each sample, and never make a batch twice: for users' objects with a state.
        keeps: the trainer uses these generators, too, so `restore` sets their states at `start`. False in a worker.

    Attributes:
        seeds: functions to call with the key of each sample before it is loaded; always the same list.
    """

    def __init__(self, *, always: bool, keeps: bool) -> None:
        self._generators: list[_Generator] = [_Python(), _NumPy(), _Torch()]
        self._kept = self._generators if keeps else []
        self._quiet = [] if always else list(self._generators)
        self._learns = not always
        # In the first batch: the last key, and the number of checks.
        self._key: int | None = None
        self._checks = 0
        self.seeds: list[Callable[[int], object]]
        self.seeds = [self._learn] if self._learns else [generator.seed for generator in self._generators]

    def start(self, key: int) -> None:
        """Start to make a batch, given the key of its first sample."""
        for generator in self._kept:
            generator.save()
        if self._learns:
            self._key = None
        else:
            for generator in self._quiet:
                generator.rest(key)

    def moved(self) -> bool:
        """Return whether a generator has moved that was not seeded for each sample. From now on it is."""
        if self._learns:
            # Otherwise the batch had no sample.
            if self._key is not None:
                self._check()
                self._learns = False
                self.seeds[:] = [generator.seed for generator in self._generators if generator not in self._quiet]
            return False
        moved = [generator for generator in self._quiet if generator.moved()]
        for generator in moved:
            self._quiet.remove(generator)
            self.seeds.append(generator.seed)
        return bool(moved)

    def restore(self) -> None:
        """Set the trainer's states."""
        for generator in self._kept:
            generator.restore()

    def _learn(self, key: int) -> None:
        """Seed all generators for a sample of the first batch."""
        if self._checks < _CHECKS:
            self._check()
        for generator in self._generators:
            generator.seed(key)
        self._key = key

    def _check(self) -> None:
        """Note which generators have moved since they were seeded in the first batch."""
        if self._key is not None:
            self._checks += 1
            for generator in list(self._quiet):
                seen = generator.look()
                generator.seed(self._key)
                if generator.look() != seen:
                    self._quiet.remove(generator)


class _Generator:
    """A global generator of the process. It *moves* when code draws from it, seeds it or sets its state."""

    seed: Callable[[int], object]
    """Seeds it from a sample's key."""
    # They return and set its state.
    _get: Callable[[], Any]
    _set: Callable[[Any], object]
    look: Callable[[], Any]
    """Returns its next number, which is drawn, or its state."""
    _look_at_twin: Callable[[], Any]
    _saved: Any = None
    _in_step: bool = False

    def rest(self, key: int) -> None:
        """Prepare for a batch with this first key, whose samples are not expected to draw."""
        if not self._in_step:
            self._in_step = True
            self._seed_twin()

    def _seed_twin(self) -> None:
        """Seed the generator and its twin alike."""

    def moved(self) -> bool:
        """Return whether it has moved since `rest`. Called once."""
        return bool(self.look() != self._look_at_twin())

    def save(self) -> None:
        """Keep the trainer's state."""
        self._saved = self._get()

    def restore(self) -> None:
        """Set the state that was kept last, unless it has been restored."""
        if self._saved is not None:
            self._set(self._saved)
            self._in_step, self._saved = False, None


class _Python(_Generator):
    """The functions of `random`."""

    def __init__(self) -> None:
        self.seed, self._get, self._set = random.seed, random.getstate, random.setstate
        self._twin = random.Random(_REST)
        self._start = self._twin.getstate()
        self.look, self._look_at_twin = partial(random.getrandbits, 64), partial(self._twin.getrandbits, 64)

    def _seed_twin(self) -> None:
        random.setstate(self._start)
        self._twin.setstate(self._start)


class _NumPy(_Generator):
    """The functions of `np.random`.

    If a program sets another kind of bit generator, it draws other numbers than the twin: it is then seeded for each
    sample.
    """

    def __init__(self) -> None:
        self.seed = lambda key: np.random.seed(key & 0xFFFFFFFF)
        self._own = np.random.MT19937()
        self.look, self._look_at_twin = np.random.random_sample, np.random.RandomState(_REST).random_sample

    def _seed_twin(self) -> None:
        np.random.seed(_REST)

    def save(self) -> None:
        """Replace the trainer's bit generator, since setting its state takes long."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._saved = source, np.random.get_state(legacy=False)
        if type(source) is np.random.MT19937:
            np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]

    def restore(self) -> None:
        if self._saved is not None:
            source, state = self._saved
            np.random.set_bit_generator(source)  # type: ignore[attr-defined]
            # A normal number drawn in advance is not part of the bit generator.
            if state["has_gauss"] or type(source) is not np.random.MT19937:
                np.random.set_state(state)
            self._saved = None


class _Torch(_Generator):
    """torch's CPU generator. Its state is read and set as fast as it is seeded."""

    def __init__(self) -> None:
        generator = torch.default_generator
        # A hundred times cheaper than `torch.manual_seed`.
        self.seed, self._get, self._set = generator.manual_seed, generator.get_state, generator.set_state

    def rest(self, key: int) -> None:
        self.seed(key)
        self._rested = self.look()

    def moved(self) -> bool:
        return self.look() != self._rested

    def look(self) -> bytes:
        state: bytes = self._get().numpy().tobytes()
        return state
