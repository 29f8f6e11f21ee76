"""`BlockTypes`: the pack types of every block of documents, in one mapped file that is written once.

    table      a row per block: packs, tokens, pieces, most, types, begin of its record, hash of all these
    records    of each block: packs of each type | sizes of the types | their lengths

Computing the types of a block (`penstock.order.packing.pack_types`) takes longer than all other work on it, and the
number of packs in an epoch is known only once the types of all blocks are known. So the types are computed once, and
read from the file afterwards.

Memory: 56 bytes per block; writing the file needs memory for the types of one block. The file has about 4 bytes for
each length in each type, about 300 KB for a block of 262,144 documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import DataFileIOError
from penstock.order.packing import PackLayout, TypeTable
from penstock.order.permutation import Indices
from penstock.progress import progress_bar
from penstock.storage.derived import array_in_memory, derived_array

__all__ = ["BlockTypes"]

_COLUMNS = 7
_PACKS, _TOKENS, _PIECES, _MOST, _TYPES, _BEGIN, _HASH = range(_COLUMNS)


class BlockTypes:
    """The pack types of each block, from the user's cache folder if they exist there.

    Args:
        digest: identifies the blocks and their lengths.
        blocks: number of blocks. The types of a single block are computed, because that is faster than a file.
        largest: upper bound of all numbers in a record: the capacity, or the documents of a block.
        layout_of: computes the types of a block.

    Raises:
        DataFileIOError: the path of the file is a folder.

    If the folder cannot be written, each process holds the types in its own memory, and a warning is issued.
    """

    def __init__(self, digest: str, blocks: int, largest: int, layout_of: Callable[[int], PackLayout]) -> None:
        kind = np.min_scalar_type(largest)
        write = partial(_write, blocks, kind, layout_of)
        data = (
            array_in_memory(np.uint8, write)
            if blocks <= 1
            else derived_array("packs", digest, np.uint8, write, "the types of packs")
        )
        self._path, data = getattr(data, "filename", None), np.asarray(data)
        begin = 8 * _COLUMNS * blocks
        self._table: Indices = data[:begin].view(np.int64).reshape(blocks, _COLUMNS).copy()
        self._records = data[begin:].view(kind)
        self.packs: Indices = self._table[:, _PACKS]
        """Number of packs in each block."""
        self.tokens = int(self._table[:, _TOKENS].sum())
        """Tokens in all documents."""
        self.pieces = int(self._table[:, _PIECES].sum())
        """Documents, or parts of them, in all packs."""
        self.most = int(self._table[:, _MOST].max(initial=1))
        """The largest number of documents in a pack."""

    def __getitem__(self, number: int) -> TypeTable:
        """Return the types of a block.

        Raises:
            DataFileIOError: its record is damaged.
        """
        row = self._table[number]
        types, begin = row[_TYPES : _BEGIN + 1].tolist()
        end = int(self._table[number + 1, _BEGIN]) if number + 1 < len(self._table) else len(self._records)
        record = self._records[begin:end]
        if _hash(row, record) != row[_HASH]:
            raise DataFileIOError(
                f"{self._path}: the types of packs in block {number} are damaged: remove the file; it is then written "
                "again"
            )
        return TypeTable(*(part.astype(np.int64) for part in np.split(record, [types, 2 * types])))


def _hash(row: Indices, record: npt.NDArray[Any]) -> int:
    """Return a hash of a block's numbers that fits into an int64."""
    return xxhash.xxh3_64_intdigest(row[:_HASH].tobytes() + record.tobytes()) >> 1


def _write(blocks: int, kind: np.dtype[Any], layout_of: Callable[[int], PackLayout], out: BinaryIO) -> None:
    table, first, begin = np.zeros((blocks, _COLUMNS), np.int64), out.tell(), 0
    out.write(table.tobytes())
    with progress_bar("packing", blocks, None if blocks > 1 else False, in_bytes=False) as done:
        for number, row in enumerate(table):
            layout = layout_of(number)
            record = np.concatenate(layout.types).astype(kind)
            row[:_HASH] = [len(layout), layout.tokens, layout.count, layout.most, len(layout.types.packs), begin]
            row[_HASH] = _hash(row, record)
            out.write(record.tobytes())
            begin += len(record)
            done(1)
    out.seek(first)
    out.write(table.tobytes())
