"""What our map-style data sets share: whole batches are asked for, unless a subclass has its own idea of an item."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

__all__ = ["BatchedDataset", "StreamDataset"]


class StreamDataset(IterableDataset[Any]):
    """An iterable data set that has its ``samples`` as a map-style one too, and deals whole batches to workers.

    Penstock's loader makes its batches from ``samples``; other loaders iterate it.
    """

    samples: Any
    batch_size: int
    drop_last: bool


class BatchedDataset(Dataset[Any]):
    """Loaders get the items of a batch by ``load_samples`` (ours) or ``__getitems__`` (torch's), past ``__getitem__``.

    One that sets ``makes_batches`` writes batches into memory that it is given, past the default collate function:
    ``fetch_batch(indices, keys, empty, place=None) -> batch``, where ``empty(shape, dtype)`` gives an uninitialised
    tensor, in a worker process one in shared memory. The batch equals that which the default collate function makes of
    ``load_samples``.

    A subclass that defines ``__getitem__`` alone would lose it that way. So there the batch methods are taken out,
    loaders ask item by item, and the subclass is not taken to be pure unless it says so.
    """

    own_items = False
    """Whether a subclass makes its items by a ``__getitem__`` of its own."""

    makes_batches: bool = False
    """Whether there is a `fetch_batch`, and nothing that it would pass by."""

    fills_rows: bool = False
    """Whether ``load_samples`` takes ``into=``, a function ``(shape, dtype) -> tensor`` that gives memory for the first
    tensor of all items, and writes their rows there: several workers may fill one batch that way.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__
        if own.keys() & {"__getitem__", "__getitems__", "load_samples"} and "fetch_batch" not in own:
            cls.makes_batches = False
        if "load_samples" in own and "fills_rows" not in own:
            cls.fills_rows = False
        if "__getitem__" in own and not own.keys() & {"load_samples", "__getitems__"}:
            cls.own_items = True
            cls.load_samples = cls.__getitems__ = None  # type: ignore[attr-defined]
            if "pure" not in own:
                cls.pure = False  # type: ignore[attr-defined]
