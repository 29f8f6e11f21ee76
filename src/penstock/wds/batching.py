"""Batches, lists, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import ConfigError
from penstock.wds.collate import default_collation_fn
from penstock.wds.curried import RestCurried
from penstock.wds.steps import Context, Expanded, Stage, Step, memoryless

__all__ = ["Unpack", "batched", "listed", "unbatched", "unlisted"]

Samples = Iterable[Any]


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


def _rows(batch: Any, _: Any) -> Iterator[Any]:
    """The samples of a batch of columns: dicts of dicts, tuples of tuples and lists."""
    if isinstance(batch, dict):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
    elif isinstance(batch, tuple | list):
        yield from zip(*batch, strict=True)
    else:
        raise ConfigError(f"unknown sample type: {type(batch)}")


class _Numbered:
    """Items of a batch with their numbers, for `Expanded`; picklable."""

    def __init__(self, items: Callable[[Any, Any], Iterable[Any]]) -> None:
        self.items = items

    def __call__(self, batch: Any, position: int | None) -> Iterator[tuple[int, Any]]:
        for number, item in enumerate(self.items(batch, None)):
            if position is None or number > position:
                yield number, item


def _list(batch: Any, _: Any) -> Iterable[Any]:
    items: Iterable[Any] = batch
    return items


class Unpack(Stage):
    """Batches to what is in them."""

    def __init__(self, items: Callable[[Any, Any], Iterable[Any]]) -> None:
        self.items = items

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """A `Step` over the source."""
        return Expanded(source, _Numbered(self.items), own)


def unbatched() -> Unpack:
    """The samples of batches: what `batched` has put together."""
    return Unpack(_rows)


def unlisted() -> Unpack:
    """The samples of lists: what `listed` has put together."""
    return Unpack(_list)


batched = RestCurried(_batched)
listed = RestCurried(_listed)
