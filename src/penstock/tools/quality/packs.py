"""`PackSpread`: how evenly document lengths mix across batches of packs, compared with randomly filled packs.

Which documents fit together depends on their lengths. So in a good packing, a pack is not a random sample of lengths:
some packs have one long document, others fifty short ones. But training sees batches of packs. So this module measures
how much the mean document length varies between batches, and compares it with next-fit packs of random documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.order.permutation import Indices
from penstock.samplers.lengths import SampleLengths

__all__ = ["PackSpread", "mean_pieces", "pack_spread"]

_DRAWN = 1 << 17  # documents drawn for randomly filled packs


@dataclass(frozen=True)
class PackSpread:
    """Lengths of documents in the batches of one rank.

    Attributes:
        batches: number of measured batches.
        documents: mean number of documents in a pack; a piece of a cut document counts as one.
        length: mean number of tokens in a document, averaged over batches.
        spread: standard deviation of the batches' mean lengths, relative to ``length``.
        spread_random: the same for packs of random documents.
    """

    batches: int
    documents: float
    length: float
    spread: float
    spread_random: float


def mean_pieces(lengths: Indices, capacity: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the mean number of tokens in each document's pieces, for packs of this capacity."""
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
        packs: number of packs in each batch.

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
    """Return the mean and the number of values, for each batch that has values."""
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
