"""The formats of manifests: a name, and a function that opens one source. A new format is one file and one entry."""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.manifest.formats.arrow import open_arrow
from penstock.manifest.formats.base import Context, LinePart, Part
from penstock.manifest.formats.csv import open_csv, open_tsv
from penstock.manifest.formats.jsonl import open_jsonl
from penstock.manifest.formats.parquet import open_parquet
from penstock.manifest.formats.text import open_text
from penstock.manifest.options import Options

__all__ = ["EXTENSIONS", "FORMATS", "Context", "LinePart", "Part", "format_of"]

FORMATS: dict[str, Callable[[str, Options, Context], Part]] = {
    "text": open_text,
    "csv": open_csv,
    "tsv": open_tsv,
    "jsonl": open_jsonl,
    "parquet": open_parquet,
    "arrow": open_arrow,
}

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


def format_of(path: str, format: str = "auto") -> str:
    """The format's name: as given, or by the extension for "auto", where all but the known ones are text."""
    if format == "auto":
        return EXTENSIONS.get(os.path.splitext(path)[1].lower(), "text")
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; use one of auto, {', '.join(FORMATS)}")
    return format
