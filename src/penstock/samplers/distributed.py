"""`DistributedSampler`: torch's, with a shuffle that needs no memory and a state that another world size can load."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.utils.data

from penstock import distributed
from penstock.errors import PartitionError
from penstock.hashing import checked_seed
from penstock.order import ORDER_VERSION, Order, Partition, make_order
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.samplers.base import EpochSampler
from penstock.samplers.identity import data_identity, holds_a_share
from penstock.samplers.orders import TorchOrder, block_options, order_kind

__all__ = ["DistributedSampler"]


if TYPE_CHECKING:

    class _Torch: ...  # its types of attributes are narrower than its promises

else:
    _Torch = torch.utils.data.DistributedSampler


class DistributedSampler(EpochSampler, _Torch):
    """The indices of one rank, with the signature and semantics of ``torch.utils.data.DistributedSampler``.

    Args:
        dataset: anything with a length (read at every pass).
        num_replicas, rank: world size and rank; by default from torch.distributed, else RANK and WORLD_SIZE, else 1, 0:
            found when they are first needed, so the sampler may be made before the process group.
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
        PartitionError: a rank outside the world, a data set that splits by rank itself, drop_last and remainder that
            contradict each other, or (at use) a process group made later that disagrees with the rank found first.

    States are elastic: what a job of any size has consumed is a prefix of the epoch, so another number of ranks goes
    on from there. All ranks must save at the same step. An epoch never advances by itself.

    To a loader a sampler with ``shuffle=True`` or ``False`` is torch's, and has no seed: the loader repeats its epoch
    until ``set_epoch`` is called, and draws the seeds of transforms as torch does. With a shuffle that is named
    (``"global"``, ``"block"``, ``"none"``) the seed here is that of the transforms too.

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
        if holds_a_share(dataset):
            raise PartitionError(
                f"a {type(dataset).__name__} is already one rank's share, and a DistributedSampler would split it "
                "again: leave the sampler out, or put it over the Manifest"
            )
        if remainder is not None and drop_last and remainder != "drop":
            raise PartitionError(f"drop_last=True contradicts remainder={remainder!r}")
        self._world = distributed.LateWorld(
            rank, num_replicas, process_group=process_group, each=True, of="DistributedSampler"
        )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = checked_seed(seed)
        self.remainder = remainder or ("drop" if drop_last else "pad")
        self.drop_last = self.remainder == "drop"
        self._kind = order_kind(shuffle)
        self.block_size, self.window = block_size, window
        self._block = block_options(self._kind, block_size, window)
        # An unknown remainder is refused here, not at the first sample.
        Partition(len(dataset), remainder=self.remainder)

    @property
    def num_replicas(self) -> int:
        """World size; asking settles it."""
        return self._world.get().world_size

    @property
    def rank(self) -> int:
        """Which rank this is; asking settles it."""
        return self._world.get().rank

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

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators: torch's orders follow torch's rules throughout, and have none."""
        return self.seed if isinstance(self.shuffle, str) else None

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        """Return this rank's share of what is left of the cursor's epoch."""
        n, epoch = len(self.dataset), cursor.epoch
        make = partial(self._order, n, epoch)
        partition = self._partition(cursor.consumed)
        return PartitionedOrder(make, partition, self._identity(), seed=self.key_seed, epoch=epoch)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state of any number of ranks holds."""
        return Cursor.read(state, of="DistributedSampler", plan=self._identity(), most=len(self.dataset))

    def _order(self, n: int, epoch: int) -> Order:
        if self._kind == "torch":
            return TorchOrder(n, self.seed, epoch)
        return make_order(self._kind, n, seed=self.seed, epoch=epoch, **self._block)

    def _partition(self, consumed: int) -> Partition:
        rank, world_size = self._world.get()
        return Partition(len(self.dataset), world_size, rank, remainder=self.remainder, consumed=consumed)

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "shuffle": self._kind,
            **self._block,
            **data_identity(self.dataset),
            "seed": self.seed,
        }
