"""`Manifest`: an immutable table of samples over files that stay in place.

    manifest = Manifest.open("train.txt", root="/data/imagenet")
    manifest[0]                                  Record(path='/data/imagenet/a.jpg', label=7, row=0, extra={})
    manifest[-1], manifest[1000:2000:2]          the last record; a view of 500 rows
    manifest.records([5, 3, 5])                  a batch of records, in this order
    manifest.take([5, 3, 5])                     the same as a pyarrow.Table

Promises: opening and reading use no memory per row; all processes of a machine share the pages of the files; a changed
file is detected before the next read; results do not depend on the process that reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

import numpy as np
import xxhash

from penstock.errors import ConfigError, ManifestChangedError, ManifestError, ManifestIOError
from penstock.manifest.formats.base import Context, ParsedPart, Part, format_of, join_root, open_part
from penstock.manifest.indices import Indices, Rows, as_arrow, by_part, to_rows
from penstock.manifest.lines import TooMuch
from penstock.manifest.options import Blank, Columns, Format, Header, make_options
from penstock.storage.names import Urls, expand
from penstock.storage.urls import Name, is_remote, listed, path_of
from penstock.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.storage import Storage

__all__ = ["Manifest", "Record", "combine", "view_fingerprint"]

_BATCH = 1024  # rows per read of __iter__


class Record(NamedTuple):
    """One row of a manifest.

    ``path`` is joined with the manifest's root. ``label`` is an int, a float, a str, a tuple of them, or None.
    ``row`` is the row number in the whole manifest, even in a view. ``extra`` holds the other columns by name.
    """

    path: str
    label: Any
    row: int
    extra: Mapping[str, Any]


_make_record: partial[Record] = partial(tuple.__new__, Record)
"""Return a Record from a tuple of its four fields, in half the time of calling the class."""


class Manifest:
    """A table with a column ``path``, usually a column ``label``, and any others. Create it with `Manifest.open`.

    It is a sequence of `Record`; a slice is a view that shares everything with the whole. Reading is safe from several
    threads, after a fork, and in other processes: a pickle holds the paths, the options and the fingerprint, and the
    other process opens the same files, or raises ManifestChangedError if they differ.

    Every read raises ManifestChangedError for a file that changed since it was opened, and ManifestError, with file,
    line and content, for a row that does not parse. ``manifest[i]`` of a text or JSONL file checks the size each
    time, and the modification time once a millisecond: within that time, a rewrite of the same size may go unnoticed.

    Attributes:
        view: the rows of the whole manifest that this one holds: all, unless it is a view.
        root: the folder or URL that relative paths are joined to.
        storage: the storage options for URLs, as given.
        cache_dir: the folder for indexes, as given; None: beside the sources, or the user's cache.
        parts: the open sources, for tools that need more than a table.
    """

    def __init__(self, parts: Sequence[Part], root: str | None, reopen: dict[str, Any], rows: range | None) -> None:
        """Internal: call `Manifest.open`."""
        self.parts, self._reopen, self.root = tuple(parts), reopen, root
        self.storage: Storage | None = reopen.get("storage")
        self.cache_dir: str | None = reopen.get("cache_dir")
        self._starts = np.cumsum([0, *(part.rows for part in parts)])
        self._whole = range(int(self._starts[-1]))
        self.view = self._whole if rows is None else rows
        self._only = parts[0] if len(parts) == 1 else None
        self._prefix = "" if root is None else os.path.join(root, "")
        names = parts[0].names
        self._has_label = "label" in names
        self._extra_names = [name for name in names if name not in ("path", "label")]

    @classmethod
    def open(
        cls,
        source: Urls,
        *,
        format: Format = "auto",
        root: Name | None = None,
        columns: Columns = None,
        label: str | None = "int",
        cache_dir: Name | None = None,
        header: Header = "auto",
        blank: Blank = "skip",
        comment: str | None = None,
        classes: Sequence[str] | None = None,
        progress: bool | None = None,
        storage: Storage | None = None,
    ) -> Manifest:
        """Open a file, the files that a pattern or braces name, or a sequence of these, as one table.

        Args:
            source: paths, or URLs such as "s3://bucket/train.txt", which are copied to the local cache. The extension
                tells the format: .csv, .tsv, .jsonl, .parquet, .arrow (and a few synonyms); all others are text.
            format: "text", "csv", "tsv", "jsonl", "parquet" or "arrow", instead of the extension's.
            root: joined to the left of relative paths; a folder, or a URL such as "s3://bucket/images".
            columns: column names in file order, with types as in "score:float". For formats with column names: a
                selection of them, or a mapping of names in the manifest to names in the file. Default: "path" and
                "label". "_" is a column to ignore.
            label: type of the label: "int", "float", "str", a list as in "int[3]", or None for no label.
            cache_dir: folder for indexes. Default: beside the source, or the user's cache if that is read-only or full.
            header: whether a CSV file has a header; "auto" looks for the name of the path column.
            blank: "skip" blank lines, or "error".
            comment: the beginning of lines to skip, such as "#".
            classes: class names of the labels: label i is ``classes[i]``.
            progress: show a bar while downloading and indexing: True, False, or None for large files on a terminal.
            storage: options, deadlines and cache for URLs; see `penstock.storage.Storage`.

        The first opening of a file indexes it in one pass, about a second per GB; one process does it while others
        wait. Later openings take milliseconds. CSV, Parquet and compressed Arrow files are converted once, into the
        cache.

        Raises:
            ManifestIOError: missing, a folder, no permission, disk full.
            ManifestError: a binary file, a missing column; a record of CSV that does not parse.
            ConfigError: invalid arguments, or an invalid combination of them.
            StorageError: a remote source that is missing or cannot be reached.
        """
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):
            raise ConfigError(f"classes= takes a list of names, got {classes!r}")
        cache = None if cache_dir is None else path_of(cache_dir)
        if cache is None and cache_dir is not None:
            raise ManifestError(f"cache_dir {cache_dir!r} must be a folder of this machine, not a remote address")
        cache = None if cache is None else os.path.abspath(cache)
        names = expand(source, storage, error=ManifestIOError)
        paths = [name if is_remote(name) else os.path.abspath(name) for name in names]
        where = None if root is None else path_of(root) or os.fspath(root)
        reopen = {
            "source": paths,
            "format": format,
            "root": where,
            "columns": columns,
            "label": label,
            "cache_dir": cache,
            "header": header,
            "blank": blank,
            "comment": comment,
            "classes": None if classes is None else list(classes),
            "storage": storage,
        }
        parts: list[Part] = []
        for path in paths:
            if is_remote(path):
                from penstock.storage import local_path  # for URLs only

                path = local_path(path, storage=storage, progress=progress)
            options = make_options(format_of(path, format), columns, label, header, blank, comment)
            parts.append(open_part(path, options, Context(cache, progress)))
            if len(parts) > 1 and parts[-1].schema != parts[0].schema:
                raise ManifestError(
                    f"{path} has other columns than {paths[0]}: {_describe(parts[-1])}, not {_describe(parts[0])}"
                )
        return cls(parts, where, reopen, None)

    # ------------------------------------------------------------------ properties

    def __len__(self) -> int:
        return len(self.view)

    @property
    def rows(self) -> int:
        """The number of rows (in a view: of the view)."""
        return len(self.view)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files, as absolute paths in order."""
        return tuple(Path(part.path) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of `take`: path, label, then the others."""
        schema: pa.Schema = self.parts[0].schema.remove_metadata()
        return schema

    @property
    def columns(self) -> list[str]:
        """The names in `schema`."""
        return list(self.parts[0].names)

    @property
    def classes(self) -> list[str] | None:
        """The class names of the labels, as given, or None."""
        names = self._reopen.get("classes")
        return None if names is None else list(names)

    def locate(self, row: int) -> tuple[Part, int]:
        """Return the source that holds a row of the whole manifest, and the row's number in it."""
        number = int(np.searchsorted(self._starts, row, "right")) - 1
        return self.parts[number], row - int(self._starts[number])

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the rows, 32 hex digits: a hash of content, row count and options, and the range of a view.

        Paths, root and times are not part of it, so a copy on another machine has the same fingerprint.
        """
        whole = self.whole_fingerprint
        return whole if self.view == self._whole else view_fingerprint(whole, self.view)

    @property
    def whole_fingerprint(self) -> str:
        """The fingerprint of the whole manifest, whose rows `Record.row` counts, even for a view."""
        return combine([part.fingerprint for part in self.parts])

    def prefix_fingerprint(self, rows: int) -> str:
        """Return the fingerprint that this manifest had when it held only its first ``rows`` rows.

        For files that are only appended to. It assumes that the line feed of the last row and the skipped lines after
        it already existed; `is_prefix_of_current` tries the other possibilities, too.

        Raises:
            ManifestError: a view, rows outside ``[0, len]``, or rows that end within a Parquet or Arrow file.
        """
        if rows == len(self):
            return self.fingerprint
        found = self.prefix_fingerprints(rows)
        if not found:
            raise ManifestError(
                f"{self!r} never ended after {counted(rows, 'row')}: only text files can be appended to"
            )
        return found[0]

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a manifest with this fingerprint and number of rows has since grown into this one.

        Reads the file up to that row, at several GB/s.
        """
        if rows == len(self) and fingerprint == self.fingerprint:
            return True
        return 0 <= rows <= len(self) and fingerprint in self.prefix_fingerprints(rows)

    def prefix_fingerprints(self, rows: int) -> list[str]:
        """Return all fingerprints that this manifest may have had when it held ``rows`` rows, likeliest first.

        Empty if those rows end within a Parquet or Arrow file. Reads the file up to that row.

        Raises:
            ManifestError: a view, or rows outside ``[0, len]``.
        """
        if self.view != self._whole:
            raise ManifestError("a view has no prefix; ask the whole manifest")
        if not 0 <= rows <= len(self):
            raise ManifestError(f"rows must be from 0 to {len(self)}, not {rows}")
        return self._prefixes(rows)

    def _prefixes(self, rows: int) -> list[str]:
        start, before, results = 0, list[str](), list[str]()
        for part in self.parts:
            if start <= rows <= start + part.rows:
                results += [combine([*before, last]) for last in part.fingerprints_at(rows - start)]
            start += part.rows
            before.append(part.fingerprint)
        return results

    def reopened(self) -> Manifest:
        """Return the same files in their current state, opened with the same options; for a view, the same range.

        Raises:
            ManifestError: as `open`; or the view exceeds the current number of rows.
        """
        whole = Manifest.open(**self._reopen, progress=False)
        if self.view == self._whole:
            return whole
        if self.view and max(self.view[0], self.view[-1]) >= len(whole):
            raise ManifestError(
                f"{self!r} is a view that exceeds the {counted(len(whole), 'row')} of the current files"
            )
        return whole._view(self.view)

    def check_unchanged(self) -> None:
        """Raise ManifestChangedError if a file was truncated, written to or touched since; costs one fstat a file.

        A file that was *replaced* by a rename does not count as changed: this manifest keeps reading the old one.
        """
        for part in self.parts:
            part.check()

    # ------------------------------------------------------------------ reading

    @overload
    def __getitem__(self, index: SupportsIndex) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Manifest: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Record | Manifest:
        """Return one record, or a view for a slice. Negative indices count from the end; IndexError outside."""
        if isinstance(index, slice):
            return self._view(self.view[index])
        try:
            row = self.view[index]
        except IndexError:
            raise IndexError(f"row {index} is out of range for a manifest of {len(self)} rows") from None
        if self._only is not None:
            values = self._only.one(row)
        else:
            part, local = self.locate(row)
            values = part.one(local)
        path = values[0]
        if self._prefix and path[0] != "/":
            path = join_root(self._prefix, [path])[0]
        label = values[1] if self._has_label else None
        names = self._extra_names
        extra = dict(zip(names, values[-len(names) :], strict=True)) if names else {}
        return _make_record((path, label, row, extra))

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), _BATCH):
            yield from self.records(np.arange(start, min(start + _BATCH, len(self))))

    def records(self, indices: Indices) -> list[Record]:
        """Return the records at ``indices`` (any order, repeats allowed): the fast way to read a batch."""
        rows = self._rows(indices)
        if self._only is not None:
            return self._make_records(self._only.values(rows), rows)
        return self._collect(rows, lambda part, places, local: part.values(local))

    def take(self, indices: Indices) -> pa.Table:
        """Return the rows at ``indices`` as a table with `schema`, in this order.

        Memory: the table; values pass through Python objects, 65,536 rows at a time.

        Raises:
            ManifestError: as every read; also for text that is not UTF-8, which Arrow cannot hold.
        """
        import pyarrow as pa  # imported late: records of text need no Arrow

        rows = self._rows(indices)
        pieces = [(places, part.table(local, self._prefix)) for part, places, local in self._by_part(rows)]
        if not pieces:
            return self.schema.empty_table()
        table = pa.concat_tables([piece for _, piece in pieces])
        if len(pieces) > 1:
            table = table.take(as_arrow(np.argsort(np.concatenate([places for places, _ in pieces]))))
        return table

    def raw(self, indices: Indices) -> pa.LargeBinaryArray:
        """Return the raw text of the rows at ``indices``, without line ends, as a large_binary array.

        Raises:
            ManifestError: as every read; also for files whose rows are stored in columns: CSV, Parquet and Arrow.
        """
        first = self.parts[0]
        if not isinstance(first, ParsedPart):
            raise ManifestError(f"{first.path} has columns and not lines, so it has no raw text; use take")
        return first.raw(self._rows(indices)) if self._only is not None else self.gather(indices).column(0)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a whole column. Memory: the column, about 16 bytes and the text for each row."""
        import pyarrow as pa

        if name not in self.columns:
            raise ManifestError(f"no column {name!r}; there are {', '.join(self.columns)}")
        step = 1 << 18
        chunks = [
            chunk
            for start in range(0, len(self), step)
            for chunk in self.take(range(start, min(start + step, len(self)))).column(name).chunks
        ]
        return pa.chunked_array(chunks, self.schema.field(name).type)

    def gather(self, rows: Indices, most: int | None = None) -> pa.RecordBatch:
        """Return rows in their stored form, in one compact batch that does not refer to the file; see `parse`.

        Text and JSONL: one column ``line`` (large_binary). All others: the table's columns, with paths without root.

        Raises:
            ManifestError: as every read; also if sources of both kinds are combined.
            TooMuch: the rows have more than ``most`` bytes; raised before they are copied. A few rows may exceed it.
        """
        wanted = self._rows(rows)
        if self._only is not None:
            return self._only.gather(wanted, most)
        pieces = []
        for part, places, local in self._by_part(wanted):
            pieces.append((places, part.gather(local, most)))
            if most is not None:
                most -= pieces[-1][1].nbytes
                if most < 0:
                    raise TooMuch
        if not pieces:
            return self.parts[0].gather(wanted)
        if any(piece.schema != pieces[0][1].schema for _, piece in pieces):
            raise ManifestError("sources kept as lines and sources kept as columns cannot be gathered together")

        from penstock.manifest.formats.columns import reordered

        return reordered([piece for _, piece in pieces], [places for places, _ in pieces])

    def parse(self, batch: pa.RecordBatch, rows: Indices) -> list[Record]:
        """Return the records of a batch from `gather`, or of some of its rows; ``rows`` are their indices.

        Reads no file, unless a row does not parse.
        """
        wanted = self._rows(rows)
        if len(wanted) != batch.num_rows:
            raise ConfigError(f"a batch of {batch.num_rows} rows cannot be parsed as {len(wanted)} rows")
        if self._only is not None:
            return self._make_records(self._only.values_of(batch, wanted), wanted)
        return self._collect(wanted, lambda part, places, local: part.values_of(batch.take(as_arrow(places)), local))

    # ------------------------------------------------------------------ rows of views and of several sources

    def _view(self, rows: range) -> Manifest:
        return Manifest(self.parts, self.root, self._reopen, rows)

    def _rows(self, indices: Indices) -> Rows:
        return to_rows(indices, self.view)

    def _by_part(self, rows: Rows) -> Iterator[tuple[Part, Rows, Rows]]:
        """Yield each part that holds some of the rows, with their positions in ``rows`` and row numbers in the part."""
        for number, places, local in by_part(self._starts, rows):
            yield self.parts[number], places, local

    def _collect(self, rows: Rows, read: Callable[[Part, Rows, Rows], list[list[Any]]]) -> list[Record]:
        """Return the records of several parts in the order of ``rows``; ``read`` returns the values of one part."""
        result: dict[int, Record] = {}
        for part, places, local in self._by_part(rows):
            result.update(
                zip(places.tolist(), self._make_records(read(part, places, local), rows[places]), strict=True)
            )
        return [result[place] for place in range(len(rows))]

    def _make_records(self, values: list[list[Any]], rows: Rows) -> list[Record]:
        paths, *others = values
        paths = join_root(self._prefix, paths)
        labels = others.pop(0) if self._has_label else repeat(None)
        names = self._extra_names
        if names:
            extras = [dict(zip(names, row, strict=True)) for row in zip(*others, strict=True)]
        else:
            extras = [{} for _ in paths]
        # Half the time of calling Record.
        return list(map(tuple.__new__, repeat(Record), zip(paths, labels, rows.tolist(), extras, strict=False)))

    def __reduce__(self) -> tuple[Any, ...]:
        view = None if self.view == self._whole else self.view
        return _reopen, (self._reopen, [part.fingerprint for part in self.parts], view)

    def __repr__(self) -> str:
        return f"<Manifest of {counted(len(self), 'row')}: {', '.join(self.columns)}; {listed(self._reopen['source'])}>"


def combine(fingerprints: list[str]) -> str:
    """Return the fingerprint of concatenated sources; a single source keeps its own."""
    return fingerprints[0] if len(fingerprints) == 1 else xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())


def view_fingerprint(whole: str, view: range) -> str:
    """Return the fingerprint of a view of a manifest."""
    return xxhash.xxh3_128_hexdigest(f"{whole}[{view.start}:{view.stop}:{view.step}]".encode())


def _reopen(arguments: dict[str, Any], fingerprints: list[str], view: range | None) -> Manifest:
    manifest = Manifest.open(**arguments, progress=False)
    for part, expected in zip(manifest.parts, fingerprints, strict=True):
        if part.fingerprint != expected:
            raise ManifestChangedError(
                f"{part.path} is not the file that the manifest was opened with: its content has changed"
            )
    return manifest if view is None else manifest._view(view)


def _describe(part: Part) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in part.schema)
