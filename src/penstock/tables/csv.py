"""CSV and TSV files as tables: converted once to an Arrow file in the cache.

The first record names the columns. A column holds integers, floats, booleans or text: the first of these that all of
its values are. Empty fields of numbers and booleans are null.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.csv

from penstock.errors import DataFileError, DataFileIOError, ManifestError, ManifestIOError
from penstock.manifest.formats.arrow import converted
from penstock.manifest.formats.base import Context
from penstock.manifest.formats.csv import is_number, read_records
from penstock.manifest.scan import SURROGATE, check_is_text, shorten
from penstock.storage import File

__all__ = ["converted_table", "holds_samples"]

_BLOCK = 16 << 20  # bytes read at once, the most that a record may have
_WRONG = re.compile(r"In CSV column #(\d+): .*CSV conversion error to (\w+)")
_KINDS = {"int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}  # all others are read as text


def holds_samples(source: File, delimiter: str) -> bool:
    """Return whether a file is a table, and not a list of paths and labels, by its first record."""
    _, head = next(read_records(source, delimiter), (0, []))
    is_sample = len(head) == 2 and is_number(head[1])
    return bool(head) and not is_sample and not {"path", "label"} <= set(head)


def converted_table(source: File, delimiter: str) -> File:
    """Return the conversion of a table; it is made if it is missing or out of date.

    Raises:
        DataFileError: no header, a record with more or fewer fields, an unclosed quote, or text that is not UTF-8.
        DataFileIOError: the cache cannot be written.
        DataFileChangedError: the file has changed.
    """
    key = f"table {delimiter}".encode()
    try:
        read, instead = partial(_read, source, delimiter), "set XDG_CACHE_HOME to another folder"
        return converted(source, key, read, Context(), instead)[0]
    except ManifestError as error:
        kind = DataFileIOError if isinstance(error, ManifestIOError) else DataFileError
        raise kind(str(error)) from error


def _read(source: File, delimiter: str) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    check_is_text(source, "a table")
    _, names = next(read_records(source, delimiter), (0, list[str]()))
    if not names or "" in names or len(set(names)) < len(names) or any(map(is_number, names)):
        raise DataFileError(
            f"{source.path}: the first record of a table names its columns, each once, and this one is "
            f"{shorten(delimiter.join(names))}. Open a list of paths and labels as a manifest, with header=False, "
            "and columns= if it has more than these"
        )
    kinds: dict[str, pa.DataType] = {}
    while True:
        try:
            with _open(source, delimiter, len(names), kinds) as reader:
                kinds = {field.name: _KINDS.get(str(field.type), pa.string()) for field in reader.schema}
            for _ in _batches(_open(source, delimiter, len(names), kinds)):
                pass
            return pa.schema(list(kinds.items())), _batches(_open(source, delimiter, len(names), kinds))
        except pa.ArrowInvalid as error:
            found = _WRONG.search(str(error))
            if found is None or found[2] == "string":
                raise _explained(source, delimiter, len(names), error) from None
            # The first block decides on types. A later value does not fit.
            kinds[names[int(found[1])]] = pa.float64() if found[2] == "int64" else pa.string()


def _explained(source: File, delimiter: str, count: int, error: Exception) -> DataFileError:
    """Return the error for the first record that is wrong. Arrow does not tell its line.

    Raises:
        ManifestError: see `read_records`.
    """
    limit = csv.field_size_limit(_BLOCK)
    try:
        for line, fields in read_records(source, delimiter):
            where, content = f"{source.path}, line {line}", delimiter.join(fields)
            if len(fields) != count:
                return DataFileError(f"{where}: expected {count} fields, found {len(fields)}: {shorten(content)}")
            if SURROGATE.search(content):
                return DataFileError(f"{where}: not UTF-8: {shorten(content)}")
            if len(content.encode()) > _BLOCK:
                return DataFileError(f"{where}: longer than {_BLOCK >> 20} MiB, the limit of a record")
    finally:
        csv.field_size_limit(limit)
    return DataFileError(f"{source.path} cannot be read as CSV: {error}")


class _WithEnd(io.RawIOBase):
    """A file, and after it a record of empty fields, which becomes a part of a quoted field that is never closed."""

    def __init__(self, source: File, delimiter: str, fields: int) -> None:
        self._source, self._position = source, 0
        self._end = f'\n""{delimiter * (fields - 1)}\n'.encode()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size, self._position)
        self._position += len(data)
        if not data:
            data, self._end = self._end, b""
        return data


def _open(source: File, delimiter: str, fields: int, kinds: dict[str, pa.DataType]) -> pa.csv.CSVStreamingReader:
    return pa.csv.open_csv(
        pa.PythonFile(_WithEnd(source, delimiter, fields), mode="r"),
        pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=kinds),
    )


def _batches(reader: pa.csv.CSVStreamingReader) -> Iterator[pa.RecordBatch]:
    """Yield all batches without the record at the end."""
    held: pa.RecordBatch | None = None
    for batch in filter(len, reader):
        if held is not None:
            yield held
        held = batch
    assert held is not None
    last = held.num_rows - 1
    if any(column[last].as_py() for column in held.columns):
        raise pa.ArrowInvalid("a quoted field is never closed")
    yield held.slice(0, last)
