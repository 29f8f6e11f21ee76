"""Python's, NumPy's and torch's global generators as JSON-serialisable text, and back."""

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

__all__ = ["generator_states", "set_generators"]


def _text_of(generator: torch.Generator) -> str:
    """The state of one of torch's generators."""
    return _encode(generator.get_state().numpy().tobytes())


def _put_back(generator: torch.Generator, text: Any) -> None:
    """Set it to the state that `_text_of` gave.

    Raises:
        StateError: it is none, or one of another kind of device.
    """
    try:
        generator.set_state(torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8))
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the state of a generator in this state cannot be read: {error}") from error


def generator_states() -> State:
    """The states of the three global generators (13 kB): lists of text and numbers."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, _encode(np.array(words, dtype="<u4").tobytes()), gauss],
        "numpy": [
            kind,
            _encode(np.asarray(keys).astype("<u4").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": _text_of(torch.default_generator),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set those global generators that are named.

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
            _put_back(torch.default_generator, states["torch"])
    except StateError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"the state of a generator in this state cannot be read: {error}") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise StateError(f"the state of a generator in this state cannot be read: {error}") from error
