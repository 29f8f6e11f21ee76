"""Convert ``keep=`` of a `Subset` (a mask, an array of rows, or an expression over columns) to `KeptRows`.

An expression is evaluated once, in chunks, and reads only the columns that it names. The result is cached under the
fingerprint of the data, the version of its files (size, modification time and inode, or ETag) and the expression.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import Indices
from penstock.plan.filter import KeptRows
from penstock.plan.source import Source
from penstock.progress import progress_bar
from penstock.tables.table import TableFiles

__all__ = ["Filterable", "has_columns", "kept_rows"]

_ROWS = 1 << 16  # rows whose columns are in memory at once


def has_columns(source: Any) -> bool:
    """Return whether a source has columns: a `penstock.Manifest`, `penstock.TableFiles`."""
    # A user's dataset may use these attribute names for something else.
    return isinstance(source, Source) and hasattr(source, "take") and hasattr(source, "columns")


class Filterable(NamedTuple):
    """The data that a filter selects from.

    Attributes:
        fingerprint: identity of the rows; None if unknown.
        samples: number of rows.
        source: the source of their columns, or None.
        row: maps rows of these data to rows of the source.
    """

    fingerprint: str | None
    samples: int
    source: Any
    row: Callable[[Indices], Indices]

    @classmethod
    def of(
        cls, source: Any, fingerprint: str | None, samples: int, row: Callable[[Indices], Indices] = lambda rows: rows
    ) -> Filterable:
        """Return the rows of a source, with its columns if it has any."""
        return cls(fingerprint, samples, source if has_columns(source) else None, row)

    def table(self, rows: Indices, names: list[str]) -> pa.Table:
        """Return some columns of rows as an Arrow table."""
        if isinstance(self.source, TableFiles):
            return pa.Table.from_batches([self.source.take(self.row(rows), names)])
        found: pa.Table = self.source.take(self.row(rows)).select(names)
        return found


def kept_rows(keep: Any, of: Filterable) -> KeptRows:
    """Return the rows that ``keep`` selects, see `penstock.Subset`.

    Raises:
        ConfigError: ``keep`` is not a mask, rows or an expression; a mask has the wrong length; an expression names
            unknown columns or is not boolean.
        IndexError: a row is outside the data.
    """
    if isinstance(keep, KeptRows):
        if keep.rows != of.samples:
            raise ConfigError(f"these rows were selected from {keep.rows} rows, but the dataset has {of.samples}")
        return keep
    if isinstance(keep, pc.Expression):
        return _evaluate(keep, of)
    if isinstance(keep, str | os.PathLike):
        try:
            keep = np.load(keep, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            example = ". An expression is an object such as pyarrow.compute.field('label') == 3"
            raise DataFileError(
                f"{os.fspath(keep)} is not an .npy file with a mask or row numbers: {error}"
                + ("" if os.fspath(keep).endswith(".npy") else example)
            ) from error
    array = keep.numpy() if isinstance(keep, torch.Tensor) else np.asarray(keep)
    if array.ndim == 1 and array.dtype == np.bool_:
        if len(array) != of.samples:
            raise ConfigError(
                f"keep is a mask of {len(array)} values for a dataset of {of.samples} rows: it needs one for each row"
            )
        return KeptRows.of_mask(array)
    if array.ndim == 1 and array.dtype == np.uint8 and len(array) == of.samples > 2 and int(array.max()) <= 1:
        raise ConfigError("keep is an array of 0 and 1, one for each row: for a mask, give keep.astype(bool)")
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return KeptRows.of_rows(array.astype(np.int64) if not array.size else array, of.samples)
    is_array = isinstance(keep, np.ndarray | torch.Tensor) or array.dtype != object
    raise ConfigError(
        "keep takes a mask (one boolean for each row), an array of row numbers, the path of an .npy file with one "
        "of these, or an expression over columns such as pyarrow.compute.field('label') > 3; got "
        + (f"{array.dtype} of shape {array.shape}" if is_array else repr(keep))
    )


def _evaluate(keep: pc.Expression, of: Filterable) -> KeptRows:
    if of.source is None:
        raise ConfigError(
            f"keep={keep} is an expression over columns, but this data has no columns. Manifests and Parquet or Arrow "
            "tables have columns; JSON lines do not. Give a mask or an array of rows"
        )
    # The columns whose names occur in the text, else all columns.
    text, columns = str(keep), of.source.columns
    names = [name for name in columns if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)] or list(columns)
    number = "row"
    while number in names:
        number += "_"

    def matching() -> Iterator[Indices]:
        with progress_bar("evaluating the filter", of.samples, None, in_bytes=False) as advance:
            for begin in range(0, of.samples, _ROWS):
                rows = np.arange(begin, min(begin + _ROWS, of.samples))
                table = of.table(rows, names)
                try:
                    found = table.append_column(number, pa.array(rows)).filter(keep)[number]
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError) as error:
                    types = {name: f" ({table.schema.field(name).type})" for name in names}
                    raise ConfigError(
                        f"keep={keep} cannot be evaluated: {str(error).partition(chr(10))[0]}. The columns are: "
                        + ", ".join(name + types.get(name, "") for name in columns)
                    ) from error
                yield found.to_numpy()
                advance(len(rows))

    # Without a fingerprint, the data may be different next time, so nothing is cached. The expression is pickled,
    # because its text abbreviates long lists.
    version = of.source.version if isinstance(of.source, TableFiles) else ""
    identity = f"{of.fingerprint} {version} {of.samples} ".encode() + pickle.dumps(keep, protocol=5)
    name = None if of.fingerprint is None else xxhash.xxh3_128_hexdigest(identity)
    return KeptRows.of_chunks(matching, of.samples, name=name)
