"""torch's own samplers, read as plans: their orders to the letter, and a state that is counted in samples.

What torch draws at the beginning of an epoch is the cursor's entropy: the seed that its `RandomSampler` takes from the
global generator, or the generator's state (7 kB of text) where numbers are drawn from that directly.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data
import xxhash

from penstock.hashing import derive_key
from penstock.order import ORDER_VERSION, Order, Partition, make_order
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Wish
from penstock.samplers.alias import weights_digest
from penstock.samplers.base import EpochSampler
from penstock.samplers.draws import Draw, check_entropy, decode_generator
from penstock.samplers.identity import data_identity
from penstock.samplers.orders import TorchOrder
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

__all__ = ["TORCH_PLANS"]


class TorchRandom(RandomSampler):
    """The plan of ``torch.utils.data.RandomSampler``: that of ours with ``shuffle=True``."""

    def __init__(self, sampler: torch.utils.data.RandomSampler) -> None:
        self._sampler = sampler
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)

    @property
    def source(self) -> torch.utils.data.RandomSampler:
        """torch's sampler."""
        return self._sampler

    # All are torch's sampler's: programs assign them there, and subclasses compute them.
    @property
    def data_source(self) -> Sized:
        """torch's sampler's."""
        return self._sampler.data_source

    @data_source.setter
    def data_source(self, data_source: Sized) -> None:
        pass

    @property
    def replacement(self) -> bool:
        """torch's sampler's."""
        return self._sampler.replacement

    @replacement.setter
    def replacement(self, replacement: bool) -> None:
        pass

    @property
    def _num_samples(self) -> int | None:
        return self._sampler._num_samples

    @_num_samples.setter
    def _num_samples(self, num_samples: int | None) -> None:
        pass

    @property
    def generator(self) -> torch.Generator | None:
        """torch's sampler's."""
        return cast("torch.Generator | None", self._sampler.generator)

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        pass

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on. Each rank draws its own."""
        run = super().bind(cursor, entropy)
        run.per_rank = True
        return run


class TorchSequential(SequentialSampler):
    """The plan of ``torch.utils.data.SequentialSampler``: that of ours."""

    def __init__(self, sampler: torch.utils.data.SequentialSampler) -> None:
        self._sampler = sampler
        super().__init__(sampler.data_source)

    @property
    def data_source(self) -> Sized:
        """torch's sampler's."""
        return self._sampler.data_source

    @data_source.setter
    def data_source(self, data_source: Sized) -> None:
        pass

    @property
    def source(self) -> torch.utils.data.SequentialSampler:
        """torch's sampler."""
        return self._sampler


class TorchDistributed(EpochSampler):
    """The plan of ``torch.utils.data.DistributedSampler``: elastic, as ours is.

    The epoch is what the sampler's ``set_epoch`` said last. A loader does not advance it, with a seed or without.
    """

    advances = False

    def __init__(self, sampler: torch.utils.data.DistributedSampler[Any]) -> None:
        super().__init__()
        self._sampler = sampler

    def _epoch_shown(self) -> int:
        return int(self._sampler.epoch)

    @property
    def source(self) -> torch.utils.data.DistributedSampler[Any]:
        """torch's sampler."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, on torch's sampler."""
        super().set_epoch(epoch)
        self._sampler.set_epoch(epoch)

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._times_set, self._sampler.epoch

    def wish(self) -> Wish:
        """Return where the next reader should begin: in the sampler's epoch."""
        wish, epoch = super().wish(), int(self._sampler.epoch)
        if wish.cursor.epoch == epoch:
            return wish
        return Wish(Cursor(epoch=epoch), False)

    def chosen(self, cursor: Cursor) -> None:
        """Tell torch's sampler the epoch."""
        self._sampler.set_epoch(cursor.epoch)

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return this rank's share of what is left of the cursor's epoch."""
        sampler, epoch = self._sampler, cursor.epoch
        n, seed, shuffle = self._samples, int(sampler.seed), bool(sampler.shuffle)
        partition = Partition(
            n,
            int(sampler.num_replicas),
            int(sampler.rank),
            remainder="drop" if sampler.drop_last else "pad",
            consumed=cursor.consumed,
        )

        def make() -> Order:
            return TorchOrder(n, seed, epoch) if shuffle else make_order("none", n)

        return PartitionedOrder(make, partition, self._identity(), seed=None, epoch=epoch)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state of any number of ranks holds."""
        return Cursor.read(state, of="DistributedSampler", plan=self._identity(), most=self._samples)

    @property
    def _samples(self) -> int:
        return len(cast(Any, self._sampler.dataset))

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "shuffle": "torch" if self._sampler.shuffle else "none",
            **data_identity(cast(Any, self._sampler.dataset)),
            "seed": int(self._sampler.seed),
        }


