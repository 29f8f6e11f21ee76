"""`Subset`: some rows of a dataset, without copying the data.

clean = Subset(TableDataset("web-*.parquet", seed=0), pc.field("score") > 0.7)
loader = DataLoader(clean, batch_size=256)              # ranks, epochs, states: as without the filter

train = Subset(my_dataset, mask)                        # any map-style dataset: torch's Subset, in constant memory

A filter is part of the dataset's plan: it maps a position among the kept rows to a row::

    position -> order of the kept rows (seed, epoch) -> position among the kept rows -> row -> item

No process uses memory per row, see `penstock.plan.filter.KeptRows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
import xxhash
from torch.utils.data import IterableDataset
from torch.utils.data import Subset as TorchSubset

from penstock.datasets.keep import Filterable, kept_rows
from penstock.datasets.rows import load_rows
from penstock.datasets.source_dataset import SourceDataset, SourceWrapper
from penstock.errors import ConfigError
from penstock.order.permutation import Indices, normalise
from penstock.plan.filter import KeptRows
from penstock.random import in_sample
from penstock.samplers.identity import fingerprint_of, holds_a_share
from penstock.sources.batched import BatchedDataset
from penstock.wording import kind_text

__all__ = ["Subset", "filtered_parts"]


class Subset(BatchedDataset, TorchSubset[Any]):
    """The rows of a map-style dataset that ``keep`` selects.

    Args:
        dataset: any map-style dataset. For a Penstock dataset with its own order, such as `penstock.RankDataset`, the
            result is one of the same class with the same options, whose epochs contain only the kept rows. For a
            `penstock.Mixture`, it is the mixture of the filtered sources, in the same proportions; rows are numbered
            over the concatenated sources. For any other dataset, the result has no order of its own.
        keep: the rows to keep: a mask (one boolean for each row), an array of row numbers, the path of an ``.npy`` file
            with one of the two, or an expression over columns (`pyarrow.compute.field`) of tables and manifests. Row
            numbers are rows of the source, independent of the dataset's order. They may have any order and repeat;
            negative numbers count from the end.

    Raises:
        ConfigError: an iterable-style dataset, a mask of the wrong length, or an expression that cannot be evaluated.
        IndexError: a row is outside the dataset.
        DataFileError: the path is not an ``.npy`` file with a mask or rows.

    The fingerprint covers the data and the kept rows, so a state for other rows raises an error. An expression is
    evaluated once, with a progress bar, and reads only the columns that it names; the result is stored in the user's
    cache until a file is written again. Kept rows are stored as a mapped file of row numbers, 4 bytes each (8 if the
    dataset has 2**31 rows or more).

    >>> Subset(list("abcdef"), [True, False, True, True, False, False])[1]
    'c'
    """

    def __new__(cls, dataset: Any, keep: Any) -> Subset:
        """Return a filtered view of a dataset that has its own order, else a plain subset."""
        if cls is Subset and isinstance(dataset, SourceDataset):
            return cast(Subset, dataset.filtered(keep))
        if (
            cls is Subset
            and isinstance(dataset, SourceWrapper)
            and isinstance(dataset.source, SourceDataset | SourceWrapper)
        ):
            return cast(Subset, dataset.with_source(Subset(dataset.source, keep)))
        # A user's dataset over these: its indices mean other rows in each epoch.
        if not isinstance(dataset, SourceDataset) and holds_a_share(dataset):
            raise ConfigError(
                f"{kind_text(dataset)} over datasets with their own order has no fixed rows to filter: filter each "
                "inner dataset instead, Subset(inner, keep)"
            )
        return super().__new__(cls)

    def __init__(self, dataset: Any, keep: Any) -> None:
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__getitem__")
            or not hasattr(dataset, "__len__")
        ):
            raise ConfigError(
                f"a Subset takes a dataset with __len__ and __getitem__, got {kind_text(dataset)}: filter a "
                "stream where it is created, with a condition in its __iter__ or a select() in its pipeline"
            )
        kept = kept_rows(keep, filterable(dataset))
        super().__init__(dataset, cast(Sequence[int], kept))
        self.kept: KeptRows = kept
        """The kept rows, indexed by their position in this dataset."""
        self.pure = bool(getattr(dataset, "pure", False))
        self.releases_gil = bool(getattr(dataset, "releases_gil", False))
        self.channels_last = bool(getattr(dataset, "channels_last", False))
        self.fork_safe = bool(getattr(dataset, "fork_safe", True))
        ours = isinstance(dataset, BatchedDataset)
        self.makes_batches = ours and dataset.makes_batches
        self.fills_rows = ours and dataset.fills_rows

    def __getnewargs__(self) -> tuple[Any, Any]:
        return [], []

    def __repr__(self) -> str:
        # Otherwise a user's list would be printed in full.
        inside = self.dataset if isinstance(self.dataset, BatchedDataset) else type(self.dataset).__name__
        return f"Subset of {len(self):,} of the {self.kept.rows:,} rows of {inside}"

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def fingerprint(self) -> str | None:
        """Identity of the kept rows; None if the data has no fingerprint."""
        inner = fingerprint_of(self.dataset)
        return None if inner is None else xxhash.xxh3_128_hexdigest(f"{inner} {self.kept.fingerprint}".encode())

    def rows(self, indices: Any) -> Indices:
        """Return the rows of the dataset at several indices: int64 of the shape of ``indices``."""
        return self.kept.find(normalise(indices, len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return Subset.__getitems__(self, index)
        return self.dataset[self.kept[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return Subset.load_samples(self, indices, None)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None, **into: Any) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key."""
        rows, dataset = self.rows(indices).tolist(), self.dataset
        if into and isinstance(dataset, BatchedDataset):
            return list(dataset.load_samples(rows, keys, **into))  # type: ignore[attr-defined]
        return load_rows(dataset, rows, None if in_sample() else keys)

    def fetch_batch(self, indices: Sequence[int], keys: Sequence[int] | None, empty: Any) -> Any:
        """Return the batch of several indices, see `penstock.sources.batched.BatchedDataset`."""
        return self.dataset.fetch_batch(self.rows(indices).tolist(), keys, empty)  # type: ignore[attr-defined]


