"""`Subset`: some rows of a data set, without writing it anew.

clean = Subset(TableDataset("web-*.parquet", seed=0), pc.field("score") > 0.7)
loader = DataLoader(clean, batch_size=256)              # ranks, epochs, states: as without the filter

train = Subset(my_dataset, mask)                        # any map-style data set: torch's Subset, in constant memory

A filter is a function of the place among the kept rows, and a part of the data set's plan::

    position -> order of the kept rows (seed, epoch) -> place among them -> row -> item

Memory: none for each row in any process; see `penstock.plan.filter.KeptRows`.
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

from penstock.datasets.delegation import Around
from penstock.datasets.keep import Filterable, kept_rows
from penstock.datasets.rows import load_rows
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.order.permutation import Indices, normalise
from penstock.plan.filter import KeptRows
from penstock.random import in_sample
from penstock.samplers.identity import fingerprint_of, holds_a_share
from penstock.sources.batched import BatchedDataset

__all__ = ["Subset", "filtered_parts"]


class Subset(BatchedDataset, TorchSubset[Any]):
    """The rows of a map-style data set that ``keep`` says.

    Args:
        dataset: any map-style data set. Of one of ours that has an order of its own (`penstock.RankDataset`,
            `penstock.TableDataset`, ...) the result is a data set of the same class with the same options, whose
            epochs hold the kept rows alone. Of a `penstock.Mixture` it is the mixture of the filtered sources, in the
            same proportions; its rows are those of its sources, one source after the other. Of all others, the result
            has no order of its own: put a sampler on top, or ``shuffle=``.
        keep: which rows. A mask (one truth value for each row), an array of row numbers, the path of an ``.npy`` file
            with one of the two, or an expression over columns (`pyarrow.compute.field`) where the data have columns:
            tables, manifests, and filters of these. Rows may come in any order and repeatedly, as with torch's
            ``Subset``; negative ones count from the end. Rows are those of the source, whatever order the data set
            gives them.

    Raises:
        ConfigError: an iterable-style data set, a mask of another length, an expression that cannot be evaluated.
        IndexError: a row outside the data set.
        DataFileError: the path is of no ``.npy`` file with a mask or rows.

    The fingerprint is of the data and the kept rows, so a state of other rows is refused. An expression is evaluated
    once, with a bar, over the columns that it names; its rows stay in the user's cache under the fingerprint of the
    data. Rows are kept as a mapped file of row numbers, or of one bit for each row where that is smaller (51 million
    rows: 7.2 MB).

    >>> Subset(list("abcdef"), [True, False, True, True, False, False])[1]
    'c'
    """

    def __new__(cls, dataset: Any, keep: Any) -> Subset:
        """Return a filtered view of a data set with an order of its own, else a plain subset."""
        if cls is Subset and isinstance(dataset, SourceDataset):
            return cast(Subset, dataset.filtered(keep))
        if cls is Subset and isinstance(dataset, Around) and isinstance(dataset.source, SourceDataset | Around):
            return cast(Subset, dataset.around(Subset(dataset.source, keep)))
        _refuse_shares(dataset)
        return super().__new__(cls)

    def __init__(self, dataset: Any, keep: Any) -> None:
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__getitem__")
            or not hasattr(dataset, "__len__")
        ):
            raise ConfigError(
                f"a Subset takes a data set with length and items, got a {type(dataset).__name__}: filter streams "
                "where they are made, with a condition in their __iter__ or a select() in their pipeline"
            )
        kept = kept_rows(keep, filterable(dataset))
        super().__init__(dataset, cast(Sequence[int], kept))
        self.kept: KeptRows = kept
        """The rows, by their place in this data set."""
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
        # A user's list would be printed in full.
        inside = self.dataset if isinstance(self.dataset, BatchedDataset) else type(self.dataset).__name__
        return f"Subset of {len(self):,} of the {self.kept.rows:,} rows of {inside}"

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def fingerprint(self) -> str | None:
        """Identity of the kept rows; None where nobody knows that of the data."""
        inner = fingerprint_of(self.dataset)
        return None if inner is None else xxhash.xxh3_128_hexdigest(f"{inner} {self.kept.fingerprint}".encode())

    def rows(self, indices: Any) -> Indices:
        """Return the rows of the data set at these places: int64 of the shape of ``indices``."""
        return self.kept.find(normalise(indices, len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return Subset.__getitems__(self, index)
        return self.dataset[self.kept[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices at once."""
        return Subset.load_samples(self, indices, None)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None, **into: Any) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key."""
        rows, dataset = self.rows(indices).tolist(), self.dataset
        if into and isinstance(dataset, BatchedDataset):
            return list(dataset.load_samples(rows, keys, **into))  # type: ignore[attr-defined]
        return load_rows(dataset, rows, None if in_sample() else keys)

    def fetch_batch(self, indices: Sequence[int], keys: Sequence[int] | None, empty: Any) -> Any:
        """Return the batch of the items at several indices, see `penstock.sources.batched.BatchedDataset`."""
        return self.dataset.fetch_batch(self.rows(indices).tolist(), keys, empty)  # type: ignore[attr-defined]


def filter_rows(dataset: Any) -> int:
    """Return how many rows a filter of a data set is over: those of its documents, or of all its sources."""
    return dataset.filter_rows if isinstance(dataset, SourceDataset) else len(dataset)


def _refuse_shares(dataset: Any) -> None:
    """Refuse what holds data sets with an order of their own: its indices are other rows in each epoch."""
    if not isinstance(dataset, SourceDataset) and holds_a_share(dataset):
        raise ConfigError(
            f"a {type(dataset).__name__} over data sets with an order of their own has no rows to filter: filter those "
            "inside, Subset(part, keep)"
        )


def filterable(dataset: Any) -> Filterable:
    """Return what a filter has to know of a map-style data set without an order of its own."""
    if isinstance(dataset, Subset):
        inner = filterable(dataset.dataset)
        return inner._replace(
            fingerprint=dataset.fingerprint, samples=len(dataset), row=lambda rows: inner.row(dataset.kept.find(rows))
        )
    source = getattr(dataset, "source", getattr(dataset, "manifest", dataset)) if _ours(dataset) else dataset
    return Filterable.of(source, fingerprint_of(dataset), len(dataset))


def _ours(dataset: Any) -> bool:
    return isinstance(dataset, BatchedDataset) and type(dataset).__module__.startswith("penstock.")


def filtered_parts(keep: Any, datasets: Sequence[Any]) -> list[Any]:
    """Return each data set with those of its rows that ``keep`` says, of all rows one data set after the other."""
    if isinstance(keep, pc.Expression):
        return [Subset(dataset, keep) for dataset in datasets]
    ends = np.cumsum([0, *map(filter_rows, datasets)]).tolist()
    kept = kept_rows(keep, Filterable.of(None, None, ends[-1]))
    return [
        Subset(dataset, kept.between(begin, end))
        for dataset, (begin, end) in zip(datasets, itertools.pairwise(ends), strict=True)
    ]
