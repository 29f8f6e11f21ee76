"""Load items of a map-style dataset by row of its data, independent of the dataset's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from penstock.datasets.source_dataset import SourceDataset, SourceWrapper
from penstock.errors import ConfigError, PartitionError
from penstock.order.permutation import Indices
from penstock.random import sample_scope
from penstock.samplers.identity import own_order, shares_in
from penstock.sources.batched import BatchedDataset
from penstock.sources.files_source import FilesSource
from penstock.wording import counted, kind_text

if TYPE_CHECKING:
    from penstock.plan.exclusion import ExcludedRows

__all__ = [
    "check_rows",
    "check_source",
    "excluded_rows",
    "has_rows",
    "load_rows",
    "row_count",
    "rows_behind",
    "version_of",
]


def has_rows(dataset: Any) -> bool:
    """Return whether a dataset with its own order can load items by row of its source."""
    return isinstance(dataset, SourceDataset | SourceWrapper) and bool(getattr(dataset, "has_rows", False))


def check_source(name: str, dataset: Any, taker: str) -> None:
    """Raise an error for a dataset that is not a map-style dataset of all data; ``taker`` is what needs it.

    Raises:
        ConfigError: the dataset has no length or no items.
        PartitionError: the dataset holds one rank's samples only.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{name} is {kind_text(dataset)}, but {taker} takes datasets with __len__ and __getitem__")
    share = next((share for share in shares_in(dataset) if getattr(share, "world_size", 1) != 1), None)
    if share is not None:
        raise PartitionError(
            f"{name} is one rank's share of {kind_text(share)}, but {taker} takes all data: create it with rank=0, "
            "world_size=1, or give the source of the data (a Manifest's images, an MDSFolder)"
        )


def check_rows(dataset: Any, taker: str) -> None:
    """Check that a dataset of all data can load items by row.

    Raises:
        ConfigError, PartitionError: see `check_source`; or the dataset makes its items itself, in its own shuffled
            order.
    """
    check_source("the dataset", dataset, taker)
    order = own_order(dataset)
    if order is not None and not has_rows(dataset) and getattr(order, "shuffle", "none") != "none":
        raise ConfigError(
            f"{kind_text(dataset)} makes items by position in its own order, but documents and their lengths are read "
            "by row: give documents of tokens, such as a TokenizedDataset, or create it with shuffle='none'"
        )


def row_count(dataset: Any) -> int:
    """Return the number of rows of a dataset; if it holds one rank's samples, the rows of all ranks.

    Raises:
        LengthUnknownError: the samples of its shards have not been counted yet.
    """
    rows: int = dataset.plan.samples if has_rows(dataset) else -1
    return rows if rows >= 0 else len(dataset)


def rows_behind(dataset: Any) -> Callable[[Indices], Indices] | None:
    """Return a function from rows of a filtered dataset to rows of its data; None without a filter."""
    filtered = has_rows(dataset) and dataset.plan.filters
    return dataset.plan.kept if filtered else None


def version_of(data: Any) -> str:
    """Return the version of the files behind a source or dataset, for the key of a cached result.

    It is empty for data whose fingerprint covers every byte, such as a `penstock.Manifest`, or for a user's own class.
    """
    while not isinstance(data, FilesSource):
        if isinstance(data, SourceDataset | SourceWrapper):
            data = data.source
        elif isinstance(data, Subset):
            data = data.dataset
        else:
            return ""
    return data.version


def excluded_rows(dataset: Any, exclude: Any = None) -> ExcludedRows | None:
    """Return the excluded rows of a dataset, plus those in ``exclude``; None if there are none.

    Args:
        dataset: a dataset that is read by row.
        exclude: further rows, as an array of row numbers.
    """
    own: ExcludedRows | None = dataset.plan.excluded if has_rows(dataset) else None
    if exclude is None:
        return own
    # Imported here, because few jobs exclude rows.
    from penstock.plan.exclusion import ExcludedRows

    given = ExcludedRows.of(exclude, row_count(dataset))
    return given if own is None else given.with_rows(own.rows)


def load_rows(dataset: Any, rows: Sequence[int], keys: Sequence[int] | None, *, name: str | None = None) -> list[Any]:
    """Return the items of rows, each made in the scope of its key.

    Args:
        dataset: any map-style dataset. For a Penstock dataset with its own order, these are rows of its source. For a
            subclass that makes its items itself, they are indices.
        rows: 0 to ``row_count - 1``.
        keys: of the items' generators; None to use the caller's scope.
        name: of the dataset, for notes of errors; by default its class.

    A dataset's own ``__getitems__`` is called once for all rows. If it draws from `penstock.generator`, each row is
    loaded again by itself.
    """
    if has_rows(dataset):
        return list(dataset.load_rows(rows, keys))
    if isinstance(dataset, BatchedDataset) and dataset.load_samples is not None:  # type: ignore[attr-defined]
        return list(dataset.load_samples(rows, keys))  # type: ignore[attr-defined]

    def item(row: int) -> Any:
        try:
            return dataset[row]
        except Exception as error:
            error.add_note(f"while loading row {row} of {type(dataset).__name__ if name is None else name}")
            raise

    def together() -> list[Any]:
        try:
            items = list(many(list(rows)))
            if len(items) != len(rows):
                made = f"{counted(len(items), 'item')} for {counted(len(rows), 'row')}"
                raise ConfigError(f"__getitems__ of {type(dataset).__name__} returned {made}: return one for each")
            return items
        except Exception as error:
            if name is not None:
                error.add_note(f"while loading {counted(len(rows), 'row')} of {name}")
            raise

    many: Any = getattr(dataset, "__getitems__", None)
    if keys is None:
        return together() if many is not None else [item(row) for row in rows]
    with sample_scope(keys[0] if keys else 0) as scope:
        if many is not None:
            items = together()
            if scope.generator is None:
                return items
        # Items that drew from one generator would depend on each other: load each again in its own scope.
        items = []
        for row, key in zip(rows, keys, strict=True):
            scope.move(key)
            items.append(item(row))
        return items
