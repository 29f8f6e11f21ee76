"""Conversion of whole batches: each tensor as a NumPy array, or on another device.

batch from the executor  ->  map_batch  ->  dicts, lists, tuples and dataclasses of the same types;
                                            a function replaces every other value
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import PackedSequence

from penstock.errors import ConfigError

__all__ = ["as_arrays", "map_batch"]


def map_batch(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch of the same structure, with every leaf value replaced by a function's result.

    Mappings, lists, tuples, named tuples, dataclasses and torch's ``PackedSequence``, including subclasses, are
    structure. The original batch does not change.
    """
    if isinstance(batch, PackedSequence):
        # torch requires `batch_sizes` to stay a CPU tensor.
        indices = batch.sorted_indices, batch.unsorted_indices
        moved = (None if one is None else function(one) for one in indices)
        return PackedSequence(function(batch.data), batch.batch_sizes, *moved)
    if isinstance(batch, tuple):
        values = [map_batch(function, value) for value in batch]
        return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = [map_batch(function, value) for value in batch]
        return changed
    if isinstance(batch, Mapping):
        mapped = {key: map_batch(function, value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(mapped)  # type: ignore[call-arg]
        mapping = copy.copy(batch)
        mapping.update(mapped)
        return mapping
    if is_dataclass(batch) and not isinstance(batch, type):
        record: Any = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(record, field.name, map_batch(function, getattr(batch, field.name)))
        return record
    return function(batch)


def as_arrays(batch: Any) -> Any:
    """Return a batch with a NumPy array over the memory of each tensor. Other values stay.

    Nothing is copied: an array shares the memory of its tensor and keeps it alive. Costs about 2 µs per tensor.

    Raises:
        ConfigError: a tensor that NumPy cannot represent: bfloat16, sparse, on another device, or requiring a gradient.

    >>> import torch
    >>> as_arrays({"x": [torch.zeros(2)], "name": "a"})
    {'x': [array([0., 0.], dtype=float32)], 'name': 'a'}
    """
    return map_batch(_as_array, batch)


def _as_array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    try:
        array: npt.NDArray[np.generic] = value.numpy()
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"output='numpy' cannot convert a tensor of {value.dtype} and shape {tuple(value.shape)} to an array: "
            f"{error}. Return another tensor or an array from the dataset or collate_fn=, or use output='torch'"
        ) from error
    return array
