"""Plans of torch's own samplers: exactly torch's orders, with a state that counts samples.

The cursor's entropy holds the random draw of torch at the start of an epoch: the seed that its `RandomSampler` draws
from the global generator, or the state of the generator (7 kB of text) if torch draws all numbers from it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data

from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.draws import DrawingSampler
from penstock.samplers.external import ForeignSampler
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.weighted import weights_digest

__all__ = ["TORCH_PLANS"]


class _Ours(ForeignSampler[int, EpochPlan], EpochSampler):
    """The plan of a torch sampler that has the order of one of ours."""

    @abc.abstractmethod
    def _ours(self) -> EpochSampler:
        """Return our sampler with torch's attributes: programs assign them, and subclasses compute them."""

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        return self._ours().bind(cursor, draws)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._ours().read(state)


class _Drawing(ForeignSampler[int, EpochPlan], DrawingSampler):
    """The plan of a torch sampler with a generator. Each rank draws its own order."""

    @property
    def generator(self) -> torch.Generator | None:  # type: ignore[override]
        """The generator of torch's sampler."""
        return cast("torch.Generator | None", self.items.generator)


class TorchRandom(_Drawing, _Ours):
    """The plan of ``torch.utils.data.RandomSampler``: Penstock's `RandomSampler` with ``shuffle=True``."""

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        run = super().bind(cursor, draws)
        run.per_rank = True
        return run

    def _ours(self) -> RandomSampler:
        given = self.items
        return RandomSampler(given.data_source, given.replacement, given._num_samples, self.generator)


class TorchDistributed(_Ours):
    """The plan of ``torch.utils.data.DistributedSampler``. Its states are elastic: of any number of ranks."""

    def _ours(self) -> DistributedSampler:
        given = self.items
        return DistributedSampler(
            given.dataset, given.num_replicas, given.rank, bool(given.shuffle), given.seed, given.drop_last
        )


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


class _DrawnAtOnce(_Drawing):
    """The plan of a torch sampler that draws its whole order at the start, from its own or torch's global generator."""

    at_once = True
    _hashed: tuple[Any, int | None, str] | None = None

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        count, identity = len(self.items), self._identity()
        run = self._drawn(cursor, draws, lambda: identity, size=count, count=count, last=0, block=self._block)
        run.per_rank = True
        return run

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._read_drawn(state, self._identity(), len(self.items))

    def _digest(self, data: Any, dtype: type[np.generic]) -> str:
        """Return a hash of the indices or weights; cached for the same object until a tensor is changed."""
        version = data._version if isinstance(data, torch.Tensor) else None
        if self._hashed is None or self._hashed[0] is not data or self._hashed[1] != version:
            values = np.asarray(data.cpu() if isinstance(data, torch.Tensor) else data, dtype)
            self._hashed = data, version, weights_digest(values)
        return self._hashed[2]

    @abc.abstractmethod
    def _block(self, generator: torch.Generator, number: int) -> torch.Tensor:
        """Return all indices."""

    @abc.abstractmethod
    def _identity(self) -> State: ...


class TorchSubset(_DrawnAtOnce):
    """The plan of ``torch.utils.data.SubsetRandomSampler``."""

    def _block(self, generator: torch.Generator, number: int) -> torch.Tensor:
        indices = torch.as_tensor(self.items.indices)
        return indices[torch.randperm(len(indices), generator=generator)]

    def _identity(self) -> State:
        indices = self.items.indices
        return {"order": "subset", "samples": len(indices), "indices": self._digest(indices, np.int64)}


class TorchWeighted(_DrawnAtOnce):
    """The plan of ``torch.utils.data.WeightedRandomSampler``."""

    def _block(self, generator: torch.Generator, number: int) -> torch.Tensor:
        given = self.items
        return torch.multinomial(given.weights, given.num_samples, given.replacement, generator=generator).cpu()

    def _identity(self) -> State:
        sampler = self.items
        return {
            "order": "torch weighted",
            "weights": self._digest(sampler.weights, np.float64),
            "samples": len(sampler.weights),
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
        }


TORCH_PLANS: dict[type, Callable[[Any], EpochSampler]] = {
    torch.utils.data.SequentialSampler: TorchSequential,
    torch.utils.data.RandomSampler: TorchRandom,
    torch.utils.data.DistributedSampler: TorchDistributed,
    torch.utils.data.SubsetRandomSampler: TorchSubset,
    torch.utils.data.WeightedRandomSampler: TorchWeighted,
}
"""The plan class for each class of torch, and for its subclasses with the same order."""
