"""`PackOrder`: computes the documents of any pack of any epoch, and the packs of any document.

    number in the epoch -> pack -> (type, ordinal) -> for each of its lengths a rank -> shuffled rank -> document

A document that is longer than a pack is cut into full packs and a remainder. Documents are sorted by the length of
their remainder (`PackClasses`); the *place* of a document is its number in this sequence. The pack types are computed
from the histogram of remainders (`pack_types`). Each type has a range of *ranks*: numbers of documents
of one length::

    lengths     ... | 2                 | 3        | ...
    documents       | a b c d e f g h i | j k l    |
    ranks of        | (3,2) x3 | (2,2) x3 |          pack k of (2, 2) has the ranks 2 k and 2 k + 1 of its part

In each epoch, a `penstock.order.classes.ClassShuffle` assigns documents of the same length to ranks, and a permutation
orders the packs. No list of documents or packs is needed.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, OrderError
from penstock.hashing import derive_key, mix
from penstock.order.classes import ClassShuffle, class_of
from penstock.order.permutation import Bijection, Indices, Permutation
from penstock.order.shuffle import cached_permutation, groups

__all__ = [
    "PACK_BLOCK_ORDER",
    "PACK_ORDER",
    "PackBlockOrder",
    "PackClasses",
    "PackLayout",
    "PackOrder",
    "Pieces",
    "TypeTable",
    "check_lengths",
    "pack_types",
    "split_by_cost",
]

PACK_ORDER = "packs-1"
PACK_BLOCK_ORDER = "pack-blocks-1"
"""Names of the frozen orders. States contain them."""

_BEST_FIT = (0.1, 0.3, 0.6, 1.0)
"""Fractions of all tokens to place by best fit. The first fraction whose number of packs is near the minimum is used.
"""
_HARDLY = 2e-4
"""Relative difference in the number of packs that counts as near."""


def check_lengths(lengths: Indices, begin: int) -> None:
    """Raise ConfigError if a document has a negative length; ``begin`` is the row of the first one."""
    if len(lengths) and int(lengths.min()) < 0:
        row = int(np.flatnonzero(lengths < 0)[0])
        raise ConfigError(f"document {begin + row} has a length of {lengths[row]}: lengths must be 0 or more")


class PackClasses:
    """Classes of document lengths, sorted by the remainder, then by the length. Empty documents are the last class.

    Args:
        capacity: tokens in a pack.
        long: the distinct lengths of ``capacity`` or more, ascending: int64.

    Memory: 8 bytes for each token of the capacity, and for each long length.
    """

    def __init__(self, capacity: int, long: Indices) -> None:
        if capacity < 1:
            raise OrderError(f"a pack must have at least one token, got capacity={capacity}")
        self.capacity = capacity
        self._long = long
        lengths = np.concatenate([np.arange(capacity), long])
        remainders = lengths % capacity
        remainders[remainders == 0] = capacity
        remainders[0] = capacity + 1
        # Lengths ascend, so a stable sort keeps their order. NumPy sorts 16-bit integers by radix.
        order = np.argsort(remainders.astype(np.min_scalar_type(capacity + 1)), kind="stable")
        self.lengths: Indices = lengths[order]
        """The length of the documents of each class."""
        self.remainders: Indices = remainders[order]
        """The remainder of each class: the capacity if its documents fill whole packs, capacity + 1 if they are empty.
        """
        self._classes = np.empty(len(order), np.min_scalar_type(len(order)))
        self._classes[order] = np.arange(len(order))
        self.count = len(order)
        """Number of classes."""

    def of(self, lengths: npt.NDArray[np.integer]) -> npt.NDArray[Any]:
        """Return the class of each length: unsigned integers of the smallest size for `count`, of the same shape."""
        places = np.asarray(lengths, dtype=np.int64)
        if len(self._long):
            long = np.flatnonzero(places >= self.capacity)
            places = places.copy()
            places[long] = self.capacity + self._long.searchsorted(places[long])
        return self._classes[places]


class Pieces(NamedTuple):
    """The documents or parts of documents in some packs, one pack after the other.

    Attributes:
        places: of the documents, in the sequence sorted by class: int64 of shape (pieces,).
        begins: the first token of each piece in its document.
        lengths: number of tokens of each piece.
        splits: the first piece of each pack, then the number of pieces: int64 of shape (packs + 1,).
    """

    places: Indices
    begins: Indices
    lengths: Indices
    splits: Indices


class TypeTable(NamedTuple):
    """Pack types: packs with the same document lengths.

    Attributes:
        packs: number of packs of each type: int64 of shape (types,).
        sizes: number of documents in a pack of each type: int64 of shape (types,).
        lengths: the lengths of one type after the other, descending in each: int64 of shape (sizes.sum(),).
    """

    packs: Indices
    sizes: Indices
    lengths: Indices


def pack_types(histogram: npt.ArrayLike, capacity: int, *, max_documents: int | None = None) -> TypeTable:
    """Return types of packs that hold every document of a histogram::

        length 1: 40 documents, length 2: 7, ...     ->     (7, 2, 1): 5 packs, (6, 4): 3 packs, ...

    All documents of a length are placed together, longest first. So the work grows with the capacity, not with the
    number of documents. Long documents go to the emptiest packs, so that each pack gets documents of many lengths. The
    rest goes to the packs where it fits best, so that packs become full (worst-fit and best-fit decreasing: Coffman,
    Garey and Johnson, "Approximation algorithms for bin packing", 1996).

    Args:
        histogram: number of documents of each length; int64 of shape (capacity + 1,) at most. The entry of length 0 is
            ignored.
        capacity: tokens in a pack.
        max_documents: the largest number of documents in a pack; None for no limit.

    Raises:
        OrderError: a document is longer than a pack, a count is negative, or the capacity or limit is below 1.

    Cost: 0.2 to 1 s for a capacity of 8,192 and any number of documents. Returns about one type per length.

    >>> [part.tolist() for part in pack_types([0, 3, 0, 1, 1], 4)]  # (4,), (3, 1) and (1, 1)
    [[1, 1, 1], [1, 2, 2], [4, 3, 1, 1, 1]]
    """
    counts = np.asarray(histogram, dtype=np.int64)
    if capacity < 1 or (max_documents is not None and max_documents < 1):
        raise OrderError(f"capacity and max_documents must be positive, got {capacity} and {max_documents}")
    if counts.ndim != 1 or (counts < 0).any() or counts[capacity + 1 :].any():
        raise OrderError(f"a histogram needs counts of 0 or more, for lengths up to the capacity of {capacity}")
    most = capacity if max_documents is None else max_documents
    tokens, documents = int((counts * np.arange(len(counts))).sum()), int(counts[1:].sum())
    least = max(-(-tokens // capacity), -(-documents // most))
    found = []
    for part in _BEST_FIT:
        found.append(_packed(counts, capacity, most, part))
        # No packing needs fewer packs than `least`, so other fractions need not be tried.
        if found[-1].total() <= least * (1 + _HARDLY):
            break
    fewest = min(types.total() for types in found)
    chosen = next(types for types in found if types.total() <= fewest * (1 + _HARDLY))
    kinds = sorted(chosen, reverse=True)
    return TypeTable(
        np.array([chosen[lengths] for lengths in kinds], np.int64),
        np.array([len(lengths) for lengths in kinds], np.int64),
        np.array([length for lengths in kinds for length in lengths], np.int64),
    )


def _packed(counts: Indices, capacity: int, most: int, part: float) -> Counter[tuple[int, ...]]:
    """Return the number of packs of each combination of lengths; the last ``part`` of all tokens goes by best fit."""
    tokens = left = int((counts * np.arange(len(counts))).sum())
    # By free space: numbers of packs, and their lengths. The sizes of the spaces ascend.
    spaces: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    sizes: list[int] = []
    found: Counter[tuple[int, ...]] = Counter()

    def add(space: int, packs: int, lengths: tuple[int, ...]) -> None:
        # A pack without space, or with the largest number of documents, is closed.
        if not space or len(lengths) >= most:
            found[lengths] += packs
            return
        if space not in spaces:
            bisect.insort(sizes, space)
            spaces[space] = []
        spaces[space].append((packs, lengths))

    add(capacity, -(-tokens // capacity), ())
    for length in np.flatnonzero(counts)[::-1].tolist():
        number = int(counts[length]) if length else 0
        while number:
            if not sizes or sizes[-1] < length:
                add(capacity, max(-(-number * length // capacity), -(-number // most)), ())
                continue
            at = bisect.bisect_left(sizes, length) if left <= part * tokens else len(sizes) - 1
            space = sizes[at]
            packs, lengths = spaces[space].pop()
            taken = min(packs, number)
            if packs > taken:
                spaces[space].append((packs - taken, lengths))
            elif not spaces[space]:
                del spaces[space], sizes[at]
            add(space - length, taken, (*lengths, length))
            number -= taken
            left -= taken * length
    for packs, lengths in itertools.chain.from_iterable(spaces.values()):
        if lengths:
            found[lengths] += packs
    return found


class PackLayout:
    """The packs of a corpus. They have the same lengths in every epoch, but other documents.

    Args:
        classes: classes of the document lengths.
        starts: the first place of each class, then the number of documents: int64 of shape (classes.count + 1,).
        max_documents: the largest number of documents in a pack.
        types: the `types` of an earlier layout of the same classes and starts, which saves their computation.

    Packs are numbered type by type, then the full packs of long documents.

    Memory: about 40 bytes for each length in each type, a few MB; nothing per document.

    >>> classes = PackClasses(4, np.array([9]))  # documents of 1, 1, 3 and 9 tokens
    >>> layout = PackLayout(classes, np.array([0, 2, 3, 3, 4, 4]))
    >>> len(layout), layout.pieces(np.arange(4)).lengths.tolist()
    (4, [3, 1, 1, 1, 4, 4])
    """

    def __init__(
        self,
        classes: PackClasses,
        starts: Indices,
        *,
        max_documents: int | None = None,
        types: TypeTable | None = None,
    ) -> None:
        self.classes, self.capacity, self.starts = classes, classes.capacity, starts
        sizes = np.diff(starts)
        # The first place of the documents of each remainder.
        bounds = starts[classes.remainders.searchsorted(np.arange(1, self.capacity + 1))]
        self.shuffled: Indices = np.concatenate([[0], bounds])
        if types is None:
            types = pack_types(np.diff(self.shuffled), self.capacity, max_documents=max_documents)
        self.types = types
        """The pack types: combinations of lengths, and their numbers of packs."""
        self.first: Indices = np.concatenate([[0], np.cumsum(types.packs)])
        self.slots: Indices = np.concatenate([[0], np.cumsum(types.sizes)])
        self._assign()
        self.whole = np.where(classes.lengths >= self.capacity, classes.lengths // self.capacity, 0)
        self.full: Indices = np.concatenate([[0], np.cumsum(sizes * self.whole)])
        """The first full pack of each class, counted from 0, then the number of full packs."""
        self.tokens = int((sizes * classes.lengths).sum())
        self.count = int((types.sizes * types.packs).sum() + self.full[-1])
        """Number of documents, or parts of documents, in all packs."""
        self.most = int(types.sizes.max(initial=1))
        """The largest number of documents in a pack."""

    def _assign(self) -> None:
        """Assign ranks of each length to each type. Slots of the same length in one type alternate."""
        packs, sizes, lengths = self.types
        types = np.repeat(np.arange(len(packs)), sizes)
        # Ranks are places: documents are sorted by their remainders 1, 2, ... So a range for each length of each type.
        keys = lengths * len(packs) + types
        _, first, ranges, alike = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        self._range_types, self._range_strides = types[first], alike
        ranks = alike * packs[self._range_types]
        self._range_begins = np.cumsum(ranks) - ranks
        # Slots of a type are sorted by length, so slots of a range are neighbours. Full packs are like one more type.
        places = self._range_begins[ranges] + np.arange(len(lengths)) - first[ranges]
        self.slot_places, self.strides = np.append(places, 0), np.append(alike[ranges], 0)
        self._sizes, self._lengths = np.append(sizes, 1), np.append(lengths, self.capacity)

    def __len__(self) -> int:
        return int(self.first[-1] + self.full[-1])

    def pieces(self, packs: Indices) -> Pieces:
        """Return the pieces of packs with ranks as places: documents of the same length are not shuffled yet."""
        types = class_of(self.first, packs)
        counts = self._sizes[types]
        splits = np.concatenate([[0], np.cumsum(counts)])
        which = np.repeat(np.arange(len(packs)), counts)
        slots = self.slots[types][which] + np.arange(len(which)) - splits[which]
        ordinals = (packs - self.first[types])[which]
        places = self.slot_places[slots] + self.strides[slots] * ordinals
        begins = np.zeros_like(places)
        full = np.flatnonzero(types[which] == len(self.types.packs))
        if full.size:
            classes = class_of(self.full, ordinals[full])
            documents, parts = np.divmod(ordinals[full] - self.full[classes], self.whole[classes])
            places[full], begins[full] = self.starts[classes] + documents, parts * self.capacity
        return Pieces(places, begins, self._lengths[slots], splits)

    def costs(self, packs: Indices) -> Indices:
        """Return the cost of attention for each pack: the sum of the squares of its documents' lengths."""
        found = self.pieces(packs)
        sums = np.concatenate([[0], np.cumsum(found.lengths**2)])
        return np.diff(sums[found.splits])

    def lengths_of(self, places: Indices) -> Indices:
        """Return the lengths of documents, given by place."""
        return self.classes.lengths[class_of(self.starts, places)]

    def pack_at(self, place: int) -> int:
        """Return the pack of a rank, given as a place: the inverse of `pieces`."""
        number = int(self._range_begins.searchsorted(place, "right")) - 1
        ordinal = (place - self._range_begins[number]) // self._range_strides[number]
        return int(self.first[self._range_types[number]] + ordinal)


