"""`RowGroups`: record batches and row groups of several files, numbered across all files; the base of `TableFiles`.

Columns of numbers and text are read from the mapped files, or from decoded row groups; others are gathered by Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataFileError
from penstock.manifest.formats.columns import as_batch, offsets_of, reordered
from penstock.manifest.indices import as_arrow
from penstock.order.permutation import Indices
from penstock.order.shuffle import groups
from penstock.sources.files_source import FilesSource
from penstock.tables.arrow import ArrowFile, RowGroupIndex
from penstock.tables.lru import LruCache
from penstock.tables.parquet import ParquetFile
from penstock.tables.values import as_array, plain_batch, plain_type

__all__ = ["Room", "RowGroups"]

_RUNS, _LIGHT = 8, 1 << 12  # from this many runs of a batch, and up to this many bytes a row, one take gathers all
_MOST_OPEN = 256  # files whose metadata is in memory
_WIDE = 8  # from this many numbers a row, rows are copied one by one

Room = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""``room(column, shape, dtype)`` returns the array to write numbers to."""


class _Located(NamedTuple):
    """Rows, the row group of each, its row number within the group, and the open files with their positions."""

    rows: Indices
    pieces: Indices
    local: Indices
    files: list[tuple[int, ArrowFile | ParquetFile, Indices]]

    @property
    def in_place(self) -> bool:
        """Whether all row groups are views of mapped files, as far as known."""
        return all(isinstance(file, ArrowFile) and not file.compressed for _, file, _ in self.files)


