"""`ListedClips`: a source whose rows are clips listed in a table with path, start time, end time and label."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from penstock.clips.clip_files import ClipRecord, Rule
from penstock.clips.clip_index import ClipIndex
from penstock.clips.packets import Ints
from penstock.errors import ConfigError
from penstock.order.permutation import Indices, normalise
from penstock.storage import is_remote

__all__ = ["ClipTable", "ListedClips"]

_PLACE = ("path", "start", "end")
_AT_A_TIME = 16_384  # rows


class _Rows(Protocol):
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def records(self, rows: Indices) -> list[Any]: ...


class _ArrowRows:
    """Rows in memory."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def fingerprint(self) -> str:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as out:
            out.write_table(self.table)
        return xxhash.xxh3_128_hexdigest(sink.getvalue())

    def records(self, rows: Indices) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table.take(pa.array(rows)).to_pylist()
        return found


class ClipTable:
    """File, start and end time of each row.

    Args:
        rows: a source of dicts, such as `penstock.TableFiles`, or a list of dicts, an Arrow table, or columns by name.
            The column ``path`` is required, ``start`` and ``end`` in seconds are optional. Other columns are the label.
        root: the folder or URL that relative paths refer to.

    Raises:
        ConfigError: no rows, a missing path, or invalid times; the message names the row.

    Memory: 20 bytes per row, and the memory of the source of the rows.

    Attributes:
        paths: the distinct files, in the order of their first row.
    """

    def __init__(self, rows: Any, root: str | os.PathLike[str]) -> None:
        self._rows = _as_rows(rows)
        count = len(self._rows)
        if not count:
            raise ConfigError("clips= has no rows")
        numbers: dict[str, int] = {}
        self._files = np.empty(count, np.int32)
        self._times = np.empty((count, 2))
        base = os.fspath(root)
        for begin in range(0, count, _AT_A_TIME):
            some = self._rows.records(np.arange(begin, min(begin + _AT_A_TIME, count)))
            for row, record in enumerate(some, begin):
                path = _below(base, _path_of(record, row))
                self._files[row] = numbers.setdefault(path, len(numbers))
                self._times[row] = _times_of(record, row)
        self.paths = list(numbers)

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the rows."""
        return self._rows.fingerprint

    def place(self, row: int) -> tuple[int, float, float]:
        """Return the file number of a row, and its start and end time in seconds."""
        start, end = self._times[row].tolist()
        return int(self._files[row]), start, end

    def labels(self, rows: Indices) -> list[Any]:
        """Return the labels of the given rows: ``label`` if it is the only other column; otherwise a dict of
        the other columns, or None without any."""
        found = []
        for record in self._rows.records(rows):
            others = {name: value for name, value in record.items() if name not in _PLACE}
            found.append(others.get("label") if list(others) in ([], ["label"]) else others)
        return found


class ListedClips:
    """The clips of a table.

    Args:
        index: the index of the table's files.
        rule: decides which part of the time from start to end is a clip.
        table: the rows.
    """

    fork_safe = True

    def __init__(self, index: ClipIndex, rule: Rule, table: ClipTable) -> None:
        self.index, self.rule, self.table = index, rule, table

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"<ListedClips of {len(self):,} rows: {len(self.index):,} {self.index.kind.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ListedClips, (self.index, self.rule, self.table)

    @property
    def lengths(self) -> Ints:
        """The number of frames or samples of each row, int64."""
        return np.array([self._clip_range(row)[3] for row in range(len(self))], np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' contents, the rule and the table."""
        digest = xxhash.xxh3_128(f"{self.rule!r} {self.table.fingerprint}".encode())
        for one in self.index.column("digest"):
            digest.update(one)
        return digest.hexdigest()

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether this is the table with this fingerprint; a table that has grown is not."""
        return fingerprint == self.fingerprint and rows == len(self)

    def records(self, rows: Indices) -> list[ClipRecord]:
        """Return the records of the given rows, in this order."""
        numbers = normalise(rows, len(self))
        labels = self.table.labels(numbers)
        return [
            ClipRecord(row, self.index.path_of(file), file, first, last, span, end, label)
            for label, row in zip(labels, numbers.tolist(), strict=True)
            for file, first, last, span, end in [self._clip_range(row)]
        ]

    def _clip_range(self, row: int) -> tuple[int, int, int, int, int]:
        """Return the file, the first and last position where the clip may begin, its length, and its end."""
        file, start, end = self.table.place(row)
        begin, stop = self.rule.window(self.index, file, start, end)
        spans = self.rule.span(self.index, file)
        span = stop - begin if spans is None else spans
        last = max(begin, stop - span) if self.rule.random_start else begin
        return file, begin, last, span, stop


def _as_rows(rows: Any) -> _Rows:
    if isinstance(rows, pa.Table):
        return _ArrowRows(rows)
    if isinstance(rows, Mapping):
        return _in_memory(dict(rows))
    if hasattr(rows, "records") and hasattr(rows, "fingerprint"):
        found: _Rows = rows
        return found
    if isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        if "path" in columns:
            columns["path"] = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in columns["path"]]
        return _in_memory(columns)
    raise ConfigError(
        f"clips= takes a list of dicts, an Arrow table, columns by name, or a source of dicts such as "
        f"penstock.TableFiles(...), not {rows!r}"
    )


def _in_memory(columns: dict[str, Any]) -> _ArrowRows:
    try:
        return _ArrowRows(pa.table(columns))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"clips=: the columns cannot become an Arrow table; each needs one type: {error}") from error


def _path_of(record: Any, row: int) -> str:
    path = record.get("path") if isinstance(record, Mapping) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"clips=: row {row} has no path: {record!r}")
    return path


def _times_of(record: Mapping[str, Any], row: int) -> tuple[float, float]:
    start, end = record.get("start"), record.get("end")
    try:
        times = 0.0 if start is None else float(start), math.inf if end is None else float(end)
    except (TypeError, ValueError):
        times = (math.nan, math.nan)
    if not 0 <= times[0] < times[1]:
        raise ConfigError(f"clips=: row {row} has the times {start!r} to {end!r}: pass seconds, start before end")
    return times


def _below(root: str, path: str) -> str:
    """Return a path relative to the root, or the path itself if it is absolute or a URL."""
    if is_remote(path) or os.path.isabs(path):
        return path
    return f"{root.rstrip('/')}/{path}" if is_remote(root) else os.path.join(root, path)
