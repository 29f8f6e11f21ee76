"""One rank's share, whoever's sampler it comes from, is not dealt to ranks once more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PartitionError, SamplerError
from penstock.samplers import (
    DistributedSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    make_batch_data_sampler,
)
from penstock.samplers.batch import layers, rank_splitter

N = 41
GROUPS = np.arange(N) % 3


class Share(torch.utils.data.Sampler[int]):
    """A copy of torch's DistributedSampler, as maskrcnn-benchmark and many others have one."""

    def __init__(self, dataset: Any, num_replicas: int = 2, rank: int = 0) -> None:
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0
        self.num_samples = -(-len(dataset) // num_replicas)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        order += order[: self.num_samples * self.num_replicas - len(order)]
        return iter(order[self.num_samples * self.rank : self.num_samples * (self.rank + 1)])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Sized:
    """A stream that says nothing but its length."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Unsized:
    """A stream that does not say how long it is."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class Named(Sized):
    """A share that names its rank, and how many there are, in some way."""

    def __init__(self, indices: list[int], **names: int) -> None:
        super().__init__(indices)
        self.__dict__.update(names)


class Wrapper(Sized):
    """The order of another sampler, repeated, so that it is no shorter than the data."""

    def __init__(self, sampler: Any) -> None:
        super().__init__([*sampler, *sampler])
        self.sampler = sampler


SHARES: dict[str, Callable[[int], Any]] = {
    "copy of torch's": lambda rank: Share(range(N), 2, rank),
    "torch's": lambda rank: torch.utils.data.DistributedSampler(range(N), 2, rank),
    "rank and world_size": lambda rank: Named(list(range(N)), rank=rank, world_size=2),
    "detectron2's names": lambda rank: Named(list(range(N)), _rank=rank, _world_size=2),
    "rank alone": lambda rank: Named(list(range(N)), rank=rank),
    "wrapped": lambda rank: Wrapper(Share(range(N), 2, rank)),
}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What torchrun sets for one of two ranks."""

    def become(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")

    become(0)
    return become


@pytest.mark.parametrize("kind", SHARES)
def test_a_share_is_known(kind: str) -> None:
    assert rank_splitter(SHARES[kind](0), ranks=2) is not None


def test_fewer_draws_of_our_own_samplers_are_dealt(two_ranks: Any) -> None:
    """Ours are known to be the stream of the whole job, whatever their length."""
    stream = WeightedRandomSampler(np.ones(N), 12, seed=0)
    assert [len(GroupedBatchSampler(stream, [0] * N, 3, rank=rank, world_size=2)) for rank in range(2)] == [2, 2]


def test_the_factory_refuses_a_share(two_ranks: Any) -> None:
    class Images:
        group_ids = GROUPS

        def __len__(self) -> int:
            return N

    with pytest.raises(SamplerError, match=r"that of a Share is unknown: pass a sampler of Penstock \(DistributedS"):
        make_batch_data_sampler(Images(), Share(range(N)), True, 4)


def test_a_data_set_that_is_a_share_takes_no_sampler_that_deals(tmp_path: Any) -> None:
    path = tmp_path / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(20)))
    dataset = ps.RankDataset(path, rank=0, world_size=2)
    with pytest.raises(PartitionError, match="RankDataset already is this rank's share, and Share would split it"):
        ps.DataLoader(dataset, 2, sampler=Share(range(10), 2, 0))
    grouped = GroupedBatchSampler(SequentialSampler(range(10)), [0] * 10, 2, world_size=2, rank=0)
    with pytest.raises(PartitionError, match="GroupedBatchSampler would split it"):
        ps.DataLoader(dataset, batch_sampler=grouped)
    rows = ps.RankDataset(path, rank=0, world_size=2, shuffle="none")
    assert len(ps.DataLoader(rows, 2, sampler=Share(range(10), 1, 0))) == 5


def test_who_deals() -> None:
    share = Share(range(N))
    assert rank_splitter(share, ranks=1) is share
    assert rank_splitter(torch.utils.data.BatchSampler(share, 2, False), ranks=1) is share
    inner = DistributedSampler(range(N), 2, 0)
    grouped = GroupedBatchSampler(inner, GROUPS, 2)
    assert rank_splitter(IterationBasedBatchSampler(grouped, 3), ranks=1) is grouped
    for said in (InfiniteSampler(range(N), rank=0, world_size=2), DistributedSampler(range(N), 1, 0)):
        assert rank_splitter(said, ranks=2) is said
    for silent in (RandomSampler(range(N)), range(N), InfiniteSampler(range(N), rank=0, world_size=1), Unsized([])):
        assert rank_splitter(silent, ranks=2) is None


def test_samplers_that_hold_each_other_are_looked_at_once() -> None:
    outer, inner = Sized([]), Sized([])
    outer.sampler, inner.sampler = inner, outer  # type: ignore[attr-defined]
    assert list(itertools.islice(layers(outer), 3)) == [outer, inner]
    inner.sampler = inner  # type: ignore[attr-defined]
    assert list(itertools.islice(layers(inner), 2)) == [inner]


def test_drop_uneven_is_the_fourth_argument_as_in_maskrcnn_benchmark() -> None:
    groups = [0, 1, 0, 1, 0, 0, 1]
    stream = SequentialSampler(range(7))
    dropped = GroupedBatchSampler(stream, groups, 2, True, world_size=1)
    assert dropped.drop_last is dropped.drop_uneven is True
    assert all(len(batch) == 2 for batch in dropped)
    for same in (
        GroupedBatchSampler(stream, groups, 2, drop_last=True, world_size=1),
        GroupedBatchSampler(stream, groups, 2, drop_uneven=True, world_size=1),
        GroupedBatchSampler(stream, groups, 2, False, drop_last=True, world_size=1),
    ):
        assert list(same) == list(dropped)
    assert sorted(itertools.chain(*GroupedBatchSampler(stream, groups, 2, False, world_size=1))) == list(range(7))
    with pytest.raises(TypeError):
        GroupedBatchSampler(stream, groups, 2, False, "first")  # type: ignore[misc]
