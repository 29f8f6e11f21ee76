"""`Packs`: the packs of a dataset of documents as the rows of a source. `PackPlan`: splits them across ranks.

pack -> positions among the documents sorted by class (`penstock.order.packing`) -> class index -> rows of documents

`Packs` holds documents from anywhere. `BlockPacks` packs block by block, for data that should be read sequentially::

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

import itertools
import json
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, BinaryIO, NamedTuple, Unpack, cast

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.datasets.rows import row_count
from penstock.errors import ConfigError, DataFileIOError, StateError
from penstock.hashing import mix
from penstock.manifest.indices import by_part
from penstock.order import Order, Partition
from penstock.order.packing import (
    PACK_BLOCK_ORDER,
    PACK_ORDER,
    PackBlockOrder,
    PackClasses,
    PackLayout,
    PackOrder,
    TypeTable,
    check_lengths,
    split_by_cost,
)
from penstock.order.permutation import Bijection, Indices
from penstock.order.shuffle import groups
from penstock.plan.cursor import State, read_int
from penstock.plan.exclusion import ExcludedRows, ExclusionMark
from penstock.plan.share import EpochView, MiniEpoch, ShareCursor, SharePlan
from penstock.plan.share_options import PartitionOptions
from penstock.progress import progress_bar
from penstock.samplers.identity import fingerprint_of
from penstock.samplers.lengths import SampleLengths
from penstock.sources.batched import BatchedDataset
from penstock.storage.class_index import ClassIndex
from penstock.storage.derived import array_in_memory, derived_array
from penstock.wording import counted

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockPacks", "PackPlan", "PackedDocuments", "Packs"]

_CHUNK = 1 << 18
_TABLE = 1 << 20
"""Lengths below this are marked in a table; larger ones are sorted, which takes longer."""

DEFAULT_BLOCK_SIZE = 1 << 18
"""Documents in a block. Smaller blocks fill packs less well; larger blocks take longer to enter."""

_CACHED_BLOCKS = 2  # a few MB each
_NONE = np.empty(0, np.int64)

_COLUMNS = 7
_PACKS, _TOKENS, _PIECES, _MOST, _TYPES, _BEGIN, _HASH = range(_COLUMNS)


class PackedDocuments(NamedTuple):
    """The documents, or parts of them, in some packs, one pack after the other.

    Attributes:
        rows: rows of the documents: int64 of shape (pieces,).
        begins: the first token of each piece in its document.
        lengths: tokens in each piece.
        splits: the index of the first piece of each pack, and the total: int64 of shape (packs + 1,).
    """

    rows: Indices
    begins: Indices
    lengths: Indices
    splits: Indices


class _DocumentGroup:
    """Documents that are packed together, and their packs: all documents of a dataset, or those of a block.

    Args:
        layout: the packs.
        rows: returns the rows of documents at positions in the sequence sorted by class.
        places: returns the positions of rows.
        excluded: rows of the group to replace with others.
    """

    def __init__(
        self,
        layout: PackLayout,
        rows: Callable[[Indices], Indices],
        places: Callable[[Indices], Indices],
        excluded: Indices,
    ) -> None:
        self.layout, self._rows, self._places, self._left_out = layout, rows, places, excluded
        self._excluded: ExcludedRows | None = None
        if len(excluded):
            self._excluded = ExcludedRows(places(excluded), layout.starts, layout.classes.lengths)
        self.order: Callable[[int, int], PackOrder] = lru_cache(maxsize=8)(partial(PackOrder, layout))
        """Returns the packs of (seed, epoch) in order."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _DocumentGroup, (self.layout, self._rows, self._places, self._left_out)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        """Return the documents in packs of an epoch.

        A piece of an excluded document is replaced by the same tokens of another one, or by its first if it is too
        short.
        """
        places, begins, lengths, splits = self.order(seed, epoch).pieces(packs)
        if self._excluded is not None:
            places = self._excluded.replace(places, seed, epoch)
            whole = self.layout.lengths_of(places)
            begins = np.where(begins < whole, begins, 0)
            lengths = np.minimum(lengths, whole - begins)
        return PackedDocuments(self._rows(places), begins, lengths, splits)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        """Return the packs of an epoch with parts of a document, including packs where it replaces an excluded one."""
        order, place = self.order(seed, epoch), int(self._places(np.array([row]))[0])
        if self._excluded is None:
            return order.packs_of(place)
        found = (order.packs_of(other).tolist() for other in self._excluded.places_of(place, seed, epoch))
        return np.array(list(dict.fromkeys(itertools.chain.from_iterable(found))), np.int64)


class Packs:
    """The packs as the rows of a source: their number and their documents, which are from anywhere in the dataset.

    Args:
        dataset: the documents.
        capacity: tokens in a pack.
        lengths: lengths of the documents.
        max_documents: the largest number of documents in a pack.
        excluded: documents to replace with others; not part of the fingerprint.
        block_size: for `BlockPacks`.

    Raises:
        ConfigError: the number of lengths differs from the number of documents, or all documents are excluded.
    """

    tokens: int
    """Tokens in all documents."""
    pieces: int
    """Documents, or parts of them, in all packs."""
    most: int
    """The largest number of documents in a pack."""

    def __init__(
        self,
        dataset: Any,
        capacity: int,
        lengths: SampleLengths,
        max_documents: int | None,
        excluded: ExcludedRows | None,
        block_size: int | None = None,
    ) -> None:
        if len(lengths) != row_count(dataset):
            raise ConfigError(
                f"{len(lengths)} lengths for {counted(row_count(dataset), 'document')}: give one length for each"
            )
        self.lengths, self.capacity, self.max_documents = lengths, capacity, max_documents
        self.excluded = excluded
        self._block_size = block_size
        self._excluded_rows = np.empty(0, np.int64) if excluded is None else excluded.rows
        # The name of the order of packs, with its sizes.
        name = PACK_ORDER if block_size is None else f"{PACK_BLOCK_ORDER} {block_size} {PACK_ORDER}"
        identity = [name, capacity, lengths.digest, max_documents, fingerprint_of(dataset)]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())
        self._compute_packs()
        self.bounds = (max_documents or self.most) + 2
        """Number of entries in an item's ``cu_seqlens``."""
        # Otherwise a user's list would be printed in full.
        documents = dataset if isinstance(dataset, BatchedDataset) else type(dataset).__name__
        self._description = f"<{counted(len(self), 'pack')} of {capacity} tokens: {documents}>"

    def _compute_packs(self) -> None:
        """Compute the packs. The list of documents by length is a mapped file."""
        classes = PackClasses(self.capacity, _distinct_from(self.capacity, self.lengths))
        digest = xxhash.xxh3_128_hexdigest(f"{PACK_ORDER} {self.capacity} {self.lengths.digest}".encode())
        samples = ClassIndex(self.lengths, classes.count, digest, classes.of)
        layout = PackLayout(classes, samples.starts, max_documents=self.max_documents)
        self.tokens, self.pieces, self.most = layout.tokens, layout.count, layout.most
        self._group = _DocumentGroup(layout, samples.rows, samples.places, self._excluded_rows)

    def __len__(self) -> int:
        return len(self._group.layout)

    def order(self, seed: int, epoch: int) -> Order:
        """Return the pack at each position of an epoch."""
        return cast(Order, self._group.order(seed, epoch).order)

    def documents(self, packs: Indices, seed: int, epoch: int) -> PackedDocuments:
        """Return the documents in packs of an epoch."""
        return self._group.documents(packs, seed, epoch)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        """Return the packs of an epoch that contain a document, in the order of its tokens."""
        return self._group.packs_of(row, seed, epoch)

    def costs(self, packs: Indices) -> Indices:
        """Return the sum of squares of the lengths in each pack."""
        return self._group.layout.costs(packs)

    def __repr__(self) -> str:
        return self._description

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return False: with more documents, other documents are packed together."""
        return False

    def records(self, rows: Indices) -> list[int]:
        """Return the numbers of packs: their documents depend on the epoch."""
        return list(rows.tolist())


def _distinct_from(least: int, lengths: SampleLengths) -> Indices:
    """Return the distinct lengths of ``least`` or more, ascending. Takes one pass over all lengths, and checks them."""
    marked, others = np.zeros(_TABLE, np.bool_), np.empty(0, np.int64)
    for begin in range(0, len(lengths), _CHUNK):
        chunk = lengths[begin : begin + _CHUNK]
        check_lengths(chunk, begin)
        if int(chunk.max()) >= _TABLE:
            others = np.union1d(others, chunk[chunk >= _TABLE])
            chunk = chunk[chunk < _TABLE]
        marked[chunk] = True
    found = np.concatenate([np.flatnonzero(marked), others])
    return found[found.searchsorted(least) :]


class BlockPacks(Packs):
    """Packs of documents from one block of ``block_size`` documents each; excluded ones are replaced within the block.

    Memory: 100 bytes per block, and a few MB for each of the two most recently used blocks.
    """

    _block_size: int

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
    def _block(self) -> Callable[[int], _DocumentGroup]:
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

    def _packed(self, number: int, types: TypeTable | None, excluded: Indices) -> _DocumentGroup:
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
        return _DocumentGroup(
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
        for number, here, inside in by_part(self._firsts, packs):
            parts.append(self._block(number).documents(inside, mix(seed, number), epoch))
            places.append(here)
        return _merged(parts, places)

    def packs_of(self, row: int, seed: int, epoch: int) -> Indices:
        number = row // self._block_size
        found: Indices = self._block(number).packs_of(row, mix(seed, number), epoch) + self._firsts[number]
        return found

    def costs(self, packs: Indices) -> Indices:
        costs = np.zeros(len(packs), np.int64)
        for number, here, inside in by_part(self._firsts, packs):
            costs[here] = self._block(number).layout.costs(inside)
        return costs


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


class PackPlan(SharePlan):
    """A `SharePlan` over the packs of an epoch."""

    def __init__(self, packs: Packs, order: str, balance: int | None, **deal: Unpack[PartitionOptions]) -> None:
        self.order, self.balance = order, balance
        super().__init__(packs, shuffle="none", **deal)

    @property
    def excluded_mark(self) -> ExclusionMark | None:
        excluded: ExcludedRows | None = self.source.excluded
        return None if excluded is None else excluded.mark

    def make_order(self, place: MiniEpoch) -> Order:
        return cast(Order, self.source.order(self.seed, place.epoch))

    def make_view(self, place: MiniEpoch) -> EpochView:
        view = super().make_view(place)
        view.order = self.dealt(view.order, view.partition)
        return view

    def dealt(self, order: Order, partition: Partition) -> Order:
        """Return an epoch's packs in the order of their assignment to ranks; with ``balance``, by cost."""
        if self.balance is None or partition.world_size == 1:
            return order
        return cast(Order, _Balanced(order, self.source, partition, self.balance * partition.world_size))

    def identity(self) -> State:
        return {**super().identity(), "balance": self.balance}

    def read(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> ShareCursor:
        """Return the cursor in a state; with ``balance``, the ranks may change only between windows of packs."""
        found = super().read(state, allow_growth=allow_growth)
        ranks = read_int(state, "world_size", of="dataset")
        if self.balance is None or ranks == self.world.world_size or state.get("finished"):
            return found
        done, base, _ = state["dealt"]
        parts = {"mini_epochs": max(1, self.mini_epochs - done), "mini_epoch": max(0, state["mini_epoch"] - done)}
        dealt = Partition(found.place.samples, ranks, 0, **parts, remainder=self.remainder, consumed=base)
        had, window = state["consumed"] - dealt.begin, self.balance * ranks
        if had % window and dealt.begin + (had // window + 1) * window <= min(dealt.end, dealt.n):
            raise StateError(
                f"this state is in the middle of {window} packs that were assigned to {ranks} ranks by cost: each rank "
                f"has consumed {had // ranks % self.balance} of {self.balance}. Resume on {ranks} ranks, or from a "
                f"state after a multiple of balance={self.balance} packs (with batch_size={self.balance}, after any "
                "batch)"
            )
        return found

    def _order_in_words(self) -> str:
        where = " in blocks" if self.order == "block" else ""
        return f"packs, reshuffled each epoch{where}" + (f", balance {self.balance}" if self.balance else "")

    def agrees_with(self, shuffle: bool | str) -> bool:
        """Return whether a loader's ``shuffle`` fits this order: True does, because packs are always shuffled."""
        return shuffle is True or shuffle == self.order


class _Balanced(Bijection):
    """An order in windows of a global batch, in which packs are assigned to ranks by cost."""

    def __init__(self, order: Order, packs: Packs, partition: Partition, window: int) -> None:
        self.n = len(order)
        self._order, self._packs = order, packs
        self._begin, self._end = partition.begin, min(partition.end, partition.n)
        self._world, self._window = partition.world_size, window

    def _rows(self, positions: Indices) -> Indices:
        found = np.empty(positions.size, np.int64)
        for number, here in groups((positions - self._begin) // self._window):
            begin, assigned = self._assigned(number)
            inside = positions[here]
            found[here] = self._order[inside] if assigned is None else assigned[inside - begin]
        return found

    def _find(self, rows: Indices) -> Indices:
        return np.array([self._position(pack) for pack in rows.tolist()], np.int64)

    def _position(self, pack: int) -> int:
        place: int = self._order.inverse[pack]  # type: ignore[attr-defined]
        begin, assigned = self._assigned((place - self._begin) // self._window)
        return place if assigned is None else begin + int(np.flatnonzero(assigned == pack)[0])

    def _assigned(self, number: int) -> tuple[int, Indices | None]:
        """Return the first position of a window, and its packs; None for a window that is not whole.

        Index p of the packs belongs to rank ``p % world_size``.
        """
        begin = self._begin + number * self._window
        if begin < self._begin or begin + self._window > self._end:
            return begin, None
        packs = self._order[np.arange(begin, begin + self._window)]
        return begin, packs[split_by_cost(self._packs.costs(packs), self._world).T.reshape(-1)]
