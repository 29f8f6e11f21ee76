"""`BlockTypes`: the pack types of every block of documents, in one mapped file that is written once.

    table      a row per block: packs, tokens, pieces, most, types, begin of its record, hash of its record
    records    of each block: packs of each type | sizes of the types | their lengths

Computing the types of a block (`penstock.order.packing.pack_types`) takes longer than all other work on it, and the
number of packs in an epoch is known only once the types of all blocks are known. So the types are computed once, and
read from the file afterwards.

Memory: 56 bytes per block; writing the file needs memory for the types of one block. The file has about 4 bytes for
each length in each type, about 300 KB for a block of 262,144 documents.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import DataFileIOError
from penstock.order.packing import PackLayout, TypeTable
from penstock.order.permutation import Indices
from penstock.progress import progress_bar
from penstock.storage import UNWRITABLE, file_lock, kept_path, write_kept

__all__ = ["BlockTypes"]

_MAGIC = b"PSTKPTY1"
_HEADER = struct.Struct("<8sQQQQ")  # magic, blocks, numbers in all records, bytes of a number, hash of the table
_COLUMNS = 7
_PACKS, _TOKENS, _PIECES, _MOST, _TYPES, _BEGIN, _HASH = range(_COLUMNS)

_Record = tuple[list[int], npt.NDArray[Any]]
_LayoutOf = Callable[[int], PackLayout]


class BlockTypes:
    """The pack types of each block.

    Args:
        table: int64 of shape (blocks, 7), see above.
        records: of all blocks, one after the other: unsigned integers.
        path: path of the file; None if the types are in memory.
    """

    def __init__(self, table: Indices, records: npt.NDArray[Any], path: Path | None = None) -> None:
        """Create from arrays. Use `BlockTypes.open`."""
        self._table, self._records, self._path = table, records, path
        self.packs: Indices = table[:, _PACKS]
        """Number of packs in each block."""
        self.tokens = int(table[:, _TOKENS].sum())
        """Tokens in all documents."""
        self.pieces = int(table[:, _PIECES].sum())
        """Documents, or parts of them, in all packs."""
        self.most = int(table[:, _MOST].max(initial=1))
        """The largest number of documents in a pack."""

    @classmethod
    def open(cls, digest: str, blocks: int, largest: int, layout_of: _LayoutOf) -> BlockTypes:
        """Return the types of all blocks, from the user's cache folder if they exist there.

        Args:
            digest: identifies the blocks and their lengths.
            blocks: number of blocks. The types of a single block are computed, because that is faster than a file.
            largest: upper bound of all numbers in a record: the capacity, or the documents of a block.
            layout_of: computes the types of a block.

        Raises:
            DataFileIOError: the path of the file is a folder.

        If the folder cannot be written, each process holds the types in its own memory, and a warning is issued.
        """
        kind = np.min_scalar_type(largest)
        if blocks <= 1:
            return cls(*_in_memory(blocks, kind, layout_of))
        path = kept_path("packs", f"{digest}.types")
        try:
            return _open_or_write(path, blocks, kind, layout_of)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            warnings.warn(
                f"{path}: the types of packs cannot be stored there: {error.strerror}. Until this works, each "
                "process computes them again and holds them in memory. Free space, or set XDG_CACHE_HOME to "
                "another folder",
                stacklevel=2,
            )
            return cls(*_in_memory(blocks, kind, layout_of))

    def __getitem__(self, number: int) -> TypeTable:
        """Return the types of a block.

        Raises:
            DataFileIOError: its record is damaged.
        """
        types, begin, hashed = self._table[number, _TYPES:].tolist()
        end = int(self._table[number + 1, _BEGIN]) if number + 1 < len(self._table) else len(self._records)
        record = self._records[begin:end]
        if _hash(record) != hashed:
            raise DataFileIOError(
                f"{self._path}: the types of packs in block {number} are damaged: remove the file; it is then written "
                "again"
            )
        return TypeTable(*(part.astype(np.int64) for part in np.split(record, [types, 2 * types])))


def _hash(numbers: npt.NDArray[Any]) -> int:
    """Return a hash that fits into an int64."""
    return xxhash.xxh3_64_intdigest(numbers.tobytes()) >> 1


def _compute_records(blocks: int, kind: np.dtype[Any], layout_of: _LayoutOf) -> Iterator[_Record]:
    """Yield the table row and the record of each block."""
    begin = 0
    with progress_bar("packing", blocks, None if blocks > 1 else False, in_bytes=False) as done:
        for number in range(blocks):
            layout = layout_of(number)
            record = np.concatenate(layout.types).astype(kind)
            numbers = [len(layout), layout.tokens, layout.count, layout.most, len(layout.types.packs)]
            yield [*numbers, begin, _hash(record)], record
            begin += len(record)
            done(1)


def _in_memory(blocks: int, kind: np.dtype[Any], layout_of: _LayoutOf) -> tuple[Indices, npt.NDArray[Any]]:
    rows, records = [], [np.empty(0, kind)]
    for row, record in _compute_records(blocks, kind, layout_of):
        rows.append(row)
        records.append(record)
    return np.array(rows, np.int64).reshape(-1, _COLUMNS), np.concatenate(records)


def _open_or_write(path: Path, blocks: int, kind: np.dtype[Any], layout_of: _LayoutOf) -> BlockTypes:
    """Return the types in a file. One process of a machine writes it while the others wait."""
    found = _map(path, blocks, kind)
    if found is None:
        path.parent.mkdir(exist_ok=True)
        with file_lock(path):
            found = _map(path, blocks, kind)
            if found is None:
                with write_kept(path) as file:
                    _write(file, blocks, kind, layout_of)
                found = _map(path, blocks, kind)
    if found is None:
        raise DataFileIOError(f"{path}: the file was written, but reads back differently: check the disk")
    return found


def _write(file: BinaryIO, blocks: int, kind: np.dtype[Any], layout_of: _LayoutOf) -> None:
    table, size = np.zeros((blocks, _COLUMNS), np.int64), 0
    file.seek(_HEADER.size + table.nbytes)
    for number, (row, record) in enumerate(_compute_records(blocks, kind, layout_of)):
        table[number] = row
        size += len(record)
        file.write(record.tobytes())
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, blocks, size, kind.itemsize, _hash(table)))
    file.write(table.tobytes())


def _map(path: Path, blocks: int, kind: np.dtype[Any]) -> BlockTypes | None:
    """Return the types in a file; None if it does not exist or is incomplete."""
    try:
        mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    # An empty file cannot be mapped: ValueError.
    except (FileNotFoundError, ValueError):
        return None
    begin = _HEADER.size + 8 * _COLUMNS * blocks
    if len(mapped) < begin:
        return None
    table = mapped[_HEADER.size : begin].view(np.int64).reshape(blocks, _COLUMNS).copy()
    size, left = divmod(len(mapped) - begin, kind.itemsize)
    expected = _HEADER.pack(_MAGIC, blocks, size, kind.itemsize, _hash(table))
    if left or mapped[: _HEADER.size].tobytes() != expected:
        return None
    return BlockTypes(table, mapped[begin:].view(kind), path)
