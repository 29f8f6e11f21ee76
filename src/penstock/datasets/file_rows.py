"""Which rows of its files a map-style data set gives, whatever filters and packs are between.

A data set over others counts rows as `penstock.datasets.rows.load_rows` does: those that its filters keep. Here these
become rows of the data as they were before any filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.datasets.delegation import Around
from penstock.datasets.packed import PackedDataset
from penstock.datasets.rows import rows_behind
from penstock.datasets.source_dataset import SourceDataset
from penstock.datasets.subset import Subset
from penstock.order.permutation import Indices
from penstock.plan.filter import KeptRows

__all__ = ["documents_in", "file_row_count", "file_rows", "filters_in", "kept_places", "with_an_order"]


def with_an_order(dataset: Any) -> SourceDataset | None:
    """Return the data set with an order of its own that this one is or is around; None without one."""
    while isinstance(dataset, Around):
        dataset = dataset.source
    return dataset if isinstance(dataset, SourceDataset) else None


def documents_in(dataset: Any) -> Any:
    """Return the documents of packs; any other data set itself."""
    return dataset.dataset if isinstance(dataset, PackedDataset) else dataset


def file_row_count(dataset: Any) -> int:
    """Return how many rows a data set had before filters; of packs, the documents."""
    if isinstance(dataset, PackedDataset | Subset):
        return file_row_count(dataset.dataset)
    if isinstance(dataset, Around):
        return file_row_count(dataset.source)
    return len(dataset.plan.source) if isinstance(dataset, SourceDataset) else len(dataset)


def file_rows(dataset: Any, rows: Indices) -> Indices:
    """Return the rows before filters of the rows that a data set without packs counts: int64 of shape (n,)."""
    behind = rows_behind(dataset)
    if behind is not None:
        return behind(rows)
    return file_rows(dataset.dataset, dataset.kept.find(rows)) if isinstance(dataset, Subset) else rows


def kept_places(dataset: Any, rows: Indices) -> Indices:
    """Return which of the rows that filters keep these rows of the source are: the inverse of ``plan.kept``."""
    for kept in dataset.plan.filters if isinstance(dataset, SourceDataset) else ():
        rows = np.asarray(kept.ordinals(rows))
    return rows


def filters_in(dataset: Any) -> Iterator[KeptRows]:
    """Yield the filters of a data set and of those inside of it."""
    if isinstance(dataset, SourceDataset):
        yield from dataset.plan.filters
    if isinstance(dataset, Subset):
        yield dataset.kept
    if isinstance(dataset, PackedDataset | Subset):
        yield from filters_in(dataset.dataset)
    if isinstance(dataset, Around):
        yield from filters_in(dataset.source)
