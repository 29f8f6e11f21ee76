"""CSV and TSV: records as in RFC 4180, with or without a header; quoted fields may hold line feeds."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.errors import ConfigError, ManifestError
from penstock.manifest.fields import BadRow, convert, floats
from penstock.manifest.formats.base import Context, LinePart, open_lines
from penstock.manifest.options import Column, Options
from penstock.manifest.row_splitter import ExactRecords, Unclosed
from penstock.manifest.scan import BOM, LineRules, check_is_text, shorten
from penstock.storage import SourceFile

__all__ = ["CsvParser", "open_csv", "open_tsv"]

_HEAD = 1 << 20  # a header is not longer than this
_LONG = 1 << 16  # the csv module rejects fields of twice this length
_FIRST = 16  # so many records are compared with the first one, to find a header
_NAME = re.compile(r"[^\W\d]+(?:[ -][^\W\d]+)*")
# Names of a column of paths, without the signs between their words: "filename", "image_id", "Image File URL".
_PATHS = re.compile(r"(?=.)((audio|clip|image|img|photo|picture|sample|video)s?)?((file|id|key|name|path|uri|url)s?)*")


class CsvParser:
    """Splits records into ``count`` fields and selects columns: ``places`` holds the field numbers of each column.

    A column of several values spans as many fields, or is one field of values separated by spaces.
    """

    def __init__(self, columns: tuple[Column, ...], places: list[list[int]], count: int, delimiter: str) -> None:
        self.columns, self.places, self.count, self.delimiter = columns, places, count, delimiter
        d = re.escape(delimiter)
        self._field = re.compile(rf'("[^"]*+(?:""[^"]*+)*+"(?!"))?([^{d}]*+)(?:{d}|\Z)')

    def parse(self, lines: list[str]) -> list[list[Any]]:
        if not lines:
            return [[] for _ in self.columns]
        try:
            rows = list(csv.reader(lines, delimiter=self.delimiter))
            fields = list(zip(*rows, strict=True))
            if len(rows) != len(lines) or len(fields) != self.count:
                raise ValueError
            values = [self._values(column, fields, place) for column, place in self._pairs()]
            if "" in values[0]:
                raise ValueError
            return values
        except (ValueError, csv.Error):
            columns = zip(*(self._parse_one(k, line) for k, line in enumerate(lines)), strict=True)
            return [list(column) for column in columns]

    def parse_one(self, line: str) -> list[Any]:
        return [values[0] for values in self.parse([line])]

    def _pairs(self) -> list[tuple[Column, list[int]]]:
        return list(zip(self.columns, self.places, strict=True))

    def _values(self, column: Column, fields: Sequence[Sequence[str]], place: list[int]) -> list[Any]:
        if column.width and len(place) == 1:
            cells = [cell.split() for cell in fields[place[0]]]
            if any(len(cell) != column.width for cell in cells):
                raise ValueError(f"not {column.width} values separated by spaces")
            return convert(column, list(zip(*cells, strict=True)))
        return convert(column, [fields[k] for k in place])

    def _parse_one(self, index: int, line: str) -> list[Any]:
        try:
            found = self._split(line)
        except csv.Error as error:
            reason = "a carriage return in an unquoted field" if "\r" in line else str(error)
            raise BadRow(index, "fields", reason) from None
        if len(found) != self.count:
            hint = (
                ""
                if self.count != len(self.columns)
                else "; name all of them with columns=, with '_' for fields to ignore"
            )
            raise BadRow(index, "fields", f"expected {self.count} fields, found {len(found)}{hint}")
        values = []
        for column, place in self._pairs():
            cells = [found[k] if column.kind in ("str", "any") else found[k].strip(" \t") for k in place]
            by_number = dict(zip(place, ([cell] for cell in cells), strict=True))
            try:
                values.append(self._values(column, [by_number.get(k, [""]) for k in range(self.count)], place)[0])
            except ValueError as error:
                raise BadRow.of_value(index, column, self.delimiter.join(cells), error) from None
        if not values[0]:
            raise BadRow(index, "fields", "the path is empty")
        return values

    def _split(self, line: str) -> list[str]:
        if len(line) < _LONG:
            rows = list(csv.reader([line], delimiter=self.delimiter))
            return rows[0] if rows else []
        fields, position = [], -1
        while position < len(line):  # a trailing delimiter adds one empty field
            match = self._field.match(line, position + 1)
            if match is None:
                raise csv.Error("a quoted field is never closed")
            quoted, rest = match.groups()
            fields.append((quoted[1:-1].replace('""', '"') if quoted else "") + rest)
            position = match.end(2)
        return fields


def split_first(source: SourceFile, rules: LineRules) -> list[list[str]]:
    """Return the fields of the first records; none for an empty file."""
    head = source.read(_HEAD, 0)
    piece = memoryview(head.removeprefix(BOM))
    delimiter = rules.delimiter or ","
    try:
        ends, _ = ExactRecords(delimiter, rules.comment).find(piece, final=len(head) == source.size)
    except Unclosed:
        return []  # indexing will report it
    found: list[list[str]] = []
    start = 0
    for end in [*ends.tolist(), len(piece)]:
        record = bytes(piece[start:end]).decode("utf-8", "surrogateescape").rstrip("\r\n")
        if record and not (rules.comment and record.startswith(rules.comment)):
            try:
                found += csv.reader([record], delimiter=delimiter)
            except csv.Error:
                return found  # not a header; reading it as a row will report it
            if len(found) > _FIRST:
                break
        start = end
    return found


def _is_header(first: list[list[str]], columns: tuple[Column, ...], places: dict[str, list[int]], count: int) -> bool:
    """Return whether the first record holds names of columns, where its name for the paths is unknown.

    It has no number and no path of several parts. Its name for the paths is a usual one, or the next records have
    numbers where it has names, or paths with endings.
    """
    head, *rows = first
    rows = [row for row in rows if len(row) == len(head)]
    if any(_is_number(text) or "/" in text or "\\" in text for text in head):
        return False
    place = places["path"][0]
    # With another number of fields no record is a sample, so any of them may show that it is a header.
    candidates = head[place : place + 1] if len(head) == count else head
    if any(_PATHS.fullmatch(re.sub(r"[\W_]", "", text.lower())) for text in candidates):
        return True
    numbers = [k for column in columns if column.kind in ("int", "float") for k in places[column.name]]
    if len(head) != count or not rows or not all(_NAME.fullmatch(head[k]) for k in [place, *numbers]):
        return False
    if numbers and all(_is_number(row[k]) for row in rows for k in numbers):
        return True
    return all(os.path.splitext(row[place])[1] for row in rows)


def _is_number(text: str) -> bool:
    try:
        return bool(floats([text.strip(" \t")]))
    except ValueError:
        return False


def _by_name(source: SourceFile, head: list[str], columns: tuple[Column, ...]) -> list[list[int]]:
    for column in columns:
        if head.count(column.source) != 1:
            problem = "no column" if column.source not in head else "more than one column"
            raise ManifestError(
                f"{source.path} has {problem} {column.source!r}; its header is {shorten(','.join(head))}. Choose with "
                f"columns={{'path': ..., 'label': ...}}, leave the label out with label=None, or pass header=False"
            )
    return [[head.index(column.source)] for column in columns]


def _by_position(columns: tuple[Column, ...]) -> tuple[dict[str, list[int]], int]:
    places, position = {}, 0
    for column in columns:
        places[column.name] = list(range(position, position + column.fields))
        position += column.fields
    return places, position


def _open(delimiter: str, path: str, options: Options, context: Context) -> LinePart:
    if options.named and options.header is False:
        raise ConfigError("columns: a mapping chooses by name, which header=False rules out; give a list in file order")
    source = SourceFile(path)
    check_is_text(source)
    wanted = options.wanted
    rules = LineRules(delimiter, "\r", options.blank, options.comment)
    first = split_first(source, rules)
    head = first[0] if first else []
    header = options.header
    if header == "auto":
        header = bool(head) and (options.named or wanted[0].source in head)
    if header and head:
        places, count = _by_name(source, head, wanted), len(head)
    else:
        by_position, count = _by_position(options.columns)
        if options.header == "auto" and first and _is_header(first, wanted, by_position, count):
            raise ManifestError(
                f"{source.path}: its first record {shorten(delimiter.join(head))} looks like a header. Choose its "
                "columns with header=True, columns={'path': ..., 'label': ...}; if it is a sample, pass header=False"
            )
        places = [by_position[column.name] for column in wanted]
    parser = CsvParser(wanted, places, count, delimiter)
    rules = LineRules(delimiter, "\r", options.blank, options.comment, bool(header))
    return open_lines(source, parser, rules, options, context)


open_csv = partial(_open, ",")
open_tsv = partial(_open, "\t")
