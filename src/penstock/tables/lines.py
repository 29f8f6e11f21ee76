"""`LineFiles`: the rows of JSON-lines files, by file and row number.

    lines = LineFiles(open_parts(found, storage, as_they_are=is_remote), columns=None, cache_bytes=32 << 20)
    len(lines.index(3))                     number of rows of a file
    lines.records([3, 3], [0, 17])          two of its rows

A file in a store is copied to the cache when its rows are needed. If the cache has no room, rows are read by concurrent
range requests; from compressed files, the frames that contain them are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataFileError
from penstock.order.permutation import Indices
from penstock.storage.ranges import Range, read_ranges
from penstock.storage.remote import RemoteSource
from penstock.storage.urls import shown
from penstock.tables.frames import decode_frame, stream
from penstock.tables.line_index import LineIndex, open_index
from penstock.tables.line_shard import find_index_of, make_index_of
from penstock.tables.lru import LruCache
from penstock.tables.ranged import TableParts

__all__ = ["LineFiles"]

_SHOWN = 80

_decode = json.JSONDecoder().decode


class LineFiles:
    """JSON-lines files, indexed at first use.

    Args:
        maps: the files.
        columns: the keys of each row; None for all keys of its line.
        cache_bytes: memory for decoded frames of compressed files.
    """

    def __init__(self, maps: TableParts, columns: Sequence[str] | None, cache_bytes: int) -> None:
        self.maps, self.wanted = maps, None if columns is None else list(columns)
        self.kept: LruCache[bytes] = LruCache(cache_bytes)
        self._indexes: dict[int, LineIndex] = {}

    def index(self, number: int, progress: bool | None = None) -> LineIndex:
        """Return the index of a file, built at first use. Raises as `open_index`."""
        found = self._indexes.get(number)
        if found is None:
            found = self._indexes[number] = self._open_index(number, progress)
        return found

    def _open_index(self, number: int, progress: bool | None) -> LineIndex:
        source = self.maps.source(number)
        if source is not None:
            return find_index_of(source) or make_index_of(source, source.local(progress=progress))
        file = self.maps.files[number]
        identity = os.fsencode(f"{os.path.realpath(file.path)} {self.maps.version(number)}")
        return open_index(file.path, identity, lambda: self.maps.array(number), progress)

    def name(self, number: int) -> str:
        """Return the name of a file, without secrets."""
        return shown(self.maps.files[number].path)

    # Reading.

    def records(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        """Return rows, in this order, given the file number and the row number within the file of each.

        Raises:
            DataFileError: a line that is not a JSON object, or lacks a column; the message names file and line.
            DataFileChangedError, StorageChangedError: a file has changed.
        """
        found = self.objects(numbers, rows)
        if self.wanted is None:
            return found
        try:
            return [{name: row[name] for name in self.wanted} for row in found]
        except KeyError as error:
            place = next(k for k, row in enumerate(found) if error.args[0] not in row)
            raise DataFileError(
                f"{self.line_name(int(numbers[place]), int(rows[place]))}: no key {error.args[0]!r}; there are "
                f"{', '.join(found[place])}. Leave columns= out, and give load= to read rows that differ"
            ) from None

    def objects(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        """Return the same rows with all their keys. Raises as `records`."""
        found: list[Any] = [None] * len(rows)
        for place, text in self._texts(numbers, rows):
            try:
                item = _decode(str(text, "utf-8"))
            except (ValueError, RecursionError) as error:
                where = self.line_name(int(numbers[place]), int(rows[place]))
                raise DataFileError(f"{where}: {_why(text, error)}") from None
            if type(item) is not dict:
                where = self.line_name(int(numbers[place]), int(rows[place]))
                raise DataFileError(f"{where}: expected a JSON object, found {type(item).__name__}")
            found[place] = item
        return found

    def _texts(self, numbers: Indices, rows: Indices) -> Iterator[tuple[int, bytes]]:
        """Yield the position in ``rows`` and the text of each line, file by file, and frame by frame if compressed."""
        ranges: list[tuple[int, Range]] = []
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            index, local = self.index(number), rows[places]
            begins, ends = index.rows[local], index.rows[local + 1]
            if len(index.frames):
                yield from self._decoded(number, places, begins, ends)
                continue
            data, spans = self.maps.array(number), zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True)
            if isinstance(data, RemoteSource):
                ranges += ((place, Range(data, begin, end)) for place, begin, end in spans)
                continue
            view: Any = memoryview(data)
            for place, begin, end in spans:
                yield place, bytes(view[begin:end])
        ranges.sort(key=lambda one: (one[1].source.url, one[1].begin))
        texts = read_ranges([part for _, part in ranges])
        yield from zip((place for place, _ in ranges), texts, strict=True)

    def _decoded(
        self, number: int, places: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, bytes]]:
        frames = self.index(number).frames[:, 1]
        first, last = frames.searchsorted(begins, "right") - 1, frames.searchsorted(ends, "left") - 1
        for k in np.argsort(first, kind="stable").tolist():
            pieces = [self._frame(number, frame) for frame in range(int(first[k]), int(last[k]) + 1)]
            offset = int(frames[first[k]])
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            yield int(places[k]), whole[int(begins[k]) - offset : int(ends[k]) - offset]

    def _frame(self, number: int, frame: int) -> bytes:
        """Return the text of one frame."""

        def make() -> tuple[bytes, int]:
            index = self.index(number)
            (begin, first), (end, last) = index.frames[frame : frame + 2].tolist()
            name, data = self.name(number), None
            if index.copy is not None:
                name, data = str(index.copy), index.copied()
            else:
                data = self.maps.array(number)
            piece = data.read_at(begin, end - begin) if isinstance(data, RemoteSource) else data[begin:end]
            text = decode_frame(name, piece, begin, last - first)
            return text, len(text)

        return self.kept.get((number, frame), make)

    def line_name(self, number: int, row: int) -> str:
        """Return file and line number of a row, for messages. Reads a local file up to that row."""
        name, left, line = self.name(number), int(self.index(number).rows[row]), 1
        data = self.maps.array(number)
        if isinstance(data, RemoteSource):
            return f"{name}, the line at byte {left:,}{' of its text' if len(self.index(number).frames) else ''}"
        for piece in stream(name, data, lambda _: None):
            line += piece.count(b"\n", 0, left)
            left -= len(piece)
            if left <= 0:
                break
        return f"{name}, line {line}"

    # Pickling.

    def __getstate__(self) -> dict[str, Any]:
        return {"maps": self.maps, "wanted": self.wanted, "cache_bytes": self.kept.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["maps"], state["wanted"], state["cache_bytes"])  # type: ignore[misc]


def _why(text: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error})"
    if not text.endswith(b"\n"):
        return f"not JSON ({error}), and the file ends within this line: it is truncated, or still being written"
    if text.strip() in (b"[", b"{"):
        return "JSON over several lines; JSON lines have one object a line, as `jq -c .[]` writes them"
    return f"not JSON ({error}): {str(text[:_SHOWN], 'utf-8', 'replace')!r}"
