"""Base classes of Penstock's datasets: loaders request whole batches, unless a subclass defines its own items."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

__all__ = ["BatchedDataset", "StreamDataset"]


class StreamDataset(IterableDataset[Any]):
    """An iterable dataset with a map-style form, ``samples``, which splits whole batches among workers.

    Penstock's loader reads its batches from ``samples``; other loaders iterate over it.
    """

    samples: Any
    batch_size: int
    drop_last: bool


class BatchedDataset(Dataset[Any]):
    """A map-style dataset whose loaders read batches by ``load_samples`` (Penstock's) or ``__getitems__`` (torch's).

    A dataset that sets ``makes_batches`` writes batches into given memory, without the default collate function:
    ``fetch_batch(indices, keys, empty, place=None) -> batch``, where ``empty(shape, dtype)`` returns an uninitialised
    tensor, in shared memory in a worker process. The batch equals the collated result of ``load_samples``.

    The ``__getitem__`` of a subclass would be bypassed. So if a subclass overrides only ``__getitem__``, the batch
    methods are removed, loaders read item by item, and the subclass does not count as pure unless it says so.
    """

    own_items = False
    """Whether a subclass overrides ``__getitem__``."""

    makes_batches: bool = False
    """Whether loaders may use `fetch_batch`."""

    fills_rows: bool = False
    """Whether ``load_samples`` accepts ``into=``, so that several workers can fill one batch.

    ``into`` is a function ``(shape, dtype) -> tensor`` that returns memory for the first tensor of all items.
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
