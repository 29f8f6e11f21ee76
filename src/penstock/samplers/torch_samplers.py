"""Plans of torch's own samplers: exactly torch's orders, with a state that counts samples.

The cursor's entropy holds the random draw of torch at the start of an epoch: the seed that its `RandomSampler` draws
from the global generator, or the state of the generator (7 kB of text) if torch draws all numbers from it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from functools import partial
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


class _OfTorch(ForeignSampler[int, EpochPlan], DrawingSampler):
    """The plan of a torch sampler. If it has a generator, each rank draws its own order."""

    @property
    def generator(self) -> torch.Generator | None:  # type: ignore[override]
        """The generator of torch's sampler."""
        return cast("torch.Generator | None", getattr(self.items, "generator", None))


class TorchPlan(_OfTorch):
    """The plan of a torch sampler that has the order of one of ours: of ours with torch's attributes.

    They are read at every use: programs assign them, and subclasses compute them.

    Args:
        sampler: torch's.
        ours: returns our sampler, with the attributes of torch's.
    """

    def __init__(self, sampler: Any, ours: Callable[[Any], EpochSampler]) -> None:
        super().__init__(sampler)
        self._ours = ours

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return self._ours(self.items).key_seed

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        run = self._ours(self.items).bind(cursor, draws)
        run.per_rank = run.per_rank or hasattr(self.items, "generator")
        return run

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return self._ours(self.items).read(state)


def _sequential(given: Any) -> EpochSampler:
    return SequentialSampler(given.data_source)


def _random(given: Any) -> EpochSampler:
    return RandomSampler(given.data_source, given.replacement, given._num_samples, given.generator)


def _distributed(given: Any) -> EpochSampler:
    """Its states are elastic: of any number of ranks."""
    shuffle, drop_last = bool(given.shuffle), given.drop_last
    return DistributedSampler(given.dataset, given.num_replicas, given.rank, shuffle, given.seed, drop_last)


class _DrawnAtOnce(_OfTorch):
    """The plan of a torch sampler that draws its whole order at the start, from its own or torch's global generator."""

    at_once = True
    _hashed: tuple[Any, int | None, str] | None = None

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        count, identity = len(self.items), self._identity()
        run = self._drawn(cursor, draws, lambda: identity, size=count, count=count, last=0, block=self._block)
        run.per_rank = True
        return run

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
    torch.utils.data.SequentialSampler: partial(TorchPlan, ours=_sequential),
    torch.utils.data.RandomSampler: partial(TorchPlan, ours=_random),
    torch.utils.data.DistributedSampler: partial(TorchPlan, ours=_distributed),
    torch.utils.data.SubsetRandomSampler: TorchSubset,
    torch.utils.data.WeightedRandomSampler: TorchWeighted,
}
"""What makes the plan, for each class of torch, and for its subclasses with the same order."""
