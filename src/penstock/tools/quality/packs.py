"""`PackSpread`: whether batches of packs have documents of all lengths, compared with packs that are filled at random.

Which documents fit together depends on their lengths, so a pack of a good packing is no sample of the lengths: some
have one long document, others have fifty short ones. What training sees is a batch of packs. So the mean length of a
document is compared from batch to batch, and with the same of packs that take documents as they come (next-fit).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.order.permutation import Indices
from penstock.samplers.lengths import SampleLengths

__all__ = ["PackSpread", "mean_pieces", "pack_spread"]

_DRAWN = 1 << 17  # documents that packs are filled with at random


@dataclass(frozen=True)
class PackSpread:
    """Lengths of documents in the batches of one rank.

    Attributes:
        batches: looked at.
        documents: in a pack, on average; a piece of a cut one counts.
        length: tokens of a document, on average over batches.
        spread: standard deviation of the batches' mean lengths, over ``length``.
        spread_random: the same of packs that are filled with documents at random.
    """

    batches: int
    documents: float
    length: float
    spread: float
    spread_random: float


def mean_pieces(lengths: Indices, capacity: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the tokens of a document's pieces in packs of a capacity, on average over its pieces."""
    pieces: np.ndarray[tuple[int], np.dtype[np.float64]] = lengths / np.maximum(1, -(-lengths // capacity))
    return pieces


def pack_spread(
    lengths: SampleLengths, capacity: int, batches: Indices, pieces: Indices, packs: Indices
) -> PackSpread | None:
    """Return the spread of some batches.

    Args:
        lengths: of all documents.
        capacity: tokens of a pack.
        batches: the number of the batch of each piece: int64 of shape (pieces,), 0 to ``len(packs) - 1``.
        pieces: the length of the document that it is of.
        packs: of each batch.

    Returns:
        None where there are fewer than two batches with packs.
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
    """Return the mean of the values of each batch that has some, and how many it has."""
    counts = np.bincount(batches, minlength=count)
    sums = np.bincount(batches, values, minlength=count)
    return sums[counts > 0] / counts[counts > 0], counts[counts > 0]


def _at_random(
    lengths: SampleLengths, capacity: int, packs: Indices
) -> tuple[Indices, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return batches and lengths of pieces where packs take documents at random, one after the other (next-fit)."""
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
