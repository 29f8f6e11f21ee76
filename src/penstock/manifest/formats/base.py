"""`Part`: one open source of a manifest, the interface of formats; and `LinePart`, the part of all line formats.

A new format is one file, and one entry in `FORMATS`. `ParsedPart` is the half that lines of a file share with lines
from elsewhere, such as a server.
"""

from __future__ import annotations

import abc
import json
import os
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import xxhash

from penstock.errors import ConfigError, ManifestError
from penstock.manifest.fields import BadRow, Parser, parse_rows
from penstock.manifest.indices import Rows
from penstock.manifest.lines import LineIndex, texts
from penstock.manifest.options import Options
from penstock.manifest.scan import SURROGATE, LineRules, shorten
from penstock.storage import File
from penstock.storage.urls import scheme

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "EXTENSIONS",
    "FORMATS",
    "Context",
    "LinePart",
    "ParsedPart",
    "Part",
    "format_of",
    "join_root",
    "open_lines",
    "open_part",
    "part_fingerprint",
    "reject",
]

FORMATS = {
    "text": ("text", "open_text"),
    "csv": ("csv", "open_csv"),
    "tsv": ("csv", "open_tsv"),
    "jsonl": ("jsonl", "open_jsonl"),
    "parquet": ("arrow", "open_parquet"),
    "arrow": ("arrow", "open_arrow"),
}
"""The module and function of each format, imported at first use: Parquet takes 60 ms."""

EXTENSIONS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}

_FEW = 3  # up to this many rows, reading one by one is faster
_CHUNK = 1 << 16  # rows parsed at once, so that few Python objects live until they are converted to Arrow


@dataclass(frozen=True)
class Context:
    """Options for opening a source that do not affect its content."""

    cache_dir: str | None = None
    progress: bool | None = None


