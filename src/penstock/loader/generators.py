"""Conversion of the global generators' states (Python, NumPy, torch) to JSON-serialisable text and back."""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import StateError
from penstock.plan.cursor import State

__all__ = ["WorkerGenerators", "generator_states", "set_generators"]

_TORCH_BYTES = 5056
"""Size of the state of torch's CPU generator: header, 624 words of 8 bytes (4 of them zero), and tail."""
_HEAD, _WORDS = 24, 624


class WorkerGenerators:
    """The global generators of a worker process that nothing else draws from.

    A resumed worker is seeded in the same way, so an unused generator needs no state. Create this object after seeding
    and before the first draw.
    """

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = _present()

    def drawn(self) -> State:
        """Return the states of the generators that were used since (takes 50 µs if none was)."""
        python, legacy, own = _present()
        moved = {
            "python": python != self._python,
            "numpy": legacy[2:] != self._numpy[2:] or not np.array_equal(legacy[1], self._numpy[1]),
            "torch": not torch.equal(own, self._torch),
        }
        return {
            name: _TEXT_OF[name](state)
            for (name, yes), state in zip(moved.items(), (python, legacy, own), strict=True)
            if yes
        }

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators that have a state, and reset the others to the worker's initial seeds.

        Raises:
            StateError: a state is damaged.
        """
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        set_generators(states)


def _present() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=True), torch.default_generator.get_state()


def generator_states() -> State:
    """Return the states of the three global generators as lists of text and numbers."""
    return {name: _TEXT_OF[name](state) for name, state in zip(_TEXT_OF, _present(), strict=True)}


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators that have an entry.

    Raises:
        StateError: a state is damaged.
    """
    try:
        if "python" in states:
            version, words, gauss = states["python"]
            random.setstate((version, tuple(np.frombuffer(_decode(words), dtype="<u4").tolist()), gauss))
        if "numpy" in states:
            kind, keys, *rest = states["numpy"]
            np.random.set_state((kind, np.frombuffer(_decode(keys), dtype="<u4").astype(np.uint32), *rest))
        if "torch" in states:
            data = _expanded(_decode(states["torch"]))
            torch.default_generator.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    except StateError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the state of a generator in this state cannot be read: {error}") from error


def _python_text(state: Any) -> Any:
    version, words, gauss = state
    return [version, _encode(np.array(words, dtype="<u4").tobytes()), gauss]


def _numpy_text(state: Any) -> Any:
    kind, keys, position, has_gauss, cached = state
    return [
        kind,
        _encode(np.asarray(keys).astype("<u4").tobytes()),
        int(position),
        int(has_gauss),
        float(cached),
    ]


def _torch_text(state: torch.Tensor) -> str:
    return _encode(_compact(state.numpy().tobytes()))


_TEXT_OF = {"python": _python_text, "numpy": _numpy_text, "torch": _torch_text}


def _compact(data: bytes) -> bytes:
    """Return the state of torch's generator without the zero half of each word; unchanged if its layout differs."""
    end = _HEAD + 8 * _WORDS
    if len(data) != _TORCH_BYTES:
        return data
    words = np.frombuffer(data[_HEAD:end], "<u8")
    return data if (words >> 32).any() else data[:_HEAD] + words.astype("<u4").tobytes() + data[end:]


def _expanded(data: bytes) -> bytes:
    """Return the original state from a result of `_compact`."""
    end = _HEAD + 4 * _WORDS
    if len(data) != _TORCH_BYTES - 4 * _WORDS:
        return data
    return data[:_HEAD] + np.frombuffer(data[_HEAD:end], "<u4").astype("<u8").tobytes() + data[end:]


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise StateError(f"the state of a generator in this state cannot be read: {error}") from error
