"""Options for reading the rows of a manifest: columns, their types, and which lines are rows.

`Options` is a value: comparable, picklable, and equal options give equal bytes, since they are part of the manifest's
fingerprint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from penstock.errors import ConfigError

__all__ = ["IGNORED", "Blank", "Column", "Columns", "Format", "Header", "Options", "make_options", "places_of"]

Columns = Sequence[str] | Mapping[str, str] | None
Header = bool | Literal["auto"]
Blank = Literal["skip", "error"]
Format = Literal["auto", "text", "csv", "tsv", "jsonl", "parquet", "arrow"]

IGNORED = "_"
"""The name of a column in the file that is not read."""

_TYPE = re.compile(r"(int|float|str)(?:\[([1-9][0-9]*)\])?")


@dataclass(frozen=True)
class Column:
    """One column: its name in the manifest, its type, and its name in the file.

    ``kind`` is "int", "float", "str", or "any" (the type in the file; for JSONL, values as JSON text). ``width`` is 0
    for a single value, and n for a list of exactly n values.
    """

    name: str
    kind: str
    width: int
    source: str

    @property
    def arrow_type(self) -> Any:
        """The `pyarrow.DataType`, or None if the file determines it."""
        import pyarrow as pa  # text manifests need it only for tables

        scalar = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "any": None}[self.kind]
        return pa.list_(scalar, self.width) if self.width else scalar

    @property
    def fields(self) -> int:
        """The number of fields that it spans in a line."""
        return self.width or 1

    def __str__(self) -> str:
        return f"{self.kind}[{self.width}]" if self.width else self.kind


@dataclass(frozen=True)
class Options:
    """How to read a source. All sources of a manifest share all options except ``format``.

    ``named``: the columns were given as a mapping, so they are looked up by name. ``given``: the caller passed columns.
    """

    format: str
    columns: tuple[Column, ...]
    named: bool
    given: bool
    header: Header
    blank: Blank
    comment: str | None

    def canonical(self, header: bool | None = None) -> bytes:
        """Return the options as bytes for the fingerprint; ``header`` is the value that "auto" resolved to."""
        return json.dumps({**asdict(self), "header": header}, sort_keys=True, ensure_ascii=True).encode()

    @property
    def wanted(self) -> tuple[Column, ...]:
        """The columns without the ignored ones, ``path`` first and ``label`` second."""
        rank = {"path": 0, "label": 1}
        return tuple(sorted((c for c in self.columns if c.name != IGNORED), key=lambda c: rank.get(c.name, 2)))


def places_of(columns: Sequence[Column]) -> dict[str, slice]:
    """Return the fields of each column, by name, in rows that have these columns in this order."""
    ends = list(accumulate(column.fields for column in columns))
    return {column.name: slice(end - column.fields, end) for column, end in zip(columns, ends, strict=True)}


def _parse_type(text: str, where: str) -> tuple[str, int]:
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: unknown type {text!r}; use int, float, str, or with a length as in int[3]")
    return match[1], int(match[2] or 0)


def _parse_columns(columns: Columns, label: str | None) -> tuple[Column, ...]:
    label_type = None if label is None else _parse_type(label, f"label={label!r}")
    if columns is None:
        columns = ["path"] if label is None else ["path", "label"]
    named = isinstance(columns, Sequence | Mapping) and not isinstance(columns, str | bytes)
    if not named or not all(isinstance(name, str) for name in columns):
        given = "the string " if isinstance(columns, str) else ""
        raise ConfigError(f"columns must be a list of names or a mapping, not {given}{columns!r}")
    pairs = columns.items() if isinstance(columns, Mapping) else [(spec, None) for spec in columns]
    result = []
    for spec, source in pairs:
        name, colon, type_text = spec.partition(":")
        if not name:
            raise ConfigError(f"columns: {spec!r} has no name")
        if colon:
            kind, width = _parse_type(type_text, f"columns: {spec!r}")
        elif name == "label" and label_type is not None:
            kind, width = label_type
        else:
            kind, width = ("str", 0) if name == "path" else ("any", 0)
        result.append(Column(name, kind, width, source if source is not None else name))
    return tuple(result)


def _check_columns(columns: tuple[Column, ...], label: str | None) -> None:
    names = [column.name for column in columns if column.name != IGNORED]
    if len(set(names)) < len(names):
        raise ConfigError(f"columns: the same name twice in {names}")
    if "path" not in names:
        raise ConfigError(f"columns must have one named 'path', got {names}")
    if (label is not None) != ("label" in names):
        problem = "label=None, but columns has one" if label is None else f"columns has no 'label', only {names}"
        raise ConfigError(f"{problem}; either name a column 'label' or pass label=None")
    path = next(column for column in columns if column.name == "path")
    if (path.kind, path.width) != ("str", 0):
        raise ConfigError(f"columns: 'path' must be str, not {path}")


def make_options(
    format: str, columns: Columns, label: str | None, header: Header, blank: Blank, comment: str | None
) -> Options:
    """Return checked `Options` from the arguments of `Manifest.open`; ConfigError if one is invalid."""
    if header not in (True, False, "auto"):
        raise ConfigError(f"header must be True, False or 'auto', not {header!r}")
    if blank not in ("skip", "error"):
        raise ConfigError(f"blank must be 'skip' or 'error', not {blank!r}")
    if comment is not None and (not comment or comment != comment.strip() or "\n" in comment):
        raise ConfigError(f"comment must be the characters that begin a comment line, such as '#', not {comment!r}")
    parsed = _parse_columns(columns, label)
    _check_columns(parsed, label)
    return Options(format, parsed, isinstance(columns, Mapping), columns is not None, header, blank, comment)
