"""The format of rows on the wire, as a small JSON text, so that a client can parse records without any file.

Rows are sent in their stored form: a column ``line`` for text and JSONL, and the columns for all others.
`describe` writes what a parser needs, and `restore` is its counterpart in the client. Invariant: for every manifest,
``restore(describe(manifest))`` parses the batches of `Manifest.gather` into the records of `Manifest.records`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import ManifestError, ServerError
from penstock.manifest import Manifest
from penstock.manifest.fields import Parser
from penstock.manifest.formats.base import LinePart
from penstock.manifest.formats.jsonl import JsonParser
from penstock.manifest.formats.text import TextParser
from penstock.manifest.options import Column
from penstock.manifest.table import combine, view_fingerprint

__all__ = ["KEY", "WireFormat", "describe", "restore"]

KEY = b"penstock"
"""The key of the format in the metadata of a dataset's schema."""

_VERSION = 1


@dataclass(frozen=True)
class WireFormat:
    """The format of the rows of one version of a dataset.

    ``parsers`` holds one parser for each range of rows, with its length; it is empty for rows in columns. ``view`` is
    the range of the manifest's ``rows`` that is served; row numbers on the wire are indices into it. ``whole`` is the
    fingerprint of the whole manifest.
    """

    root: str | None
    nbytes: int
    rows: int
    view: range
    parsers: tuple[tuple[int, Parser], ...]
    whole: str

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the served rows."""
        return self.whole if self.view == range(self.rows) else view_fingerprint(self.whole, self.view)

    def schema(self, sent: pa.Schema) -> pa.Schema:
        """Return the columns of the manifest's tables, for rows sent with the schema ``sent``."""
        if not self.parsers:
            return sent
        columns = self.parsers[0][1].columns
        return pa.schema([(column.name, column.arrow_type or pa.string()) for column in columns])


def describe(manifest: Manifest) -> str:
    """Return the format of a manifest's rows as JSON.

    Raises:
        ManifestError: the manifest mixes sources of lines and sources of columns.
    """
    parts, view = manifest.parts, manifest.view
    if len({isinstance(part, LinePart) for part in parts}) > 1:
        raise ManifestError(
            f"{parts[0].path} and the others are partly lines (text, JSONL) and partly columns (CSV, Arrow, Parquet), "
            "which cannot be served as one dataset: serve them as two, or convert some"
        )
    # Neighbours with the same parser are one range: a manifest of a thousand equal files has one parser.
    parsers: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        if isinstance(part, LinePart):
            parser = _describe_parser(part.parser)
            before = parsers.pop()[0] if parsers and parsers[-1][1] == parser else 0
            parsers.append((before + part.rows, parser))
    return json.dumps(
        {
            "version": _VERSION,
            "whole": combine([part.fingerprint for part in parts]),
            "root": manifest.root,
            "nbytes": manifest.nbytes,
            "rows": sum(part.rows for part in parts),
            "view": [view.start, view.stop, view.step],
            "parsers": parsers,
        }
    )


def restore(text: str | bytes) -> WireFormat:
    """Return the format that `describe` wrote.

    Raises:
        ServerError: it has another version, or is damaged.
    """
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise ServerError(
                f"the server uses version {found['version']} of the row format, and this client version {_VERSION}"
            )
        parsers = tuple((rows, _parser(one)) for rows, one in found["parsers"])
        view = range(*found["view"])
        return WireFormat(found["root"], found["nbytes"], found["rows"], view, parsers, found["whole"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ServerError(f"the server's row format is invalid ({error!r})") from None


def _describe_parser(parser: Parser) -> dict[str, Any]:
    columns = [asdict(column) for column in parser.columns]
    match parser:
        case TextParser():
            return {"format": "text", "columns": columns, "stored": [asdict(column) for column in parser.all_columns]}
        case JsonParser():
            return {"format": "jsonl", "columns": columns}
    raise ManifestError(f"rows parsed by {type(parser).__name__} cannot be served")


def _parser(found: dict[str, Any]) -> Parser:
    columns = tuple(Column(**one) for one in found["columns"])
    match found["format"]:
        case "text":
            return TextParser(tuple(Column(**one) for one in found["stored"]), columns)
        case "jsonl":
            return JsonParser(columns)
    raise ServerError(f"the server sends rows of the format {found['format']!r}, which this client does not know")