class _Piece:
    """A record batch or row group, without extension types, and views of its columns."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._views: dict[int, Any] = {}

    def view(self, column: int) -> Any:
        """Return a column of numbers as an array; of text, what returns begin and end of a value, and all bytes.

        None if it has nulls.
        """
        found = self._views.get(column)
        if found is None:
            array = self.batch.column(column)
            offsets = offsets_of(array)
            if array.null_count:
                return None
            if offsets is None:
                found = as_array(array)
            else:
                data = array.buffers()[2]
                begins, ends = memoryview(offsets), memoryview(offsets)[1:]  # type: ignore[arg-type]
                found = begins.__getitem__, ends.__getitem__, memoryview(b"" if data is None else data)
            self._views[column] = found
        return found


class RowGroups(FilesSource):
    """The rows of files in columns. A subclass has these attributes before it calls `_set_up`.

    Attributes:
        schema: the columns that are read, as in the first file.
    """

    schema: pa.Schema
    _indexes: list[RowGroupIndex]
    _places: list[list[int]]  # the numbers of the columns in each file
    _kept: LruCache[_Piece]

    def _set_up(self) -> None:
        counts = [index.counts for index in self._indexes]
        self._first = np.cumsum([0, *map(len, counts)], dtype=np.int64)  # the first row group of each file
        self._begins = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)  # the first row of each row group
        self.starts = self._begins[self._first]
        self._open: dict[int, ArrowFile | ParquetFile] = {}
        self._nulls: set[int] = set()  # columns that have nulls in a decoded row group
        kinds = [plain_type(field.type) for field in self.schema]
        self._plain = {number: kind for number, kind in enumerate(kinds) if kind is not None}

    def _locate(self, rows: Indices) -> _Located:
        """Return the row groups of rows; DataFileChangedError if a file with some of the rows has changed."""
        pieces = self._begins.searchsorted(rows, "right") - 1
        if len(self._indexes) == 1:
            files = [(0, self._file(0), np.arange(len(rows)))]
        else:
            numbers = self._first.searchsorted(pieces, "right") - 1
            used = np.unique(numbers).tolist()
            files = [(number, self._file(number), np.flatnonzero(numbers == number)) for number in used]
        return _Located(rows, pieces, rows - self._begins[pieces], files)

    def row_name(self, row: int) -> str:
        """Return file and row, for messages."""
        file = int(self.starts.searchsorted(row, "right")) - 1
        return f"{self.maps.files[file].path}, row {row - int(self.starts[file])}"

    def _read(self, rows: Indices, room: Room, by_arrow: Collection[str]) -> dict[str, Any]:
        """Return the columns of rows, all of which are in range.

        Numbers are arrays from ``room``, text and bytes are lists. Columns with nulls, nested columns, and the columns
        ``by_arrow`` are Arrow arrays.

        Raises:
            DataFileError: the data is damaged, too much at once, or text that is not UTF-8.
        """
        names = self.schema.names
        at = self._locate(rows)
        plain = [number for number in self._plain if names[number] not in by_arrow]
        found = (self._from_maps if at.in_place else self._from_pieces)(at, plain, room)
        rest = [number for number in range(len(names)) if number not in found]
        if rest:
            found |= zip(rest, self._take(at, rest).columns, strict=True)
        return {name: found[number] for number, name in enumerate(names)}

    def _from_maps(self, at: _Located, plain: list[int], room: Room) -> dict[int, Any]:
        """Return the columns of ``plain`` that are in mapped files as they are, copied once."""
        found: dict[int, Any] = {}
        for column in plain:
            kind, parts = self._plain[column], []
            for number, file, where in at.files:
                assert isinstance(file, ArrowFile)
                first = int(self._first[number])
                piece = partial(self._batch, first=first)
                spans = file.spans(column, kind, at.pieces[where] - first, at.local[where], piece)
                if spans is not None:
                    parts.append((file, where, *spans))
            if len(parts) < len(at.files):
                continue
            found[column] = out = self._empty(column, len(at.rows), room)
            for file, where, begins, ends in parts:
                if kind.shape is None:
                    view: Any = memoryview(file.data)  # type: ignore[arg-type]
                    places = zip(where.tolist(), begins.tolist(), ends.tolist(), strict=True)
                    self._fill(out, column, view, places, at.rows)
                    continue
                items, flat = file.items(kind.dtype), out.reshape(len(at.rows), kind.width)
                if kind.width < _WIDE:
                    for k in range(kind.width):
                        flat[where, k] = items[begins + k]
                else:
                    for place, begin in zip(where.tolist(), begins.tolist(), strict=True):
                        flat[place] = items[begin : begin + kind.width]
        return found

    def _empty(self, column: int, count: int, room: Room) -> Any:
        """Return what the values of a column are written to: an array of numbers, or a list of texts."""
        kind = self._plain[column]
        if kind.shape is None:
            return [None] * count
        return room(self.schema.names[column], (count, *kind.shape), kind.dtype)

    def _from_pieces(self, at: _Located, plain: list[int], room: Room) -> dict[int, Any]:
        """Return all columns, row group by row group: memory holds only the rows and the cache."""
        plain = [column for column in plain if column not in self._nulls]
        rest = [column for column in range(len(self.schema)) if column not in plain]
        found: dict[int, Any] = {column: self._empty(column, len(at.rows), room) for column in plain}
        parts, places_of = [], dict(groups(at.pieces))
        for number, where in places_of.items():
            piece, local = self._piece(number), at.local[where]
            places, rows = where.tolist(), local.tolist()
            for column in plain:
                view, out, kind = piece.view(column), found[column], self._plain[column]
                if view is None:
                    self._nulls.add(column)
                    return self._from_pieces(at, plain, room)
                if kind.shape is None:
                    begin_of, end_of, data = view
                    spans = zip(places, map(begin_of, rows), map(end_of, rows), strict=True)
                    self._fill(out, column, data, spans, at.rows)
                else:
                    out[where] = view[local]
            if rest:
                parts.append(piece.batch.select(rest).take(as_arrow(local)))
        if rest:
            found |= zip(rest, reordered(parts, [*places_of.values()], self._too_much).columns, strict=True)
        return found

    def _fill(
        self, values: list[Any], column: int, data: Any, spans: Iterable[tuple[int, int, int]], rows: Indices
    ) -> None:
        """Set values at their places to the text or bytes between two offsets."""
        is_text = self._plain[column].is_text
        for place, begin, end in spans:
            try:
                values[place] = str(data[begin:end], "utf-8") if is_text else bytes(data[begin:end])
            except UnicodeDecodeError:
                raise DataFileError(
                    f"{self.row_name(int(rows[place]))}: column {self.schema.names[column]!r} says that it is text, "
                    "and this value is not UTF-8. Write the column anew as bytes (pyarrow.binary()), or decoded by the "
                    "encoding that it is in; or leave it out with columns="
                ) from None

    def _take(self, at: _Located, columns: list[int]) -> pa.RecordBatch:
        """Return columns of rows, gathered by Arrow.

        Consecutive rows of mapped files are sliced. Decoded row groups are processed one by one.
        """
        rows, pieces, local, _ = at
        places_of = dict(groups(pieces))
        if at.in_place:
            held = {piece: self._batch(piece).select(columns) for piece in places_of}
            cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(pieces) != 0)) + 1
            if len(cuts) < _RUNS * len(held) or not all(map(_is_light, held.values())):
                begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
                spans = zip(pieces[begins].tolist(), local[begins].tolist(), (ends - begins).tolist(), strict=True)
                return as_batch([held[piece].slice(begin, count) for piece, begin, count in spans], self._too_much)
        parts = [self._batch(piece).select(columns).take(as_arrow(local[g])) for piece, g in places_of.items()]
        return reordered(parts, [*places_of.values()], self._too_much)

    def _too_much(self, why: str) -> DataFileError:
        return DataFileError(f"{self.maps.in_words()}: {why}")

    def _batch(self, number: int, first: int = 0) -> pa.RecordBatch:
        """Return a record batch or row group, given its number, counted from number ``first`` on."""
        return self._piece(first + number).batch

    def _piece(self, number: int) -> _Piece:
        def make() -> tuple[_Piece, int]:
            file = int(self._first.searchsorted(number, "right")) - 1
            batch, size = self._file(file).piece(number - int(self._first[file]))
            return _Piece(plain_batch(batch)), size

        return self._kept.get(number, make)

    def _file(self, number: int) -> ArrowFile | ParquetFile:
        """Return an open file. If there are very many, only the most recently opened ones stay open."""
        data = self.maps.array(number)
        found = self._open.get(number)
        if found is not None and found.data is data:
            return found
        path, index, places = self.maps.files[number].path, self._indexes[number], self._places[number]
        opened = (
            ParquetFile(path, data, list(self.schema.names))
            if index.kind == "parquet"
            else ArrowFile(path, data, index, places)
        )
        for place, (other, file) in enumerate([*self._open.items()]):
            if place <= len(self._open) - _MOST_OPEN or not self.maps.holds(other, file.data):
                self._open.pop(other, None)  # other threads may open files, too
                if isinstance(file, ArrowFile):
                    self._kept.drop(range(*self._first[other : other + 2].tolist()))  # cached batches refer to its map
        self._open[number] = opened
        return opened


def _is_light(batch: pa.RecordBatch) -> bool:
    """Return whether rows are small enough that copying them twice is cheap."""
    return bool(batch.get_total_buffer_size() <= _LIGHT * batch.num_rows)
