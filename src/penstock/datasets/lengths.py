"""Lengths of documents: given as an array or a file, provided by the dataset, or read from a column.

`count_lengths` counts the length of every sample of a dataset once, into an ``.npy`` file, and resumes after a kill:

count_lengths(TokenizedDataset(text, "tokenizer.json"), "lengths.npy")
packs = PackedDataset(TokenizedDataset(text, "tokenizer.json"), 8192, lengths="lengths.npy")

The finished part is in ``.lengths.npy.<identity>.part`` beside the file: an ``.npy`` file without its end. The identity
is a hash of the data and the measure, so a partial file of other data or another measure is never continued.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from torch.utils.data import Subset as TorchSubset

from penstock.datasets.keep import Filterable, has_columns
from penstock.datasets.rows import check_rows, load_rows, row_count, rows_behind, version_of
from penstock.datasets.source_dataset import SourceWrapper
from penstock.datasets.subset import Subset
from penstock.errors import ConfigError, DataFileError, DataFileIOError
from penstock.order.permutation import Indices
from penstock.plan.filter import KeptRows
from penstock.progress import progress_bar
from penstock.samplers.identity import fingerprint_of
from penstock.samplers.lengths import SampleLengths, lengths_of
from penstock.storage import file_lock
from penstock.storage.derived import derived_array
from penstock.wording import kind_text

__all__ = ["CountedLengths", "count_lengths", "document_lengths", "filtered_lengths", "last_filter"]

_ROWS = 1 << 16  # rows of a column or an array in memory at once
_ITEMS = 1 << 10  # items in memory at once
_TYPE = np.dtype("<i8")

_ReadLengths = Callable[[Indices], Indices]
"""Returns the lengths of samples, by row."""


def document_lengths(dataset: Any, given: Any) -> SampleLengths:
    """Return the number of tokens of each document of a dataset.

    Args:
        dataset: the documents.
        given: an array, the path of an ``.npy`` file, the name of a column, or None for the dataset's own ``lengths``.
            For a filtered dataset, they may be the lengths of all documents before the filter.

    Raises:
        ConfigError: the lengths are unknown, or there is no such column.
        SamplerError: the lengths are not integers.
    """
    count, is_column = row_count(dataset), isinstance(given, str) and not given.endswith(".npy")
    every: SampleLengths | None = None
    if given is not None and not is_column:
        every = given if isinstance(given, SampleLengths) else lengths_of(given)
        if len(every) == count:
            return every
    if isinstance(dataset, Subset):
        return filtered_lengths(document_lengths(dataset.dataset, every or given), dataset.kept.find, count)
    if is_column:
        column = _Column(dataset, given)
        every = SampleLengths(len(column), column)
    elif every is None:
        own = getattr(dataset, "lengths", None)
        if own is None:
            raise ConfigError(
                f"the lengths of the documents of this {type(dataset).__name__} are unknown: give lengths= (an array, "
                "the path of an .npy file or the name of a column), or give the dataset an attribute `lengths`"
            )
        every = lengths_of(own)
        if isinstance(own, np.memmap):
            # The pickle of a map holds all its numbers.
            every = SampleLengths(len(own), partial(_own_lengths, dataset))
    behind = rows_behind(dataset)
    return every if behind is None else filtered_lengths(every, behind, count)


def _own_lengths(dataset: Any, part: Any) -> Indices:
    lengths: Indices = np.asarray(dataset.lengths)[part]
    return lengths


def last_filter(dataset: Any) -> KeptRows:
    """Return the rows that the outermost filter of a dataset keeps."""
    found: KeptRows = dataset.kept if hasattr(dataset, "kept") else dataset.plan.filters[-1]
    return found


def filtered_lengths(every: SampleLengths, find: Callable[[Indices], Indices], count: int) -> SampleLengths:
    """Return the lengths of the ``count`` rows that a filter keeps; ``find`` maps them to rows before the filter."""
    return SampleLengths(count, partial(_kept_lengths, every, find, count))


def _kept_lengths(every: SampleLengths, find: Callable[[Indices], Indices], count: int, part: Any) -> Indices:
    rows = np.arange(*part.indices(count)) if isinstance(part, slice) else np.asarray(part, dtype=np.int64)
    return every[find(rows)]


class _Column:
    """The lengths in a column of a table, which are read once, and stored in the user's cache."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name, self._read = dataset, name, _column_lengths(dataset, name)
        source = getattr(dataset, "source", dataset)
        fingerprint = fingerprint_of(source)
        if fingerprint is None:
            raise ConfigError(
                f"{kind_text(source)} has no fingerprint, so its column {name!r} cannot be cached: give an array"
            )
        self._rows, self._question = len(source), f"{fingerprint} {version_of(source)} {len(source)} {name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _Column, (self._dataset, self._name)

    def __len__(self) -> int:
        return self._rows

    def __call__(self, part: Any) -> Indices:
        lengths: Indices = self._lengths[part]
        return lengths

    @cached_property
    def _lengths(self) -> Indices:
        what = f"the lengths in the column {self._name!r}"
        return np.asarray(derived_array("lengths", self._question, np.int64, self._write, what))

    def _write(self, out: BinaryIO) -> None:
        for begin in range(0, len(self), _ROWS):
            out.write(self._read(np.arange(begin, min(begin + _ROWS, len(self)))).tobytes())


