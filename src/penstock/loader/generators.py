"""States of the global generators (Python, NumPy, torch): kept, and as JSON-serialisable values in a loader's state."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import StateError
from penstock.plan.cursor import State

__all__ = ["WorkerGenerators", "preserved_generators"]


class WorkerGenerators:
    """The global generators of a worker process that nothing else draws from.

    A resumed worker is seeded in the same way, so an unused generator needs no state. Create this object after seeding
    and before the first draw.
    """

    def __init__(self) -> None:
        self._first = _present()

    def drawn(self) -> State:
        """Return the states of the generators that were used since (takes 50 µs if none was)."""
        states: State = {}
        for name, (values, words) in _present().items():
            first_values, first_words = self._first[name]
            if values != first_values or not np.array_equal(words, first_words):
                # torch's words have a zero half each.
                packed = zlib.compress(words.astype("<u4").tobytes())
                states[name] = [*values, base64.b64encode(packed).decode()]
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators that have a state, and reset the others to the worker's initial seeds.

        Raises:
            StateError: a state is damaged.
        """
        _set(self._first)
        try:
            unpacked = {}
            for name, (*values, text) in states.items():
                data = zlib.decompress(base64.b64decode(text, validate=True))
                unpacked[name] = values, np.frombuffer(data, "<u4").astype(np.uint32)
            _set(unpacked)
        except (TypeError, ValueError, RuntimeError, zlib.error) as error:
            raise StateError(f"the state of a generator in this state cannot be read: {error}") from error


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch at the end of the block."""
    python, legacy, own = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(own)


_States = dict[str, tuple[list[Any], npt.NDArray[np.uint32]]]
"""A few values and many words, by the generator's name."""


def _present() -> _States:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, *numbers = legacy
    # First the lower half of all words, then the upper one.
    halves = torch.default_generator.get_state().numpy().view(np.uint32).reshape(-1, 2).T.flatten()
    return {
        "python": ([version, gauss], np.array(words, np.uint32)),
        "numpy": ([kind, *numbers], keys),
        "torch": ([], halves),
    }


def _set(states: _States) -> None:
    if "python" in states:
        (version, gauss), words = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states:
        (kind, *numbers), words = states["numpy"]
        np.random.set_state((kind, words, *numbers))
    if "torch" in states:
        _, words = states["torch"]
        torch.default_generator.set_state(torch.from_numpy(words.reshape(2, -1).T.flatten().view(np.uint8)))
