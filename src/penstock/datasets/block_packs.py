"""`BlockPacks`: documents packed block by block, for data that should be read sequentially.

    documents    block 0           | block 1           | ...
    packs        its pack types    | its pack types    | ...     computed once for all blocks, into a mapped file

A pack contains documents of one block only, in a dataset of any size. Entering a block sorts its documents by length,
and reads its pack types. Computing these (`penstock.order.packing.pack_types`) takes longer than all other work on a
block, and only all of them give the number of packs in an epoch. The file::

    table      a row per block: packs, tokens, pieces, most, types, begin of its record, hash of all these
    records    of each block: packs of each type | sizes of the types | their lengths

It has about 4 bytes for each length in each type, about 300 KB for a block of 262,144 documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.datasets.packs import DocumentGroup, PackedDocuments, Packs, check_lengths
from penstock.errors import ConfigError, DataFileIOError
from penstock.hashing import mix
from penstock.order import Order
from penstock.order.packing import (
    PACK_BLOCK_ORDER,
    PACK_ORDER,
    PackBlockOrder,
    PackClasses,
    PackLayout,
    TypeTable,
)
from penstock.order.permutation import Indices
from penstock.order.shuffle import groups
from penstock.plan.exclusion import ExcludedRows
from penstock.progress import progress_bar
from penstock.samplers.lengths import SampleLengths
from penstock.storage.derived import array_in_memory, derived_array

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockPacks"]

DEFAULT_BLOCK_SIZE = 1 << 18
"""Documents in a block. Smaller blocks fill packs less well; larger blocks take longer to enter."""

_CACHED_BLOCKS = 2  # a few MB each
_NONE = np.empty(0, np.int64)

_COLUMNS = 7
_PACKS, _TOKENS, _PIECES, _MOST, _TYPES, _BEGIN, _HASH = range(_COLUMNS)


class BlockPacks(Packs):
    """Packs whose documents are all from the same block.

    Args:
        dataset, capacity, lengths, max_documents, excluded: see `Packs`. An excluded document is replaced by one of the
            same block.
        block_size: documents in a block.

    Memory: 100 bytes per block, and a few MB for each of the two most recently used blocks.
    """

    def __init__(
        self,
        dataset: Any,
        capacity: int,
        lengths: SampleLengths,
        max_documents: int | None,
        excluded: ExcludedRows | None,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        name = f"{PACK_BLOCK_ORDER} {block_size} {PACK_ORDER}"
        super().__init__(dataset, capacity, lengths, max_documents, excluded, name)

    def _compute_packs(self) -> None:
        table = self._types.table
        self._firsts: Indices = np.concatenate([[0], np.cumsum(table[:, _PACKS])])
        self.tokens, self.pieces = int(table[:, _TOKENS].sum()), int(table[:, _PIECES].sum())
        self.most = int(table[:, _MOST].max(initial=1))
        # If all documents of a block are excluded, nothing can replace them.
        for number, _ in groups(self._excluded_rows // self._block_size):
            begin = number * self._block_size
            lengths = self.lengths[begin : begin + self._block_size].copy()
            lengths[self._excluded_in(number) - begin] = 0
            if not lengths.any():
                raise ConfigError(
                    f"exclude= leaves no tokens in documents {begin} to {begin + len(lengths) - 1}, and order='block' "
                    f"packs these together: use a larger block_size than {self._block_size}, or order='global'"
                )

    def _excluded_in(self, number: int) -> Indices:
        """Return the excluded rows of a block."""
        begin = number * self._block_size
        first, last = self._excluded_rows.searchsorted([begin, begin + self._block_size])
        return self._excluded_rows[first:last]

    @cached_property
    def _block(self) -> Callable[[int], DocumentGroup]:
        """Returns a block; caches recently used ones, since a batch is in one block, or in two neighbouring ones."""
        return lru_cache(maxsize=_CACHED_BLOCKS)(
            lambda number: self._packed(number, self._types[number], self._excluded_in(number))
        )

    @cached_property
    def _types(self) -> _BlockTypes:
        identity = f"{PACK_ORDER} {self.capacity} {self.max_documents} {self._block_size} {self.lengths.digest}"
        digest = xxhash.xxh3_128_hexdigest(identity.encode())
        blocks = -(-len(self.lengths) // self._block_size)
        # No number in a record is larger than the capacity, or the documents of a block.
        kind = np.min_scalar_type(max(self.capacity, self._block_size))
        return _BlockTypes(digest, blocks, kind, lambda number: self._packed(number, None, _NONE).layout)

    def _packed(self, number: int, types: TypeTable | None, excluded: Indices) -> DocumentGroup:
        """Return the documents of a block; without ``types``, compute its pack types."""
        begin = number * self._block_size
        lengths = self.lengths[begin : begin + self._block_size]
        check_lengths(lengths, begin)
        classes = PackClasses(self.capacity, np.unique(lengths[lengths >= self.capacity]))
        keys = classes.of(lengths)
        starts = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=classes.count))])
        layout = PackLayout(classes, starts, max_documents=self.max_documents, types=types)
        # NumPy uses a fast radix sort for 16-bit integers, and the keys of most blocks fit in 16 bits.
        by_class = np.argsort(keys, kind="stable")
        by_class = by_class.astype(np.min_scalar_type(len(by_class)))
        return DocumentGroup(
            layout,
            rows=lambda places: by_class[places].astype(np.int64) + begin,
            places=lambda rows: np.flatnonzero(np.isin(by_class, rows - begin)),
            excluded=excluded,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_types", "_block")}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def order(self, seed: int, epoch: int) -> Order:
        return _order(self, seed, epoch)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        parts, places = [], []
        for number, here in groups(self._blocks_of(packs)):
            inside = packs[here] - self._firsts[number]
            parts.append(self._block(number).documents(inside, mix(seed, number), epoch))
            places.append(np.arange(len(packs))[here])
        return _merged(parts, places)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        number = row // self._block_size
        found: Indices = self._block(number).packs_of(row, mix(seed, number), epoch) + self._firsts[number]
        return found

    def costs(self, packs: Indices) -> Indices:
        costs = np.zeros(len(packs), np.int64)
        for number, here in groups(self._blocks_of(packs)):
            costs[here] = self._block(number).layout.costs(packs[here] - self._firsts[number])
        return costs

    def _blocks_of(self, packs: Indices) -> Indices:
        """Return the block of each pack. A block with only empty documents has no packs."""
        blocks: Indices = self._firsts.searchsorted(packs, "right") - 1
        return blocks


class _BlockTypes:
    """The pack types of each block, from the user's cache folder if they exist there.

    Args:
        digest: identifies the blocks and their lengths.
        blocks: number of blocks. The types of a single block are computed, because that is faster than a file.
        kind: dtype of the records.
        layout_of: computes the types of a block.

    If the folder cannot be written, each process holds the types in its own memory, and a warning is issued.
    """

    def __init__(self, digest: str, blocks: int, kind: np.dtype[Any], layout_of: Callable[[int], PackLayout]) -> None:
        write = partial(_write_types, blocks, kind, layout_of)
        data = (
            array_in_memory(np.uint8, write)
            if blocks <= 1
            else derived_array("packs", digest, np.uint8, write, "the types of packs")
        )
        self._path, data = getattr(data, "filename", None), np.asarray(data)
        begin = 8 * _COLUMNS * blocks
        self.table: Indices = data[:begin].view(np.int64).reshape(blocks, _COLUMNS).copy()
        self._records = data[begin:].view(kind)

    def __getitem__(self, number: int) -> TypeTable:
        """Return the types of a block.

        Raises:
            DataFileIOError: its record is damaged.
        """
        row = self.table[number]
        types, begin = row[_TYPES : _BEGIN + 1].tolist()
        end = int(self.table[number + 1, _BEGIN]) if number + 1 < len(self.table) else len(self._records)
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


def _write_types(blocks: int, kind: np.dtype[Any], layout_of: Callable[[int], PackLayout], out: BinaryIO) -> None:
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


@lru_cache(maxsize=8)
def _order(packs: BlockPacks, seed: int, epoch: int) -> PackBlockOrder:
    return PackBlockOrder(packs._firsts, seed, epoch)


def _merged(parts: list[PackedDocuments], places: list[Indices]) -> PackedDocuments:
    """Return the packs of several blocks as one; ``places`` are the output positions of each block's packs."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return PackedDocuments(_NONE, _NONE, _NONE, np.zeros(1, np.int64))
    order = np.argsort(np.concatenate(places))
    sizes = np.concatenate([np.diff(part.splits) for part in parts])
    begins = (np.cumsum(sizes) - sizes)[order]
    splits = np.concatenate([[0], np.cumsum(sizes[order])])
    at = np.repeat(begins - splits[:-1], sizes[order]) + np.arange(splits[-1])
    rows, first, lengths = (np.concatenate([part[k] for part in parts])[at] for k in range(3))
    return PackedDocuments(rows, first, lengths, splits)
