"""Samples into batches of columns: numbers to arrays, tensors and arrays stacked, everything else as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError

__all__ = ["default_collation_fn"]


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """A batch of samples that are all dicts, or all tuples.

    Args:
        samples: at least one.
        combine_tensors: stack tensors and arrays; they have to be of one shape.
        combine_scalars: numbers become an array.

    Raises:
        ConfigError: samples with different keys.
        AssertionError: arrays of different shapes.
    """
    assert len(samples) > 0
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ConfigError("keys don't match in different samples")
        return {name: _column([s[name] for s in samples], combine_tensors, combine_scalars) for name in first}
    columns = zip(*samples, strict=True)
    return tuple([_column(list(values), combine_tensors, combine_scalars) for values in columns])


def _column(values: list[Any], tensors: bool, scalars: bool) -> Any:
    first = values[0]
    if isinstance(first, int | float | np.generic):
        return np.array(values) if scalars else values
    if isinstance(first, torch.Tensor | np.ndarray) and tensors:
        shapes = {tuple(value.shape) for value in values}
        assert len(shapes) == 1, f"all shapes must be equal in collation, got {shapes}"
        return torch.stack(values) if isinstance(first, torch.Tensor) else np.array(values)
    return values
