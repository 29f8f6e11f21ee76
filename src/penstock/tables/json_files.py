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
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.shards.counted_source import CountedSource
from penstock.shards.stored import StoredShard
from penstock.shards.urls import Urls
from penstock.stages import stage
from penstock.storage import Storage, is_remote
from penstock.storage.mapped import FilesTable
from penstock.storage.parallel_requests import in_threads
from penstock.tables.files import Found, table_files
from penstock.tables.lines import LineFiles
from penstock.tables.ranged import TableParts, open_parts
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "JsonFiles", "check_columns", "first_keys"]

CACHE_BYTES = 32 << 20
_LOOKED_AT = 16
"""Rows whose keys are the columns of a file."""
_COPIES = 4  # files in a store that are copied at a time, to be indexed


class JsonFiles(CountedSource, FilesTable):
    """The rows of JSON lines, one file after the other: one JSON object a line, with any keys.

    Args:
        source: files ending in ``.jsonl``, ``.ndjson`` or ``.json``, or these with ``.zst`` or ``.gz``: paths,
            patterns, braces, ``::``, a list of those, or a folder. Those in a store are copied into the cache
            when they are needed, or read by ranges where it has no room.
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

    _columns: list[str] | None

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
        check_columns(columns)
        self._open(table_files(source, split, storage), columns, cache_bytes, storage, progress)

    @classmethod
    def of(
        cls,
        files: Sequence[Found],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        storage: Storage | None = None,
    ) -> Self:
        """Return the rows of files that were found by `table_files`; arguments are those of the class."""
        check_columns(columns)
        made = cls.__new__(cls)
        made._open(files, columns, cache_bytes, storage, None)
        return made

    @classmethod
    def counted(cls, lines: LineFiles, counts: Sequence[int]) -> Self:
        """Return the rows of files that were counted, so many in each."""
        made = cls.__new__(cls)
        made._set_up(lines, counts)
        return made

    def _open(
        self,
        files: Sequence[Found],
        columns: Sequence[str] | None,
        cache_bytes: int,
        storage: Storage | None,
        progress: bool | None,
    ) -> None:
        lines = LineFiles(open_parts(files, storage, as_they_are=is_remote), columns, cache_bytes)
        stored = [number for number in range(len(files)) if lines.maps.source(number) is not None]
        in_threads(lambda number: lines.index(number, progress), stored, count=_COPIES)
        self._set_up(lines, [len(lines.index(number, progress)) for number in range(len(files))])
        keys = self._first_keys()
        for name in columns or ():
            if name not in keys:
                raise ConfigError(
                    f"{lines.name(0)}: the first rows have no column {name!r}; there are {', '.join(keys)}: choose "
                    "with columns="
                )
        self._columns = keys if columns is None else list(columns)

    def _set_up(self, lines: LineFiles, counts: Sequence[int]) -> None:
        self._lines = lines
        self.maps: TableParts = lines.maps
        self.urls = [file.path for file in self.maps.files]
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        self._columns = lines.wanted
        if not len(self):
            raise DataFileError(f"{self.maps.in_words()}: there are no rows, only empty files or blank lines")

    def _first_keys(self) -> list[str]:
        """The keys of the first rows, in their order there."""
        rows = self._lines.objects(*self._places(np.arange(min(_LOOKED_AT, len(self)))))
        return list(dict.fromkeys(key for row in rows for key in row))

    # What it is.

    @property
    def columns(self) -> list[str]:
        """The keys that are read: ``columns``, or those of the first rows."""
        if self._columns is None:
            self._columns = self._first_keys()
        return self._columns

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        columns = "" if self._columns is None else f"{', '.join(self._columns)}; "  # reading them may cost a copy
        return f"<JsonFiles of {counted(len(self), 'row')}: {columns}{self.maps.in_words()}>"

    def stored(self) -> list[StoredShard]:
        """Return the files in a store, for look-ahead."""
        return self.maps.stored()

    def prefixes(self, rows: int) -> list[str]:
        return [self._combined(end) for end in np.flatnonzero(self.starts == rows).tolist()]

    def _combined(self, files: int) -> str:
        prints = [self.maps.fingerprint(number) for number in range(files)]
        return xxhash.xxh3_128_hexdigest(f"json {' '.join(prints)}".encode())

    def blocks(self) -> tuple[int, int] | None:
        """Block size and window of a block shuffle that decodes a frame once: rows of a frame, on the average, and how
        many such fit into half of ``cache_bytes``. None of plain files."""
        indexes = [self._lines.index(number) for number in range(len(self.maps.files))]
        frames = [index.frames for index in indexes if len(index.frames)]
        count = sum(len(its) - 1 for its in frames)
        if not count:
            return None
        largest = max(int(np.diff(its[:, 1]).max()) for its in frames)
        rows = sum(len(index) for index in indexes if len(index.frames))
        return max(1, -(-rows // count)), max(1, self._lines.kept.limit // 2 // max(1, largest))

    @property
    def decoded(self) -> int:
        """How many frames of compressed text this process has decoded so far, some of them again and again."""
        return self._lines.kept.made

    # Reading.

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """One row. IndexError outside, negative indices count from the end."""
        return self.records([operator.index(index)])[0]

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """The rows at several indices (any order, repeats allowed)."""
        with stage("read"):
            return self._read(*self._places(normalise(indices, len(self))))

    def _read(self, numbers: Indices, rows: Indices) -> list[dict[str, Any]]:
        return self._lines.records(numbers, rows)

    def _places(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the files of rows, and their rows there."""
        numbers = self.starts.searchsorted(rows, "right") - 1
        return numbers, rows - self.starts[numbers]


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise ConfigError unless these can be the keys of rows."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} has to be a list of names")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise ConfigError(f"columns={list(columns)!r}: at least one, and each once")


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
