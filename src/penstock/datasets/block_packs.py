"""`BlockPacks`: documents packed block by block, for data that should be read sequentially.

    documents    block 0           | block 1           | ...
    packs        its pack types    | its pack types    | ...     computed once for all blocks: `BlockTypes`

A pack contains documents of one block only, in a dataset of any size. Entering a block sorts its documents by length,
and reads its pack types from a mapped file.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.datasets.block_types import BlockTypes
from penstock.datasets.packs import PackedDocuments, Packs, check_lengths, packs_at, pieces_of
from penstock.errors import ConfigError
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
from penstock.samplers.lengths import SampleLengths

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockPacks"]

DEFAULT_BLOCK_SIZE = 1 << 18
"""Documents in a block. Smaller blocks fill packs less well; larger blocks take longer to enter."""

_CACHED_BLOCKS = 2  # a few MB each


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
        block_size: int = DEFAULT_BLOCK_SIZE,
        excluded: ExcludedRows | None = None,
    ) -> None:
        self._block_size = block_size
        name = f"{PACK_BLOCK_ORDER} {block_size} {PACK_ORDER}"
        super().__init__(dataset, capacity, lengths, max_documents, name, excluded)

    def _compute_packs(self) -> None:
        self._create_caches()
        self._firsts: Indices = np.concatenate([[0], np.cumsum(self._types.packs)])
        self.tokens, self.pieces, self.most = self._types.tokens, self._types.pieces, self._types.most
        self._check_excluded()

    def _check_excluded(self) -> None:
        """Raise ConfigError if all documents of a block are excluded: nothing could replace them."""
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

    @cached_property
    def _types(self) -> BlockTypes:
        identity = f"{PACK_ORDER} {self.capacity} {self.max_documents} {self._block_size} {self.lengths.digest}"
        digest = xxhash.xxh3_128_hexdigest(identity.encode())
        blocks = -(-len(self.lengths) // self._block_size)
        largest = max(self.capacity, self._block_size)
        return BlockTypes(digest, blocks, largest, lambda number: self._packed(number, None).layout)

    def _create_caches(self) -> None:
        """Create the caches of recently used blocks: a batch is in one block, or in two neighbouring ones."""
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(lambda number: self._packed(number, self._types[number]))
        self._pack_order = lru_cache(maxsize=_CACHED_BLOCKS)(self._make_pack_order)
        self._replacements = lru_cache(maxsize=_CACHED_BLOCKS)(self._make_replacements)

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

    def _make_pack_order(self, number: int, seed: int, epoch: int) -> PackOrder:
        """Return the assignment of documents to the packs of a block in an epoch."""
        return PackOrder(self._block(number).layout, mix(seed, number), epoch)

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
        """Return the pack at each position of an epoch."""
        return _order(self, seed, epoch)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        """Return the documents in packs of an epoch."""
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
        """Return the packs of an epoch that contain a document, in the order of its tokens."""
        (row,) = normalise([row], len(self.lengths)).tolist()
        number = row // self._block_size
        block = self._block(number)
        place = int(np.flatnonzero(block.rows == row - block.begin)[0])
        order, replacements = self._pack_order(number, seed, epoch), self._replacements(number)
        found: Indices = packs_at(order, place, replacements, mix(seed, number), epoch) + self._firsts[number]
        return found

    def costs(self, packs: Indices) -> Indices:
        """Return the sum of squares of the lengths in each pack."""
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
