"""The formats of manifests: a name and a function that opens a source. A new format is one file and one entry."""

from __future__ import annotations

import os
from importlib import import_module

from penstock.errors import ConfigError
from penstock.manifest.formats.base import Context, LinePart, Part
from penstock.manifest.options import Options

__all__ = ["EXTENSIONS", "FORMATS", "Context", "LinePart", "Part", "format_of", "open_part"]

FORMATS = {
    "text": ("text", "open_text"),
    "csv": ("csv", "open_csv"),
    "tsv": ("csv", "open_tsv"),
    "jsonl": ("jsonl", "open_jsonl"),
    "parquet": ("arrow", "open_parquet"),
    "arrow": ("arrow", "open_arrow"),
}
"""The module and function of each format, imported at first use: Parquet takes 60 ms."""

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
    """Return the name of the format: as given, or for "auto" by the extension; unknown extensions are text."""
    if format == "auto":
        return EXTENSIONS.get(os.path.splitext(path)[1].lower(), "text")
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; use one of auto, {', '.join(FORMATS)}")
    return format


def open_part(path: str, options: Options, context: Context) -> Part:
    """Open a source in the format of its options."""
    module, function = FORMATS[options.format]
    part: Part = getattr(import_module(f"{__name__}.{module}"), function)(path, options, context)
    return part
