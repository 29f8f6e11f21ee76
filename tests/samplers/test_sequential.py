"""`SequentialSampler` over a data set with an order of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plan_support import bound

from penstock.datasets.rank import RankDataset
from penstock.errors import PartitionError, SamplerError
from penstock.samplers import BatchSampler, DistributedSampler, GroupedBatchSampler, SequentialSampler


@pytest.fixture
def rank_dataset(tmp_path: Path) -> Any:
    meta = tmp_path / "train.txt"
    meta.write_text("".join(f"{i}.jpg {i}\n" for i in range(23)))
    return lambda rank=0, world=2, **options: RankDataset(meta, rank=rank, world_size=world, seed=3, **options)


def test_sequential_passes_everything_on(rank_dataset: Any) -> None:
    dataset = rank_dataset()
    sampler = SequentialSampler(dataset)
    assert sampler.seed == 3
    assert list(sampler) == list(range(12)) == list(range(len(sampler)))
    sampler.set_epoch(2)
    assert dataset.epoch == 2
    rows = [dataset[index][2] for index in sampler]
    plain = DistributedSampler(range(23), 2, 0, "global", 3)
    plain.set_epoch(2)
    assert rows == list(plain)
    iterator = iter(sampler)
    had = [dataset[next(iterator)][2] for _ in range(5)]
    state = sampler.state_dict()
    other = rank_dataset()
    resumed = SequentialSampler(other)
    resumed.load_state_dict(state)
    assert resumed.epoch == 2
    assert len(resumed) == 7
    assert had + [other[index][2] for index in resumed] == rows
    other.set_epoch(3)
    assert len(resumed) == 12
    dataset.set_epoch(3)
    assert bound(sampler).epoch == 3


def test_sequential_in_batches_and_mini_epochs(rank_dataset: Any) -> None:
    dataset = rank_dataset(mini_epochs=3)
    batches = BatchSampler(SequentialSampler(dataset), 3, False)
    seen = []
    for mini_epoch in range(3):
        assert dataset.mini_epoch == mini_epoch
        assert len(batches) == 2
        seen += [dataset[index][2] for batch in batches for index in batch]
        dataset.next_mini_epoch()
    assert dataset.epoch == 1
    other = rank_dataset(1, mini_epochs=3)
    for _ in range(3):
        seen += [other[index][2] for index in range(len(other))]
        other.next_mini_epoch()
    assert set(seen) == set(range(23))


def test_a_share_is_not_shared_out_again(rank_dataset: Any) -> None:
    dataset = rank_dataset()
    with pytest.raises(PartitionError, match="already one rank's share"):
        DistributedSampler(dataset, 2, 0)
    with pytest.raises(SamplerError, match="only one rank's share"):
        GroupedBatchSampler(SequentialSampler(dataset), [0] * 12, 3)
