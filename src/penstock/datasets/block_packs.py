"""`BlockPacks`: documents packed block by block, for data that should be read in runs.

    documents    block 0           | block 1           | ...
    packs        its pack types    | its pack types    | ...     types and documents of a block are found when needed

A pack has documents of one block only. How many packs each block has is found once, by packing all of them, and kept
in the user's cache.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.datasets.packs import PackedDocuments, Packs, packs_at, pieces_of
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.order import Order
from penstock.order.pack_blocks import PACK_BLOCK_ORDER, PackBlockOrder
from penstock.order.packing import PACK_ORDER, PackClasses, PackLayout, PackOrder
from penstock.order.permutation import Indices, normalise
from penstock.plan.exclusion import ExcludedPieces, ExcludedRows
from penstock.progress import progress_bar
from penstock.samplers.lengths import SampleLengths
from penstock.storage import UNWRITABLE, cache_root, file_lock, write_atomically

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockPacks"]

DEFAULT_BLOCK_SIZE = 1 << 18
"""Documents. Fewer make packs less full, and more take longer to pack."""


class BlockPacks(Packs):
    """Packs of documents of the same block.

    Args:
        dataset, capacity, lengths, max_documents, excluded: see `Packs`. Others of the same block stand for those.
        block_size: documents of a block.

    Memory: 8 bytes a block, and a few MB for the packs of those in use.
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

    def _find(self) -> None:
        told = f"{PACK_ORDER} {self.capacity} {self.max_documents} {self._block_size} {self.lengths.digest}"
        blocks = -(-len(self.lengths) // self._block_size)
        counts = self._counted(blocks) if blocks <= 1 else self._kept(blocks, xxhash.xxh3_128_hexdigest(told.encode()))
        self._firsts: Indices = np.concatenate([[0], np.cumsum(counts[:, 0])])
        self.tokens, self.pieces = int(counts[:, 1].sum()), int(counts[:, 2].sum())
        self.most = int(counts[:, 3].max(initial=1))
        self._check_excluded()

    def _check_excluded(self) -> None:
        """Refuse to leave out all documents of a block: then there is nothing to put in their places."""
        rows = np.empty(0, np.int64) if self.excluded is None else self.excluded.rows
        for number in np.unique(rows // self._block_size).tolist():
            begin = number * self._block_size
            lengths = self.lengths[begin : begin + self._block_size].copy()
            first, last = rows.searchsorted([begin, begin + self._block_size])
            lengths[rows[first:last] - begin] = 0
            if not lengths.any():
                raise ConfigError(
                    f"exclude= leaves none of the documents {begin} to {begin + len(lengths) - 1}, which order='block' "
                    f"packs together: take a larger block_size than {self._block_size}, or order='global'"
                )

    def _kept(self, blocks: int, digest: str) -> Indices:
        """Return what `_counted` returns, which one of the processes of a machine finds while the others wait."""
        folder = cache_root() / "packs"
        path = folder / f"{digest}.npy"
        if not path.exists():
            with file_lock(path):
                if not path.exists():
                    counts = self._counted(blocks)
                    try:
                        folder.mkdir(exist_ok=True)
                        with write_atomically(path) as file:
                            np.save(file, counts)
                    except OSError as error:
                        if error.errno not in UNWRITABLE:
                            raise
                        warnings.warn(
                            f"{path}: the numbers of packs cannot be kept there: {error.strerror}. Until there is "
                            "room, each process counts them anew. Free space, or set XDG_CACHE_HOME to another folder",
                            stacklevel=2,
                        )
                    return counts
        found: Indices = np.load(path)
        return found

    def _counted(self, blocks: int) -> Indices:
        """Return packs, tokens, pieces and the most pieces of a pack, block by block: int64 of shape (blocks, 4)."""
        counts = np.zeros((blocks, 4), np.int64)
        with progress_bar("packing", blocks, None if blocks > 1 else False, in_bytes=False) as done:
            for number in range(blocks):
                layout = _block(self, number).layout
                counts[number] = len(layout), layout.tokens, layout.count, layout.most
                done(1)
        return counts

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def order(self, seed: int, epoch: int) -> Order:
        """Return the pack at each position of an epoch."""
        return _order(self, seed, epoch)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        """Return the documents of packs in an epoch."""
        blocks = self._blocks_of(packs)
        parts, places = [], []
        for number in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == number)
            rows = _block(self, number).rows
            inside = packs[here] - self._firsts[number]
            own, instead = mix(seed, number), _instead(self, number)
            found = pieces_of(_deal(self, number, seed, epoch), inside, instead, own, epoch)
            parts.append(PackedDocuments(rows[found.places].astype(np.int64), *found[1:]))
            places.append(here)
        return _merged(parts, places)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        """Return the packs that hold a document in an epoch, in the order of its tokens."""
        (row,) = normalise([row], len(self.lengths)).tolist()
        number = row // self._block_size
        place = int(np.flatnonzero(_block(self, number).rows == row)[0])
        order, instead = _deal(self, number, seed, epoch), _instead(self, number)
        found: Indices = packs_at(order, place, instead, mix(seed, number), epoch) + self._firsts[number]
        return found

    def costs(self, packs: Indices) -> Indices:
        """Return the sums of squares of the lengths in packs."""
        blocks = self._blocks_of(packs)
        costs = np.zeros(len(packs), np.int64)
        for number in np.unique(blocks).tolist():
            here = blocks == number
            costs[here] = _block(self, number).layout.costs(packs[here] - self._firsts[number])
        return costs

    def _blocks_of(self, packs: Indices) -> Indices:
        """Return the block of each pack. A block of empty documents has none."""
        blocks: Indices = self._firsts.searchsorted(packs, "right") - 1
        return blocks


class _Block(NamedTuple):
    """The packs of a block, and its documents by class."""

    layout: PackLayout
    rows: npt.NDArray[Any]


@lru_cache(maxsize=4)
def _block(packs: BlockPacks, number: int) -> _Block:
    begin = number * packs._block_size
    lengths = packs.lengths[begin : begin + packs._block_size]
    if int(lengths.min()) < 0:
        bad = int(np.flatnonzero(lengths < 0)[0])
        raise ConfigError(f"document {begin + bad} has a length of {lengths[bad]}: lengths are 0 or more")
    classes = PackClasses(packs.capacity, np.unique(lengths[lengths >= packs.capacity]))
    keys = classes.of(lengths)
    starts = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=classes.count))])
    rows = np.argsort(keys, kind="stable") + begin
    if begin + len(rows) <= 1 << 32:
        rows = rows.astype(np.uint32)
    return _Block(PackLayout(classes, starts, max_documents=packs.max_documents), rows)


