"""`packing_plan`: padding and cost of packs, for the usual ways of packing and for `PackedDataset`.

one document each       a row for each piece, padded to the capacity
next-fit                shuffled pieces in a row, until the next one does not fit
windows of 4,096        best-fit decreasing inside windows of 4,096 pieces
PackedDataset           types of packs from the histogram of all lengths, see `penstock.order.packing.pack_types`

All ways cut documents longer than a pack into full pieces and a rest. `PackedDataset` is computed for all documents
from the histogram. The other ways pack a sample of the documents.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.packing import check_lengths, pack_types, split_by_cost
from penstock.order.permutation import Indices
from penstock.storage.mapped import MappedFiles, inspect_file

__all__ = ["Packing", "PackingPlan", "packing_plan"]

WINDOW = 4096
_CHUNK = 1 << 20
_RUNS = 64  # runs of consecutive documents in the sample
_STEPS = 64  # global batches for the mean of costs


@dataclass(frozen=True)
class Packing:
    """Results of one way of packing.

    Attributes:
        name: name of the way of packing.
        packs: number of packs for all documents, extrapolated from a sample.
        fill: share of real tokens.
        documents: mean number of documents in a pack; a piece of a cut document counts as one.
        deviation: standard deviation of the packs' mean document length, relative to its mean.
        cost: attention cost (sum of squared document lengths, including padding for padded documents) of the most
            expensive rank, relative to the mean of all ranks.
        balanced: the same if each global batch is distributed by cost (``balance=``).
    """

    name: str
    packs: int
    fill: float
    documents: float
    deviation: float
    cost: float
    balanced: float


@dataclass(frozen=True)
class PackingPlan:
    """The documents to pack, and the results of all ways.

    Attributes:
        capacity: tokens of a pack.
        documents, tokens: numbers in the file, including empty documents.
        cut: number of documents longer than a pack.
        looked_at: number of documents in the sample for the usual ways.
        ranks, batch: ranks for the comparison of costs, and packs in a batch of each.
        ways: all ways; the last one is `PackedDataset`.
    """

    capacity: int
    documents: int
    tokens: int
    cut: int
    looked_at: int
    ranks: int
    batch: int
    ways: list[Packing]


@dataclass(frozen=True)
class _Filled:
    """Kinds of packs: the number of each, and its tokens, documents and sum of squared lengths."""

    times: Indices
    tokens: Indices
    documents: Indices
    squares: Indices

    @classmethod
    def of(cls, packs: list[list[int]], times: list[int]) -> _Filled:
        """Build kinds of packs from lists of lengths."""
        sums = [[sum(pack), len(pack), sum(n * n for n in pack)] for pack in packs]
        tokens, documents, squares = np.array(sums, np.int64).reshape(-1, 3).T
        return cls(np.array(times, np.int64), tokens, documents, squares)


def packing_plan(
    path: str | os.PathLike[str],
    capacity: int,
    *,
    max_documents: int | None = None,
    ranks: int = 8,
    batch: int = 8,
    look_at_most: int = 200_000,
) -> PackingPlan:
    """Compare ways of packing documents, from their lengths.

    Args:
        path: an ``.npy`` file with an integer for each document, as `penstock.count_lengths` writes.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.
        ranks, batch: ranks, and packs in a batch of each, for the costs.
        look_at_most: most documents in the sample for the usual ways.

    Raises:
        ConfigError, OrderError: numbers below 1; lengths that are not one-dimensional integers, or negative; no tokens.
        DataFileError, DataFileIOError: the file cannot be read.

    Cost: one pass over the lengths in O(1) memory, and about two seconds.
    """
    for name, value in (("capacity", capacity), ("ranks", ranks), ("batch", batch), ("look_at_most", look_at_most)):
        if value < 1:
            raise ConfigError(f"{name} must be positive, got {value}")
    file = inspect_file(path, None)
    if len(file.shape) != 1 or np.dtype(file.dtype).kind not in "iu":
        raise ConfigError(
            f"{file.path} must have one integer for each document, got {file.dtype} of shape {file.shape}"
        )
    lengths = MappedFiles([file]).array(0)
    histogram, full, cut = _histogram(lengths, capacity)
    tokens = int((histogram * np.arange(capacity + 1)).sum()) + full * capacity
    if not tokens:
        raise ConfigError(f"{file.path} has no document with a token")
    some = _some(lengths, look_at_most)
    pieces = _pieces(some, capacity)
    most = max_documents or capacity
    ours = pack_types(histogram, capacity, max_documents=max_documents)
    kinds = [part.tolist() for part in np.split(ours.lengths, np.cumsum(ours.sizes))[:-1]]
    ways = {
        "one document each": _alone(pieces, capacity),
        "next-fit": _next_fit(pieces, capacity, most),
        f"windows of {WINDOW:,}": _windows(pieces, capacity, most),
        "PackedDataset": _Filled.of([*kinds, [capacity]], [*ours.packs.tolist(), full]),
    }
    return PackingPlan(
        capacity=capacity,
        documents=len(lengths),
        tokens=tokens,
        cut=cut,
        looked_at=len(some),
        ranks=ranks,
        batch=batch,
        ways=[_figures(name, filled, capacity, tokens, ranks, batch) for name, filled in ways.items()],
    )


def _histogram(lengths: npt.NDArray[np.integer], capacity: int) -> tuple[Indices, int, int]:
    """Return the histogram of the lengths of rests, the number of full pieces, and the number of cut documents."""
    histogram, full, cut = np.zeros(capacity + 1, np.int64), 0, 0
    for begin in range(0, len(lengths), _CHUNK):
        chunk = lengths[begin : begin + _CHUNK].astype(np.int64)
        check_lengths(chunk, begin)
        histogram += np.bincount(chunk % capacity, minlength=capacity + 1)
        full, cut = full + int((chunk // capacity).sum()), cut + int((chunk > capacity).sum())
    histogram[0] = 0
    return histogram, full, cut


def _some(lengths: npt.NDArray[np.integer], count: int) -> Indices:
    """Return a sample of lengths: runs of consecutive documents, spread over the file."""
    if len(lengths) <= count:
        return lengths.astype(np.int64)
    size = max(1, count // _RUNS)
    begins = np.linspace(0, len(lengths) - size, min(_RUNS, count)).astype(np.int64)
    return np.concatenate([lengths[begin : begin + size].astype(np.int64) for begin in begins.tolist()])


def _pieces(lengths: Indices, capacity: int) -> list[int]:
    """Return the tokens of all pieces, shuffled."""
    full, rest = np.divmod(lengths, capacity)
    pieces = np.concatenate([np.full(int(full.sum()), capacity), rest[rest > 0]])
    np.random.default_rng(0).shuffle(pieces)
    found: list[int] = pieces.tolist()
    return found


def _alone(pieces: list[int], capacity: int) -> _Filled:
    lengths = np.array(pieces, np.int64)
    ones = np.ones_like(lengths)
    # Attention includes padding, so all rows cost the same.
    return _Filled(ones, lengths, ones, np.full_like(lengths, capacity**2))


def _next_fit(pieces: list[int], capacity: int, most: int) -> _Filled:
    packs: list[list[int]] = [[]]
    used = 0
    for length in pieces:
        if used + length > capacity or len(packs[-1]) == most:
            packs.append([])
            used = 0
        packs[-1].append(length)
        used += length
    return _Filled.of(packs, [1] * len(packs))


def _windows(pieces: list[int], capacity: int, most: int) -> _Filled:
    packs: list[list[int]] = []
    for begin in range(0, len(pieces), WINDOW):
        # Free space and number of each pack that is not full, ascending.
        free: list[tuple[int, int]] = []
        for length in sorted(pieces[begin : begin + WINDOW], reverse=True):
            place = bisect.bisect_left(free, (length, 0))
            if place == len(free):
                space, number = capacity, len(packs)
                packs.append([])
            else:
                space, number = free.pop(place)
            packs[number].append(length)
            if space > length and len(packs[number]) < most:
                bisect.insort(free, (space - length, number))
    return _Filled.of(packs, [1] * len(packs))


def _figures(name: str, filled: _Filled, capacity: int, tokens: int, ranks: int, batch: int) -> Packing:
    packs, had = int(filled.times.sum()), int((filled.times * filled.tokens).sum())
    means = filled.tokens / filled.documents
    mean = np.average(means, weights=filled.times)
    spread = np.sqrt(np.average((means - mean) ** 2, weights=filled.times)) / mean
    drawn = np.random.default_rng(0).choice(
        filled.squares, (_STEPS, ranks * batch), p=filled.times / filled.times.sum()
    )
    return Packing(
        name=name,
        packs=round(packs * tokens / had),
        fill=had / (packs * capacity),
        documents=float(np.average(filled.documents, weights=filled.times)),
        deviation=float(spread),
        cost=_cost(drawn.reshape(_STEPS, ranks, batch)),
        balanced=_cost(np.stack([costs[split_by_cost(costs, ranks)] for costs in drawn])),
    )


def _cost(costs: Indices) -> float:
    """Return the cost of the most expensive rank over the mean, for costs of shape (steps, ranks, packs)."""
    sums = costs.sum(axis=2)
    return float((sums.max(axis=1) / sums.mean(axis=1)).mean())
