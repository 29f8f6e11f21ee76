"""`JsonFiles`: random access to the rows of JSON-lines files, plain or compressed.

    table = JsonFiles("part-*.jsonl.zst")
    table[0]                                  {"text": "...", "meta": {"source": "web"}}: the object of the first line
    table.records([5, 3, 5])                  several rows, in this order

Promises: memory does not depend on the number of rows. Files are mapped, and so are the indexes of row offsets, which
are built in one pass when a file is first opened, and cached for all processes of the machine. A file that changes
while it is open raises an error before the next read. A pickle is a handle that opens the same files elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from penstock.errors import ConfigError, DataFileError
from penstock.manifest.indices import located
from penstock.manifest.scan import LONGEST, json_array
from penstock.order.permutation import Indices, normalise
from penstock.order.shuffle import groups
from penstock.shards.shard_file import Facts
from penstock.sources.files_source import FilesSource
from penstock.stages import stage
from penstock.storage import Storage, is_remote
from penstock.storage.file_pool import FilePool
from penstock.storage.mapped import MappedFiles
from penstock.storage.names import Urls
from penstock.storage.remote import RemoteSource
from penstock.storage.stream import Range, in_threads, read_ranges
from penstock.storage.urls import shown
from penstock.tables.found_files import FoundFiles, open_parts, table_files
from penstock.tables.frames import decode_frame, stream
from penstock.tables.line_index import TextIndex, find_index_of, make_index_of, open_index
from penstock.tables.lru import LruCache
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "JsonFiles", "check_columns", "first_keys"]

CACHE_BYTES = 32 << 20
_LOOKED_AT = 16
"""Number of leading rows whose keys are taken as the columns of a file."""
_COPIES = 4  # files of a store copied at a time for indexing
_SHOWN = 80

_decode = json.JSONDecoder().decode


class JsonFiles(FilesSource):
    """The rows of concatenated JSON-lines files: one JSON object per line, with any keys.

    Args:
        source: files ending in ``.jsonl``, ``.ndjson`` or ``.json``, or these with ``.zst`` or ``.gz``: paths,
            patterns, braces, ``::``, a list of those, or a folder. Files in a store are copied to the cache when they
            are needed, or read by ranges if it has no room.
        split: the split, for a folder that holds several, by the names of its files.
        columns: the keys of each row, in this order; by default a row is the whole object.
        cache_bytes: memory of each process for decoded frames of compressed files; at least one frame is cached.
        storage: access options, see `penstock.storage.Storage`.
        progress: show a bar while rows are indexed: True, False, or None for large files on a terminal.

    Raises:
        ConfigError: a column that none of the first rows has; the message lists the columns.
        DataFileError: a file that is not JSON lines, damaged or truncated, or no rows at all; on access, a line that is
            not a JSON object, or lacks one of ``columns``. The message names file and line.
        DataFileIOError: a file is missing or unreadable, or the cache cannot be written.
        DataFileChangedError: (on access) a file was truncated or modified since.
        ShardIOError, StorageError: nothing matches a pattern, or a store fails.

    Blank lines are not rows. A byte order mark, ``\\r\\n``, and a last line without a newline are handled.
    Rows may have different keys: without ``columns`` each row is returned with its own.

    The first opening reads every file once, at about 400 MB per CPU second for plain text, 270 for zstd in small
    frames, and 45 for files that are recompressed. It stores 8 bytes per row in the user's cache folder
    (``XDG_CACHE_HOME``). Rows of plain text are read in place. Of compressed local files, the cache stores the text,
    whose rows are read in place as well, until it is half full. Further ones, and files in a store, are read frame by
    frame: zstd files with frames of up to 2 MiB of text (as written by ``pzstd`` and the seekable format) directly,
    other zstd files and gzip from a copy in frames of 128 KiB, about as large as the file.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = path.write_text('{"text": "one", "n": 1}\\n{"text": "two", "n": 2}\\n')
        >>> table = JsonFiles(path)
        >>> table.columns, table[1]
        (['text', 'n'], {'text': 'two', 'n': 2})
    """

    complete = True
    """Whether all files are counted."""

    _columns: list[str] | None

    def __init__(
        self,
        source: Urls | FoundFiles,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
        progress: bool | None = None,
    ) -> None:
        files = table_files(source, split, storage)
        check_columns(columns)
        self._set_up(open_parts(files, storage, as_they_are=is_remote), columns, cache_bytes)
        stored = [number for number in range(len(files)) if number in self.maps.sources]
        in_threads(lambda number: self._index(number, progress), stored, count=_COPIES)
        self.count([len(self._index(number, progress)) for number in range(len(files))])
        keys = self._first_keys()
        for name in columns or ():
            if name not in keys:
                raise ConfigError(
                    f"{self._name(0)}: the first rows have no column {name!r}; there are {', '.join(keys)}: choose "
                    "with columns="
                )
        self._columns = keys if columns is None else list(columns)

    @classmethod
    def uncounted(cls, maps: MappedFiles, columns: Sequence[str] | None, cache_bytes: int) -> Self:
        """Return files for `read` alone; a call of `count` makes them a table."""
        made = cls.__new__(cls)
        made._set_up(maps, columns, cache_bytes)
        return made

    def _set_up(self, maps: MappedFiles, columns: Sequence[str] | None, cache_bytes: int) -> None:
        self.maps: MappedFiles = maps
        self.wanted = None if columns is None else list(columns)
        """The argument ``columns``."""
        self._columns = self.wanted
        self._frames: LruCache[bytes] = LruCache(cache_bytes)
        self._indexes: FilePool[TextIndex] = FilePool()

    def count(self, counts: Sequence[int]) -> None:
        """Set the number of rows of each file.

        Raises:
            DataFileError: there are none.
        """
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        if not len(self):
            raise DataFileError(f"{self.maps.in_words()}: there are no rows, only empty files or blank lines")

    def _index(self, number: int, progress: bool | None = None) -> TextIndex:
        """Return the index of a file, built at first use. Raises as `open_index`."""
        found = self._indexes.find(number)
        if found is None:
            source = self.maps.sources.get(number)
            if source is not None:
                found = find_index_of(source) or make_index_of(source, source.local(progress=progress))
            else:
                file = self.maps.files[number]
                # A file that is written again with its old time is found out by its content: the text may be a copy.
                version = f"{self.maps.version(number)} {self.maps.fingerprint(number)}"
                identity = os.fsencode(f"{os.path.realpath(file.path)} {version}")
                found = open_index(file.path, identity, lambda: self.maps.array(number), progress, as_text=True)
            self._indexes.add(number, found)
        return found

    def _first_keys(self) -> list[str]:
        """Return the keys of the first rows, in their order."""
        rows = self._objects(*located(self.starts, np.arange(min(_LOOKED_AT, len(self)))))
        return list(dict.fromkeys(key for row in rows for key in row))

    # Properties.

    @property
    def urls(self) -> list[str]:
        """The paths and URLs of the files."""
        return [file.path for file in self.maps.files]

    @property
    def columns(self) -> list[str]:
        """The keys that are read: ``columns``, or the keys of the first rows."""
        if self._columns is None:
            self._columns = self._first_keys()
        return self._columns

    def __repr__(self) -> str:
        # Reading the first rows may cost a copy.
        columns = "" if self._columns is None else f"{', '.join(self._columns)}; "
        return f"<JsonFiles of {counted(len(self), 'row')}: {columns}{self.maps.in_words()}>"

    def identity(self, files: int) -> list[str]:
        return ["json", *super().identity(files)]

    def facts(self, shards: Sequence[int]) -> list[Facts]:
        """Return facts of files, to finish an epoch that began before they were counted."""
        counts, sources = np.diff(self.starts).tolist(), self.maps.sources
        versions = [sources[at].fingerprint if at in sources else self.maps.fingerprint(at) for at in shards]
        return [Facts(None, counts[at], version) for at, version in zip(shards, versions, strict=True)]

    def blocks(self) -> tuple[int, int] | None:
        """Return block size and window of a block shuffle that decodes each frame once; None for plain files.

        They are the mean rows of a frame, and the number of frames that fit in half of ``cache_bytes``.
        """
        rows = frames = largest = 0
        for number in range(len(self.maps.files)):
            index = self._index(number)
            if len(index.frames):
                rows, frames = rows + len(index), frames + len(index.frames) - 1
                largest = max(largest, int(np.diff(index.frames[:, 1]).max()))
        return (max(1, -(-rows // frames)), max(1, self._frames.limit // 2 // max(1, largest))) if frames else None

    @property
    def decoded(self) -> int:
        """The number of frames that this process has decoded so far, repetitions included."""
        return self._frames.made

    # Reading.

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """Return the rows at ``indices`` (any order, repeats allowed)."""
        with stage("read"):
            return self.read(*located(self.starts, normalise(indices, len(self))))

    def read(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        """Return rows, in this order, given the file number and the row number within the file of each.

        Raises:
            DataFileError: a line that is not a JSON object, or lacks a column; the message names file and line.
            DataFileChangedError, StorageChangedError: a file has changed.
        """
        found = self._objects(numbers, rows)
        if self.wanted is None:
            return found
        try:
            return [{name: row[name] for name in self.wanted} for row in found]
        except KeyError as error:
            place = next(k for k, row in enumerate(found) if error.args[0] not in row)
            raise DataFileError(
                f"{self._line_name(int(numbers[place]), int(rows[place]))}: no key {error.args[0]!r}; there are "
                f"{', '.join(found[place])}. Leave columns= out, and give load= to read rows that differ"
            ) from None

    def row_name(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        (number,), (inside,) = located(self.starts, np.array([row]))
        return self._line_name(int(number), int(inside))

    def _objects(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        """Return rows with all their keys. Raises as `read`."""
        found: list[Any] = [None] * len(rows)
        for place, text in self._texts(numbers, rows):
            try:
                item = _decode(str(text, "utf-8"))
                why = "" if type(item) is dict else f"expected a JSON object, found {type(item).__name__}"
            except (ValueError, RecursionError) as error:
                why = _why(text, error)
            if why:
                raise DataFileError(f"{self._line_name(int(numbers[place]), int(rows[place]))}: {why}")
            found[place] = item
        return found

    def _texts(self, numbers: Indices, rows: Indices) -> Iterator[tuple[int, bytes]]:
        """Yield the position in ``rows`` and the text of each line, file by file, and frame by frame if compressed."""
        ranges: list[tuple[int, Range]] = []
        for number, places in groups(numbers):
            index, local = self._index(number), rows[places]
            begins, ends = index.rows[local], index.rows[local + 1]
            if len(index.frames):
                yield from self._decoded(number, places, begins, ends)
                continue
            data, spans = self.maps.array(number), zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True)
            if index.copied is not None:
                data = index.copied
            elif isinstance(data, RemoteSource):
                ranges += ((place, Range(data, begin, end)) for place, begin, end in spans)
                continue
            view: Any = memoryview(data)
            for place, begin, end in spans:
                yield place, bytes(view[begin:end])
        ranges.sort(key=lambda one: (one[1].source.url, one[1].begin))
        texts = read_ranges([part for _, part in ranges])
        yield from zip((place for place, _ in ranges), texts, strict=True)

    def _decoded(self, number: int, places: Indices, begins: Indices, ends: Indices) -> Iterator[tuple[int, bytes]]:
        frames = self._index(number).frames[:, 1]
        first, last = frames.searchsorted(begins, "right") - 1, frames.searchsorted(ends, "left") - 1
        for k in np.argsort(first, kind="stable").tolist():
            pieces = [self._frame(number, frame) for frame in range(int(first[k]), int(last[k]) + 1)]
            offset = int(frames[first[k]])
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            yield int(places[k]), whole[int(begins[k]) - offset : int(ends[k]) - offset]

    def _frame(self, number: int, frame: int) -> bytes:
        """Return the text of one frame."""

        def make() -> tuple[bytes, int]:
            index = self._index(number)
            (begin, first), (end, last) = index.frames[frame : frame + 2].tolist()
            name, data = str(index.copy), index.copied
            if data is None:
                name, data = self._name(number), self.maps.array(number)
            piece = data.read_at(begin, end - begin) if isinstance(data, RemoteSource) else data[begin:end]
            text = decode_frame(name, piece, begin, last - first)
            return text, len(text)

        return self._frames.get((number, frame), make)

    def _line_name(self, number: int, row: int) -> str:
        """Return file and line number of a row, for messages. Reads a local file up to that row."""
        name, left, line = self._name(number), int(self._index(number).rows[row]), 1
        data = self.maps.array(number)
        if isinstance(data, RemoteSource):
            return f"{name}, the line at byte {left:,}{' of its text' if len(self._index(number).frames) else ''}"
        for piece in stream(name, data, lambda _: None):
            line += piece.count(b"\n", 0, left)
            left -= len(piece)
            if left <= 0:
                break
        return f"{name}, line {line}"

    def _name(self, number: int) -> str:
        """Return the name of a file, without secrets."""
        return shown(self.maps.files[number].path)


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise ConfigError unless these are valid row keys."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} has to be a list of names")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise ConfigError(f"columns={list(columns)!r}: at least one, and each once")


def first_keys(name: str, storage: Storage | None = None) -> set[str] | None:
    """Return the keys of the first row of a plain JSON-lines file; empty if it is not an object; None without rows.

    Reads only that row; from an object in a store, by a range request.
    """
    source = (storage or Storage()).open(name)
    size, head = 1 << 16, b""
    while True:
        head = source.read_at(0, size)
        lines = head.removeprefix(b"\xef\xbb\xbf").lstrip().splitlines(keepends=True)
        if len(head) < size or (lines and lines[0].endswith(b"\n")):
            break
        if json_array(head) or size > LONGEST:
            return set()
        size *= 8
    if not lines:
        return None
    try:
        found = json.loads(lines[0])
    except (ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, dict) else set()


def _why(text: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error})"
    if not text.endswith(b"\n"):
        return f"not JSON ({error}), and the file ends within this line: it is truncated, or still being written"
    if text.strip() in (b"[", b"{"):
        return "JSON over several lines; JSON lines have one object a line, as `jq -c .[]` writes them"
    return f"not JSON ({error}): {str(text[:_SHOWN], 'utf-8', 'replace')!r}"
