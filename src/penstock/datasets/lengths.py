"""Lengths of documents: given as an array or a file, provided by the dataset, or read from a column."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets.keep import Filterable, has_columns
from penstock.datasets.rows import row_count, rows_behind, version_of
from penstock.datasets.subset import Subset
from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.plan.filter import KeptRows
from penstock.samplers.identity import fingerprint_of
from penstock.samplers.lengths import SampleLengths, lengths_of
from penstock.storage.derived import derived_array
from penstock.wording import kind_text

__all__ = ["column_lengths", "document_lengths", "filtered_lengths", "last_filter"]

_ROWS = 1 << 16  # rows of a column in memory at once


def document_lengths(dataset: Any, given: Any) -> SampleLengths:
    """Return the number of tokens of each document of a dataset.

    Args:
        dataset: the documents.
        given: an array, the path of an ``.npy`` file, the name of a column, or None for the dataset's own ``lengths``.
            For a filtered dataset, they may be the lengths of all documents before the filter.

    Raises:
        ConfigError: the lengths are unknown, or there is no such column.
        SamplerError: the lengths are not integers.
    """
    count, is_column = row_count(dataset), isinstance(given, str) and not given.endswith(".npy")
    every: SampleLengths | None = None
    if given is not None and not is_column:
        every = given if isinstance(given, SampleLengths) else lengths_of(given)
        if len(every) == count:
            return every
    if isinstance(dataset, Subset):
        return filtered_lengths(document_lengths(dataset.dataset, every or given), dataset.kept.find, count)
    if is_column:
        column = _Column(dataset, given)
        every = SampleLengths(len(column), column)
    elif every is None:
        own = getattr(dataset, "lengths", None)
        if own is None:
            raise ConfigError(
                f"the lengths of the documents of this {type(dataset).__name__} are unknown: give lengths= (an array, "
                "the path of an .npy file or the name of a column), or give the dataset an attribute `lengths`"
            )
        every = lengths_of(own)
        if isinstance(own, np.memmap):
            # The pickle of a map holds all its numbers.
            every = SampleLengths(len(own), partial(_own_lengths, dataset))
    behind = rows_behind(dataset)
    return every if behind is None else filtered_lengths(every, behind, count)


def _own_lengths(dataset: Any, part: Any) -> Indices:
    lengths: Indices = np.asarray(dataset.lengths)[part]
    return lengths


def last_filter(dataset: Any) -> KeptRows:
    """Return the rows that the outermost filter of a dataset keeps."""
    found: KeptRows = dataset.kept if hasattr(dataset, "kept") else dataset.plan.filters[-1]
    return found


def filtered_lengths(every: SampleLengths, find: Callable[[Indices], Indices], count: int) -> SampleLengths:
    """Return the lengths of the ``count`` rows that a filter keeps; ``find`` maps them to rows before the filter."""
    return SampleLengths(count, partial(_kept_lengths, every, find, count))


def _kept_lengths(every: SampleLengths, find: Callable[[Indices], Indices], count: int, part: Any) -> Indices:
    rows = np.arange(*part.indices(count)) if isinstance(part, slice) else np.asarray(part, dtype=np.int64)
    return every[find(rows)]


class _Column:
    """The lengths in a column of a table, which are read once, and stored in the user's cache."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name, self._read = dataset, name, column_lengths(dataset, name)
        source = getattr(dataset, "source", dataset)
        fingerprint = fingerprint_of(source)
        if fingerprint is None:
            raise ConfigError(
                f"{kind_text(source)} has no fingerprint, so its column {name!r} cannot be cached: give an array"
            )
        self._rows, self._question = len(source), f"{fingerprint} {version_of(source)} {len(source)} {name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _Column, (self._dataset, self._name)

    def __len__(self) -> int:
        return self._rows

    def __call__(self, part: Any) -> Indices:
        lengths: Indices = self._lengths[part]
        return lengths

    @cached_property
    def _lengths(self) -> Indices:
        what = f"the lengths in the column {self._name!r}"
        return np.asarray(derived_array("lengths", self._question, np.int64, self._write, what))

    def _write(self, out: BinaryIO) -> None:
        for begin in range(0, len(self), _ROWS):
            out.write(self._read(np.arange(begin, min(begin + _ROWS, len(self)))).tobytes())


def column_lengths(dataset: Any, name: str, *, texts: bool = False) -> Callable[[Indices], Indices]:
    """Return a function that reads the lengths of rows from a column.

    Args:
        dataset: the table, or a dataset over one.
        name: of a column of integers (these are the lengths), or of lists (their lengths are used).
        texts: also accept text and bytes; the length is the number of characters or bytes.

    Raises:
        ConfigError: there is no such column; (on access) it has another type, or nulls.
    """
    source = getattr(dataset, "source", dataset)
    columns = source.columns if has_columns(source) else []
    if name not in columns:
        has = f"its columns are {', '.join(columns)}" if columns else "it has no columns"
        raise ConfigError(f"there is no column {name!r} in this {type(dataset).__name__}: {has}")
    table = Filterable.of(source, None, len(dataset))

    def lengths(rows: Indices) -> Indices:
        values = table.table(rows, [name])[name]
        kind = values.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            values = pc.list_value_length(values)
        elif texts and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            values = pc.utf8_length(values)
        elif texts and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            values = pc.binary_length(values)
        elif not pa.types.is_integer(kind):
            raise ConfigError(f"column {name!r} has the type {kind}: lengths need a column of integers or of lists")
        if values.null_count:
            row = rows[int(np.flatnonzero(values.is_null().to_numpy())[0])]
            raise ConfigError(f"column {name!r} is null in row {row}: lengths need integers or lists without nulls")
        found: Indices = values.to_numpy().astype(np.int64)
        return found

    return lengths
