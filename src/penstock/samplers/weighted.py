"""`WeightedRandomSampler`: torch's signature, draws in constant time, from an alias table.

Walker's method: n columns of equal width, each split between its own item and one alias. A draw chooses a column and a
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

from penstock.errors import SamplerError
from penstock.hashing import checked_seed, derive_key, mix_array
from penstock.order import ORDER_VERSION, Partition
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochOrder, EpochPlan, PartitionedOrder
from penstock.plan.reader import Draws
from penstock.samplers.draws import DrawingSampler, Hashed, scale
from penstock.samplers.orders import flag, positive

__all__ = ["AliasTable", "WeightedRandomSampler", "build_table", "weights_digest"]

Weights = npt.NDArray[np.float64]


class WeightedRandomSampler(DrawingSampler, torch.utils.data.WeightedRandomSampler):
    """Indices drawn with weights, with the signature of ``torch.utils.data.WeightedRandomSampler``.

    Args:
        weights: one per sample, of any scale; not all zero.
        num_samples: number of draws in an epoch.
        replacement: draw with replacement. Each draw is then O(1), a function of a key and its position. Without
            replacement, each epoch starts with O(N) time and memory (16 bytes per sample).
        generator: without a seed, each epoch draws one number from it (by default from torch's global generator).
        seed: makes the draws a function of (seed, epoch), the same on all ranks.

    Raises:
        SamplerError: weights are empty, NaN, infinite, negative, all zero or not one-dimensional, num_samples is not a
            positive integer, or, without replacement, num_samples is larger than the number of positive weights.

    The draws have torch's distribution, but other values. With ``seed``, the stream is the same on all ranks: pass it
    to `GroupedBatchSampler`, which splits it, or use one rank. The state holds the drawn seed (or the generator's state
    at the start of the epoch), the hash of the weights, and the number of draws.

    Cost: 80 bytes of memory per weight while the table is built, then 16 bytes per weight in each process that draws.

    >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], 8, seed=0)
    >>> set(sampler) <= {1, 2}
    True
    """

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
        num_samples: int,
        replacement: bool = True,
        generator: torch.Generator | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.generator = generator
        self.num_samples = positive("num_samples", num_samples)
        self.replacement = flag("replacement", replacement)
        if seed is not None and generator is not None:
            raise SamplerError("pass either seed= or generator=, not both")
        self.weights = torch.as_tensor(weights, dtype=torch.double).detach().cpu()
        if self.weights.ndim != 1:
            raise SamplerError(
                "weights should be a 1d sequence but given weights have shape " + str(tuple(self.weights.shape))
            )
        self.seed = None if seed is None else checked_seed(seed)
        values = self._values
        if values.size == 0:
            raise SamplerError("weights are empty: there is nothing to draw")
        bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))  # also NaN
        if bad.size:
            raise SamplerError(
                f"weights must be finite and not negative: weight {bad[0]} is {values[bad[0]]} "
                f"({bad.size} bad of {values.size})"
            )
        drawable = np.count_nonzero(values)
        if not drawable:
            raise SamplerError(f"all {values.size} weights are zero: there is nothing to draw")
        if not replacement and self.num_samples > drawable:
            raise SamplerError(
                f"cannot draw {self.num_samples} samples without replacement: only {drawable} of {values.size} weights "
                "are positive"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_table"}

    @property
    def _values(self) -> Weights:
        return cast(Weights, self.weights.numpy())

    @cached_property
    def _digest(self) -> str:
        return weights_digest(self._values)

    @cached_property
    def _table(self) -> AliasTable:
        return build_table(self._values)

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "order": "weighted",
            "weights": self._digest,
            "samples": len(self.weights),
            "num_samples": self.num_samples,
            "replacement": self.replacement,
            **({} if self.seed is None else {"seed": self.seed}),
        }

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators; None without a seed."""
        return self.seed

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the draws of the cursor's epoch, from the cursor on."""
        seed, epoch = self.seed, cursor.epoch
        draw = self._draw(cursor, draws) if seed is None else None

        def order() -> EpochOrder:
            key = derive_key(seed or 0, epoch, "weighted") if draw is None else derive_key(draw.key(), 0, "weighted")
            if self.replacement:
                return Hashed(key, self._table.draw)
            return _without_replacement(self._values, self.num_samples, key)

        return PartitionedOrder(
            order,
            Partition(self.num_samples, remainder="uneven", consumed=cursor.consumed),
            self._identity,
            seed=seed,
            epoch=epoch,
            rounds=None,
            entropy=dict if draw is None else draw.state,
            at_end=None if draw is None else draw.key,
        )


def _without_replacement(weights: Weights, count: int, key: int) -> Indices:
    """Return ``count`` draws: the samples with the smallest ``-log(u) / weight`` (Efraimidis and Spirakis, 2006)."""
    uniform = mix_array(key, np.arange(len(weights), dtype=np.uint64)) >> np.uint64(11)
    # u is never 0, so only a weight of 0 has an infinite key.
    keys = (uniform + 0.5) * 2.0**-53
    np.log(keys, out=keys)
    with np.errstate(divide="ignore", over="ignore"):
        keys /= -weights
    chosen = np.argpartition(keys, count - 1)[:count] if count < len(keys) else np.arange(len(keys))
    return chosen[np.argsort(keys[chosen], kind="stable")].astype(np.int64, copy=False)


def weights_digest(weights: Weights) -> str:
    """Return the xxh3 of the weights, which identifies them in states."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(weights).view(np.uint8).data)


class AliasTable(NamedTuple):
    """An alias table: column i is item i with probability ``keep[i]``, else item ``alias[i]``."""

    keep: Weights
    alias: Indices

    def draw(self, hashes: npt.NDArray[np.uint64]) -> Indices:
        """Return the items drawn with an array of hashes, which it overwrites."""
        # The upper half of hash * n is the column, the lower half the point within it, in steps of n / 2**64.
        n = len(self.keep)
        columns = scale(hashes, n)
        hashes *= np.uint64(n)
        within = hashes.astype(np.float64)
        within *= 2.0**-64
        return np.where(within < self.keep[columns], columns, self.alias[columns])


def build_table(weights: Weights) -> AliasTable:
    """Return the alias table of valid float64 weights.

    Built without a loop over items, by the sweeping algorithm of Huebschle-Schneider and Sanders ("Parallel weighted
    random sampling", ESA 2019). Weights are scaled to a mean of 1. Items are then *light* (at most 1) or *heavy*. The
    sweep fills light columns from the current heavy item until at most 1 is left of it. The next heavy item fills the
    rest of its column: this closes the heavy item. Two prefix sums determine which heavy item fills each light one, and
    where each heavy item closes: the deficits of the light items, and the surpluses of the heavy ones.

    Takes about 80 bytes of memory per weight.
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
