"""A run of iterations is one sequence, wherever it is interrupted; endless streams likewise."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import closed, opened
from full_run import full_only
from plan_support import bound

from penstock import DataLoader
from penstock.errors import SamplerError, StateError
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)


def batches(kind: str, rank: int = 0, world: int = 2) -> Any:
    inner = DistributedSampler(range(41), world, rank, "global", 6)
    if kind == "batch":
        return BatchSampler(inner, 3, drop_last=False)
    if kind == "grouped":
        return GroupedBatchSampler(inner, np.arange(41) % 3, 3)
    if kind == "varying":
        stream = WeightedRandomSampler(np.arange(1, 42), 40, seed=1)
        return GroupedBatchSampler(stream, np.arange(41) % 5, 4, world_size=world, rank=rank)
    theirs = torch.utils.data.DistributedSampler(range(41), world, rank)
    return _TorchBatches(theirs, 3, drop_last=False)


class _TorchBatches(torch.utils.data.BatchSampler):
    """A program's own batch sampler that passes the epoch on."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


@pytest.mark.parametrize("kind", ["batch", "grouped", "varying", "torch"])
def test_the_sequence_is_epoch_after_epoch(kind: str) -> None:
    expected: list[Any] = []
    epoch = 0
    while len(expected) < 25:
        one = batches(kind)
        one.set_epoch(epoch)
        expected += list(one)
        epoch += 1
    sampler = IterationBasedBatchSampler(batches(kind), 25)
    assert len(sampler) == 25
    assert list(sampler) == expected[:25]
    for start in range(26):
        later = IterationBasedBatchSampler(batches(kind), 25, start_iter=start)
        assert len(later) == 25 - start
        assert list(later) == expected[start:25]


def test_set_epoch_moves_the_first_pass() -> None:
    sampler = IterationBasedBatchSampler(batches("batch"), 10)
    sampler.set_epoch(4)
    plain = batches("batch")
    plain.set_epoch(4)
    first = list(plain)
    plain.set_epoch(5)
    assert list(sampler) == (first + list(plain))[:10]


class _Counted(_TorchBatches):
    """Counts how often it was run."""

    runs = 0

    def __iter__(self) -> Any:
        type(self).runs += 1
        return super().__iter__()


def test_nothing_is_prepared_beyond_the_last_iteration_nor_before_the_first() -> None:
    _Counted.runs = 0
    inner = _Counted(torch.utils.data.DistributedSampler(range(12), 1, 0), 3, drop_last=False)
    assert len(list(IterationBasedBatchSampler(inner, 8))) == 8
    assert _Counted.runs == 2, "8 iterations are two passes of 4"
    assert len(list(IterationBasedBatchSampler(inner, 4_000_008, start_iter=4_000_000))) == 8
    assert _Counted.runs == 4


def test_an_empty_batch_sampler_ends() -> None:
    for empty in (
        BatchSampler(SequentialSampler([]), 3, False),
        BatchSampler(SequentialSampler(range(2)), 3, True),
        BatchSampler([], 3, False),
        GroupedBatchSampler(SequentialSampler([]), [], 3),
        torch.utils.data.BatchSampler(range(0), 3, False),
    ):
        for start in (0, 4):
            sampler = IterationBasedBatchSampler(empty, 10, start)
            assert len(sampler) == 0
            assert list(sampler) == []


def test_more_passes_than_may_be_empty_in_a_row() -> None:
    batches = BatchSampler(SequentialSampler(range(2)), 2, False)
    assert list(IterationBasedBatchSampler(batches, 150)) == [[0, 1]] * 150


