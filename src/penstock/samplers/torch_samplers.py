"""Plans of torch's own samplers: exactly torch's orders, with a state that counts samples.

The cursor's entropy holds the random draw of torch at the start of an epoch: the seed that its `RandomSampler` draws
from the global generator, or the state of the generator (7 kB of text) if torch draws all numbers from it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data
import xxhash

from penstock.order import Order, Partition
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Bookmark, Draws
from penstock.samplers.base import EpochSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.draws import DrawingSampler
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.weighted import weights_digest

__all__ = ["TORCH_PLANS"]


class TorchRandom(DrawingSampler):
    """The plan of ``torch.utils.data.RandomSampler``: Penstock's `RandomSampler` with ``shuffle=True``."""

    def __init__(self, sampler: torch.utils.data.RandomSampler) -> None:
        super().__init__()
        self._sampler = sampler

    @property
    def source(self) -> torch.utils.data.RandomSampler:
        """torch's sampler."""
        return self._sampler

    @property
    def generator(self) -> torch.Generator | None:  # type: ignore[override]
        """The generator of torch's sampler."""
        return cast("torch.Generator | None", self._sampler.generator)

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on. Each rank draws its own."""
        run = self._ours().bind(cursor, draws)
        run.per_rank = True
        return run

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._ours().read(state)

    def _ours(self) -> RandomSampler:
        """Return our sampler with torch's attributes: programs assign them, and subclasses compute them."""
        given = self._sampler
        return RandomSampler(given.data_source, given.replacement, given._num_samples, self.generator)


class TorchSequential(SequentialSampler):
    """The plan of ``torch.utils.data.SequentialSampler``: Penstock's `SequentialSampler`."""

    def __init__(self, sampler: torch.utils.data.SequentialSampler) -> None:
        self._sampler = sampler
        super().__init__(sampler.data_source)

    @property
    def data_source(self) -> Sized:
        """The dataset of torch's sampler."""
        return self._sampler.data_source

    @data_source.setter
    def data_source(self, data_source: Sized) -> None:
        pass

    @property
    def source(self) -> torch.utils.data.SequentialSampler:
        """torch's sampler."""
        return self._sampler


class TorchDistributed(EpochSampler):
    """The plan of ``torch.utils.data.DistributedSampler``. Its states are elastic.

    The epoch is the one that torch's ``set_epoch`` set last. A loader never advances it.
    """

    def __init__(self, sampler: torch.utils.data.DistributedSampler[Any]) -> None:
        super().__init__()
        self._bookmark.advances = False
        self._sampler = sampler
        # The epoch of torch's sampler when it was last looked at.
        self._seen = 0

    @property
    def source(self) -> torch.utils.data.DistributedSampler[Any]:
        """torch's sampler."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, also on torch's sampler."""
        super().set_epoch(epoch)
        self._sampler.set_epoch(epoch)

    @property
    def bookmark(self) -> Bookmark:  # type: ignore[override]
        """Where readers begin next: in the epoch that was set last, here or on torch's sampler."""
        mark, epoch = self._bookmark, int(self._sampler.epoch)
        if epoch != self._seen:
            self._seen = epoch
            keeps = mark.cursor.epoch == epoch
            mark.write(mark.cursor if keeps else Cursor(epoch=epoch), loaded=keeps and mark.loaded)
        return mark

    def chosen(self, cursor: Cursor) -> None:
        """Set the epoch of torch's sampler."""
        self._sampler.set_epoch(cursor.epoch)

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return this rank's share of the rest of the cursor's epoch."""
        return self._ours().bind(cursor, draws)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. The state may come from any number of ranks."""
        return self._ours().read(state)

    def _ours(self) -> DistributedSampler:
        """Return our sampler with torch's attributes: programs assign them."""
        given = self._sampler
        return DistributedSampler(
            cast(Sized, given.dataset), given.num_replicas, given.rank, bool(given.shuffle), given.seed, given.drop_last
        )


