"""Map rows of a map-style dataset to rows of its files, through filters and packs.

A dataset that wraps another one numbers its rows as `penstock.datasets.rows.load_rows` does: only rows that the filters
keep are counted. The functions here convert these numbers to rows of the data before any filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.datasets.packed import PackedDataset
from penstock.datasets.rows import rows_behind
from penstock.datasets.source_dataset import SourceDataset, SourceWrapper
from penstock.datasets.subset import Subset
from penstock.order.permutation import Indices
from penstock.plan.filter import KeptRows

__all__ = ["documents_in", "file_row_count", "file_rows", "filters_in", "kept_places", "row_name", "with_an_order"]


def with_an_order(dataset: Any) -> SourceDataset | None:
    """Return the dataset with its own order that this dataset is or wraps; None if there is none."""
    while isinstance(dataset, SourceWrapper):
        dataset = dataset.source
    return dataset if isinstance(dataset, SourceDataset) else None


def documents_in(dataset: Any) -> Any:
    """Return the dataset of documents inside a `PackedDataset`; any other dataset unchanged."""
    return dataset.dataset if isinstance(dataset, PackedDataset) else dataset


def file_row_count(dataset: Any) -> int:
    """Return the number of rows of a dataset before filters; for packs, of documents."""
    if isinstance(dataset, PackedDataset | Subset):
        return file_row_count(dataset.dataset)
    if isinstance(dataset, SourceWrapper):
        return file_row_count(dataset.source)
    return len(dataset.plan.source) if isinstance(dataset, SourceDataset) else len(dataset)


def row_name(dataset: Any, row: int) -> str:
    """Return file and row of a row before filters, for messages; of other data its number alone."""
    own = with_an_order(dataset)
    name = getattr(dataset if own is None else own.source, "row_name", None)
    return f"sample {row}" if name is None else str(name(row))


def file_rows(dataset: Any, rows: Indices) -> Indices:
    """Return the rows before filters for rows of a dataset without packs: int64 of shape (n,)."""
    behind = rows_behind(dataset)
    if behind is not None:
        return behind(rows)
    return file_rows(dataset.dataset, dataset.kept.find(rows)) if isinstance(dataset, Subset) else rows


def kept_places(dataset: Any, rows: Indices) -> Indices:
    """Return the positions of source rows, all of which the filters keep, among the kept rows: the inverse of
    ``plan.kept``.
    """
    for kept in dataset.plan.filters if isinstance(dataset, SourceDataset) else ():
        places = kept.places_of(rows)
        found = kept.find(places)
        by_row = np.argsort(found, kind="stable")
        rows = places[by_row[found.searchsorted(rows, sorter=by_row)]]
    return rows


def filters_in(dataset: Any) -> Iterator[KeptRows]:
    """Yield the filters of a dataset and of the datasets inside it."""
    if isinstance(dataset, SourceDataset):
        yield from dataset.plan.filters
    if isinstance(dataset, Subset):
        yield dataset.kept
    if isinstance(dataset, PackedDataset | Subset):
        yield from filters_in(dataset.dataset)
    if isinstance(dataset, SourceWrapper):
        yield from filters_in(dataset.source)