def filter_rows(dataset: Any) -> int:
    """Return the number of rows that a filter of a dataset selects from; for packs, documents; for a mixture, the rows
    of all sources.
    """
    return dataset.filter_rows if isinstance(dataset, SourceDataset) else len(dataset)


def filterable(dataset: Any) -> Filterable:
    """Return the rows and columns of a map-style dataset without its own order, for a filter."""
    if isinstance(dataset, Subset):
        inner = filterable(dataset.dataset)
        return inner._replace(
            fingerprint=dataset.fingerprint, samples=len(dataset), row=lambda rows: inner.row(dataset.kept.find(rows))
        )
    ours = isinstance(dataset, BatchedDataset) and type(dataset).__module__.startswith("penstock.")
    source = getattr(dataset, "source", getattr(dataset, "manifest", dataset)) if ours else dataset
    return Filterable.of(source, fingerprint_of(dataset), len(dataset))


def filtered_parts(keep: Any, datasets: Sequence[Any]) -> list[Any]:
    """Return each dataset with its rows in ``keep``; row numbers and masks count over all datasets, one after the
    other.
    """
    if isinstance(keep, pc.Expression):
        return [Subset(dataset, keep) for dataset in datasets]
    ends = np.cumsum([0, *map(filter_rows, datasets)]).tolist()
    kept = kept_rows(keep, Filterable.of(None, None, ends[-1]))
    return [
        Subset(dataset, kept.between(begin, end))
        for dataset, (begin, end) in zip(datasets, itertools.pairwise(ends), strict=True)
    ]
