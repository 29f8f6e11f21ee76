"""Stages that batch samples and split batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.wds.curried import RestCurried
from penstock.wds.iterators import Context, FlatMapStep, Stage, Step, memoryless

__all__ = ["Unpack", "batched", "default_collation_fn", "listed", "unbatched", "unlisted"]

Samples = Iterable[Any]


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Collate samples, all dicts or all tuples, into a batch.

    Args:
        samples: one sample or more.
        combine_tensors: stack tensors and arrays, which must have the same shape.
        combine_scalars: combine numbers into an array.

    Raises:
        ConfigError: the samples have different keys, or are neither dicts nor tuples.
        AssertionError: arrays have different shapes.
    """
    assert len(samples) > 0
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ConfigError("keys don't match in different samples")
        return {name: _column([s[name] for s in samples], combine_tensors, combine_scalars) for name in first}
    if not isinstance(first, tuple | list):
        raise ConfigError(
            f"cannot batch samples of type {type(first).__name__}, only dicts and tuples: use to_tuple before "
            "batched, or pass collation_fn= (None makes a batch a list of samples)"
        )
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


@memoryless
def _batched(
    data: Samples,
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """Yield batches of samples.

    Args:
        batchsize: samples in a batch.
        collation_fn: turns a list of samples into a batch; None makes the list the batch.
        partial: keep a last batch that is smaller.
    """
    batch: list[Any] = []
    for sample in data:
        batch.append(sample)
        if len(batch) >= batchsize:
            # The batch must not outlive this point: the state would have to hold it.
            full, batch = batch, []
            yield full if collation_fn is None else collation_fn(full)
    if batch and partial:
        yield batch if collation_fn is None else collation_fn(batch)


@memoryless
def _listed(data: Samples, batchsize: int = 20, partial: bool = True) -> Iterator[Any]:
    """Yield lists of ``batchsize`` samples; with ``partial`` the last one may be shorter."""
    return _batched(data, batchsize, None, partial)


def _rows(batch: Any) -> Iterator[Any]:
    """Yield the samples of a batch: dicts from a dict of columns, tuples from a tuple or list of columns."""
    if isinstance(batch, dict):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
    elif isinstance(batch, tuple | list):
        yield from zip(*batch, strict=True)
    else:
        raise ConfigError(f"unknown sample type: {type(batch)}")


class Unpack(Stage):
    """A stage that splits batches into items with a function of a batch."""

    def __init__(self, items: Callable[[Any], Iterable[Any]]) -> None:
        self.items = items

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source."""
        return FlatMapStep(source, self._numbered, own)

    def _numbered(self, batch: Any, position: int | None) -> Iterator[tuple[int, Any]]:
        for number, item in enumerate(self.items(batch)):
            if position is None or number > position:
                yield number, item


def unbatched() -> Unpack:
    """Split batches into samples; undoes `batched`."""
    return Unpack(_rows)


def unlisted() -> Unpack:
    """Split lists into samples; undoes `listed`."""
    return Unpack(iter)


batched = RestCurried(_batched)
listed = RestCurried(_listed)
