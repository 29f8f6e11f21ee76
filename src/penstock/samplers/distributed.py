"""`DistributedSampler`: torch's, with a shuffle that needs no memory and a state that another world size can load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from penstock import distributed
from penstock.errors import PartitionError, SamplerError
from penstock.order import ORDER_VERSION, Order, Partition, make_order
from penstock.order.permutation import Indices
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW, SHUFFLES
from penstock.samplers.base import EpochSampler, Pass
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["DistributedSampler", "OrderPass", "order_kind"]


class TorchOrder:
    """``torch.randperm`` of a generator seeded with ``seed + epoch``: torch's own order, 8 bytes an index."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        self._indices: Indices = torch.randperm(n, generator=generator).numpy()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._indices[index]


def order_kind(shuffle: bool | str) -> str:
    """The name of an order: ``"torch"`` for True, ``"none"`` for False, else one of ``penstock.order.SHUFFLES``.

    Raises:
        SamplerError: any other value.
    """
    if isinstance(shuffle, str):
        if shuffle not in SHUFFLES:
            known = ", ".join(map(repr, SHUFFLES))
            raise SamplerError(f"unknown shuffle {shuffle!r}: use True (torch's order), False, or one of {known}")
        return shuffle
    return "torch" if shuffle else "none"


class OrderPass:
    """A pass over an order, dealt by a partition.

    Args:
        make: makes the order, when the first index is asked for (torch's costs O(N)).
        partition: this rank's positions.
        identity: what a state must agree with.
        seed, epoch: of the generators of the samples; seed None leaves them to the loader.
    """

    def __init__(
        self, make: Callable[[], Order], partition: Partition, identity: State, *, seed: int | None, epoch: int
    ) -> None:
        self._make = make
        self.partition = partition
        self._identity = identity
        self.seed = seed
        self.epoch = epoch

    @cached_property
    def order(self) -> Order:
        """The order of the whole epoch, all ranks together."""
        return self._make()

    def __len__(self) -> int:
        return len(self.partition)

    def indices(self, start: int, stop: int) -> Indices:
        """Sample indices; padding repeats the start of the epoch's order."""
        return self.order[self.positions(start, stop) % max(self.partition.n, 1)]

    def positions(self, start: int, stop: int) -> Indices:
        """Global positions; those of n and more are padding."""
        return self.partition.positions(start, stop)

    def state(self, count: int) -> State:
        """Elastic: what the whole job has consumed once every rank has had ``count`` samples."""
        return {**self._identity, "epoch": self.epoch, "consumed": self.partition.consumed_after(count)}


class DistributedSampler(EpochSampler):
    """The indices of one rank, with the signature and semantics of ``torch.utils.data.DistributedSampler``.

    Args:
        dataset: anything with a length (read at every pass).
        num_replicas, rank: world size and rank; by default from torch.distributed, else RANK and WORLD_SIZE, else 1, 0.
        shuffle: ``True`` gives torch's own indices (O(N) memory, 8 bytes each); ``"global"`` and ``"block"`` give ours
            in O(1) memory; ``False`` or ``"none"`` keeps the order of the data set.
        seed: the same on all ranks.
        drop_last: leave out the last samples instead of repeating the first, so that ranks get equally many.
        remainder: ``"pad"``, ``"drop"`` or ``"uneven"`` (every sample once, ranks may differ by one, for exact
            evaluation); by default what ``drop_last`` says.
        block_size, window: of the block shuffle, see `penstock.order.BlockShuffle`.
        process_group: whose ranks share out the data, where that is not the default group.

    Raises:
        SamplerError: an unknown shuffle, or block sizes without the block shuffle.
        PartitionError: a rank outside the world, or drop_last and remainder that contradict each other.

    States are elastic: what a job of any size has consumed is a prefix of the epoch, so another number of ranks goes
    on from there. All ranks must save at the same step. An epoch never advances by itself.

    >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=0, shuffle="global", seed=1)
    >>> it = iter(sampler)
    >>> head = [next(it), next(it)]
    >>> other = DistributedSampler(range(10), num_replicas=1, rank=0, shuffle="global", seed=1)
    >>> other.load_state_dict(sampler.state_dict())
    >>> len(other)  # both ranks have had two samples
    6
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | str = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        remainder: str | None = None,
        block_size: int | None = None,
        window: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if remainder is not None and drop_last and remainder != "drop":
            raise PartitionError(f"drop_last=True contradicts remainder={remainder!r}")
        world = _world(num_replicas, rank, process_group)
        self.dataset = dataset
        self.num_replicas = world.world_size
        self.rank = world.rank
        self.shuffle = shuffle
        self.seed = seed
        self.remainder = remainder or ("drop" if drop_last else "pad")
        self.drop_last = self.remainder == "drop"
        self._kind = order_kind(shuffle)
        self._block: dict[str, int] = {}
        if self._kind == "block":
            self._block = {"block_size": block_size or DEFAULT_BLOCK_SIZE, "window": window or DEFAULT_WINDOW}
        elif block_size is not None or window is not None:
            raise SamplerError(f"block_size and window belong to shuffle='block', not to shuffle={shuffle!r}")
        self._partition(0)

    @property
    def num_samples(self) -> int:
        """Samples of this rank in a whole epoch."""
        return len(self._partition(0))

    @property
    def total_size(self) -> int:
        """Samples of all ranks in a whole epoch, padding included."""
        n = len(self.dataset)
        whole = self._partition(0)
        return n + whole.padded - whole.dropped

    def _order(self) -> Callable[[], Order]:
        n, seed, epoch = len(self.dataset), self.seed, self.epoch
        if self._kind == "torch":
            return lambda: TorchOrder(n, seed, epoch)
        return lambda: make_order(self._kind, n, seed=seed, epoch=epoch, **self._block)

    def _partition(self, consumed: int) -> Partition:
        return Partition(len(self.dataset), self.num_replicas, self.rank, remainder=self.remainder, consumed=consumed)

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "shuffle": self._kind,
            **self._block,
            "samples": len(self.dataset),
            "seed": self.seed,
        }

    def _build(self, resume: State | None) -> Pass:
        partition = self._partition(0 if resume is None else resume["consumed"])
        return OrderPass(self._order(), partition, self._identity(), seed=self.seed, epoch=self.epoch)

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, self._identity(), of="DistributedSampler")
        for name in ("epoch", "consumed"):
            read_int(state, name, of="DistributedSampler")
        return dict(state)


def _world(num_replicas: int | None, rank: int | None, process_group: dist.ProcessGroup | None) -> distributed.World:
    """torch's rule: each of the two that is not given comes from the process group (or the environment)."""
    if num_replicas is None or rank is None:
        found = distributed.current(process_group=process_group)
        num_replicas = found.world_size if num_replicas is None else num_replicas
        rank = found.rank if rank is None else rank
    elif process_group is not None:
        raise PartitionError("give either num_replicas and rank or process_group, not both")
    return distributed.World(rank, num_replicas)
