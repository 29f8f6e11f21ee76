"""Parse the text of fields into values: strictly, and whole columns at a time.

Python's ``int`` and ``float`` also accept ``1_000``, surrounding blanks and digits of any script. In a manifest these
are more likely mistakes than intended, so they raise errors here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.manifest.options import Column

__all__ = ["BadRow", "convert", "floats", "in_range", "integers"]

_INT = b"0123456789+-"
_FLOAT = _INT + b".eEinftyaINFTYA"
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class BadRow(Exception):
    """A row that does not parse: its index in the batch, the kind of problem, the reason in words, and what to do."""

    def __init__(self, index: int, kind: str, reason: str, hint: str = "") -> None:
        super().__init__(index, kind, reason, hint)
        self.index, self.kind, self.reason, self.hint = index, kind, reason, hint

    @classmethod
    def of_value(cls, index: int, column: Column, found: object, error: ValueError) -> BadRow:
        """Return the error for a value that does not parse."""
        names = column.name == "label" and column.kind != "str" and isinstance(found, str) and found[:1].isalpha()
        hint = ". For names of classes pass label='str'" if names else ""
        return cls(index, column.name, f"{column.name} {repr(found)[:80]} is {error}", hint)


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
