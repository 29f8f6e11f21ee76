"""Where our samplers carry torch's names and arguments they give torch's indices; torch itself says which."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import bound
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from penstock.errors import ConfigError, PartitionError, SamplerError
from penstock.loader import DataLoader
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    GroupedBatchSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 37])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed(n: int, world: int, drop_last: bool, shuffle: bool) -> None:
    for rank, seed, epoch in itertools.product(sorted({0, world // 2, world - 1}), (0, 7), (0, 3)):
        options: dict[str, Any] = {"rank": rank, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        theirs = TorchDistributedSampler(range(n), world, **options)
        ours = DistributedSampler(range(n), world, **options)
        for sampler in (theirs, ours):
            sampler.set_epoch(epoch)
        if n == 0 and not drop_last:
            assert list(ours) == []  # torch divides by zero here
            continue
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


def test_distributed_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(DistributedSampler(range(100), 2, 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rank", [-1, 2, 3])
@pytest.mark.parametrize("kind", [TorchDistributedSampler, DistributedSampler])
def test_distributed_refuses_a_rank_outside(kind: Any, rank: int) -> None:
    with pytest.raises(ValueError):
        kind(range(10), num_replicas=2, rank=rank)


_RANDOM = [
    {},
    {"num_samples": 5},
    {"num_samples": 37},
    {"num_samples": 74},
    {"num_samples": 100},
    {"replacement": True},
    {"replacement": True, "num_samples": 5},
    {"replacement": True, "num_samples": 64},
    {"replacement": True, "num_samples": 40_000},
]


@pytest.mark.parametrize("options", _RANDOM, ids=str)
def test_random_with_the_global_generator(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    theirs = TorchRandomSampler(range(37), **options)
    expected, after = [list(theirs), list(theirs)], torch.get_rng_state()
    torch.manual_seed(5)
    ours = RandomSampler(range(37), **options)
    assert [list(ours), list(ours)] == expected
    assert torch.equal(torch.get_rng_state(), after)
    assert len(ours) == len(theirs) == len(expected[0])


@pytest.mark.parametrize("options", _RANDOM, ids=str)
def test_random_with_a_generator(options: dict[str, Any]) -> None:
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    theirs = TorchRandomSampler(range(37), generator=generators[0], **options)
    ours = RandomSampler(range(37), generator=generators[1], **options)
    for _ in range(3):
        assert list(ours) == list(theirs)
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("options", _RANDOM, ids=str)
@pytest.mark.parametrize("place", [0, 1, 4, 5])
def test_random_resumed_leaves_the_generator_where_torch_would(options: dict[str, Any], place: int) -> None:
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(range(37), generator=generator, **options)
    place = len(sampler) if place == 5 else place
    items = list(itertools.islice(sampler, place))
    state = sampler.state_dict()
    torch_generator = torch.Generator().manual_seed(5)
    theirs = TorchRandomSampler(range(37), generator=torch_generator, **options)
    whole = list(theirs)
    resumed_generator = torch.Generator()
    resumed = RandomSampler(range(37), generator=resumed_generator, **options)
    resumed.load_state_dict(state)
    assert items + list(resumed) == whole
    assert torch.equal(resumed_generator.get_state(), torch_generator.get_state())
    assert list(resumed) == list(theirs)


def test_an_epoch_of_data_that_grew_before_it_began_is_torchs() -> None:
    torch.manual_seed(5)
    expected = list(TorchRandomSampler(range(50), True, 40))
    torch.manual_seed(5)
    data = list(range(5))
    sampler = RandomSampler(data, True, 40)
    sampler.state_dict()
    data.extend(range(5, 50))
    assert list(sampler) == expected


@pytest.mark.parametrize("place", [0, 1, 36, 37])
def test_random_left_early_leaves_the_generator_where_torch_would(place: int) -> None:
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    kinds: list[Any] = [TorchRandomSampler, RandomSampler]
    samplers = [kind(range(37), generator=generator) for kind, generator in zip(kinds, generators, strict=True)]
    for _ in range(2):
        theirs, ours = (list(itertools.islice(sampler, place)) for sampler in samplers)
        assert ours == theirs
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("size", [4, 37, 50])
def test_a_dropped_tail_is_drawn_as_by_torch(size: int) -> None:
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    theirs = TorchBatchSampler(TorchRandomSampler(range(37), generator=generators[0]), size, True)
    ours = BatchSampler(RandomSampler(range(37), generator=generators[1]), size, True)
    for _ in range(2):
        assert list(ours) == list(theirs)
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_a_loader_with_a_dropped_tail_goes_on_to_the_next_epoch() -> None:
    def make(seed: int) -> DataLoader[int]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(list(range(10)), 4, shuffle=True, drop_last=True, generator=generator)

    loader = make(1)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    assert list(iterator) == []
    resumed = make(2)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]


def test_counting_a_stream_draws_nothing_twice() -> None:
    def make(generator: torch.Generator | None) -> GroupedBatchSampler:
        sampler = RandomSampler(range(37), True, 40_000, generator=generator)
        return GroupedBatchSampler(sampler, [i % 3 for i in range(37)], 4, world_size=1, rank=0)

    for seed in (None, 5):
        plain, counted = (make(None if seed is None else torch.Generator().manual_seed(seed)) for _ in range(2))
        torch.manual_seed(3)
        announced = len(counted)
        batches = list(counted)
        torch.manual_seed(3)
        assert batches == list(plain)
        assert len(counted) == announced


def test_torchs_orders_have_no_seed_for_a_loader() -> None:
    for shuffle, seed in ((True, None), (False, None), ("global", 7), ("none", 7)):
        sampler = DistributedSampler(range(12), 2, 0, shuffle, 7)
        groups = GroupedBatchSampler(sampler, [0, 1] * 6, 2)
        iterations = IterationBasedBatchSampler(groups, 9)
        assert [each.key_seed for each in (sampler, groups, iterations)] == [seed] * 3
        expected = list(iterations)
        again = IterationBasedBatchSampler(
            GroupedBatchSampler(DistributedSampler(range(12), 2, 0, shuffle, 7), [0, 1] * 6, 2), 9, start_iter=4
        )
        assert list(again) == expected[4:], "the order has the sampler's own seed"


def test_a_loader_repeats_the_epoch_of_torchs_order_until_set_epoch() -> None:
    sampler = DistributedSampler(range(12), 1, 0, seed=7)
    loader = DataLoader(list(range(12)), 4, sampler=sampler)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert first == second
    sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() != first


def test_random_can_look_back() -> None:
    torch.manual_seed(2)
    run = bound(RandomSampler(range(10), num_samples=35))
    forward = run.block(0, 35)[0].tolist()
    assert [run.block(i, i + 1)[0].tolist()[0] for i in reversed(range(35))] == forward[::-1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (((), False, 0), ValueError),
        (((), False, -1), ValueError),
        (((), False, 2.5), ValueError),
        (((), 1, None), TypeError),
        (((), "yes", 3), TypeError),
    ],
)
def test_random_refuses_in_torchs_words(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    said = []
    for kind in (TorchRandomSampler, RandomSampler):
        with pytest.raises(error) as caught:
            kind(range(3), *arguments[1:])
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_random_refuses_an_empty_data_set_as_torch_does() -> None:
    for kind in (TorchRandomSampler, RandomSampler):
        with pytest.raises(ValueError, match="num_samples should be a positive integer value, but got num_samples=0"):
            kind([])


@pytest.mark.parametrize("arguments", [(0, False), (-1, False), (2.5, False), (True, False), (3, 1), ("3", False)])
def test_batch_refuses_in_torchs_words(arguments: tuple[Any, Any]) -> None:
    said = []
    for kind in (TorchBatchSampler, BatchSampler):
        with pytest.raises(ValueError) as caught:
            kind(range(3), *arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]
    for make in (lambda: BatchSampler(range(3), *arguments), lambda: _grouped(*arguments)):
        with pytest.raises(SamplerError) as refused:
            make()
        assert str(refused.value) == said[0]


def _grouped(batch_size: Any, drop_last: Any) -> GroupedBatchSampler:
    return GroupedBatchSampler(
        SequentialSampler(range(3)), [0, 0, 0], batch_size, drop_last=drop_last, world_size=1, rank=0
    )


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 60), size=st.integers(1, 20), drop=st.booleans(), foreign=st.booleans())
def test_batches(n: int, size: int, drop: bool, foreign: bool) -> None:
    theirs = TorchBatchSampler(TorchSequentialSampler(range(n)), size, drop)
    ours = BatchSampler(range(n) if foreign else SequentialSampler(range(n)), size, drop)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)


def test_batches_of_anything() -> None:
    assert list(BatchSampler(["a", "b", "c"], 2, False)) == [["a", "b"], ["c"]]
    assert list(BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=True)) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


def test_works_in_torchs_loader() -> None:
    data = list(range(20))
    sampler = DistributedSampler(data, 2, 1, "global", 3)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    assert torch.cat(list(loader)).tolist() == list(sampler)
    batches = torch.utils.data.DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    assert torch.cat(list(batches)).tolist() == list(sampler)
    assert len(batches) == 3


def test_distributed_refuses_contradictions() -> None:
    with pytest.raises(PartitionError, match="contradicts"):
        DistributedSampler(range(3), 1, 0, drop_last=True, remainder="pad")
    with pytest.raises(ConfigError, match="block_size and window belong"):
        DistributedSampler(range(3), 1, 0, "global", block_size=4)
    with pytest.raises(ConfigError, match="must be positive"):
        DistributedSampler(range(3), 1, 0, "block", block_size=0)
    with pytest.raises(SamplerError, match="unknown shuffle 'globel'"):
        DistributedSampler(range(3), 1, 0, "globel")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3},
        {"shuffle": False},
        {"shuffle": "global", "generator": torch.Generator()},
        {"shuffle": "block", "replacement": True},
        {"shuffle": "global", "window": 3},
    ],
    ids=["seed", "none", "generator", "replacement", "window"],  # a generator's text is another in every process
)
def test_random_refuses_what_it_would_ignore(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError if "window" in options else SamplerError):
        RandomSampler(range(3), **options)


def test_random_and_distributed_share_their_states() -> None:
    one = RandomSampler(range(20), shuffle="global", seed=3)
    order = list(one)
    it = iter(one)
    had = [next(it) for _ in range(6)]
    ranks = [DistributedSampler(range(20), 2, rank, "global", 3) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(one.state_dict())
    rest = [index for pair in zip(*ranks, strict=True) for index in pair]
    assert had + rest == order


def test_a_state_of_another_way_of_drawing_is_refused() -> None:
    with_generator = RandomSampler(range(5), generator=torch.Generator())
    without = RandomSampler(range(5))
    with pytest.raises(ValueError, match="taken with a generator"):
        without.load_state_dict(with_generator.state_dict())
    with pytest.raises(ValueError, match="taken without a generator"):
        with_generator.load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match="cannot be read"):
        entropy = {"generator": "AAAA", "begun": True}
        with_generator.load_state_dict(closed({**opened(with_generator.state_dict()), "entropy": entropy}))
