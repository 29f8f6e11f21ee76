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
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.datasets.packs import PackedDocuments, Packs, check_lengths, packs_at, pieces_of
from penstock.errors import ConfigError, DataFileIOError
from penstock.hashing import mix
from penstock.order import Order
from penstock.order.packing import (
    PACK_BLOCK_ORDER,
    PACK_ORDER,
    PackBlockOrder,
    PackClasses,
    PackLayout,
    PackOrder,
    TypeTable,
)
from penstock.order.permutation import Indices, normalise
from penstock.order.shuffle import groups
from penstock.plan.exclusion import ExcludedRows
from penstock.progress import progress_bar
from penstock.samplers.lengths import SampleLengths
from penstock.storage.derived import array_in_memory, derived_array

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockPacks"]

DEFAULT_BLOCK_SIZE = 1 << 18
"""Documents in a block. Smaller blocks fill packs less well; larger blocks take longer to enter."""

_CACHED_BLOCKS = 2  # a few MB each

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
        self._create_caches()
        table = self._types.table
        self._firsts: Indices = np.concatenate([[0], np.cumsum(table[:, _PACKS])])
        self.tokens, self.pieces = int(table[:, _TOKENS].sum()), int(table[:, _PIECES].sum())
        self.most = int(table[:, _MOST].max(initial=1))
        # If all documents of a block are excluded, nothing can replace them.
        rows = np.empty(0, np.int64) if self.excluded is None else self.excluded.rows
        for number, _ in groups(rows // self._block_size):
            begin = number * self._block_size
            lengths = self.lengths[begin : begin + self._block_size].copy()
            first, last = rows.searchsorted([begin, begin + self._block_size])
            lengths[rows[first:last] - begin] = 0
            if not lengths.any():
                raise ConfigError(
                    f"exclude= leaves no tokens in documents {begin} to {begin + len(lengths) - 1}, and order='block' "
                    f"packs these together: use a larger block_size than {self._block_size}, or order='global'"
                )

    def _create_caches(self) -> None:
        """Create the caches of recently used blocks: a batch is in one block, or in two neighbouring ones."""
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(lambda number: self._packed(number, self._types[number]))
        self._pack_order = lru_cache(maxsize=_CACHED_BLOCKS)(
            lambda number, seed, epoch: PackOrder(self._block(number).layout, mix(seed, number), epoch)
        )
        self._replacements = lru_cache(maxsize=_CACHED_BLOCKS)(self._make_replacements)

    @cached_property
    def _types(self) -> _BlockTypes:
        identity = f"{PACK_ORDER} {self.capacity} {self.max_documents} {self._block_size} {self.lengths.digest}"
        digest = xxhash.xxh3_128_hexdigest(identity.encode())
        blocks = -(-len(self.lengths) // self._block_size)
        # No number in a record is larger than the capacity, or the documents of a block.
        kind = np.min_scalar_type(max(self.capacity, self._block_size))
        return _BlockTypes(digest, blocks, kind, lambda number: self._packed(number, None).layout)

    def _packed(self, number: int, types: TypeTable | None) -> _Block:
        """Return a block; without ``types``, compute its pack types."""
        begin = number * self._block_size
        lengths = self.lengths[begin : begin + self._block_size]
        check_lengths(lengths, begin)
        classes = PackClasses(self.capacity, np.unique(lengths[lengths >= self.capacity]))
        keys = classes.of(lengths)
        starts = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=classes.count))])
        layout = PackLayout(classes, starts, max_documents=self.max_documents, types=types)
        # NumPy uses a fast radix sort for 16-bit integers, and the keys of most blocks fit in 16 bits.
        rows = np.argsort(keys, kind="stable")
        return _Block(layout, rows.astype(np.min_scalar_type(len(rows))), begin)

    def _make_replacements(self, number: int) -> ExcludedRows | None:
        """Return the replacements of the excluded documents of a block; None if it has none."""
        if self.excluded is None:
            return None
        layout, rows, begin = self._block(number)
        first, last = self.excluded.rows.searchsorted([begin, begin + self._block_size])
        if first == last:
            return None
        places = np.flatnonzero(np.isin(rows, self.excluded.rows[first:last] - begin))
        return ExcludedRows(places, layout.starts, layout.classes.lengths)

    def __getstate__(self) -> dict[str, Any]:
        cached = ("_types", "_block", "_pack_order", "_replacements")
        return {name: value for name, value in self.__dict__.items() if name not in cached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._create_caches()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def order(self, seed: int, epoch: int) -> Order:
        return _order(self, seed, epoch)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        parts, places = [], []
        for number, here in groups(self._blocks_of(packs)):
            block = self._block(number)
            inside = packs[here] - self._firsts[number]
            own, replacements = mix(seed, number), self._replacements(number)
            found = pieces_of(self._pack_order(number, seed, epoch), inside, replacements, own, epoch)
            parts.append(PackedDocuments(block.rows[found.places].astype(np.int64) + block.begin, *found[1:]))
            places.append(np.arange(len(packs))[here])
        return _merged(parts, places)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        (row,) = normalise([row], len(self.lengths)).tolist()
        number = row // self._block_size
        block = self._block(number)
        place = int(np.flatnonzero(block.rows == row - block.begin)[0])
        order, replacements = self._pack_order(number, seed, epoch), self._replacements(number)
        found: Indices = packs_at(order, place, replacements, mix(seed, number), epoch) + self._firsts[number]
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


class _Block(NamedTuple):
    """The packs of a block.

    Attributes:
        layout: the packs.
        rows: its documents sorted by class, relative to ``begin``.
        begin: the row of its first document.
    """

    layout: PackLayout
    rows: npt.NDArray[Any]
    begin: int


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
        none = np.zeros(0, np.int64)
        return PackedDocuments(none, none, none, np.zeros(1, np.int64))
    order = np.argsort(np.concatenate(places))
    sizes = np.concatenate([np.diff(part.splits) for part in parts])
    begins = (np.cumsum(sizes) - sizes)[order]
    splits = np.concatenate([[0], np.cumsum(sizes[order])])
    at = np.repeat(begins - splits[:-1], sizes[order]) + np.arange(splits[-1])
    rows, first, lengths = (np.concatenate([part[k] for part in parts])[at] for k in range(3))
    return PackedDocuments(rows, first, lengths, splits)
