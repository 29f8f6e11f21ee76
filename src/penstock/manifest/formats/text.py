"""Text: ``path label``, one sample per line, separated by spaces or tabs.

Fields after the path are split off from the right, so a path may contain spaces. Spaces and tabs around a field are
stripped.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.manifest.fields import BadRow, convert, convert_all
from penstock.manifest.formats.base import Context, LinePart, open_lines, reject
from penstock.manifest.options import IGNORED, Column, Options, places_of
from penstock.storage import File

__all__ = ["TextParser", "open_text"]

_SEPARATORS = " \t"


class TextParser:
    """Splits lines of text; ``columns`` are in file order, the path first."""

    def __init__(self, columns: tuple[Column, ...], wanted: tuple[Column, ...]) -> None:
        if columns[0].name != "path":
            raise ConfigError(f"columns: in text the first one must be 'path', not {columns[0].name!r}")
        self.columns, self.all_columns = wanted, columns
        self._fields = sum(column.fields for column in columns[1:])
        places = places_of(columns)
        kinds = [column.kind for column in columns[1:] for _ in range(column.fields)]
        self._texts = [k for k, kind in enumerate(kinds) if kind in ("str", "any")]
        self._places = [(column, places[column.name]) for column in wanted]
        names = ["path"] + [str(c) if c.name == IGNORED else f"{c.name} ({c})" for c in columns[1:]]
        self._expected = " ".join(names)
        self._usual = [(c.name, c.kind, c.width) for c in columns] == [("path", "str", 0), ("label", "int", 0)]

    def parse_one(self, line: str) -> list[Any]:
        """Return the values of one line, with any spacing; with a fast path for plain ``path 123``."""
        if self._usual:
            path, _, text = line.rpartition(" ")
            if path and text.isdecimal() and text.isascii() and len(text) < 19:
                return [path if path[0] > " " < path[-1] else path.strip(_SEPARATORS), int(text)]
        fields: list[list[str]] = []
        rest = line.strip(_SEPARATORS)
        for _ in range(self._fields):
            space = rest.rfind(" ")
            cut = max(space, rest.rfind("\t", space + 1))
            if cut < 0:
                break
            fields.append([rest[cut + 1 :]])
            rest = rest[:cut].rstrip(_SEPARATORS)
        if len(fields) < self._fields or not rest:
            raise BadRow("fields", f"expected '{self._expected}', found too few fields")
        return [values[0] for values in convert_all(self._places, [[rest], *fields[::-1]])]

    def parse(self, lines: list[str]) -> list[list[Any]]:
        count = self._fields
        if not lines:
            return [[] for _ in self.columns]
        rows = [line.rsplit(" ", count) if count else [line] for line in lines]
        first, *rest = zip(*rows, strict=True)
        if len(rest) != count or any("" in rest[k] or "\t" in "".join(rest[k]) for k in self._texts):
            raise ValueError
        # The last `count` spaces separate the fields (a tab or an empty text does not parse as a number); the rest is
        # the path.
        paths = [text.strip(_SEPARATORS) for text in first]
        if "" in paths:
            raise ValueError
        fields: list[Any] = [paths, *rest]
        return [convert(column, fields[place]) for column, place in self._places]


def open_text(path: str, options: Options, context: Context) -> LinePart:
    """Open a text manifest in place."""
    reject(options, header="auto")
    if options.named:
        raise ConfigError("columns: text has no column names to choose from; give a list of names in file order")
    return open_lines(File(path), TextParser(options.columns, options.wanted), options, context)
