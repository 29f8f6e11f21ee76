"""`WeightedRandomSampler`: torch's signature, draws in constant time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from penstock.errors import SamplerError
from penstock.hashing import checked_seed, derive_key, mix_array
from penstock.order import ORDER_VERSION, Order, Partition
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.samplers.alias import AliasTable, WeightedOrder, Weights, build_table, check_weights, weights_digest
from penstock.samplers.draws import Draw, DrawingSampler

__all__ = ["WeightedRandomSampler"]


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
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples <= 0:
            raise SamplerError(f"num_samples should be a positive integer value, but got num_samples={num_samples}")
        if not isinstance(replacement, bool):
            raise SamplerError(f"replacement should be a boolean value, but got replacement={replacement}")
        if seed is not None and generator is not None:
            raise SamplerError("pass either seed= or generator=, not both")
        self.weights = torch.as_tensor(weights, dtype=torch.double).detach().cpu()
        if self.weights.ndim != 1:
            raise SamplerError(
                "weights should be a 1d sequence but given weights have shape " + str(tuple(self.weights.shape))
            )
        self.num_samples = num_samples
        self.replacement = replacement
        self.seed = None if seed is None else checked_seed(seed)
        check_weights(self._values)
        positive = int(np.count_nonzero(self._values))
        if not replacement and num_samples > positive:
            raise SamplerError(
                f"cannot draw {num_samples} samples without replacement: only {positive} of {len(self.weights)} "
                "weights are positive"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_table"}

    @property
    def _values(self) -> Weights:
        return cast(Weights, self.weights.numpy())

    @cached_property
    def _digest(self) -> str:
        return f"{weights_digest(self._values):016x}"

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

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Draw | None:
        """Return the random draw of one epoch; None with a seed."""
        return super().draw(cursor, held, seed) if self.seed is None else None

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the draws of the cursor's epoch, from the cursor on."""
        partition = Partition(self.num_samples, remainder="uneven", consumed=cursor.consumed)
        epoch = cursor.epoch
        identity: partial[State] = partial(dict, self._identity())
        if self.seed is not None:
            key = derive_key(self.seed, epoch, "weighted")
            make = partial(self._order, key)
            return PartitionedOrder(make, partition, identity, seed=self.seed, epoch=epoch, rounds=None)
        draw: Draw = entropy
        return PartitionedOrder(
            lambda: self._order(derive_key(draw.key(), 0, "weighted")),
            partition,
            identity,
            seed=None,
            epoch=epoch,
            rounds=None,
            entropy=draw.state,
            exhaust=draw.key,
        )

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        cursor = Cursor.read(state, of="WeightedRandomSampler", plan=self._identity(), most=self.num_samples)
        return self._check_draw(cursor) if self.seed is None else cursor

    def _order(self, key: int) -> Order:
        if self.replacement:
            return cast(Order, WeightedOrder(self._table, self.num_samples, key))
        return cast(Order, _without_replacement(self._values, self.num_samples, key))


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
