"""`count_lengths`: the length of every sample of a data set, counted once into an ``.npy`` file; goes on after a kill.

count_lengths(TokenizedDataset(text, "tokenizer.json"), "lengths.npy")
packs = PackedDataset(TokenizedDataset(text, "tokenizer.json"), 8192, lengths="lengths.npy")

While it counts, the file beside it, ``.lengths.npy.<identity>.part``, has what is done: an ``.npy`` file that lacks its
end. Its name follows from the data and the measure, so what others left is never gone on with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from penstock.datasets.lengths import column_lengths, document_lengths
from penstock.datasets.rows import check_rows, load_rows, row_count, rows_behind
from penstock.errors import ConfigError, DataFileError, DataFileIOError, PartitionError
from penstock.order.permutation import Indices
from penstock.progress import progress_bar
from penstock.samplers.identity import fingerprint_of, shares_in
from penstock.storage import file_lock

__all__ = ["CountedLengths", "count_lengths"]

_ITEMS = 1 << 10  # in memory at once
_ROWS = 1 << 16  # of a column or an array
_TYPE = np.dtype("<i8")

_Part = Callable[[Indices], Indices]
"""The lengths of samples, by number."""


class CountedLengths(NamedTuple):
    """What `count_lengths` counted.

    Attributes:
        samples: how many there are.
        tokens: all lengths together.
        longest: the largest length.
        kept: samples that an earlier call had counted.
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
    """Write the lengths of all samples into a file: int64 of shape (samples,), for ``lengths=``.

    Args:
        dataset: any map-style data set of whole data, not of one rank's share. Samples of ours are counted by the rows
            of their source.
        out: the path of the ``.npy`` file. One that is there is replaced at the end.
        measure: ``measure(item)`` is the length. By default it is the number of tokens: the ``len`` of an item, or of
            its ``input_ids`` where items are dicts. Data sets that have ``lengths`` are not read.
        column: count this column of a table instead: of lists their lengths, of integers themselves, of texts their
            characters.
        progress: draw a bar; by default on a terminal.

    Raises:
        ConfigError, PartitionError: arguments that make no sense, a share, a data set that makes its items by itself in
            an order of its own.
        DataFileError: a sample that has no length.
        DataFileIOError: ``out`` cannot be written.

    After a kill the next call goes on where this one was, if the data set has a fingerprint; of another, it begins
    anew. Cost: what the items cost; a column of lists takes 0.1 microseconds a row. Memory: 1,024 items.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> count_lengths([[5, 6], [7]], folder.name + "/lengths.npy")
    CountedLengths(samples=2, tokens=3, longest=2, kept=0)
    >>> np.load(folder.name + "/lengths.npy").tolist()
    [2, 1]
    """
    path = Path(out)
    if path.suffix != ".npy":
        raise ConfigError(f"lengths go to an .npy file, got {str(path)!r}")
    if measure is not None and column is not None:
        raise ConfigError("measure= is of items, and column= reads none: give one of the two")
    _check(dataset)
    part, step = _counting(dataset, measure, column)
    samples = row_count(dataset)
    try:
        with file_lock(path):
            return _count(path, samples, part, step, _identity(dataset, samples, measure, column), progress)
    except OSError as error:
        if isinstance(error, DataFileIOError):
            raise
        raise DataFileIOError(f"{path}: lengths cannot be written there: {error.strerror or error}") from error


def _check(dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"lengths are counted of data sets with length and items, got a {type(dataset).__name__}")
    share = next((share for share in shares_in(dataset) if getattr(share, "world_size", 1) != 1), None)
    if share is not None:
        raise PartitionError(
            f"this is one rank's share of a {type(share).__name__}: count all, with rank=0, world_size=1"
        )
    check_rows(dataset)


def _counting(dataset: Any, measure: Callable[[Any], int] | None, column: str | None) -> tuple[_Part, int]:
    """Return how lengths are counted, and of how many samples at once."""
    if column is not None:
        read, kept = column_lengths(dataset, column, texts=True), rows_behind(dataset)
        return lambda rows: read(rows if kept is None else kept(rows)), _ROWS
    if measure is None and getattr(dataset, "lengths", None) is not None:
        known = document_lengths(dataset, None)
        return lambda rows: known[rows], _ROWS
    length = measure or _length

    def part(rows: Indices) -> Indices:
        items = load_rows(dataset, rows.tolist(), None)
        return np.array([_measured(length, *pair) for pair in zip(items, rows.tolist(), strict=True)], np.int64)

    return part, _ITEMS


def _length(item: Any) -> int:
    return len(item["input_ids"] if isinstance(item, dict) else item)


def _measured(length: Callable[[Any], int], item: Any, row: int) -> int:
    try:
        return length(item)
    except (TypeError, KeyError) as error:
        raise DataFileError(
            f"sample {row}, a {type(item).__name__}, has no length: {error}. Give measure=, or items that are rows of "
            "tokens, or dicts with these under 'input_ids'"
        ) from error


def _identity(dataset: Any, samples: int, measure: Any, column: str | None) -> str | None:
    """Return a hash of what is counted; None where nobody knows."""
    tokenizer = getattr(dataset, "tokenizer", None)
    prints = [fingerprint_of(dataset), *([] if tokenizer is None else [getattr(tokenizer, "fingerprint", None)])]
    if None in prints:
        return None
    how = column if measure is None else f"{measure.__module__}.{getattr(measure, '__qualname__', repr(measure))}"
    return xxhash.xxh3_64_hexdigest(f"{samples} {prints} {how}".encode())


def _count(
    path: Path, samples: int, part: _Part, step: int, identity: str | None, progress: bool | None
) -> CountedLengths:
    partial = path.with_name(f".{path.name}.{identity or 'unknown'}.part")
    for other in path.parent.glob(f".{path.name}.*.part"):
        if identity is None or other != partial:
            other.unlink()
    with (
        open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file,
        progress_bar("counting lengths", samples, progress, in_bytes=False) as advance,
    ):
        begin, kept = _resumed(file, samples)
        advance(kept)
        for first in range(kept, samples, step):
            lengths = part(np.arange(first, min(first + step, samples)))
            file.write(lengths.astype(_TYPE, copy=False).tobytes())
            file.flush()
            advance(len(lengths))
        os.fsync(file.fileno())
    tokens, longest = _summed(partial, begin, samples)
    os.replace(partial, path)
    return CountedLengths(samples, tokens, longest, kept)


def _resumed(file: BinaryIO, samples: int) -> tuple[int, int]:
    """Return where lengths begin in a file, and how many are there; the file stands behind the last one."""
    header = {"descr": _TYPE.str, "fortran_order": False, "shape": (samples,)}
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    np.lib.format.write_array_header_1_0(file, header)
    begin = file.tell()
    kept = min(max(0, size - begin) // _TYPE.itemsize, samples)
    file.seek(begin + kept * _TYPE.itemsize)
    file.truncate()
    return begin, kept


def _summed(path: Path, begin: int, samples: int) -> tuple[int, int]:
    tokens = longest = 0
    every = np.memmap(path, _TYPE, "r", begin, (samples,)) if samples else np.zeros(0, _TYPE)
    for first in range(0, samples, _ROWS):
        chunk = every[first : first + _ROWS]
        tokens, longest = tokens + int(chunk.sum()), max(longest, int(chunk.max()))
    return tokens, longest