class PackOrder:
    """The packs of one epoch in order.

    Args:
        layout: the packs.
        seed, epoch: choose the order and the documents of each pack together; every pair yields unrelated ones.

    Cost: a few microseconds per document; 50 bytes of memory for each token of the capacity.
    """

    def __init__(self, layout: PackLayout, seed: int, epoch: int) -> None:
        self.layout = layout
        key = derive_key(seed, epoch, PACK_ORDER)
        self.order = Permutation(len(layout), mix(key, 0))
        """The pack at each position of the epoch."""
        self._shuffle = ClassShuffle(layout.shuffled, mix(key, 1))

    def __len__(self) -> int:
        return len(self.layout)

    def pieces(self, packs: Indices) -> Pieces:
        """Return the documents of packs, given by pack number: ``order[positions]`` for positions of the epoch."""
        layout = self.layout
        found = layout.pieces(packs)
        rest = np.repeat(packs < layout.first[-1], np.diff(found.splits))
        found.places[rest] = self._shuffle[found.places[rest]]
        if layout.full[-1]:
            # Full packs come first, then the remainder.
            found.begins[rest] = layout.lengths_of(found.places[rest]) - found.lengths[rest]
        return found

    def packs_of(self, place: int) -> Indices:
        """Return the packs of the document at a place, in the order of its tokens: int64.

        An empty document is in no pack.
        """
        layout = self.layout
        number = int(class_of(layout.starts, np.array([place]))[0])
        whole = int(layout.whole[number])
        first = int(layout.first[-1] + layout.full[number]) + (place - int(layout.starts[number])) * whole
        full = np.arange(first, first + whole)
        if place >= layout.shuffled[-1]:
            return full
        rank = int(self._shuffle.inverse[place])
        return np.append(full, layout.pack_at(rank))