class _DrawnAtOnce(DrawingSampler):
    """The plan of a torch sampler that draws its whole order at the start, from its own or torch's global generator."""

    at_once = True

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self._sampler = sampler
        self._hashed: tuple[Any, int | None, str] | None = None

    @property
    def source(self) -> Any:
        """torch's sampler."""
        return self._sampler

    @property
    def generator(self) -> torch.Generator | None:  # type: ignore[override]
        """The generator of torch's sampler."""
        return cast("torch.Generator | None", self._sampler.generator)

    def _bind(
        self, cursor: Cursor, draws: Draws, count: int, make: Callable[[torch.Generator], torch.Tensor]
    ) -> EpochPlan:
        draw = self._draw(cursor, draws)
        partition = Partition(count, remainder="uneven", consumed=cursor.consumed)

        def entropy() -> State:
            # Other code may draw from the global generator in between, so taking a state fixes the draw of the epoch.
            if self.generator is None:
                draw.values(make)
            return draw.state()

        return PartitionedOrder(
            lambda: cast(Order, draw.values(make)),
            partition,
            partial(dict, self._identity()),
            seed=None,
            epoch=cursor.epoch,
            per_rank=True,
            rounds=None,
            entropy=entropy,
            exhaust=lambda: draw.values(make),
        )

    def _read(self, state: Mapping[str, Any], count: int) -> Cursor:
        name = type(self._sampler).__name__
        return self._check_draw(Cursor.read(state, of=name, plan=self._identity(), most=count))

    def _digest(self, data: Any) -> str:
        """Return a hash of the indices or weights; cached for the same object until a tensor is changed."""
        version = data._version if isinstance(data, torch.Tensor) else None
        if self._hashed is None or self._hashed[0] is not data or self._hashed[1] != version:
            self._hashed = data, version, self._digest_of(data)
        return self._hashed[2]

    @abc.abstractmethod
    def _digest_of(self, data: Any) -> str: ...

    @abc.abstractmethod
    def _identity(self) -> State: ...


class TorchSubset(_DrawnAtOnce):
    """The plan of ``torch.utils.data.SubsetRandomSampler``."""

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        indices: Any = self._sampler.indices

        def make(generator: torch.Generator) -> torch.Tensor:
            return torch.as_tensor(indices)[torch.randperm(len(indices), generator=generator)]

        return self._bind(cursor, draws, len(indices), make)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._read(state, len(self._sampler.indices))

    def _identity(self) -> State:
        return {
            "order": "subset",
            "samples": len(self._sampler.indices),
            "indices": self._digest(self._sampler.indices),
        }

    def _digest_of(self, indices: Any) -> str:
        return xxhash.xxh3_64_hexdigest(np.asarray(indices, np.int64).tobytes())


class TorchWeighted(_DrawnAtOnce):
    """The plan of ``torch.utils.data.WeightedRandomSampler``."""

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the draws of the cursor's epoch, from the cursor on."""
        sampler = self._sampler

        def make(generator: torch.Generator) -> torch.Tensor:
            drawn = torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator)
            return drawn.cpu()

        return self._bind(cursor, draws, int(sampler.num_samples), make)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._read(state, int(self._sampler.num_samples))

    def _identity(self) -> State:
        sampler = self._sampler
        return {
            "order": "torch weighted",
            "weights": self._digest(sampler.weights),
            "samples": len(sampler.weights),
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
        }

    def _digest_of(self, weights: Any) -> str:
        return weights_digest(weights.double().cpu().numpy())


TORCH_PLANS: dict[type, Callable[[Any], EpochSampler]] = {
    torch.utils.data.SequentialSampler: TorchSequential,
    torch.utils.data.RandomSampler: TorchRandom,
    torch.utils.data.DistributedSampler: TorchDistributed,
    torch.utils.data.SubsetRandomSampler: TorchSubset,
    torch.utils.data.WeightedRandomSampler: TorchWeighted,
}
"""The plan class for each class of torch, and for its subclasses with the same order."""
