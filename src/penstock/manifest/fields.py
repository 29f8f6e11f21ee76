"""Parse the text of fields into values: strictly, and whole columns at a time.

Python's ``int`` and ``float`` also accept ``1_000``, surrounding blanks and digits of any script. In a manifest these
are more likely mistakes than intended, so they raise errors here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.manifest.options import Column

__all__ = ["BadRow", "Parser", "convert", "convert_all", "floats", "in_range", "integers", "parse_rows"]

_INT = b"0123456789+-"
_FLOAT = _INT + b".eEinftyaINFTYA"
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class BadRow(ValueError):
    """A row that does not parse: the kind of problem, the reason in words, and what to do."""

    def __init__(self, kind: str, reason: str, hint: str = "") -> None:
        super().__init__(kind, reason, hint)
        self.kind, self.reason, self.hint = kind, reason, hint

    @classmethod
    def of_value(cls, column: Column, found: object, error: ValueError) -> BadRow:
        """Return the error for a value that does not parse."""
        names = column.name == "label" and column.kind != "str" and isinstance(found, str) and found[:1].isalpha()
        hint = ". For names of classes pass label='str'" if names else ""
        return cls(column.name, f"{column.name} {repr(found)[:80]} is {error}", hint)


def _check_characters(texts: Sequence[str], allowed: bytes, name: str) -> None:
    try:
        rest = "".join(texts).encode("ascii").translate(None, allowed)
    except UnicodeEncodeError:
        rest = b"?"
    if rest:
        raise ValueError(f"not {name}")


def in_range(values: list[int]) -> list[int]:
    """Return the values; ValueError if one is outside the range of int64."""
    if values and (min(values) < _LOW or max(values) > _HIGH):
        raise ValueError("outside the range of int64")
    return values


def integers(texts: Sequence[str]) -> list[int]:
    """Return decimal texts as int64 values; ValueError if one is not an integer."""
    _check_characters(texts, _INT, "an integer")
    return in_range(list(map(int, texts)))


def floats(texts: Sequence[str]) -> list[float]:
    """Return decimal texts, inf and nan as floats; ValueError if one is not a number."""
    _check_characters(texts, _FLOAT, "a number")
    return list(map(float, texts))


_CONVERTERS: dict[str, Callable[[Sequence[str]], list[Any]]] = {
    "int": integers,
    "float": floats,
    "str": list,
    "any": list,
}


def convert(column: Column, fields: Sequence[Sequence[str]]) -> list[Any]:
    """Return the values of a column from its ``column.fields`` sequences of texts; lists become tuples."""
    values = [_CONVERTERS[column.kind](texts) for texts in fields]
    return list(zip(*values, strict=True)) if column.width else values[0]


def convert_all(
    places: Sequence[tuple[Column, slice]],
    fields: Sequence[Sequence[str]],
    separator: str = " ",
    convert: Any = convert,
) -> list[list[Any]]:
    """Return the values of columns, each at its place in the fields. BadRow tells why the first row does not parse."""
    values = []
    for column, place in places:
        try:
            values.append(convert(column, fields[place]))
        except ValueError as error:
            found = separator.join(texts[0] for texts in fields[place])
            raise BadRow.of_value(column, found, error) from None
    return values


class Parser(Protocol):
    """Parses rows, such as lines, into values."""

    columns: tuple[Column, ...]

    def parse(self, rows: list[Any]) -> list[list[Any]]:
        """Return one list of values for each of ``columns``; ValueError if `parse_one` has to read each row."""

    def parse_one(self, row: Any) -> list[Any]:
        """Return the values of one row, one for each of ``columns``; BadRow if it does not parse."""


def parse_rows(parser: Parser, rows: list[Any], fail: Callable[[BadRow, int], object]) -> list[list[Any]]:
    """Return one list of values for each column. ``fail`` is called with the number of a row that does not parse."""
    try:
        return parser.parse(rows)
    except ValueError:
        found = []
        for number, row in enumerate(rows):
            try:
                found.append(parser.parse_one(row))
            except BadRow as bad:
                fail(bad, number)
        return list(map(list, zip(*found, strict=True))) or [[] for _ in parser.columns]