class PackBlockOrder(Bijection):
    """The order of packs in one epoch, by pack number: blocks in random order, and so the packs of each block::

        blocks of documents     0 ... 262,143 | 262,144 ... 524,287 | ...       each is packed separately
        packs                   0 1 2 3 4     | 5 6 7               | 8 9       `firsts` = 0, 5, 8, 10
        an epoch                6 7 5 | 8 9 | 3 0 4 1 2

    So a job that reads one block of packs reads only one block of documents.

    Args:
        firsts: the first pack of each block, then the number of packs: int64 of shape (blocks + 1,).
        seed, epoch: choose the order together; every pair yields an unrelated order.

    Cost: a `Permutation` look-up for each block of the positions; 32 bytes of memory per block.

    >>> order = PackBlockOrder(np.array([0, 3, 5]), seed=0, epoch=0)
    >>> packs = order[np.arange(5)].tolist()
    >>> sorted(packs) == list(range(5)), {pack < 3 for pack in packs[-2:]} in ({True}, {False})
    (True, True)
    """

    def __init__(self, firsts: Indices, seed: int, epoch: int) -> None:
        self._key = derive_key(seed, epoch, PACK_BLOCK_ORDER)
        self._starts = firsts
        self._order = Permutation(len(firsts) - 1, mix(self._key, 0))
        self._blocks = self._order[np.arange(len(firsts) - 1)]
        self._firsts = firsts[self._blocks]
        self._begins = np.concatenate([[0], np.cumsum(np.diff(firsts)[self._blocks])])
        self.n = int(self._begins[-1])

    def _rows(self, positions: Indices) -> Indices:
        for step, here in groups(self._begins.searchsorted(positions, "right") - 1):
            positions[here] = self._firsts[step] + self._inside(step)[positions[here] - self._begins[step]]
        return positions

    def _find(self, rows: Indices) -> Indices:
        for step, here in groups(self._order.inverse[self._starts.searchsorted(rows, "right") - 1]):
            rows[here] = self._begins[step] + self._inside(step).inverse[rows[here] - self._firsts[step]]
        return rows

    def _inside(self, step: int) -> Permutation:
        """Return the order of the packs of a block."""
        size = int(self._begins[step + 1] - self._begins[step])
        return cached_permutation(size, mix(self._key, 1, int(self._blocks[step])))


