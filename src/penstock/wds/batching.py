"""Batches, lists, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.wds.curried import RestCurried
from penstock.wds.iterators import Context, Expanded, Stage, Step, memoryless

__all__ = ["Unpack", "batched", "default_collation_fn", "listed", "unbatched", "unlisted"]

Samples = Iterable[Any]


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """A batch of samples that are all dicts, or all tuples.

    Args:
        samples: at least one.
        combine_tensors: stack tensors and arrays; they have to be of one shape.
        combine_scalars: numbers become an array.

    Raises:
        ConfigError: samples with different keys, or that are no dicts or tuples.
        AssertionError: arrays of different shapes.
    """
    assert len(samples) > 0
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ConfigError("keys don't match in different samples")
        return {name: _column([s[name] for s in samples], combine_tensors, combine_scalars) for name in first}
    if not isinstance(first, tuple | list):
        raise ConfigError(
            f"batches are made of dicts or tuples, and here a sample is of type {type(first).__name__}: use to_tuple "
            "before, or give collation_fn=; None leaves a list of the samples"
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
    """Batches of samples.

    Args:
        batchsize: samples of a batch.
        collation_fn: of the list of samples; None leaves the list.
        partial: keep the last batch if it is smaller.
    """
    batch: list[Any] = []
    for sample in data:
        batch.append(sample)
        if len(batch) >= batchsize:
            # At once: a batch in hand would have to be in the state.
            full, batch = batch, []
            yield full if collation_fn is None else collation_fn(full)
    if batch and partial:
        yield batch if collation_fn is None else collation_fn(batch)


@memoryless
def _listed(data: Samples, batchsize: int = 20, partial: bool = True) -> Iterator[Any]:
    """Lists of samples, of ``batchsize``; with ``partial`` the last one may be shorter."""
    return _batched(data, batchsize, None, partial)


def _rows(batch: Any) -> Iterator[Any]:
    """The samples of a batch of columns: dicts of dicts, tuples of tuples and lists."""
    if isinstance(batch, dict):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
    elif isinstance(batch, tuple | list):
        yield from zip(*batch, strict=True)
    else:
        raise ConfigError(f"unknown sample type: {type(batch)}")


class Unpack(Stage):
    """Batches to what is in them, by a function of a batch."""

    def __init__(self, items: Callable[[Any], Iterable[Any]]) -> None:
        self.items = items

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """A `Step` over the source."""
        return Expanded(source, self._numbered, own)

    def _numbered(self, batch: Any, position: int | None) -> Iterator[tuple[int, Any]]:
        for number, item in enumerate(self.items(batch)):
            if position is None or number > position:
                yield number, item


def unbatched() -> Unpack:
    """The samples of batches: what `batched` has put together."""
    return Unpack(_rows)


def unlisted() -> Unpack:
    """The samples of lists: what `listed` has put together."""
    return Unpack(iter)


batched = RestCurried(_batched)
listed = RestCurried(_listed)
