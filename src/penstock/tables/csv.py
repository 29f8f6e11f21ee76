"""CSV and TSV files as tables: converted once to an Arrow file in the cache.

The first record names the columns. A column holds integers, floats, booleans or text: the first of these that all of
its values are. Empty fields of numbers and booleans are null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

import pyarrow as pa
import pyarrow.csv

from penstock.errors import (
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    ManifestChangedError,
    ManifestError,
    ManifestIOError,
)
from penstock.manifest.formats.base import Context
from penstock.manifest.formats.convert import converted
from penstock.manifest.formats.csv import first_records, is_number, read_records
from penstock.manifest.scan import check_is_text, shorten
from penstock.storage import SourceFile

__all__ = ["converted_table", "holds_samples"]

_BLOCK = 16 << 20  # bytes read at once, the most that a record may have
_WRONG = re.compile(r"In CSV column #(\d+): .*CSV conversion error to (\w+)")
_ERRORS = {ManifestIOError: DataFileIOError, ManifestChangedError: DataFileChangedError}
_KINDS = {"int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}  # all others are read as text


def holds_samples(source: SourceFile, delimiter: str) -> bool:
    """Return whether a file is a table, and not a list of paths and labels, by its first record."""
    head = next(iter(first_records(source, delimiter)), [])
    is_sample = len(head) == 2 and is_number(head[1])
    return bool(head) and not is_sample and not {"path", "label"} <= set(head)


def converted_table(source: SourceFile, delimiter: str) -> SourceFile:
    """Return the conversion of a table; it is made if it is missing or out of date.

    Raises:
        DataFileError: no header, a record with more or fewer fields, an unclosed quote, or text that is not UTF-8.
        DataFileIOError: the cache cannot be written.
        DataFileChangedError: the file has changed.
    """
    read = partial(_read, source, delimiter)
    try:
        return converted(source, f"table {delimiter}".encode(), read, lambda mapped, _: mapped, Context())
    except ManifestError as error:
        raise _ERRORS.get(type(error), DataFileError)(str(error)) from error


def _read(source: SourceFile, delimiter: str) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    check_is_text(source)
    names = next(iter(first_records(source, delimiter)), [])
    if not names or "" in names or len(set(names)) < len(names) or any(map(is_number, names)):
        raise DataFileError(
            f"{source.path}: the first record of a table names its columns, each once, and this one is "
            f"{shorten(delimiter.join(names))}. Open a list of paths and labels as a manifest, with header=False, "
            "and columns= if it has more than these"
        )
    kinds: dict[str, pa.DataType] = {}
    while True:
        try:
            inferred = _open(source, delimiter, kinds).schema
            kinds = {field.name: _KINDS.get(str(field.type), pa.string()) for field in inferred}
            for _ in _open(source, delimiter, kinds):
                pass
            return pa.schema(list(kinds.items())), _open(source, delimiter, kinds)
        except pa.ArrowInvalid as error:
            found = _WRONG.search(str(error))
            if found is None or found[2] == "string":
                for line, fields in read_records(source, delimiter):
                    if len(fields) != len(names):
                        raise DataFileError(
                            f"{source.path}, line {line}: expected {len(names)} fields, found {len(fields)}: "
                            f"{shorten(delimiter.join(fields))}"
                        ) from None
                raise DataFileError(f"{source.path}: {error}") from None
            # The first block decides on types. A later value does not fit.
            kinds[names[int(found[1])]] = pa.float64() if found[2] == "int64" else pa.string()


def _open(source: SourceFile, delimiter: str, kinds: dict[str, pa.DataType]) -> pa.csv.CSVStreamingReader:
    return pa.csv.open_csv(
        pa.BufferReader(pa.py_buffer(source.map)),
        pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=kinds),
    )
