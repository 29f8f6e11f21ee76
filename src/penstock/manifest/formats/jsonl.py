"""JSON lines: one object per line, columns by key."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import ManifestError
from penstock.manifest.fields import BadRow, in_range
from penstock.manifest.formats.base import Context, LinePart, open_lines, reject
from penstock.manifest.options import Column, Options
from penstock.manifest.scan import json_array
from penstock.storage import File

__all__ = ["JsonParser", "open_jsonl"]

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,)}
_decode = json.JSONDecoder().decode


class JsonParser:
    """Selects columns from JSON objects. A column without a type keeps values of any type."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns

    def parse(self, lines: list[str]) -> list[list[Any]]:
        try:
            objects = list(map(_decode, lines))
        except (ValueError, RecursionError) as error:
            raise BadRow("fields", f"not JSON ({error})") from None
        for item in objects:
            if type(item) is not dict:
                raise BadRow("fields", f"expected a JSON object, found {type(item).__name__}")
        columns = []
        for column in self.columns:
            try:
                found = [item[column.source] for item in objects]
                columns.append(_values(column, found))
            except KeyError:
                raise BadRow("fields", f"no key {column.source!r}") from None
            except ValueError as error:
                raise BadRow.of_value(column, found[0], error) from None
        return columns

    def parse_one(self, line: str) -> list[Any]:
        return [values[0] for values in self.parse([line])]


def _values(column: Column, values: list[Any]) -> list[Any]:
    if column.kind == "any":
        return values
    if column.width:
        if any(type(value) is not list or len(value) != column.width for value in values):
            raise ValueError(f"not a list of {column.width}")
        return list(zip(*(_scalars(column.kind, list(one)) for one in zip(*values, strict=True)), strict=True))
    values = _scalars(column.kind, values)
    if column.name == "path" and "" in values:
        raise ValueError("empty")
    return values


def _scalars(kind: str, values: list[Any]) -> list[Any]:
    if not set(map(type, values)) <= set(_TYPES[kind]):  # a bool does not count as an int
        raise ValueError(f"not {kind}")
    if kind == "float":
        try:
            return list(map(float, values))
        except OverflowError:
            raise ValueError("outside the range of float") from None
    return in_range(values) if kind == "int" else values


def open_jsonl(path: str, options: Options, context: Context) -> LinePart:
    """Open JSON lines in place. Raise ManifestError for a JSON array."""
    reject(options, header="auto")
    source = File(path)
    if wrong := json_array(source.read(64, 0)):
        raise ManifestError(f"{path}: {wrong}")
    return open_lines(source, JsonParser(options.wanted), options, context)