class Part(abc.ABC):
    """One open source. Row numbers count within it; the caller has checked that they are in ``[0, rows)``.

    Every read first checks that the file is unchanged (`one`: see `LineIndex.one`). All errors are `ManifestError`.

    Attributes:
        schema: the names and types of the columns.
        names: the names alone, without the cost of the schema.
    """

    path: str
    rows: int
    nbytes: int
    fingerprint: str
    schema: pa.Schema
    names: list[str]

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ManifestChangedError if the file has changed."""

    @abc.abstractmethod
    def gather(self, rows: Rows, most: int | None = None) -> pa.RecordBatch:
        """Return rows as they are stored, in a compact copy. TooMuch if they have more than ``most`` bytes."""

    @abc.abstractmethod
    def values_of(self, batch: pa.RecordBatch, rows: Rows) -> list[list[Any]]:
        """Return the same as `values`, from the batch that `gather` returned for these rows."""

    @abc.abstractmethod
    def table(self, rows: Rows, prefix: str) -> pa.Table:
        """Return rows as a table with this schema; ``prefix`` is put before relative paths."""

    def values(self, rows: Rows) -> list[list[Any]]:
        """Return the values of rows, one list for each field of the schema."""
        return self.values_of(self.gather(rows), rows)

    def one(self, row: int) -> list[Any]:
        """Return the values of a row, one for each field of the schema."""
        return [values[0] for values in self.values(np.array([row]))]

    def fingerprints_at(self, rows: int) -> list[str]:
        """Return the fingerprints that this source may have had when it held ``rows`` rows, likeliest first.

        By default a file that cannot be appended to.
        """
        return [self.fingerprint] if rows == self.rows else []


def format_of(path: str, format: str = "auto") -> str:
    """Return the name of the format: as given, or for "auto" by the extension; unknown extensions are text."""
    if format == "auto":
        return EXTENSIONS.get(os.path.splitext(path)[1].lower(), "text")
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; use one of auto, {', '.join(FORMATS)}")
    return format


def open_part(path: str, options: Options, context: Context) -> Part:
    """Open a source in the format of its options."""
    module, function = FORMATS[options.format]
    part: Part = getattr(import_module(f"penstock.manifest.formats.{module}"), function)(path, options, context)
    return part


def part_fingerprint(digest: bytes, rows: int, options: bytes) -> str:
    """Return the identity of a source: a hash of content, row count and options, without path and time."""
    return xxhash.xxh3_128_hexdigest(digest + rows.to_bytes(8, "little") + options)


def join_root(prefix: str, paths: list[str]) -> list[str]:
    """Return paths joined to the root, unless they are absolute or URLs. Parsers guarantee that no path is empty."""
    if not prefix:
        return paths
    return [path if path[0] == "/" or ("://" in path and scheme(path)) else prefix + path for path in paths]


def reject(options: Options, **arguments: object) -> None:
    """Raise ConfigError for arguments, passed as name=default, that this format does not support."""
    for name, default in arguments.items():
        if getattr(options, name) != default:
            raise ConfigError(f"{name}={getattr(options, name)!r} is not supported by the format {options.format!r}")


def open_lines(source: File, parser: Parser, options: Options, context: Context) -> LinePart:
    """Open a source of lines. Its sidecar has the short name if the rules are the usual ones."""
    rules = LineRules(options.blank, options.comment)
    suffix = ".pstk" if rules == LineRules() else f".{rules.digest():016x}.pstk"
    index = LineIndex(source, rules, suffix=suffix, cache_dir=context.cache_dir, progress=context.progress)
    return LinePart(index, parser, options.canonical(header=False))


class ParsedPart(Part):
    """Lines with a parser. Subclasses provide the lines, `raw`, and `_fail`."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.names = [column.name for column in parser.columns]

    @cached_property
    def schema(self) -> pa.Schema:
        """The names and types of the columns."""
        import pyarrow as pa  # imported late: records of lines need no Arrow

        return pa.schema([(c.name, c.arrow_type or pa.string()) for c in self.parser.columns])

    @abc.abstractmethod
    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        """Return the raw text of rows. TooMuch if it has more than ``most`` bytes."""

    @abc.abstractmethod
    def _fail(self, bad: BadRow, row: int) -> NoReturn:
        """Raise the error for a row that does not parse."""

    def values_of(self, batch: pa.RecordBatch, rows: Rows) -> list[list[Any]]:
        return self._parse(texts(batch.column(0)), rows)

    def gather(self, rows: Rows, most: int | None = None) -> pa.RecordBatch:
        import pyarrow as pa

        return pa.RecordBatch.from_arrays([self.raw(rows, most)], ["line"])

    def _parse(self, lines: list[str], rows: Rows) -> list[list[Any]]:
        return parse_rows(self.parser, lines, lambda bad, number: self._fail(bad, int(rows[number])))

    def table(self, rows: Rows, prefix: str) -> pa.Table:
        import pyarrow as pa

        batches = []
        for start in range(0, len(rows), _CHUNK):
            some = rows[start : start + _CHUNK]
            columns = self.values(some)
            columns[0] = join_root(prefix, columns[0])
            arrays = [self._array(*pair, some) for pair in zip(self.schema, columns, strict=True)]
            batches.append(pa.record_batch(arrays, schema=self.schema))
        return pa.Table.from_batches(batches, schema=self.schema)

    def _array(self, field: pa.Field, values: list[Any], rows: Rows) -> pa.Array:
        import pyarrow as pa

        if pa.types.is_string(field.type):  # an untyped column of JSONL may hold anything
            values = [value if value is None or type(value) is str else json.dumps(value) for value in values]
        try:
            return pa.array(values, field.type)
        except UnicodeEncodeError:
            first = next(k for k, value in enumerate(values) if SURROGATE.search(json.dumps(value, ensure_ascii=False)))
            self._fail(BadRow("utf-8", f"{field.name} is not UTF-8"), int(rows[first]))


class LinePart(ParsedPart):
    """A source that stays in place as lines: text and JSONL."""

    def __init__(self, index: LineIndex, parser: Parser, options: bytes) -> None:
        super().__init__(parser)
        self.index, self._options = index, options
        self.path, self.rows, self.nbytes = index.source.path, index.rows, index.source.size
        self.fingerprint = part_fingerprint(index.digest, self.rows, options)
        self._read_one, self._parse_one = index.one, parser.parse_one

    def check(self) -> None:
        self.index.source.check()

    def one(self, row: int) -> list[Any]:
        try:
            return self._parse_one(self._read_one(row))
        except BadRow as bad:
            self._fail(bad, row)

    def values(self, rows: Rows) -> list[list[Any]]:
        if 0 < len(rows) <= _FEW:
            self.index.source.check()
            return list(map(list, zip(*map(self.one, rows.tolist()), strict=True)))
        return self._parse(self.index.text(rows), rows)

    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        return self.index.raw(rows, most)

    def _fail(self, bad: BadRow, row: int) -> NoReturn:
        content = shorten(self.index.raw(np.array([row]))[0].as_py())
        raise ManifestError(f"{self.path}, line {self.index.line(row)}: {bad.reason}: {content}{bad.hint}") from None

    def fingerprints_at(self, rows: int) -> list[str]:
        return [part_fingerprint(digest, rows, self._options) for digest in self.index.digests_at(rows)]
