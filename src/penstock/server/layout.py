"""How rows look on the wire, as a small JSON text, so that a client can make records of them without any file.

Rows cross as they are stored: a column ``line`` for text, CSV and JSONL, the columns themselves for Arrow and Parquet.
`describe` says what a parser needs to know, `Layout` is the same on the other side. Invariant: for every manifest
``restore(describe(manifest))`` parses what `Manifest.gather` gives into the records that `Manifest.records` gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import ManifestError, ServerError
from penstock.manifest import Manifest
from penstock.manifest.fingerprint import combine, view_fingerprint
from penstock.manifest.formats.base import LinePart, Parser, Part
from penstock.manifest.formats.csv import CsvParser
from penstock.manifest.formats.jsonl import JsonParser
from penstock.manifest.formats.text import TextParser
from penstock.manifest.options import Column

__all__ = ["Layout", "describe", "restore"]

_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """What a server says of the rows of one version of a data set.

    ``parsers`` has one for each run of rows, with its length; it is empty for rows in columns. ``view`` is which of the
    ``rows`` of the whole manifest are served: numbers on the wire are indices of it. ``whole`` is the whole's
    fingerprint.
    """

    root: str | None
    nbytes: int
    rows: int
    view: range
    parsers: tuple[tuple[int, Parser], ...]
    whole: str

    @property
    def fingerprint(self) -> str:
        """Of what is served."""
        return self.whole if self.view == range(self.rows) else view_fingerprint(self.whole, self.view)

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """The columns of the manifest's tables, where rows cross with the schema ``stored``."""
        if not self.parsers:
            return stored
        columns = self.parsers[0][1].columns
        return pa.schema([(column.name, column.arrow_type or pa.string()) for column in columns])


def describe(manifest: Manifest) -> str:
    """The layout of a manifest's rows as JSON.

    Raises:
        ManifestError: sources kept as lines and sources kept as columns in one manifest.
    """
    parts = manifest.parts
    if len({isinstance(part, LinePart) for part in parts}) > 1:
        raise ManifestError(
            f"{parts[0].path} and the others are partly lines (text, CSV, JSONL) and partly columns (Arrow, Parquet), "
            "which cannot be served as one data set: serve them as two, or convert some"
        )
    view = manifest.view
    return json.dumps(
        {
            "version": _VERSION,
            "whole": combine([part.fingerprint for part in parts]),
            "root": manifest.root,
            "nbytes": manifest.nbytes,
            "rows": sum(part.rows for part in parts),
            "view": [view.start, view.stop, view.step],
            "parsers": _describe_parts(parts),
        }
    )


def restore(text: str | bytes) -> Layout:
    """The layout that `describe` wrote.

    Raises:
        ServerError: it is of another version, or damaged.
    """
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise ServerError(
                f"the server describes rows by version {found['version']}, and this is version {_VERSION}"
            )
        return Layout(
            found["root"],
            found["nbytes"],
            found["rows"],
            range(*found["view"]),
            tuple((rows, _parser(one)) for rows, one in found["parsers"]),
            found["whole"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ServerError(f"the server's description of its rows makes no sense ({error!r})") from None


def _describe_parts(parts: Sequence[Part]) -> list[tuple[int, dict[str, Any]]]:
    """Runs of rows with the same parser: a manifest of a thousand equal files has one."""
    runs: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        if isinstance(part, LinePart):
            parser = _describe_parser(part.parser)
            rows = runs.pop()[0] if runs and runs[-1][1] == parser else 0
            runs.append((rows + part.rows, parser))
    return runs


def _describe_parser(parser: Parser) -> dict[str, Any]:
    columns = [asdict(column) for column in parser.columns]
    match parser:
        case TextParser():
            return {"format": "text", "columns": columns, "stored": [asdict(column) for column in parser.stored]}
        case CsvParser():
            more = {"places": parser.places, "count": parser.count, "delimiter": parser.delimiter}
            return {"format": "csv", "columns": columns, **more}
        case JsonParser():
            return {"format": "jsonl", "columns": columns}
    raise ManifestError(f"rows parsed by {type(parser).__name__} cannot be served")


def _parser(found: dict[str, Any]) -> Parser:
    columns = _columns(found["columns"])
    match found["format"]:
        case "text":
            return TextParser(_columns(found["stored"]), columns)
        case "csv":
            return CsvParser(columns, found["places"], found["count"], found["delimiter"])
        case "jsonl":
            return JsonParser(columns)
    raise ServerError(f"the server sends rows of the format {found['format']!r}, which is not known here")


def _columns(found: list[dict[str, Any]]) -> tuple[Column, ...]:
    return tuple(Column(**one) for one in found)