@lru_cache(maxsize=4)
def _instead(packs: BlockPacks, number: int) -> ExcludedPieces | None:
    """Return what stands for the excluded documents of a block; None if it has none."""
    if packs.excluded is None:
        return None
    begin, block = number * packs._block_size, _block(packs, number)
    first, last = packs.excluded.rows.searchsorted([begin, begin + packs._block_size])
    if first == last:
        return None
    places = np.flatnonzero(np.isin(block.rows, packs.excluded.rows[first:last]))
    layout = block.layout
    return ExcludedPieces(ExcludedRows(places, len(block.rows)), layout.starts, layout.classes.lengths, packs.capacity)


@lru_cache(maxsize=4)
def _deal(packs: BlockPacks, number: int, seed: int, epoch: int) -> PackOrder:
    """Return the documents of the packs of a block in an epoch."""
    return PackOrder(_block(packs, number).layout, mix(seed, number), epoch)


@lru_cache(maxsize=8)
def _order(packs: BlockPacks, seed: int, epoch: int) -> PackBlockOrder:
    return PackBlockOrder(packs._firsts, seed, epoch)


def _merged(parts: list[PackedDocuments], places: list[Indices]) -> PackedDocuments:
    """Return packs that were found in parts as one; ``places`` say where each of them belongs."""
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