def _column_lengths(dataset: Any, name: str, *, texts: bool = False) -> Callable[[Indices], Indices]:
    """Return a function that reads the lengths of rows from a column.

    Args:
        dataset: the table, or a dataset over one.
        name: of a column of integers (these are the lengths), or of lists (their lengths are used).
        texts: also accept text and bytes; the length is the number of characters or bytes.

    Raises:
        ConfigError: there is no such column; (on access) it has another type, or nulls.
    """
    source = getattr(dataset, "source", dataset)
    columns = source.columns if has_columns(source) else []
    if name not in columns:
        has = f"its columns are {', '.join(columns)}" if columns else "it has no columns"
        raise ConfigError(f"there is no column {name!r} in this {type(dataset).__name__}: {has}")
    table = Filterable.of(source, None, len(dataset))

    def lengths(rows: Indices) -> Indices:
        values = table.table(rows, [name])[name]
        kind = values.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            values = pc.list_value_length(values)
        elif texts and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            values = pc.utf8_length(values)
        elif texts and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            values = pc.binary_length(values)
        elif not pa.types.is_integer(kind):
            raise ConfigError(f"column {name!r} has the type {kind}: lengths need a column of integers or of lists")
        if values.null_count:
            row = rows[int(np.flatnonzero(values.is_null().to_numpy())[0])]
            raise ConfigError(f"column {name!r} is null in row {row}: lengths need integers or lists without nulls")
        found: Indices = values.to_numpy().astype(np.int64)
        return found

    return lengths


class CountedLengths(NamedTuple):
    """The result of `count_lengths`.

    Attributes:
        samples: the number of samples.
        tokens: the sum of all lengths.
        longest: the largest length.
        kept: the number of samples that an interrupted earlier call had already counted.
    """

    samples: int
    tokens: int
    longest: int
    kept: int


def count_lengths(
    dataset: Any,
    out: str | os.PathLike[str],
    *,
    measure: Callable[[Any], int] | None = None,
    column: str | None = None,
    progress: bool | None = None,
) -> CountedLengths:
    """Write the lengths of all samples into a file, int64 of shape (samples,), for ``lengths=``; return the totals.

    Args:
        dataset: any map-style dataset of all data, not of one rank's samples. For Penstock's datasets, samples are
            counted by row of their source.
        out: the path of the ``.npy`` file. An existing file is replaced at the end.
        measure: ``measure(item)`` returns the length. By default it is the number of tokens: the ``len`` of an item, or
            of its ``input_ids`` if items are dicts. If the dataset has ``lengths``, its items are not read.
        column: measure this column of a table instead: a list by its length, an integer by its value, a text by its
            number of characters.
        progress: show a progress bar; by default on a terminal.

    Raises:
        ConfigError, PartitionError: invalid arguments, one rank's samples, or a dataset that creates its items itself,
            in its own order.
        DataFileError: a sample has no length.
        DataFileIOError: ``out`` cannot be written.

    After a kill, the next call continues where this one stopped, if the dataset, ``measure``, ``load`` and tokenizer
    have a fingerprint: give functions of yours an attribute ``fingerprint = "its name and version"``.

    Cost: loading all items once; a column of lists takes 0.1 microseconds per row. Memory: 1,024 items.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> count_lengths([[5, 6], [7]], folder.name + "/lengths.npy")
    CountedLengths(samples=2, tokens=3, longest=2, kept=0)
    >>> np.load(folder.name + "/lengths.npy").tolist()
    [2, 1]
    """
    path = Path(out)
    if path.suffix != ".npy":
        raise ConfigError(f"lengths are written to an .npy file, got {str(path)!r}")
    if measure is not None and column is not None:
        raise ConfigError("measure= needs items, but column= reads none: give one of the two")
    check_rows(dataset, "count_lengths")
    read, step = _length_reader(dataset, measure, column)
    samples = row_count(dataset)
    try:
        with file_lock(path):
            return _write_lengths(path, samples, read, step, _identity(dataset, samples, measure, column), progress)
    except OSError as error:
        if isinstance(error, DataFileIOError):
            raise
        raise DataFileIOError(f"{path}: lengths cannot be written to it: {error.strerror or error}") from error


