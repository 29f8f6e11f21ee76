"""`InfiniteSampler`: epoch after epoch as one endless stream, split among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from penstock import distributed
from penstock.errors import SamplerError
from penstock.hashing import checked_seed
from penstock.order import Partition
from penstock.order.permutation import MAX_N
from penstock.order.shuffle import block_options
from penstock.plan.cursor import Cursor, State, read_int
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochSampler, RankMixin
from penstock.samplers.draws import Rounds
from penstock.samplers.identity import holds_a_share, order_identity
from penstock.samplers.orders import epoch_order, order_kind
from penstock.wording import kind_text

__all__ = ["InfiniteSampler"]


class InfiniteSampler(RankMixin, EpochSampler):
    """An endless stream of indices: position p of the whole job is sample ``order(epoch p // n)[p % n]``.

    Args:
        dataset: anything with a length.
        shuffle: ``"global"``, ``"block"``, ``"none"`` or False, or True for torch's order (8 bytes per index).
        seed: the same on all ranks.
        rank, world_size, process_group, mesh: as for `DistributedSampler`. Rank r yields the positions r,
            r + world_size, ... of the stream: no padding, no short epochs.
        block_size, window: of the block shuffle.

    Raises:
        SamplerError: an empty dataset, or an unknown shuffle.
        ConfigError: block sizes that are not positive, or without the block shuffle.
        PartitionError: the rank is outside the world, or (at use) a process group made later disagrees with the rank
            that was in use.

    ``len`` raises a TypeError, as for any endless iterable. The state is the number of positions that the job has
    consumed: O(1) and elastic. ``set_epoch(e)`` moves the stream to the start of epoch e.

    >>> import itertools
    >>> list(itertools.islice(InfiniteSampler(range(3), shuffle="none", rank=1, world_size=2), 4))
    [1, 0, 2, 1]
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool | str = "global",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
        block_size: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self._world = distributed.LateWorld(
            rank, world_size, process_group=process_group, mesh=mesh, of="InfiniteSampler"
        )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = checked_seed(seed)
        self._kind = order_kind(shuffle)
        self.block_size, self.window = block_size, window
        self._block = block_options(self._kind, block_size, window)
        self._samples()

    def __len__(self) -> NoReturn:
        raise TypeError("an InfiniteSampler has no length: it never ends")

    def _samples(self) -> int:
        n = len(self.dataset)
        if holds_a_share(self.dataset):
            raise SamplerError(f"{kind_text(self.dataset)} is already one rank's share of the data")
        if n == 0:
            raise SamplerError("the dataset is empty: an endless stream needs at least one sample")
        return n

    @property
    def key_seed(self) -> int:
        """Seed of the samples' generators."""
        return self.seed

    def bind(self, cursor: Cursor, draws: Draws) -> EpochPlan:
        """Return this rank's part of the stream from the cursor on.

        The whole stream counts as one epoch, with the number of the cursor's epoch.
        """
        n, (rank, world_size) = self._samples(), self._world.get()
        # A state counts from the start of the stream. set_epoch moves forward to the start of an epoch.
        consumed = max(cursor.consumed, cursor.epoch * n)
        if consumed >= MAX_N:
            raise SamplerError(f"epoch {cursor.epoch} of {n} samples begins after 2**62 positions: set a smaller one")
        order = Rounds(n, partial(epoch_order, self._kind, self._block, n, self.seed))
        partition = Partition(MAX_N, world_size, rank, remainder="uneven", consumed=consumed)
        return _Endless(lambda: order, partition, self._identity, seed=self.seed, epoch=cursor.epoch)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. The state may come from any number of ranks."""
        of, n = "InfiniteSampler", len(self.dataset)
        cursor = Cursor.read(state, of=of, plan=self._identity())
        read_int(state, "epoch", of=of, below=MAX_N // n)
        return cursor

    def _identity(self) -> State:
        identity = order_identity(self._kind, self._block, self.dataset, len(self.dataset), self.seed)
        return {**identity, "order": "infinite"}


class _Endless(PartitionedOrder):
    """An endless stream: positions continue from one epoch to the next."""

    layout = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise TypeError("an endless plan has no length")
