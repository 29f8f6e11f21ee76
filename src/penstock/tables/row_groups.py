"""`RowGroups`: record batches and row groups of several files, numbered across all files.

Columns of rows are gathered by Arrow, or directly from the mapped files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataFileError
from penstock.manifest.indices import as_arrow
from penstock.order.permutation import Indices
from penstock.tables.arrow import ArrowFile, Layout
from penstock.tables.lru import LruCache
from penstock.tables.parquet import ParquetFile
from penstock.tables.ranged import TableParts
from penstock.tables.values import fixed_width, plain_batch, text_offsets

__all__ = ["Located", "NotText", "Room", "RowGroups"]

_RUNS, _LIGHT = 8, 1 << 12  # from this many runs of a batch, and up to this many bytes a row, one take gathers all
_MOST_OPEN = 256  # files whose metadata is in memory
_WIDE = 8  # from this many numbers a row, rows are copied one by one

Room = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""``room(shape, dtype)`` returns the array to write numbers to."""


class Located(NamedTuple):
    """Rows, the row group of each, and its row number within the group."""

    rows: Indices
    pieces: Indices
    local: Indices


class _Mapped(NamedTuple):
    """The rows of a request in one Arrow file: their positions in the request, their batches and row numbers there."""

    file: ArrowFile
    where: Indices
    batches: Indices
    local: Indices
    piece: Callable[[int], pa.RecordBatch]

    def begins(self, column: int, part: int, dtype: np.dtype[Any]) -> Indices | None:
        """See `ArrowFile.begins`."""
        return self.file.begins(column, part, self.batches, dtype.itemsize, self.piece)

    def items(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the whole file as items of a dtype."""
        data = self.file.data
        return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)


class NotText(Exception):
    """Text that is not UTF-8, in the row at this position of the request."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class RowGroups:
    """The row groups of files.

    Args:
        maps: the files.
        layouts: the layout of each file.
        schema: the columns to read.
        places: the numbers of these columns in each file.
        cache_bytes: see `penstock.tables.TableFiles`.
    """

    def __init__(
        self, maps: TableParts, layouts: list[Layout], schema: pa.Schema, places: list[list[int]], cache_bytes: int
    ) -> None:
        self.maps, self.layouts, self.schema, self.places = maps, layouts, schema, places
        self.kept: LruCache[pa.RecordBatch] = LruCache(cache_bytes)
        counts = [layout.counts for layout in layouts]
        self._first = np.cumsum([0, *map(len, counts)], dtype=np.int64)  # the first row group of each file
        self._begins = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)  # the first row of each row group
        self.starts: npt.NDArray[np.int64] = self._begins[self._first]
        """The first row of each file, and the number of all rows."""
        self._open: dict[int, ArrowFile | ParquetFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self.maps, self.layouts, self.schema, self.places, self.kept.limit)

    def locate(self, rows: Indices) -> Located:
        """Return the row groups of rows, all of which are in range.

        Raises:
            DataFileChangedError: a file with some of the rows has changed.
        """
        pieces = self._begins.searchsorted(rows, "right") - 1
        for file in np.unique(self._files(pieces)).tolist():
            self.maps.array(file)
        return Located(rows, pieces, rows - self._begins[pieces])

    def _files(self, pieces: Indices) -> Indices:
        found: Indices = self._first.searchsorted(pieces, "right") - 1
        return found

    def take(self, at: Located, columns: list[int]) -> pa.RecordBatch:
        """Return rows gathered by Arrow.

        Consecutive rows of mapped files are sliced. Decoded row groups are processed one by one, so that memory holds
        only the rows and the cache.
        """
        rows, pieces, local = at
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(pieces) != 0)) + 1
        begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
        order = np.argsort(pieces, kind="stable")
        used, starts = np.unique(pieces[order], return_index=True)
        try:
            if self._in_place(used):
                held = {piece: self.piece(piece).select(columns) for piece in used.tolist()}
                if len(begins) <= _RUNS * len(held) or not all(_is_light(batch) for batch in held.values()):
                    spans = zip(pieces[begins].tolist(), local[begins].tolist(), (ends - begins).tolist(), strict=True)
                    return _joined([held[piece].slice(begin, count) for piece, begin, count in spans])
            groups = sorted(
                np.split(order, starts[1:]), key=lambda places: int(places[0])
            )  # in the order of their first row
            parts = [self.piece(int(pieces[g[0]])).select(columns).take(as_arrow(local[g])) for g in groups]
            return _reordered(parts, np.concatenate(groups))
        except pa.ArrowInvalid as error:
            name = self.maps.files[0].path
            raise DataFileError(f"{len(rows)} rows of {name} ... at once are too much: {error}") from None

    def _in_place(self, pieces: Indices) -> bool:
        """Return whether row groups are views of mapped files, as far as known."""
        files = [self._file(number) for number in np.unique(self._files(pieces)).tolist()]
        return all(isinstance(file, ArrowFile) and not file.compressed for file in files)

    def numbers(self, at: Located, column: int, room: Room) -> npt.NDArray[Any] | None:
        """Return a numeric column, copied once from mapped files; None if it cannot be read this way."""
        width = fixed_width(self.schema.field(column).type)
        if width is None:
            return None
        dtype, shape = width
        count, parts = math.prod(shape), []
        for mapped in self._mapped(at):
            begins = None if mapped is None else mapped.begins(column, 1, dtype)
            if mapped is None or begins is None:
                return None
            parts.append((mapped.items(dtype), mapped.where, begins + mapped.local * count))
        out = room((len(at.rows), *shape), dtype)
        flat = out.reshape(len(at.rows), count)
        for items, where, begins in parts:
            if count < _WIDE:
                for k in range(count):
                    flat[where, k] = items[begins + k]
            else:
                for place, begin in zip(where.tolist(), begins.tolist(), strict=True):
                    flat[place] = items[begin : begin + count]
        return out

    def texts(self, at: Located, column: int) -> list[Any] | None:
        """Return a column of text or bytes, read from mapped files; None if it cannot be read this way."""
        kind = self.schema.field(column).type
        dtype = text_offsets(kind)
        if dtype is None:
            return None
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        values: list[Any] = [None] * len(at.rows)
        for mapped in self._mapped(at):
            begins = None if mapped is None else mapped.begins(column, 1, dtype)
            data = None if mapped is None else mapped.begins(column, 2, np.dtype(np.uint8))
            if mapped is None or begins is None or data is None:
                return None
            offsets, first = mapped.items(dtype), begins + mapped.local
            spans = (data + offsets[first]).tolist(), (data + offsets[first + 1]).tolist()
            view: Any = memoryview(mapped.file.data)  # type: ignore[arg-type]
            for place, begin, end in zip(mapped.where.tolist(), *spans, strict=True):
                try:
                    values[place] = str(view[begin:end], "utf-8") if is_text else bytes(view[begin:end])
                except UnicodeDecodeError as error:
                    raise NotText(place) from error
        return values

    def _mapped(self, at: Located) -> Iterator[_Mapped | None]:
        """Yield the rows of each Arrow file; None for a Parquet file, which has no plain data."""
        files = self._files(at.pieces)
        for number in np.unique(files).tolist():
            file, where = self._file(number), np.flatnonzero(files == number)
            if not isinstance(file, ArrowFile):
                yield None
                continue
            first = int(self._first[number])
            piece = partial(self._piece_of, first)
            yield _Mapped(file, where, at.pieces[where] - first, at.local[where], piece)

    def _piece_of(self, first: int, number: int) -> pa.RecordBatch:
        return self.piece(first + number)

    def piece(self, piece: int) -> pa.RecordBatch:
        """Return a record batch or row group, given its number across all files."""

        def make() -> tuple[pa.RecordBatch, int]:
            file = int(self._first.searchsorted(piece, "right")) - 1
            batch, size = self._file(file).piece(piece - int(self._first[file]))
            return plain_batch(batch), size

        return self.kept.get(piece, make)

    def _file(self, number: int) -> ArrowFile | ParquetFile:
        """Return an open file. If there are very many, only the most recently opened ones stay open."""
        data = self.maps.array(number)
        found = self._open.get(number)
        if found is not None and found.data is data:
            return found
        path, layout, places = self.maps.files[number].path, self.layouts[number], self.places[number]
        opened = (
            ParquetFile(path, data, list(self.schema.names))
            if layout.kind == "parquet"
            else ArrowFile(path, data, layout, places)
        )
        for place, (other, file) in enumerate([*self._open.items()]):
            if place <= len(self._open) - _MOST_OPEN or not self.maps.holds(other, file.data):
                self._open.pop(other, None)  # other threads may open files, too
                if isinstance(file, ArrowFile):
                    self.kept.drop(range(*self._first[other : other + 2].tolist()))  # cached batches refer to its map
        self._open[number] = opened
        return opened


def _is_light(batch: pa.RecordBatch) -> bool:
    """Return whether rows are small enough that copying them twice is cheap."""
    return bool(batch.get_total_buffer_size() <= _LIGHT * batch.num_rows)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _reordered(parts: list[pa.RecordBatch], order: Indices) -> pa.RecordBatch:
    """Return concatenated parts with their rows moved to these positions."""
    if (order[1:] > order[:-1]).all():
        return _joined(parts)
    back = np.argsort(order)
    if all(_is_light(part) for part in parts):
        return _joined(parts).take(as_arrow(back))
    single = [part.slice(k, 1) for part in parts for k in range(part.num_rows)]
    return _joined([single[place] for place in back.tolist()])
