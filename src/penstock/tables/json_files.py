"""`JsonFiles`: the rows of JSON lines by their numbers, plain or compressed, without an order of their own.

    table = JsonFiles("part-*.jsonl.zst")
    table[0]                                  {"text": "...", "meta": {"source": "web"}}: the object of that line
    table.records([5, 3, 5])                  some, in this order

Promises: memory does not depend on the rows. Files are mapped, and so are the indexes of where rows begin, which are
made in one pass when a file is first opened, and kept in the cache for all processes of the machine. A file that
changes while it is open is an error before the next read. A pickle is a handle, which opens the same files elsewhere.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import normalise
from penstock.shards.urls import Urls
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.mapped import FilesTable, MappedFiles
from penstock.tables.files import table_files
from penstock.tables.frames import decode_frame, stream
from penstock.tables.kept import Kept
from penstock.tables.line_index import LineIndex, open_index
from penstock.tables.ranged import look_at_all
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "JsonFiles", "first_keys"]

CACHE_BYTES = 32 << 20
_LOOKED_AT = 16
"""Rows whose keys are the columns of a file."""
_SHOWN = 80

_decode = json.JSONDecoder().decode


class JsonFiles(FilesTable):
    """The rows of JSON lines, one file after the other: one JSON object a line, with any keys.

    Args:
        source: files ending in ``.jsonl``, ``.ndjson`` or ``.json``, or these with ``.zst`` or ``.gz``: paths,
            patterns, braces, ``::``, a list of those, or a folder. Objects in a store are copied into the local cache.
        split: of a folder that holds several, by the names of its files.
        columns: the keys that each row has then, in this order; by default a row is the object as it is.
        cache_bytes: memory of each process for frames of compressed files that are decoded. At least one is kept.
        storage: how a store is reached, see `penstock.storage.Storage`.
        progress: show a bar while rows are indexed: True, False, or None for large files on a terminal.

    Raises:
        ConfigError: a column that none of the first rows has; the message says which there are.
        DataFileError: a file that is no JSON lines, damaged or truncated, or there are no rows; and on access a line
            that is no JSON object, or lacks one of ``columns``. The message names file and line.
        DataFileIOError: a file that is missing or that nobody may read; the cache cannot be written to.
        DataFileChangedError: (on access) a file that was truncated or written to since.
        ShardIOError, StorageError: nothing matches a pattern; a store says no.

    Blank lines are no rows. A byte order mark, ``\\r\\n``, and a last line without its end are read as one expects.
    Rows may have other keys than those before: without ``columns`` each row has its own.

    The first opening reads every file once: some 400 MB a second of the processor of plain text, 270 of zstd in small
    frames, and 45 of what is copied. It keeps 8 bytes a row in the user's cache folder (``XDG_CACHE_HOME``). Rows of
    plain text are read in place. zstd files in frames of up to 2 MiB of text (as ``pzstd`` and the seekable format
    write them) are used as they are. Of others, and of gzip, the cache keeps a copy in frames of 128 KiB, about as
    large as the file. A row then costs the decoding of its frame.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = path.write_text('{"text": "one", "n": 1}\\n{"text": "two", "n": 2}\\n')
        >>> table = JsonFiles(path)
        >>> table.columns, table[1]
        (['text', 'n'], {'text': 'two', 'n': 2})
    """

    def __init__(
        self,
        source: Urls,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
        progress: bool | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} has to be a list of names")
        names = [name for name, _ in table_files(source, split, storage)]
        self.maps = MappedFiles(look_at_all(names, storage))
        self._wanted = None if columns is None else list(columns)
        self._kept: Kept[bytes] = Kept(cache_bytes)
        self._set_up(progress)
        if not len(self):
            raise DataFileError(f"{self.maps.in_words()}: there are no rows, only empty files or blank lines")
        keys = self._first_keys()
        if self._wanted is not None:
            self._check_wanted(self._wanted, keys)
        self.columns = keys if self._wanted is None else self._wanted
        """The keys that are read: `columns`, or those of the first rows."""

    def _set_up(self, progress: bool | None = None) -> None:
        self._indexes: dict[int, LineIndex] = {}
        counts = [len(self._index(number, progress)) for number in range(len(self.maps.files))]
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        """First row of each file, and the number of all."""

    def _index(self, number: int, progress: bool | None = None) -> LineIndex:
        found = self._indexes.get(number)
        if found is None:
            file = self.maps.files[number]
            found = self._indexes[number] = open_index(file, self.maps.array(number), progress)
        return found

    def _first_keys(self) -> list[str]:
        """The keys of the first rows, in their order there."""
        rows = self._objects(np.arange(min(_LOOKED_AT, len(self))))
        return list(dict.fromkeys(key for row in rows for key in row))

    def _check_wanted(self, wanted: list[str], keys: list[str]) -> None:
        if not wanted or len(set(wanted)) < len(wanted):
            raise ConfigError(f"columns={wanted!r}: at least one, and each once")
        for name in wanted:
            if name not in keys:
                raise ConfigError(
                    f"{self.maps.files[0].path}: the first rows have no column {name!r}; there are {', '.join(keys)}: "
                    "choose with columns="
                )

    # What it is.

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"<JsonFiles of {counted(len(self), 'row')}: {', '.join(self.columns)}; {self.maps.in_words()}>"

    def prefixes(self, rows: int) -> list[str]:
        return [self._combined(end) for end in np.flatnonzero(self.starts == rows).tolist()]

    def _combined(self, files: int) -> str:
        prints = [self.maps.fingerprint(number) for number in range(files)]
        return xxhash.xxh3_128_hexdigest(f"json {' '.join(prints)}".encode())

    def blocks(self) -> tuple[int, int] | None:
        """Block size and window of a block shuffle that decodes a frame once: rows of a frame, on the average, and how
        many such fit into half of ``cache_bytes``. None of plain files."""
        indexes = [self._index(number) for number in range(len(self.maps.files))]
        frames = [index.frames for index in indexes if len(index.frames)]
        count = sum(len(its) - 1 for its in frames)
        if not count:
            return None
        largest = max(int(np.diff(its[:, 1]).max()) for its in frames)
        rows = sum(len(index) for index in indexes if len(index.frames))
        return max(1, -(-rows // count)), max(1, self._kept.limit // 2 // max(1, largest))

    @property
    def decoded(self) -> int:
        """How many frames of compressed text this process has decoded so far, some of them again and again."""
        return self._kept.made

    # Reading.

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """One row. IndexError outside, negative indices count from the end."""
        return self.records([operator.index(index)])[0]

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """The rows at several indices (any order, repeats allowed)."""
        rows = normalise(indices, len(self))
        with stage("read"):
            found = self._objects(rows)
        if self._wanted is None:
            return found
        try:
            return [{name: row[name] for name in self._wanted} for row in found]
        except KeyError as error:
            place = next(k for k, row in enumerate(found) if error.args[0] not in row)
            raise DataFileError(
                f"{self._name(int(rows[place]))}: no key {error.args[0]!r}; there are {', '.join(found[place])}. Leave "
                "columns= out, and give load= to read rows that differ"
            ) from None

    def _objects(self, rows: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        found: list[Any] = [None] * len(rows)
        for place, text in self._texts(rows):
            try:
                item = _decode(str(text, "utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataFileError(f"{self._name(int(rows[place]))}: {self._why(text, error)}") from None
            if type(item) is not dict:
                raise DataFileError(
                    f"{self._name(int(rows[place]))}: expected a JSON object, found {type(item).__name__}"
                )
            found[place] = item
        return found

    def _why(self, text: bytes, error: Exception) -> str:
        if isinstance(error, UnicodeDecodeError):
            return f"not UTF-8 ({error})"
        if not text.endswith(b"\n"):
            return f"not JSON ({error}), and the file ends within this line: it is truncated, or still being written"
        if text.strip() in (b"[", b"{"):
            return "JSON over several lines; JSON lines have one object a line, as `jq -c .[]` writes them"
        return f"not JSON ({error}): {str(text[:_SHOWN], 'utf-8', 'replace')!r}"

    def _texts(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        """Yield each place among ``rows`` with the line there, file by file, and within compressed ones frame by
        frame."""
        numbers = self.starts.searchsorted(rows, "right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            index, local = self._index(number), rows[places] - self.starts[number]
            data = self.maps.array(number)
            begins, ends = index.rows[local], index.rows[local + 1]
            if len(index.frames):
                yield from self._decoded(number, places, begins, ends)
                continue
            view: Any = memoryview(data)  # type: ignore[arg-type]
            for place, begin, end in zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True):
                yield place, bytes(view[begin:end])

    def _decoded(
        self, number: int, places: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, bytes]]:
        frames = self._index(number).frames[:, 1]
        first, last = frames.searchsorted(begins, "right") - 1, frames.searchsorted(ends, "left") - 1
        for k in np.argsort(first, kind="stable").tolist():
            pieces = [self._frame(number, frame) for frame in range(int(first[k]), int(last[k]) + 1)]
            offset = int(frames[first[k]])
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            yield int(places[k]), whole[int(begins[k]) - offset : int(ends[k]) - offset]

    def _frame(self, number: int, frame: int) -> bytes:
        """The text of one frame."""

        def make() -> tuple[bytes, int]:
            index = self._index(number)
            (begin, first), (end, last) = index.frames[frame : frame + 2].tolist()
            path, data = self.maps.files[number].path, self.maps.array(number)
            if index.copy is not None:
                path, data = str(index.copy), index.copied()
            text = decode_frame(path, data, begin, end, last - first)
            return text, len(text)

        return self._kept.get((number, frame), make)

    def _name(self, row: int) -> str:
        """The file and line of a row. Reads the file up to there: for messages."""
        number = int(self.starts.searchsorted(row, "right")) - 1
        path, left = self.maps.files[number].path, int(self._index(number).rows[row - int(self.starts[number])])
        line = 1
        for piece in stream(path, self.maps.array(number), lambda _: None):
            line += piece.count(b"\n", 0, left)
            left -= len(piece)
            if left <= 0:
                break
        return f"{path}, line {line}"

    # Travelling.

    def __getstate__(self) -> dict[str, Any]:
        return {
            "maps": self.maps,
            "columns": self.columns,
            "_wanted": self._wanted,
            "cache_bytes": self._kept.limit,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kept = Kept(state.pop("cache_bytes"))
        self.__dict__.update(state)
        self._set_up()


def first_keys(name: str, storage: Storage | None = None) -> set[str] | None:
    """Return the keys of the first row of a plain file of JSON lines, none if it is no object; None if there is no row.

    Reads no more than that row, of an object in a store by a range.
    """
    source = (storage or Storage()).open(name)
    size, head = 1 << 16, b""
    while True:
        head = source.read_at(0, size)
        lines = head.removeprefix(b"\xef\xbb\xbf").lstrip().splitlines(keepends=True)
        if len(head) < size or (lines and lines[0].endswith(b"\n")):
            break
        size *= 8
    if not lines:
        return None
    try:
        found = json.loads(lines[0])
    except (ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, dict) else set()
