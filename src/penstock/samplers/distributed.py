"""`DistributedSampler`: torch's sampler, with a shuffle in O(1) memory and a state that any world size can load."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.utils.data

from penstock import distributed
from penstock.errors import PartitionError
from penstock.hashing import checked_seed
from penstock.order import Partition
from penstock.order.shuffle import block_options
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochSampler, RankMixin
from penstock.samplers.identity import holds_a_share, order_identity
from penstock.samplers.orders import epoch_order, order_kind
from penstock.wording import kind_text

__all__ = ["DistributedSampler"]


if TYPE_CHECKING:
    # torch annotates its attributes more narrowly than it documents them.
    class _Torch: ...

else:
    _Torch = torch.utils.data.DistributedSampler


class DistributedSampler(RankMixin, EpochSampler, _Torch):
    """The indices of one rank, with the signature and semantics of ``torch.utils.data.DistributedSampler``.

    Args:
        dataset: anything with a length (read again for every epoch).
        num_replicas, rank: world size and rank, by default those of the job, see `penstock.distributed`. They are read
            at the first use, so the sampler may be made before the process group.
        shuffle: ``True`` yields torch's own indices (O(N) memory, 8 bytes each). ``"global"`` and ``"block"`` yield
            Penstock's in O(1) memory. ``False`` or ``"none"`` keeps the order of the dataset.
        seed: the same on all ranks.
        drop_last: leave out the last samples instead of repeating the first ones, so that all ranks have the same
            number.
        remainder: ``"pad"``, ``"drop"`` or ``"uneven"`` (every sample exactly once, and ranks may differ by one: for
            exact evaluation). By default ``"drop"`` with ``drop_last``, else ``"pad"``.
        block_size, window: of the block shuffle, see `penstock.order.BlockShuffle`.
        process_group: the group that splits the data, if it is not the default group.
        mesh: a DeviceMesh whose data dimensions split the data, see `penstock.distributed.current`.

    Raises:
        SamplerError: an unknown shuffle.
        ConfigError: block sizes that are not positive, or without the block shuffle.
        PartitionError: the rank is outside the world, the dataset splits itself by rank, drop_last and remainder
            contradict each other, or (at use) a process group made later disagrees with the rank that was in use.

    States are elastic. The samples that a job has consumed are a prefix of the epoch, whatever its number of ranks, so
    any other number of ranks can resume after that prefix. All ranks must save at the same step. An epoch never
    advances by itself.

    In a loader, a sampler with ``shuffle=True`` or ``False`` follows torch's rules and has no seed: the loader repeats
    its epoch until ``set_epoch`` is called, and draws the seeds of transforms as torch does. With a named shuffle
    (``"global"``, ``"block"``, ``"none"``), ``seed`` also seeds the transforms.

    >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=0, shuffle="global", seed=1)
    >>> it = iter(sampler)
    >>> head = [next(it), next(it)]
    >>> other = DistributedSampler(range(10), num_replicas=1, rank=0, shuffle="global", seed=1)
    >>> other.load_state_dict(sampler.state_dict())
    >>> len(other)  # both ranks have consumed two samples
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
        mesh: dist.device_mesh.DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if holds_a_share(dataset):
            raise PartitionError(
                f"{kind_text(dataset)} is already one rank's share, and a DistributedSampler would split it "
                "again: leave the sampler out, or make it over the Manifest"
            )
        if remainder is not None and drop_last and remainder != "drop":
            raise PartitionError(f"drop_last=True contradicts remainder={remainder!r}")
        self._world = distributed.LateWorld(
            rank, num_replicas, process_group=process_group, mesh=mesh, each=True, of="DistributedSampler"
        )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = checked_seed(seed)
        self.remainder = remainder or ("drop" if drop_last else "pad")
        self.drop_last = self.remainder == "drop"
        self._kind = order_kind(shuffle)
        self.block_size, self.window = block_size, window
        self._block = block_options(self._kind, block_size, window)
        # Raises for an unknown remainder now, not at the first sample.
        Partition(len(dataset), remainder=self.remainder)

    @property
    def num_replicas(self) -> int:
        """World size. Reading it fixes rank and world size."""
        return self.world_size

    @property
    def num_samples(self) -> int:
        """Number of samples of this rank in a whole epoch."""
        return len(self._partition(0))

    @property
    def total_size(self) -> int:
        """Number of samples of all ranks in a whole epoch, with padding."""
        whole = self._partition(0)
        return whole.n + whole.padded - whole.dropped

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators; None for torch's orders, which follow torch's rules throughout."""
        return self.seed if isinstance(self.shuffle, str) else None

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return this rank's share of the rest of the cursor's epoch."""
        partition, epoch = self._partition(cursor.consumed), cursor.epoch
        make = partial(epoch_order, self._kind, self._block, partition.n, self.seed, epoch)
        identity = partial(order_identity, self._kind, self._block, self.dataset, partition.n, self.seed)
        return PartitionedOrder(make, partition, identity, seed=self.key_seed, epoch=epoch)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. The state may come from any number of ranks."""
        n = len(self.dataset)
        plan = order_identity(self._kind, self._block, self.dataset, n, self.seed)
        return Cursor.read(state, of="DistributedSampler", plan=plan, most=n)

    def _partition(self, consumed: int) -> Partition:
        rank, world_size = self._world.get()
        return Partition(len(self.dataset), world_size, rank, remainder=self.remainder, consumed=consumed)
