"""What a consumer is given: each tensor of a batch as a NumPy array, or on another device.

batch as the executor made it  ->  map_batch  ->  dicts, lists, tuples and dataclasses of the same types
                                   each other part is what a function makes of it
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
    """Return a batch of the same structure, where a function has replaced each part that holds no others.

    Mappings, lists, tuples, named tuples, dataclasses and torch's ``PackedSequence`` hold others, whatever subclasses
    of them they are. The batch itself stays as it is.
    """
    kind = type(batch)
    if kind is dict:
        return {key: map_batch(function, value) for key, value in batch.items()}
    if kind is list:
        return [map_batch(function, value) for value in batch]
    if isinstance(batch, tuple):
        return _map_tuple(function, batch)
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = [map_batch(function, value) for value in batch]
        return changed
    if isinstance(batch, Mapping):
        return _map_mapping(function, batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        record: Any = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(record, field.name, map_batch(function, getattr(batch, field.name)))
        return record
    return function(batch)


def _map_tuple(function: Callable[[Any], Any], batch: tuple[Any, ...]) -> Any:
    if isinstance(batch, PackedSequence):
        # torch wants its `batch_sizes` on the CPU, as a tensor.
        indices = batch.sorted_indices, batch.unsorted_indices
        return PackedSequence(
            function(batch.data), batch.batch_sizes, *(None if one is None else function(one) for one in indices)
        )
    values = [map_batch(function, value) for value in batch]
    return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)


def _map_mapping(function: Callable[[Any], Any], batch: Mapping[Any, Any]) -> Any:
    values = {key: map_batch(function, value) for key, value in batch.items()}
    if not isinstance(batch, MutableMapping):
        return type(batch)(values)  # type: ignore[call-arg]
    changed = copy.copy(batch)
    changed.update(values)
    return changed


def as_arrays(batch: Any) -> Any:
    """Return a batch with a NumPy array over the memory of each tensor; what is no tensor stays as it is.

    Nothing is copied: an array keeps the memory of its tensor, and writing into one shows in the other. It costs about
    two microseconds for each tensor.

    Raises:
        ConfigError: NumPy cannot show a tensor: bfloat16, sparse, on another device, or part of a graph.

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
            f"output='numpy' cannot show a tensor of {value.dtype} and shape {tuple(value.shape)} as an array: "
            f"{error}. Return another tensor or an array from the dataset or collate_fn=, or use output='torch'"
        ) from error
    return array