_SWAPS = 16  # at most, per rank
_CLOSE = 0.002  # of the mean cost


def split_by_cost(costs: Indices, ranks: int) -> Indices:
    """Return the packs of each rank, the same number for each and with nearly equal costs: (ranks, packs / ranks).

    Args:
        costs: costs of the packs: int64 of shape (packs,); the number of packs is a multiple of ``ranks``.
        ranks: number of ranks.

    Packs are assigned in descending order of cost, to ranks in alternating direction. Then the rank with the highest
    cost swaps one pack with another rank, always the pair that leaves the lowest maximum of the two. This repeats until
    the highest cost is close to the mean, or no swap helps. Each swap takes O(packs * packs / ranks).

    >>> split_by_cost(np.array([9, 5, 4, 8, 1, 3]), 2).tolist()
    [[0, 2, 4], [3, 1, 5]]
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    dealt = np.ascontiguousarray(rounds.T)
    sums = costs[dealt].sum(axis=1)
    # Swaps do not change the mean.
    enough = (1 + _CLOSE) * sums.mean()
    for _ in range(_SWAPS * ranks):
        high = int(sums.argmax())
        if sums[high] <= enough:
            break
        moved = costs[dealt[high]][:, None, None] - costs[dealt][None]
        dearer = np.maximum(sums[high] - moved, sums[None, :, None] + moved)
        dearer[:, high] = sums[high]
        mine, rank, theirs = np.unravel_index(dearer.argmin(), dearer.shape)
        if dearer[mine, rank, theirs] >= sums[high]:
            break
        dealt[high, mine], dealt[rank, theirs] = dealt[rank, theirs], dealt[high, mine]
        sums[high] -= moved[mine, rank, theirs]
        sums[rank] += moved[mine, rank, theirs]
    return dealt
