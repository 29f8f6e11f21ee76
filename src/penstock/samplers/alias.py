"""Alias tables: weighted draws in constant time.

Walker's method: n columns of equal width, each split between its own item and one alias. A draw chooses a column and a
side. The table is built without a loop over items, by the sweeping algorithm of Huebschle-Schneider and Sanders
("Parallel weighted random sampling", ESA 2019). Weights are scaled to a mean of 1. Items are then *light* (at most 1)
or *heavy*. The sweep fills light columns from the current heavy item until at most 1 is left of it. The next heavy item
fills the rest of its column: this closes the heavy item. Two prefix sums determine which heavy item fills each light
one, and where each heavy item closes: D, the deficits of the light items, and S, the surpluses of the heavy ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import SamplerError
from penstock.hashing import mix_array
from penstock.order.permutation import Indices, normalise
from penstock.samplers.draws import scale

__all__ = ["AliasTable", "build_table", "check_weights", "draw", "weights_digest"]

Weights = npt.NDArray[np.float64]


class AliasTable(NamedTuple):
    """An alias table: column i is item i with probability ``keep[i]``, else item ``alias[i]``."""

    keep: Weights
    alias: Indices


def check_weights(weights: Weights) -> None:
    """Raise unless the weights define a distribution.

    Raises:
        SamplerError: weights are empty, NaN, infinite or negative (the message names the first), or none is positive.
    """
    if weights.size == 0:
        raise SamplerError("weights are empty: there is nothing to draw")
    # With a NaN, min() and max() are NaN, so this condition also catches NaN.
    if not (weights.min() >= 0 and weights.max() < np.inf):
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            at = int(bad[0])
            raise SamplerError(
                f"weights must be finite and not negative: weight {at} is {weights[at]} ({bad.size} bad of "
                f"{weights.size})"
            )
    if weights.max() <= 0:
        raise SamplerError(f"all {weights.size} weights are zero: there is nothing to draw")


def build_table(weights: Weights) -> AliasTable:
    """Return the alias table of float64 weights that passed `check_weights`.

    Vectorised: two prefix sums and two binary searches. Takes about 80 bytes of memory per weight.
    """
    n = len(weights)
    scaled = weights / weights.max()
    scaled *= n / scaled.sum()
    light, heavy = np.flatnonzero(scaled <= 1), np.flatnonzero(scaled > 1)
    alias = np.arange(n, dtype=np.int64)
    keep = scaled
    if len(heavy):
        deficits = np.concatenate([[0.0], np.cumsum(1 - scaled[light])])  # entry i: before light item i
        surpluses = np.cumsum(scaled[heavy] - 1)
        # Light item i is filled from the heavy item that is open when the sweep reaches it.
        filler = np.searchsorted(surpluses, deficits[:-1], side="right")
        alias[light] = heavy[np.minimum(filler, len(heavy) - 1)]
        # Heavy item j closes at the first light item with D >= S_j. The next heavy item fills the rest of its column.
        closing = np.searchsorted(deficits, surpluses, side="left")
        closed = closing < len(deficits)
        # Only rounding can close the last heavy item: no item is left to fill the rest of its column.
        closed[-1] = False
        left = np.ones(len(heavy))
        left[closed] = 1 + surpluses[closed] - deficits[closing[closed]]
        keep[heavy] = left
        alias[heavy[:-1]] = heavy[1:]
    else:
        keep[:] = 1  # all weights are equal, up to rounding
    np.clip(keep, 0, 1, out=keep)
    return AliasTable(keep, alias)


def draw(table: AliasTable, positions: Indices, key: int) -> Indices:
    """Return the item drawn at each position: int64 of the shape of the positions, a function of (key, position).

    The upper half of ``hash * n`` is the column, the lower half the point within it, with a resolution of n / 2**64.
    """
    hashes = mix_array(key, positions.view(np.uint64))
    n = len(table.keep)
    columns = scale(hashes, n)
    hashes *= np.uint64(n)
    within = hashes.astype(np.float64)
    within *= 2.0**-64
    return np.where(within < table.keep[columns], columns, table.alias[columns])


class WeightedOrder:
    """``count`` weighted draws with replacement, indexed like an order."""

    def __init__(self, table: AliasTable, count: int, key: int) -> None:
        self._table, self._count, self._key = table, count, key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: npt.NDArray[np.int64]) -> Indices:
        return draw(self._table, normalise(index, self._count), self._key)


def weights_digest(weights: Weights) -> int:
    """Return the xxh3 of the weights, which identifies them in states."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(weights).view(np.uint8).data)