def test_a_generator_stands_alike_wherever_the_iterations_began() -> None:
    def stands(start: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        inner = BatchSampler(RandomSampler(range(4), num_samples=20, generator=generator), 2, False)
        list(IterationBasedBatchSampler(inner, 5, start))
        return generator.get_state()

    assert torch.equal(stands(0), stands(2))


def test_positions_are_unique_over_passes() -> None:
    run = bound(IterationBasedBatchSampler(batches("batch"), 30))
    positions = np.concatenate([positions for _, positions in run])
    assert len(set(positions.tolist())) == len(positions)
    assert run.seed == 6
    assert run.epoch == 0


def test_another_world_size_goes_on_with_the_epoch_and_ends_at_the_same_iteration() -> None:
    before = [IterationBasedBatchSampler(batches("batch", rank, 2), 20) for rank in range(2)]
    had = [list(itertools.islice(sampler, 9)) for sampler in before]  # epoch 0 has 7 batches per rank
    state = json.loads(json.dumps(before[0].state_dict()))
    assert state == before[1].state_dict()
    after = [IterationBasedBatchSampler(batches("batch", rank, 3), 20) for rank in range(3)]
    for sampler in after:
        sampler.load_state_dict(state)
    dealt = [list(sampler) for sampler in after]
    assert [len(rank) for rank in dealt] == [11, 11, 11]
    in_epoch_1 = [index for rank in had for batch in rank[7:] for index in batch]
    rest = [index for rank in dealt for batch in rank[:4] for index in batch]  # 29 samples left: 10 a rank, 4 batches
    assert set(in_epoch_1) | set(rest) == set(range(41))
    assert len(in_epoch_1) + len(rest) - 41 == 1, "one is padding"
    epoch_2 = [index for rank in dealt for batch in rank[4:9] for index in batch]
    assert set(epoch_2) == set(range(41))


def test_a_consumer_may_be_behind() -> None:
    sampler = IterationBasedBatchSampler(BatchSampler(RandomSampler(range(4)), 2, False), 40)
    run = bound(sampler)
    items = [indices for indices, _ in run]
    for count in (0, 1, 2, 3, 17, 40):
        again = IterationBasedBatchSampler(BatchSampler(RandomSampler(range(4)), 2, False), 40)
        again.load_state_dict(closed(run.cursor(count).state()))
        length = min(2, 40 - count) if count % 2 == 0 else 1
        # the pass in progress is the same; later ones are drawn anew
        assert len(again) == 40 - count
        if count % 2:
            assert list(again)[:length] == items[count : count + length]


def test_the_state_at_a_seam_does_not_depend_on_prefetching() -> None:
    eager, lazy = (bound(IterationBasedBatchSampler(batches("batch"), 20)) for _ in range(2))
    list(itertools.islice(eager, 9))
    list(itertools.islice(lazy, 7))  # an epoch has 7 batches
    assert eager.cursor(7).state() == lazy.cursor(7).state()
    assert eager.cursor(7).state()["sampler"]["epoch"] == 0


def test_refusals() -> None:
    inner = batches("batch")
    with pytest.raises(SamplerError, match="num_iterations"):
        IterationBasedBatchSampler(inner, -1)
    with pytest.raises(SamplerError, match="from 0 to num_iterations=5, got 6"):
        IterationBasedBatchSampler(inner, 5, 6)
    with pytest.raises(SamplerError, match="has no length"):
        IterationBasedBatchSampler(iter([[1]]), 5)
    sampler = IterationBasedBatchSampler(inner, 5)
    with pytest.raises(StateError, match="num_iterations is 6 in the state and 5 here"):
        sampler.load_state_dict(IterationBasedBatchSampler(batches("batch"), 6).state_dict())
    with pytest.raises(StateError, match="'sampler'"):
        sampler.load_state_dict(closed({**opened(sampler.state_dict()), "sampler": None}))
    run = bound(sampler)
    with pytest.raises(SamplerError, match="has not been started"):
        run.cursor(3)


@full_only("many epochs for each", but=["2-global", "5-block", "2-block"])
@pytest.mark.parametrize("shuffle", ["global", "block", "none", True])
@pytest.mark.parametrize("n", [1, 2, 5, 5000])
def test_infinite_is_epoch_after_epoch(shuffle: Any, n: int) -> None:
    count = 3 * n + 1
    expected: list[int] = []
    for epoch in range(4):
        one = DistributedSampler(range(n), 1, 0, shuffle, 2)
        one.set_epoch(epoch)
        expected += list(one)
    for world in (1, 3):
        ranks = [InfiniteSampler(range(n), shuffle=shuffle, seed=2, rank=r, world_size=world) for r in range(world)]
        each = -(-count // world)
        dealt = [list(itertools.islice(sampler, each)) for sampler in ranks]
        assert [index for step in zip(*dealt, strict=True) for index in step][:count] == expected[:count]


def test_infinite_from_an_epoch_and_far_away() -> None:
    sampler = InfiniteSampler(range(7), seed=1)
    long = list(itertools.islice(sampler, 70))
    sampler.set_epoch(3)
    assert list(itertools.islice(sampler, 10)) == long[21:31]
    state = closed({**opened(sampler.state_dict()), "consumed": 7 * 10**12 + 3})
    sampler.load_state_dict(state)
    run = bound(sampler)
    assert run.block(0, 2)[1].tolist() == [7 * 10**12 + 3, 7 * 10**12 + 4]
    assert sorted(run.block(4, 11)[0].tolist()) == list(range(7))
    sampler.set_epoch(1 << 60)
    with pytest.raises(SamplerError, match=r"begins after 2\*\*62 positions"):
        next(iter(sampler))


def test_infinite_refusals() -> None:
    with pytest.raises(SamplerError, match="empty"):
        InfiniteSampler([])
    with pytest.raises(TypeError, match="no length"):
        len(InfiniteSampler([1]))
    with pytest.raises(ValueError, match="rank 3 is outside the world of 2"):
        InfiniteSampler([1], rank=3, world_size=2)
    with pytest.raises(SamplerError, match="unknown shuffle"):
        InfiniteSampler([1], shuffle="local")
    with pytest.raises(StateError, match="samples is 2 in the state and 3 here"):
        InfiniteSampler(range(3)).load_state_dict(InfiniteSampler(range(2)).state_dict())


@pytest.mark.parametrize("had", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("resumed", [None, 0, 1, 4, 13])
def test_the_next_pass_begins_behind_what_was_had(had: int, resumed: int | None) -> None:
    """However far the pass before was read ahead, and wherever it was resumed."""

    def make() -> DataLoader[Any]:
        inner = BatchSampler(RandomSampler(range(23), shuffle="global", seed=3), 4, False)
        return DataLoader(np.arange(23), batch_sampler=IterationBasedBatchSampler(inner, 13))  # type: ignore[arg-type]

    def have(loader: DataLoader[Any], count: int) -> list[Any]:
        return [batch.tolist() for batch in itertools.islice(loader, count)]

    loader = make()
    if resumed is not None:
        before = min(resumed, had)
        have(loader, before)
        state, loader = loader.state_dict(), make()
        loader.load_state_dict(state)
        # At the very end an empty pass is left, and that is one, too.
        assert len(have(loader, max(1, had - before))) == (had - before or (had < 13))
        had = max(had, min(13, before + 1))
    else:
        have(loader, had)
    fresh = make()
    fresh.set_epoch((had - 1) // 6 + 1)
    assert have(loader, 6) == have(fresh, 6)
