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
import operator
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

import numpy as np

from penstock.errors import ConfigError, DataFileError
from penstock.manifest.scan import LONGEST, json_array
from penstock.order.permutation import Indices, normalise
from penstock.shards.shard_file import Facts
from penstock.sources.files_source import FilesSource
from penstock.stages import stage
from penstock.storage import Storage, is_remote
from penstock.storage.names import Urls
from penstock.storage.parallel_requests import in_threads
from penstock.tables.files import Found, table_files
from penstock.tables.lines import LineFiles
from penstock.tables.ranged import TableParts, open_parts
from penstock.wording import counted

__all__ = ["CACHE_BYTES", "JsonFiles", "check_columns", "first_keys"]

CACHE_BYTES = 32 << 20
_LOOKED_AT = 16
"""Number of leading rows whose keys are taken as the columns of a file."""
_COPIES = 4  # files of a store copied at a time for indexing


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
    (``XDG_CACHE_HOME``). Rows of plain text are read in place. zstd files with frames of up to 2 MiB of text (as
    written by ``pzstd`` and the seekable format) are used directly. For other zstd files and gzip, the cache stores a
    copy in frames of 128 KiB, about as large as the file. Reading a row then decodes its frame.

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
        """Return the rows of files from `table_files`; arguments as for the class."""
        check_columns(columns)
        made = cls.__new__(cls)
        made._open(files, columns, cache_bytes, storage, None)
        return made

    @classmethod
    def counted(cls, lines: LineFiles, counts: Sequence[int]) -> Self:
        """Return the rows of counted files, given the count of each."""
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
        """Return the keys of the first rows, in their order."""
        rows = self._lines.objects(*self._places(np.arange(min(_LOOKED_AT, len(self)))))
        return list(dict.fromkeys(key for row in rows for key in row))

    # Properties.

    @property
    def columns(self) -> list[str]:
        """The keys that are read: ``columns``, or the keys of the first rows."""
        if self._columns is None:
            self._columns = self._first_keys()
        return self._columns

    def __repr__(self) -> str:
        columns = (
            "" if self._columns is None else f"{', '.join(self._columns)}; "
        )  # reading the first rows may cost a copy
        return f"<JsonFiles of {counted(len(self), 'row')}: {columns}{self.maps.in_words()}>"

    def identity(self, files: int) -> list[str]:
        return ["json", *super().identity(files)]

    def facts(self, shards: Sequence[int]) -> list[Facts]:
        """Return facts of files, to finish an epoch that began before they were counted."""
        found, counts = [], np.diff(self.starts).tolist()
        for number in shards:
            source = self.maps.source(number)
            version = self.maps.fingerprint(number) if source is None else source.fingerprint
            found.append(Facts(None, counts[number], version))
        return found

    def blocks(self) -> tuple[int, int] | None:
        """Return block size and window of a block shuffle that decodes each frame once; None for plain files.

        They are the mean rows of a frame, and the number of frames that fit in half of ``cache_bytes``.
        """
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
        """The number of frames that this process has decoded so far, repetitions included."""
        return self._lines.kept.made

    # Reading.

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return one row. Negative indices count from the end; IndexError outside."""
        return self.records([operator.index(index)])[0]

    def records(self, indices: Any) -> list[dict[str, Any]]:
        """Return the rows at ``indices`` (any order, repeats allowed)."""
        with stage("read"):
            return self._lines.records(*self._places(normalise(indices, len(self))))

    def row_name(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        (number,), (inside,) = self._places(np.array([row]))
        return self._lines.line_name(int(number), int(inside))

    def _places(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the file of each row, and its row number there."""
        numbers = self.starts.searchsorted(rows, "right") - 1
        return numbers, rows - self.starts[numbers]


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
