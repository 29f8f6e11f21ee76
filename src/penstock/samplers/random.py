"""`RandomSampler`: torch's sampler with an exact state, and the same interface for orders in O(1) memory."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial

import torch

from penstock.errors import SamplerError
from penstock.hashing import checked_seed, derive_key
from penstock.order import Partition, make_order
from penstock.order.shuffle import block_options
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import EpochOrder, EpochPlan, PartitionedOrder
from penstock.plan.reader import Draws
from penstock.samplers.draws import DrawingSampler, Hashed, Rounds, scale
from penstock.samplers.identity import order_identity
from penstock.samplers.orders import order_kind, positive

__all__ = ["RandomSampler", "RandomSamplerOfShare"]

_BLOCK = 1 << 14
"""Draws with replacement computed at once. torch computes 32 at once; the numbers are the same."""


class RandomSampler(DrawingSampler, torch.utils.data.RandomSampler):
    """Indices in random order, with the signature and semantics of ``torch.utils.data.RandomSampler``.

    Args:
        data_source: anything with a length (read again for every epoch).
        replacement: draw with replacement.
        num_samples: number of samples to draw, by default all. If it exceeds the dataset, more permutations follow.
        generator: the generator to draw from, for ``shuffle=True``. By default each epoch draws a seed from torch's
            global generator.
        shuffle: ``True`` yields torch's own indices (8 bytes of memory each). ``"global"`` and ``"block"`` yield
            Penstock's orders in O(1) memory, a function of (seed, epoch).
        seed: seed of Penstock's orders, 0 by default.
        block_size, window: of the block shuffle, see `penstock.order.BlockShuffle`.

    Raises:
        SamplerError: num_samples is not a positive integer (torch's message; also for an empty dataset), or an option
            belongs to another shuffle.
        ConfigError: block sizes that are not positive, or without the block shuffle.
        TypeError: replacement is not a bool (torch's message).

    The state holds the random draw, so it resumes exactly in another process: the seed, or, with your own generator,
    the generator's state at the start of the epoch (7 kB of text). Calling `state_dict` before the first ``iter()``
    draws the seed of that ``iter()``. The states of ``shuffle="global"`` and ``"block"`` over all samples are equal to
    the states of `DistributedSampler`, which can load them on several ranks.

    >>> sampler = RandomSampler(range(5), shuffle="global", seed=1)
    >>> sampler.set_epoch(3)
    >>> sorted(sampler)
    [0, 1, 2, 3, 4]
    >>> len(RandomSampler(range(5), num_samples=12))
    12
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        shuffle: bool | str = True,
        seed: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.generator = generator
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        self.shuffle = shuffle
        self._kind = order_kind(shuffle)
        self.block_size, self.window = block_size, window
        self._block = block_options(self._kind, block_size, window)
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement should be a boolean value, but got replacement={replacement}")
        positive("num_samples", self.num_samples)
        if self._kind == "none":
            raise SamplerError(f"shuffle={shuffle!r} has no random order: use SequentialSampler")
        if self._kind == "torch" and seed is not None:
            raise SamplerError(
                "shuffle=True draws from generator= or torch's global generator: seed= needs shuffle='global'"
            )
        if self._kind != "torch" and generator is not None:
            raise SamplerError(f"shuffle={shuffle!r} is a function of seed and epoch: generator= needs shuffle=True")
        if self._kind == "block" and replacement:
            raise SamplerError("shuffle='block' cannot draw with replacement: use shuffle='global' or True")
        self.seed = None if self._kind == "torch" else checked_seed(0 if seed is None else seed)

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators; None for torch's order."""
        return self.seed

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        n, replacement, epoch = len(self.data_source), self.replacement, cursor.epoch
        count = n if self._num_samples is None else self._num_samples
        if n == 0:
            raise SamplerError("the data source is empty: it has no samples to draw")
        partition = Partition(count, remainder="uneven", consumed=cursor.consumed)
        rounds = None if replacement or count % n else count // n
        seeded = self._kind != "torch"
        name = self._kind if seeded else "randperm"
        if replacement:
            name = "replacement" if seeded else "randint"
        if replacement or count != n:
            name += f"[:{count}]"
        # A seed has no influence on torch's order.
        identity = partial(order_identity, name, self._block, self.data_source, n, self.seed if seeded else None)
        if seeded:
            seed = self.seed or 0
            make: Callable[[], EpochOrder] = partial(make_order, self._kind, n, seed=seed, epoch=epoch, **self._block)
            if replacement:
                make = partial(Hashed, derive_key(seed, epoch, "replacement"), partial(scale, n=n))
            elif count > n:
                make = partial(Rounds, n, partial(self._round, n, seed, epoch))
            return PartitionedOrder(make, partition, identity, seed=self.seed, epoch=epoch, rounds=rounds)

        def block(generator: torch.Generator, number: int) -> torch.Tensor:
            if replacement:
                return torch.randint(n, (min(_BLOCK, count - number * _BLOCK),), dtype=torch.int64, generator=generator)
            return torch.randperm(n, generator=generator)

        # torch always draws one more permutation for the rest of the samples, even if no sample is left.
        size, last = (_BLOCK, (count - 1) // _BLOCK) if replacement else (n, count // n)
        run = self._drawn(cursor, draws, identity, size=size, count=count, last=last, block=block, rounds=rounds)
        # If an epoch is stopped early, the state of the user's generator shows how far the plan was read.
        run.one_by_one = self.generator is not None and count > n
        return run

    def _round(self, n: int, seed: int, epoch: int, number: int) -> EpochOrder:
        # The first permutation is the epoch's own.
        if number:
            seed, epoch = derive_key(seed, epoch, f"round {number}"), 0
        return make_order(self._kind, n, seed=seed, epoch=epoch, **self._block)


class RandomSamplerOfShare(RandomSampler, torch.utils.data.DistributedSampler[int]):  # type: ignore[misc,override]
    """The indices of one rank's share in random order. For frameworks it is a sampler that splits by rank already."""
