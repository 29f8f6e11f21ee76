"""One rank's share, whoever's sampler it comes from, is not dealt to ranks once more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
from penstock.samplers.shares import layers, rank_splitter

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


@pytest.mark.parametrize("given", [{}, {"world_size": 2, "rank": 0}, {"world_size": 1}], ids=str)
def test_a_share_is_refused_where_it_would_be_dealt_again(given: Any, two_ranks: Any) -> None:
    """Half of the data would never be seen."""
    share = torch.utils.data.DistributedSampler(range(N), 2, 0)
    message = r"torch.utils.data.distributed.DistributedSampler has only one rank's share.*penstock.DistributedSampler"
    with pytest.raises(SamplerError, match=message):
        GroupedBatchSampler(share, GROUPS, 4, False, **given)


def subset(rank: int) -> Any:
    return torch.utils.data.SubsetRandomSampler(range(rank, N, 2), torch.Generator().manual_seed(1))


def test_a_shorter_sampler_of_torch_has_to_be_told(two_ranks: Any) -> None:
    """It is a share, or a part of the data that is the same on all ranks."""
    said = (
        "has 21 of 41 samples.*one rank's share.*DistributedSampler.*the same on all ranks, pass world_size=2 and rank="
    )
    for given in ({}, {"world_size": 1}):
        with pytest.raises(SamplerError, match=said):
            GroupedBatchSampler(subset(0), GROUPS, 4, **given)
    ranks = [GroupedBatchSampler(subset(0), [0] * N, 4, world_size=2, rank=rank) for rank in range(2)]
    first, second = ({index for batch in sampler for index in batch} for sampler in ranks)
    assert first | second == set(range(0, N, 2))


def test_what_is_the_same_on_all_ranks_is_dealt(two_ranks: Any) -> None:
    """As long as the data, or for one rank."""
    streams: list[Callable[[], Any]] = [
        lambda: torch.utils.data.DistributedSampler(range(N), 1, 0),
        lambda: torch.utils.data.SequentialSampler(range(N)),
        lambda: torch.utils.data.SubsetRandomSampler(range(N), torch.Generator().manual_seed(1)),
        lambda: RandomSampler(range(N), shuffle="global", seed=1),
    ]
    for stream in streams:
        seen: list[int] = []
        for rank in range(2):
            two_ranks(rank)
            sampler = GroupedBatchSampler(stream(), GROUPS, 4, drop_last=False)
            batches = list(sampler)
            seen += itertools.chain(*(batches[:-1] if sampler.repeated and rank else batches))
        assert set(seen) == set(range(N))
        assert len(seen) == N


def test_fewer_draws_of_our_own_samplers_are_dealt(two_ranks: Any) -> None:
    """Ours are known to be the stream of the whole job, whatever their length."""
    stream = WeightedRandomSampler(np.ones(N), 12, seed=0)
    assert [len(GroupedBatchSampler(stream, [0] * N, 3, rank=rank, world_size=2)) for rank in range(2)] == [2, 2]


def test_a_share_is_noticed_when_the_process_group_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    sampler = GroupedBatchSampler(subset(0), GROUPS, 4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(SamplerError, match="one rank's share"):
        len(sampler)


@pytest.mark.parametrize("stream", [torch.utils.data.SubsetRandomSampler(range(N)), RandomSampler(range(N))])
def test_an_order_drawn_by_chance_is_refused(stream: Any, two_ranks: Any) -> None:
    with pytest.raises(SamplerError, match="each of the 2 ranks would draw a different order"):
        len(GroupedBatchSampler(stream, GROUPS, 4))


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