def _length_reader(dataset: Any, measure: Callable[[Any], int] | None, column: str | None) -> tuple[_ReadLengths, int]:
    """Return the function that reads lengths, and the number of samples for each call."""
    if column is not None:
        read, kept = _column_lengths(dataset, column, texts=True), rows_behind(dataset)
        return lambda rows: read(rows if kept is None else kept(rows)), _ROWS
    if measure is None and getattr(dataset, "lengths", None) is not None:
        known = document_lengths(dataset, None)
        return lambda rows: known[rows], _ROWS

    def length(item: Any, row: int) -> int:
        try:
            if measure is not None:
                return measure(item)
            return len(item["input_ids"] if isinstance(item, dict) else item)
        except (TypeError, KeyError) as error:
            raise DataFileError(
                f"sample {row}, {kind_text(item)}, has no length: {error}. Give measure=, or items that are token "
                "sequences, or dicts with a token sequence under 'input_ids'"
            ) from error

    def read_items(rows: Indices) -> Indices:
        items = load_rows(dataset, rows.tolist(), None)
        return np.array([length(*pair) for pair in zip(items, rows.tolist(), strict=True)], np.int64)

    return read_items, _ITEMS


def _identity(dataset: Any, samples: int, measure: Any, column: str | None) -> str | None:
    """Return a hash of all that the lengths depend on; None if a part of it cannot be identified."""
    parts = [fingerprint_of(dataset), version_of(dataset), str(samples)]
    # A column is read without the functions that make items.
    parts += [f"column {column}"] if column is not None else [_name_of(measure), *_steps(dataset)]
    return None if None in parts else xxhash.xxh3_64_hexdigest(repr(parts).encode())


def _steps(dataset: Any) -> Iterator[str | None]:
    """Yield the identity of each step that makes the items of a dataset."""
    while dataset is not None:
        if getattr(dataset, "own_items", False):
            yield None
        yield _name_of(getattr(dataset, "load", None))
        tokenizer = getattr(dataset, "tokenizer", None)
        if tokenizer is not None:
            yield getattr(tokenizer, "fingerprint", None)
            yield getattr(dataset, "column", "")
        wraps = isinstance(dataset, SourceWrapper | TorchSubset)
        dataset = getattr(dataset, "source", getattr(dataset, "dataset", None)) if wraps else None


def _name_of(function: Any) -> str | None:
    """Return the identity of a function; None if it has none: two closures may have one name and other values."""
    if function is None:
        return ""
    if isinstance(getattr(function, "__self__", None), ModuleType):
        # A builtin function, such as len.
        return f"{function.__self__.__name__}.{function.__name__}"
    found = getattr(function, "fingerprint", None)
    return found if isinstance(found, str) else None


def _write_lengths(
    path: Path, samples: int, read: _ReadLengths, step: int, identity: str | None, progress: bool | None
) -> CountedLengths:
    partial = path.with_name(f".{path.name}.{identity or 'unknown'}.part")
    for other in path.parent.glob(f".{path.name}.*.part"):
        if identity is None or other != partial:
            other.unlink()
    header = {"descr": _TYPE.str, "fortran_order": False, "shape": (samples,)}
    with (
        open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file,
        progress_bar("counting lengths", samples, progress, in_bytes=False) as advance,
    ):
        size = os.fstat(file.fileno()).st_size
        np.lib.format.write_array_header_1_0(file, header)
        begin = file.tell()
        kept = min(max(0, size - begin) // _TYPE.itemsize, samples)
        file.seek(begin + kept * _TYPE.itemsize)
        file.truncate()
        advance(kept)
        for first in range(kept, samples, step):
            lengths = read(np.arange(first, min(first + step, samples)))
            file.write(lengths.astype(_TYPE, copy=False).tobytes())
            file.flush()
            advance(len(lengths))
        os.fsync(file.fileno())
    every = np.memmap(partial, _TYPE, "r", begin, (samples,)) if samples else np.zeros(0, _TYPE)
    tokens, longest = int(every.sum()), int(every.max(initial=0))
    os.replace(partial, path)
    return CountedLengths(samples, tokens, longest, kept)
