"""What samplers share about orders: their names and options, torch's own order, and a pass over any of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from penstock.errors import SamplerError
from penstock.order import Order, Partition
from penstock.order.permutation import Indices
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW, SHUFFLES
from penstock.state import State

__all__ = ["OrderPass", "TorchOrder", "block_options", "order_kind"]


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


def block_options(kind: str, block_size: int | None, window: int | None) -> dict[str, int]:
    """The sizes of the block shuffle, and nothing for the other kinds.

    Raises:
        SamplerError: sizes for a kind that has none, or that are not positive.
    """
    if kind != "block":
        if block_size is not None or window is not None:
            raise SamplerError(f"block_size and window belong to shuffle='block', not to shuffle={kind!r}")
        return {}
    sizes = {
        "block_size": DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        "window": DEFAULT_WINDOW if window is None else window,
    }
    if min(sizes.values()) < 1:
        raise SamplerError(f"block_size and window must be positive, got {block_size} and {window}")
    return sizes


class OrderPass:
    """A pass over an order, dealt by a partition.

    Args:
        make: makes the order, when the first index is asked for (torch's costs O(N)).
        partition: this rank's positions.
        identity: what a state must agree with; a function where that is drawn at the beginning of the pass.
        seed, epoch: of the generators of the samples; seed None leaves them to the loader.
        rounds: how often the order runs through all samples, each equally often; None where it does not.
        exhaust: called at the end of the pass, see `penstock.samplers.base.exhaust`; may be called again.
    """

    def __init__(
        self,
        make: Callable[[], Order],
        partition: Partition,
        identity: State | Callable[[], State],
        *,
        seed: int | None,
        epoch: int,
        rounds: int | None = 1,
        exhaust: Callable[[], object] | None = None,
    ) -> None:
        self._make = make
        self.partition = partition
        self._identity = identity
        self.seed = seed
        self.epoch = epoch
        self._rounds = rounds
        self._exhaust = exhaust

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
        identity = self._identity() if callable(self._identity) else self._identity
        return {**identity, "epoch": self.epoch, "consumed": self.partition.consumed_after(count)}

    @property
    def rounds(self) -> int | None:
        """How often this pass has every sample, if all of them equally often; else None."""
        everything = self.partition.consumed == 0 and len(self) == self.partition.n
        return self._rounds if everything else None

    def job(self) -> OrderPass:
        """What is left of the epoch for all ranks together: every sample once, no padding."""
        partition = Partition(self.partition.n, remainder="uneven", consumed=self.partition.consumed)
        return OrderPass(
            lambda: self.order,
            partition,
            self._identity,
            seed=self.seed,
            epoch=self.epoch,
            rounds=self._rounds,
            exhaust=self._exhaust,
        )

    def exhaust(self) -> None:
        """The pass was read to its end."""
        if self._exhaust is not None:
            self._exhaust()
