"""One digest of a nested value, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

__all__ = ["digest"]


def digest(value: Any) -> str:
    """Return the xxh3 of numbers, text, arrays and tensors, in lists, tuples and dicts of any depth."""
    hasher = xxhash.xxh3_64()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy()
        hasher.update(b"tensor")
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        hasher.update(f"array {array.dtype.str} {np.shape(value)} ".encode())
        hasher.update(array.tobytes())
    elif isinstance(value, Mapping):
        hasher.update(f"dict {len(value)} ".encode())
        for key in sorted(value):
            _feed(hasher, key)
            _feed(hasher, value[key])
    elif type(value) is list and all(type(item) is int for item in value):
        hasher.update(repr(value).encode())
    elif isinstance(value, list | tuple):
        # A named tuple counts as a tuple: its class is no part of what a consumer gets.
        hasher.update(f"{'list' if isinstance(value, list) else 'tuple'} {len(value)} ".encode())
        for item in value:
            _feed(hasher, item)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        hasher.update(f"{type(value).__name__} {value!r} ".encode())
    else:
        raise TypeError(f"no digest of a {type(value).__name__}")