_Make = Callable[[torch.Generator], torch.Tensor]


class _DrawnAtOnce(EpochSampler):
    """A sampler that draws its whole order at the beginning, from its generator or torch's global one."""

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self._sampler = sampler
        self._hashed: tuple[Any, int | None, str] | None = None

    @property
    def source(self) -> Any:
        """torch's sampler."""
        return self._sampler

    @property
    def _generator(self) -> torch.Generator:
        generator = self._sampler.generator
        return torch.default_generator if generator is None else generator

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Draw:
        """Return the draw of one epoch."""
        seeded = seed is not None and self._sampler.generator is None
        generator = self._generator
        if isinstance(held, Draw) and held.fits(cursor, seed) and (seeded or held.given is generator):
            return held
        if seed is not None and seeded:
            generator = torch.Generator().manual_seed(derive_key(seed, cursor.epoch, "draw") >> 1)
        return Draw.of(generator, cursor)

    def chosen(self, cursor: Cursor) -> None:
        """Put the user's own generator where it was, if the state was taken before its epoch began."""
        generator = self._sampler.generator
        if generator is not None and cursor.entropy.get("begun") is False:
            generator.set_state(decode_generator(cursor.entropy["generator"]))

    def _bind(
        self, cursor: Cursor, draw: Draw, count: int, make: Callable[[torch.Generator], torch.Tensor]
    ) -> EpochPlan:
        partition = Partition(count, remainder="uneven", consumed=cursor.consumed)

        def entropy() -> State:
            # Anybody may draw from the global generator meanwhile: a state settles what the epoch is.
            if self._sampler.generator is None:
                draw.values(make)
            return draw.state()

        return PartitionedOrder(
            lambda: cast(Order, draw.values(make)),
            partition,
            self._identity(),
            seed=None,
            epoch=cursor.epoch,
            per_rank=True,
            rounds=None,
            entropy=entropy,
            exhaust=lambda: draw.values(make),
        )

    def _read(self, state: Mapping[str, Any], count: int) -> Cursor:
        name = type(self._sampler).__name__
        cursor = Cursor.read(state, of=name, plan=self._identity(), most=count)
        check_entropy(cursor.entropy, of=name, generator=True)
        return cursor

    def _digest(self, data: Any) -> str:
        """Return a hash of what is drawn from; kept for the same object, until a tensor is written to."""
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

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the order of the cursor's epoch, from the cursor on."""
        indices: Any = self._sampler.indices

        def make(generator: torch.Generator) -> torch.Tensor:
            return torch.as_tensor(indices)[torch.randperm(len(indices), generator=generator)]

        return self._bind(cursor, entropy, len(indices), make)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds."""
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

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return the draws of the cursor's epoch, from the cursor on."""
        sampler = self._sampler

        def make(generator: torch.Generator) -> torch.Tensor:
            drawn = torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator)
            return drawn.cpu()

        return self._bind(cursor, entropy, int(sampler.num_samples), make)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state holds."""
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
        return f"{weights_digest(weights.double().cpu().numpy()):016x}"


TORCH_PLANS: dict[type, Callable[[Any], EpochSampler]] = {
    torch.utils.data.SequentialSampler: TorchSequential,
    torch.utils.data.RandomSampler: TorchRandom,
    torch.utils.data.DistributedSampler: TorchDistributed,
    torch.utils.data.SubsetRandomSampler: TorchSubset,
    torch.utils.data.WeightedRandomSampler: TorchWeighted,
}
"""Of torch's classes, and of subclasses that change nothing about their orders."""
