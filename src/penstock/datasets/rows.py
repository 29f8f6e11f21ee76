"""Items of a map-style data set by the rows of its data, whatever order it has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.datasets.delegation import Around
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.random import sample_scope
from penstock.samplers.identity import own_order
from penstock.sources.batched import BatchedDataset

if TYPE_CHECKING:
    from penstock.plan.exclusion import ExcludedRows

__all__ = ["check_rows", "excluded_rows", "has_rows", "load_rows", "row_count", "rows_behind"]


def has_rows(dataset: Any) -> bool:
    """Return whether a data set with an order of its own gives items by the rows of its source."""
    return isinstance(dataset, SourceDataset | Around) and bool(getattr(dataset, "has_rows", False))


def check_rows(dataset: Any) -> None:
    """Refuse a data set of which nobody can ask for a row.

    Raises:
        ConfigError: it makes its items by itself, in an order of its own.
    """
    order = own_order(dataset)
    if order is not None and not has_rows(dataset) and getattr(order, "shuffle", "none") != "none":
        raise ConfigError(
            f"a {type(dataset).__name__} makes its items by their place in its order, and lengths are by row: make it "
            "with shuffle='none'"
        )


def row_count(dataset: Any) -> int:
    """Return how many rows a data set has: of one rank's share, those of all ranks.

    Raises:
        LengthUnknownError: its shards are not counted yet.
    """
    rows: int = dataset.plan.samples if has_rows(dataset) else -1
    return rows if rows >= 0 else len(dataset)


def rows_behind(dataset: Any) -> Callable[[Indices], Indices] | None:
    """Return a function from rows of a data set to those of the data that its filters have left; None without one."""
    filtered = has_rows(dataset) and dataset.plan.filters
    return dataset.plan.kept if filtered else None


def excluded_rows(dataset: Any, exclude: Any = None) -> ExcludedRows | None:
    """Return the rows of a data set that nobody is to get: those that it excludes itself, and others.

    Args:
        dataset: that is read by rows.
        exclude: further ones, as an array of row numbers.
    """
    own: ExcludedRows | None = dataset.plan.excluded if has_rows(dataset) else None
    if exclude is None:
        return own
    # Few runs leave rows out.
    from penstock.plan.exclusion import ExcludedRows

    given = ExcludedRows(exclude, row_count(dataset))
    return given if own is None else given.with_rows(own.rows)


def load_rows(dataset: Any, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
    """Return the items of rows, each made in the scope of its key.

    Args:
        dataset: any map-style data set. Rows of one of ours with an order of its own are those of its source. Of a
            subclass that makes its items by itself, they are indices.
        rows: 0 to ``row_count - 1``.
        keys: of the items' generators; None where the caller's scope is to hold.

    A data set's own ``__getitems__`` is called for all rows together; one that draws from `penstock.generator` costs a
    second call for each row.
    """
    if has_rows(dataset):
        return list(dataset.load_rows(rows, keys))
    if isinstance(dataset, BatchedDataset) and dataset.load_samples is not None:  # type: ignore[attr-defined]
        return list(dataset.load_samples(rows, keys))  # type: ignore[attr-defined]
    many = getattr(dataset, "__getitems__", None)
    if keys is None:
        return list(many(list(rows))) if many is not None else [_item(dataset, row) for row in rows]
    with sample_scope(keys[0] if keys else 0) as scope:
        if many is not None:
            items = list(many(list(rows)))
            if scope.generator is None:
                return items
        # Items that drew together would depend on each other, so each is made anew in a scope of its own.
        items = []
        for row, key in zip(rows, keys, strict=True):
            scope.move(key)
            items.append(_item(dataset, row))
        return items


def _item(dataset: Any, row: int) -> Any:
    try:
        return dataset[row]
    except Exception as error:
        error.add_note(f"while loading row {row} of {type(dataset).__name__}")
        raise
