"""CSV and TSV, with or without a header: converted once to an Arrow file in the cache, as Parquet is.

Records are those of Python's csv module, whose quoted fields may hold line feeds. A quote that is never closed is an
error.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import pyarrow as pa

from penstock.errors import ConfigError, ManifestError
from penstock.manifest.fields import BadRow, convert, convert_all, floats, parse_rows
from penstock.manifest.formats.arrow import ArrowPart, convert_batches
from penstock.manifest.formats.base import Context
from penstock.manifest.options import Blank, Column, Options, places_of
from penstock.manifest.scan import BOM, check_is_text, shorten
from penstock.storage import File

__all__ = ["is_number", "open_csv", "open_tsv", "read_records"]

_LONGEST = 16 << 20  # bytes of a line
_ROWS = 1 << 10  # records converted at once: their Python objects fit into the CPU's cache
_FIRST = 16  # so many records are compared with the first one, to find a header
_NAME = re.compile(r"[^\W\d]+(?:[ -][^\W\d]+)*")
# Names of a column of paths, without the signs between their words: "filename", "image_id", "Image File URL".
_PATHS = re.compile(r"(?=.)((audio|clip|image|img|photo|picture|sample|video)s?)?((file|id|key|name|path|uri|url)s?)*")

Record = tuple[int, list[str]]
"""The number of the line on which a record begins, and its fields."""


def read_records(source: File, delimiter: str, blank: Blank = "skip", comment: str | None = None) -> Iterator[Record]:
    """Yield the records of a file, header included. Bytes that are not UTF-8 become surrogates, as in `os.fsdecode`.

    Args:
        source: the file.
        delimiter: between two fields.
        blank: "skip" blank lines between records, or "error".
        comment: the beginning of lines between records to skip.

    Raises:
        ManifestError: a quote that is never closed, a very long field or line, or a blank line if these are errors.
        ManifestChangedError: another file has the name of the source.

    Memory: the longest record.
    """
    begin, first = 0, ""  # of the record that is being read: the number of its first line, and that line; 0 between two

    def lines() -> Iterator[str]:
        nonlocal begin, first
        # Only a line feed ends a line: carriage returns in quoted fields stay as they are.
        for number, data in enumerate(iter(partial(file.readline, _LONGEST), b""), 1):
            if len(data) == _LONGEST:
                raise ManifestError(
                    f"{source.path}, line {number}: longer than {_LONGEST >> 20} MiB, the limit of a line"
                )
            line = (data if number > 1 else data.removeprefix(BOM)).decode("utf-8", "surrogateescape")
            if not begin:
                if comment and line.startswith(comment):
                    continue
                if not line.strip("\r\n"):
                    if blank == "error":
                        raise ManifestError(
                            f"{source.path}, line {number}: blank line; blank='skip' ignores such lines"
                        )
                    continue
                begin, first = number, line
            yield line
        if begin:
            raise ManifestError(
                f"{source.path}, line {begin}: a quoted field in the record that starts here is never closed: "
                f"{shorten(first)}"
            )

    with open(source.path, "rb") as file:
        if not source.is_same(file.fileno()):
            raise source.changed(os.fstat(file.fileno()).st_size)
        try:
            for fields in csv.reader(lines(), delimiter=delimiter):
                yield begin, fields
                begin = 0
        except csv.Error as error:
            # Its other message names the limit of a field, which csv.field_size_limit sets.
            reason = "a carriage return in an unquoted field" if "new-line" in str(error) else str(error)
            raise ManifestError(f"{source.path}, line {begin}: {reason}: {shorten(first)}") from None


class _Parser:
    """Selects the columns of records of ``count`` fields, each at its place.

    A column of several values spans as many fields, or is one field of values separated by spaces.
    """

    def __init__(self, columns: tuple[Column, ...], places: list[slice], count: int, delimiter: str) -> None:
        self.columns, self._places = columns, list(zip(columns, places, strict=True))
        self._count, self._delimiter = count, delimiter

    def parse(self, records: list[Record]) -> list[list[Any]]:
        found = [fields for _, fields in records]
        if set(map(len, found)) != {self._count}:
            hint = "; name all of them with columns=, with '_' for fields to ignore"
            hint = hint if self._count == len(self._places) else ""
            raise BadRow("fields", f"expected {self._count} fields, found {len(found[0])}{hint}")
        columns = convert_all(self._places, list(zip(*found, strict=True)), self._delimiter, _values)
        if "" in columns[0]:
            raise BadRow("path", "the path is empty")
        return columns

    def parse_one(self, record: Record) -> list[Any]:
        return [values[0] for values in self.parse([record])]


def _values(column: Column, fields: Sequence[Sequence[str]]) -> Sequence[Any]:
    if column.kind not in ("str", "any"):
        fields = [[cell.strip(" \t") for cell in cells] for cells in fields]
    if column.width and len(fields) == 1:
        lists = [cell.split() for cell in fields[0]]
        if any(len(cells) != column.width for cells in lists):
            raise ValueError(f"not {column.width} values separated by spaces")
        fields = list(zip(*lists, strict=True))
    return convert(column, fields)


def _is_header(first: list[list[str]], columns: tuple[Column, ...], places: list[slice], count: int) -> bool:
    """Return whether the first record holds names of columns, where its name for the paths is unknown.

    It has no number and no path of several parts. Its name for the paths is a usual one, or the next records have
    numbers where it has names, or paths with endings.
    """
    head, *rows = first
    rows = [row for row in rows if len(row) == len(head)]
    if any(is_number(text) or "/" in text or "\\" in text for text in head):
        return False
    place = places[0].start
    # With another number of fields no record is a sample, so any of them may show that it is a header.
    candidates = head[place : place + 1] if len(head) == count else head
    if any(_PATHS.fullmatch(re.sub(r"[\W_]", "", text.lower())) for text in candidates):
        return True
    numeric = [its for column, its in zip(columns, places, strict=True) if column.kind in ("int", "float")]
    numbers = [k for its in numeric for k in range(count)[its]]
    if len(head) != count or not rows or not all(_NAME.fullmatch(head[k]) for k in [place, *numbers]):
        return False
    if numbers and all(is_number(row[k]) for row in rows for k in numbers):
        return True
    return all(os.path.splitext(row[place])[1] for row in rows)


def is_number(text: str) -> bool:
    """Return whether a field is a number."""
    try:
        return bool(floats([text.strip(" \t")]))
    except ValueError:
        return False


def _open(delimiter: str, path: str, options: Options, context: Context) -> ArrowPart:
    if options.named and options.header is False:
        raise ConfigError("columns: a mapping chooses by name, which header=False rules out; give a list in file order")
    source = File(path)
    check_is_text(source)
    wanted, header = options.wanted, options.header
    how = delimiter, options.blank, options.comment
    first = [fields for _, fields in islice(read_records(source, *how), _FIRST + 1)]
    head = first[0] if first else []
    if header == "auto":
        header = bool(head) and (options.named or wanted[0].source in head)
    if header and head:
        for column in wanted:
            if head.count(column.source) != 1:
                problem = "no column" if column.source not in head else "more than one column"
                raise ManifestError(
                    f"{path} has {problem} {column.source!r}; its header is {shorten(','.join(head))}. Choose with "
                    "columns={'path': ..., 'label': ...}, leave the label out with label=None, or pass header=False"
                )
        found = [head.index(column.source) for column in wanted]
        places, count = [slice(k, k + 1) for k in found], len(head)
    else:
        by_name, count = places_of(options.columns), sum(column.fields for column in options.columns)
        places = [by_name[column.name] for column in wanted]
        if options.header == "auto" and first and _is_header(first, wanted, places, count):
            raise ManifestError(
                f"{path}: its first record {shorten(delimiter.join(head))} looks like a header. Choose its "
                "columns with header=True, columns={'path': ..., 'label': ...}; if it is a sample, pass header=False"
            )
    schema = pa.schema([(column.name, column.arrow_type or pa.string()) for column in wanted])
    parser = _Parser(wanted, places, count, delimiter)

    def fail(bad: BadRow, line: int, fields: list[str]) -> NoReturn:
        content = shorten(delimiter.join(fields))
        raise ManifestError(f"{path}, line {line}: {bad.reason}: {content}{bad.hint}") from None

    def batches() -> Iterator[pa.RecordBatch]:
        records = islice(read_records(source, *how), int(bool(header)), None)
        while some := list(islice(records, _ROWS)):
            columns = parse_rows(parser, some, lambda bad, number: fail(bad, *some[number]))
            arrays = []
            for values, field in zip(columns, schema, strict=True):
                try:
                    arrays.append(pa.array(values, field.type))
                except UnicodeEncodeError:  # a path may be any bytes, which Arrow refuses as text
                    data = [os.fsencode(value) for value in values]
                    arrays.append(pa.array(data, pa.binary()).view(pa.string()))
            yield pa.record_batch(arrays, schema=schema)

    return convert_batches(source, schema, batches(), options, options.canonical(bool(header)), context)


open_csv = partial(_open, ",")
open_tsv = partial(_open, "\t")
