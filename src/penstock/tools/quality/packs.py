"""`PackSpread`: whether batches of packs have documents of all lengths, compared with randomly filled packs.

The documents that fit together depend on their lengths, so a pack of a good packing is not a random sample of lengths:
some have one long document, others fifty short ones. But training sees a batch of packs. So the mean document length is
compared between batches, and with packs that take random documents in order (next-fit).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.order.permutation import Indices
from penstock.samplers.lengths import SampleLengths

__all__ = ["PackSpread", "mean_pieces", "pack_spread"]

_DRAWN = 1 << 17  # documents for randomly filled packs


@dataclass(frozen=True)
class PackSpread:
    """Lengths of documents in the batches of one rank.

    Attributes:
        batches: number of measured batches.
        documents: mean number of documents in a pack; a piece of a cut document counts as one.
        length: mean tokens of a document, averaged over batches.
        spread: standard deviation of the batches' mean lengths, relative to ``length``.
        spread_random: the same for packs of random documents.
    """

    batches: int
    documents: float
    length: float
    spread: float
    spread_random: float


def mean_pieces(lengths: Indices, capacity: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the mean tokens of each document's pieces in packs of a capacity."""
    pieces: np.ndarray[tuple[int], np.dtype[np.float64]] = lengths / np.maximum(1, -(-lengths // capacity))
    return pieces


def pack_spread(
    lengths: SampleLengths, capacity: int, batches: Indices, pieces: Indices, packs: Indices
) -> PackSpread | None:
    """Return the spread of document lengths over batches.

    Args:
        lengths: lengths of all documents.
        capacity: tokens of a pack.
        batches: batch number of each piece: int64 of shape (pieces,), 0 to ``len(packs) - 1``.
        pieces: length of each piece's document.
        packs: number of packs of each batch.

    Returns:
        The spread; None for fewer than two batches with packs.
    """
    means, counts = _means(batches, mean_pieces(pieces, capacity), len(packs))
    if len(means) < 2:
        return None
    by_chance, _ = _means(*_at_random(lengths, capacity, packs), len(packs))
    return PackSpread(
        batches=len(means),
        documents=float(counts.sum() / packs.sum()),
        length=float(means.mean()),
        spread=float(means.std() / means.mean()),
        spread_random=float(by_chance.std() / by_chance.mean()),
    )


def _means(
    batches: Indices, values: np.ndarray[tuple[int], np.dtype[np.float64]], count: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], Indices]:
    """Return mean and number of the values of each batch that has values."""
    counts = np.bincount(batches, minlength=count)
    sums = np.bincount(batches, values, minlength=count)
    return sums[counts > 0] / counts[counts > 0], counts[counts > 0]


def _at_random(
    lengths: SampleLengths, capacity: int, packs: Indices
) -> tuple[Indices, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return batches and lengths of pieces for packs that take random documents in order (next-fit)."""
    rng = np.random.default_rng(0)
    drawn = lengths[rng.integers(0, len(lengths), min(_DRAWN, 4 * len(lengths)))]
    drawn = drawn[drawn > 0]
    times = -(-drawn // capacity)
    rest = np.where(drawn % capacity, drawn % capacity, capacity)
    pieces = np.concatenate([np.full(int((times - 1).sum()), capacity), rest])
    rng.shuffle(pieces)
    number = np.zeros(len(pieces), np.int64)
    used = pack = 0
    for at, length in enumerate(pieces.tolist()):
        if used + length > capacity:
            pack, used = pack + 1, 0
        used += length
        number[at] = pack
    of_batch = np.repeat(np.arange(len(packs)), packs)[: pack + 1]
    inside = number < len(of_batch)
    return of_batch[number[inside]], pieces[inside].astype(np.float64)
