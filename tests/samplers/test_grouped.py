"""Grouped batches against a loop that does the same one index at a time, and the invariants of dealing them out."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import bound

from penstock.errors import ManifestError, ManifestIOError, SamplerError, StateError
from penstock.order import Partition
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import EpochPlan, PartitionedOrder
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    EpochSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from penstock.samplers.grouped import Groups, form_batches


class Given(EpochSampler):
    """Indices in a given order."""

    def __init__(self, indices: Any) -> None:
        super().__init__()
        self.indices = np.array(indices, np.int64)

    def bind(self, cursor: Cursor, entropy: Any) -> EpochPlan:
        partition = Partition(len(self.indices), remainder="uneven", consumed=cursor.consumed)
        return PartitionedOrder(
            lambda: self.indices, partition, lambda: {"order": "given"}, seed=None, epoch=cursor.epoch, rounds=None
        )

    def read(self, state: Any) -> Cursor:
        return Cursor.read(state, of="Given", plan={"order": "given"}, most=len(self.indices))


def by_hand(stream: list[int], groups: Any, size: int, drop: bool, order: str) -> list[list[int]]:
    open_batches: dict[int, list[int]] = defaultdict(list)  # of places in the stream
    done = []
    for place, index in enumerate(stream):
        batch = open_batches[groups[index]]
        batch.append(place)
        if len(batch) == size:
            done.append(open_batches.pop(groups[index]))
    partial = [] if drop else sorted(open_batches.values(), key=lambda batch: batch[-1])
    done += partial
    if order == "first":
        done.sort(key=lambda batch: batch[0])
    return [[stream[place] for place in batch] for batch in done]


@settings(deadline=None, max_examples=examples(37, 150))
@given(
    n=st.integers(1, 60),
    count=st.integers(0, 200),
    kinds=st.integers(1, 7),
    size=st.integers(1, 9),
    drop=st.booleans(),
    order=st.sampled_from(["completion", "first"]),
    cut=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_batches_are_those_of_a_loop(
    n: int, count: int, kinds: int, size: int, drop: bool, order: str, cut: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, kinds, n)
    stream = rng.integers(0, n, count)
    chunks = [np.stack([stream, np.arange(count)])[:, a : a + cut] for a in range(0, count, cut)]
    blocks = list(form_batches(chunks, Groups(ids), size, order, drop_partial=drop))
    batches = [batch for indices, _ in blocks for batch in indices.tolist()]
    assert batches == by_hand(stream.tolist(), ids, size, drop, order)
    for indices, positions in blocks:
        assert (stream[positions] == indices).all()


@settings(deadline=None, max_examples=examples(50, 200))
@given(
    n=st.integers(0, 120),
    world=st.integers(1, 9),
    size=st.integers(1, 10),
    kinds=st.integers(1, 6),
    order=st.sampled_from(["completion", "first"]),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    drop=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ranks(n: int, world: int, size: int, kinds: int, order: str, remainder: str, drop: bool, seed: int) -> None:
    groups = np.random.default_rng(seed).integers(0, kinds, n)
    samplers = [
        GroupedBatchSampler(
            DistributedSampler(range(n), world, rank, "global", seed, remainder=remainder),
            groups,
            size,
            drop_last=drop,
            order=order,
        )
        for rank in range(world)
    ]
    announced = [len(sampler) for sampler in samplers]
    dealt = [list(sampler) for sampler in samplers]
    assert [len(batches) for batches in dealt] == announced
    stream = list(DistributedSampler(range(n), 1, 0, "global", seed))
    batches = by_hand(stream, groups, size, drop, order)
    if drop or remainder == "drop":
        expected = batches[: len(batches) // world * world]
    elif remainder == "pad":
        repeated = samplers[0].repeated
        assert len(repeated) == -len(batches) % world
        expected = batches + [batches[number] for number in repeated]
    else:
        expected = batches
    if remainder != "uneven" or drop:
        assert len(set(announced)) == 1
    assert [batch for batch in itertools.chain(*itertools.zip_longest(*dealt)) if batch is not None] == expected
    assert all(len({groups[index] for index in batch}) == 1 for batch in expected)
    if not drop and remainder != "drop":
        assert sorted(index for batch in batches for index in batch) == list(range(n))


def test_repeated_draws_are_all_delivered() -> None:
    stream = [0, 1, 0, 0, 2, 1, 0]  # maskrcnn-benchmark delivers three of these seven
    sampler = GroupedBatchSampler(Given(stream), [0, 0, 1], 2, world_size=1, rank=0)
    batches = list(sampler)
    assert Counter(index for batch in batches for index in batch) == Counter(stream)
    assert len(sampler) == len(batches) == 4


def test_order_first_is_that_of_maskrcnn_benchmark() -> None:
    groups = [0, 1, 0, 1, 0, 0, 1]
    first = GroupedBatchSampler(Given([6, 2, 5, 1, 3, 0, 4]), groups, 2, order="first", world_size=1, rank=0)
    assert list(first) == [[6, 1], [2, 5], [3], [0, 4]]
    uneven = GroupedBatchSampler(
        Given([6, 2, 5, 1, 3, 0, 4]), groups, 2, order="first", drop_uneven=True, world_size=1, rank=0
    )
    assert list(uneven) == [[6, 1], [2, 5], [0, 4]]
    assert uneven.drop_last is uneven.drop_uneven is True


def test_empty_and_missing_groups() -> None:
    assert list(GroupedBatchSampler(SequentialSampler([]), [], 3, world_size=2, rank=1)) == []
    assert len(GroupedBatchSampler(DistributedSampler([], 4, 2, "global"), [], 3)) == 0
    # rank 3 of 4 has no batch of its own: it repeats one
    tiny = [GroupedBatchSampler(DistributedSampler(range(2), 4, r, False), [0, 1], 3) for r in range(4)]
    assert [list(sampler) for sampler in tiny] == [[[0]], [[1]], [[0]], [[1]]]
    assert tiny[0].repeated == [0, 1]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("order", ["completion", "first"])
def test_len_never_goes_stale(world: int, order: str) -> None:
    def make(rank: int = 0) -> GroupedBatchSampler:
        stream = WeightedRandomSampler(np.arange(1, 40), 50, seed=1)
        return GroupedBatchSampler(stream, np.arange(39) % 4, 6, order=order, world_size=world, rank=rank)

    sampler = make()
    lengths = set()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        announced = len(sampler)
        sampler.set_epoch(epoch + 100)
        sampler.set_epoch(epoch)
        plain = make()
        plain.set_epoch(epoch)
        batches = list(plain)
        assert list(sampler) == batches
        assert announced == len(batches)
        lengths.add(announced)
    assert len(lengths) > 1, "the case is one in which epochs differ"
    assert bound(sampler).length_varies


def test_the_samplers_own_set_epoch_counts_too() -> None:
    inner = DistributedSampler(range(30), 1, 0, "global")
    sampler = GroupedBatchSampler(inner, np.arange(30) % 3, 4)
    first = list(sampler)
    inner.set_epoch(5)
    assert len(sampler) == len(first)
    assert bound(sampler).epoch == 5
    second = list(sampler)
    assert second != first
    sampler.set_epoch(5)
    assert list(sampler) == second


def test_a_loaded_place_does_not_outlive_its_epoch() -> None:
    inner = DistributedSampler(range(30), 1, 0, "global")
    sampler = GroupedBatchSampler(inner, np.arange(30) % 3, 4)
    list(itertools.islice(sampler, 3))
    sampler.load_state_dict(sampler.state_dict())
    inner.set_epoch(5)  # not through the batch sampler
    whole = len(sampler)
    assert whole == 9
    assert len(list(sampler)) == whole


def test_torchs_order_is_drawn_once() -> None:
    torch.manual_seed(0)
    expected = list(torch.utils.data.RandomSampler(range(40), replacement=True))
    torch.manual_seed(0)
    inner = RandomSampler(range(40), replacement=True)
    sampler = GroupedBatchSampler(inner, np.arange(40) % 4, 3, world_size=1, rank=0)
    announced = len(sampler)
    batches = list(sampler)
    assert len(batches) == announced
    assert batches == by_hand(expected, np.arange(40) % 4, 3, False, "completion")
    assert list(sampler) != batches, "the next pass draws anew"


def test_positions_are_places_in_the_stream() -> None:
    stream = list(DistributedSampler(range(23), 1, 0, "global", 9))
    seen = []
    for rank in range(4):
        inner = DistributedSampler(range(23), 4, rank, "global", 9)
        for indices, positions in bound(GroupedBatchSampler(inner, np.arange(23) % 2, 4)):
            assert positions is not None
            assert [stream[position % 23] for position in positions.tolist()] == indices
            seen += positions.tolist()
    assert len(seen) == len(set(seen)), "repeats have positions of their own"
    assert set(range(23)) <= set(seen)


def test_batches_that_are_repeated_more_than_once_have_positions_of_their_own() -> None:
    seen = []
    for rank in range(5):
        inner = DistributedSampler(range(3), 5, rank, False)
        ((indices, positions),) = bound(GroupedBatchSampler(inner, [0, 0, 1], 2))
        assert [position % 3 for position in positions.tolist()] == indices
        seen.append(positions.tolist())
    assert seen == [[0, 1], [2], [3, 4], [5], [6, 7]]


@settings(deadline=None, max_examples=examples(15, 60))
@given(
    worlds=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    steps=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    n=st.integers(1, 90),
    order=st.sampled_from(["completion", "first"]),
)
def test_interrupted_at_any_step_and_any_world_size(worlds: list[int], steps: list[int], n: int, order: str) -> None:
    groups = np.arange(n) * 5 % 3

    def job(world: int) -> list[GroupedBatchSampler]:
        return [
            GroupedBatchSampler(DistributedSampler(range(n), world, rank, "global"), groups, 4, order=order)
            for rank in range(world)
        ]

    plain = list(job(1)[0])
    state: Any = None
    had: list[list[int]] = []
    for number, world in enumerate(worlds):
        ranks = job(world)
        for sampler in ranks if state is not None else []:
            sampler.load_state_dict(state)
        length = len(ranks[0])
        count = length if number == len(worlds) - 1 else min(steps[number], length)
        had += [batch for step in zip(*(itertools.islice(r, count) for r in ranks), strict=True) for batch in step]
        state = json.loads(json.dumps(ranks[0].state_dict()))
    assert had[: len(plain)] == plain
    assert len(had) - len(plain) < max(worlds)


def test_refusals() -> None:
    groups = [0] * 10
    with pytest.raises(SamplerError, match="already makes batches"):
        GroupedBatchSampler(BatchSampler(SequentialSampler(range(10)), 2, False), groups, 2)
    with pytest.raises(SamplerError, match="no end"):
        GroupedBatchSampler(InfiniteSampler(range(10)), groups, 2)
    with pytest.raises(SamplerError, match="leave them out"):
        GroupedBatchSampler(DistributedSampler(range(10), 2, 0), groups, 2, world_size=2, rank=0)
    with pytest.raises(SamplerError, match="10 entries for a dataset of 11"):
        GroupedBatchSampler(DistributedSampler(range(11), 2, 0), groups, 2)
    with pytest.raises(SamplerError, match=r"index 10, but group_ids has 10 entries"):
        list(GroupedBatchSampler(Given([3, 10]), groups, 2))
    with pytest.raises(SamplerError, match=r"index -1"):
        list(GroupedBatchSampler(Given([3, -1]), groups, 2))
    with pytest.raises(SamplerError, match="one-dimensional array of integers"):
        GroupedBatchSampler(SequentialSampler([1]), [0.5], 2)
    with pytest.raises(SamplerError, match="unknown order 'last'"):
        GroupedBatchSampler(SequentialSampler([1]), groups, 2, order="last")
    with pytest.raises(ValueError, match="batch_size should be a positive integer value, but got batch_size=0"):
        GroupedBatchSampler(SequentialSampler([1]), groups, 0)


class OwnOrder(DistributedSampler):
    """A user's subclass, which yields other indices than its plan."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ([3, 1], "a list"),
        (iter([1]), "a list_iterator"),
        (OwnOrder(range(10), 1, 0), "an OwnOrder"),
        (torch.utils.data.RandomSampler(range(10)), "a RandomSampler"),
        (torch.utils.data.DistributedSampler(range(10), 2, 0), "a DistributedSampler"),
    ],
)
@pytest.mark.parametrize("order", ["completion", "first", "class"])
def test_a_sampler_of_another_library_is_refused(sampler: Any, kind: str, order: str) -> None:
    with pytest.raises(SamplerError, match=rf"that of {kind} is unknown: pass a sampler of Penstock.*order='class'"):
        GroupedBatchSampler(sampler, [0] * 10, 2, order=order, world_size=1)


def test_a_state_of_other_groups_is_refused() -> None:
    def make(groups: Any, size: int = 2) -> GroupedBatchSampler:
        return GroupedBatchSampler(DistributedSampler(range(4), 1, 0, "global"), groups, size)

    state = make([0, 1, 0, 1]).state_dict()
    with pytest.raises(StateError, match="groups is"):
        make([0, 1, 1, 0]).load_state_dict(state)
    with pytest.raises(StateError, match="batch_size is 2 in the state and 3 here"):
        make([0, 1, 0, 1], 3).load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        GroupedBatchSampler(DistributedSampler(range(4), 1, 0, "global", 8), [0, 1, 0, 1], 2).load_state_dict(state)


@pytest.mark.parametrize("ids", [[-3, 7, -3, 10**9], [0, 300, 0, 70_000], np.array([0, 1, 0, 5], dtype=np.uint8)])
def test_any_integers_are_groups(ids: Any) -> None:
    sampler = GroupedBatchSampler(SequentialSampler(range(4)), ids, 2, world_size=1, rank=0)
    assert list(sampler) == [[0, 2], [1], [3]]
    assert sampler.groups.ids.itemsize == 1 if max(ids) < 256 or len(set(ids)) < 256 else True


def test_groups_from_a_file_of_sizes(tmp_path: Path) -> None:
    from penstock.images.sizes import Sizes, write_sizes
    from penstock.manifest import Manifest

    meta = tmp_path / "meta.txt"
    meta.write_text("".join(f"{i}.jpg {i}\n" for i in range(6)))
    manifest = Manifest.open(meta)
    widths = np.array([4, 2, 4, 2, 4, 0], dtype=np.int32)
    heights = np.array([2, 4, 2, 4, 2, 0], dtype=np.int32)
    path = write_sizes(manifest, widths, heights)
    sampler = DistributedSampler(manifest, 1, 0, False)
    expected = [[0, 2], [1, 3], [4], [5]]
    assert list(GroupedBatchSampler(sampler, path, 2)) == expected
    assert list(GroupedBatchSampler(sampler, Sizes.open(path, manifest), 2)) == expected
    with pytest.raises(ManifestIOError, match="penstock manifest sizes"):
        GroupedBatchSampler(sampler, tmp_path / "none.arrow", 2)
    with pytest.raises(ManifestError):
        GroupedBatchSampler(sampler, meta, 2)


def test_random_sampler_inside_needs_no_draw_for_len() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampler = GroupedBatchSampler(RandomSampler(range(20)), np.arange(20) % 2, 3, world_size=1, rank=0)
    assert len(sampler) == 8
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(40)),
        lambda: WeightedRandomSampler([1.0] * 40, 40),
    ],
    ids=["random", "weighted"],
)
def test_an_order_drawn_by_chance_is_refused_on_several_ranks(make: Any) -> None:
    """Every rank would draw another one, and samples would be lost and doubled."""
    groups = [0] * 40
    with pytest.raises(SamplerError, match="seed="):
        list(GroupedBatchSampler(make(), groups, 4, rank=0, world_size=2))
    assert len(list(GroupedBatchSampler(make(), groups, 4, rank=0, world_size=1))) == 10
    seeded = RandomSampler(range(40), generator=torch.Generator().manual_seed(1))
    assert len(list(GroupedBatchSampler(seeded, groups, 4, rank=0, world_size=2))) == 5


def test_epoch_chosen_on_the_sampler_inside_ends_the_running_pass() -> None:
    """Loops call set_epoch there; a loader that goes on by itself must see that somebody has chosen."""
    inner = DistributedSampler(range(40), 1, 0, shuffle="global", seed=0)
    grouped = GroupedBatchSampler(inner, [0] * 40, 4)
    next(iter(grouped))
    inner.set_epoch(3)
    assert next(iter(grouped)) == list(inner)[:4]


def test_the_epoch_of_a_state_loaded_inside_keeps_its_place() -> None:
    def samplers() -> tuple[DistributedSampler, GroupedBatchSampler]:
        inside = DistributedSampler(range(20), 1, 0, shuffle="global", seed=1)
        return inside, GroupedBatchSampler(inside, [0, 1] * 10, 2)

    inside, _ = samplers()
    inside.set_epoch(3)
    running = iter(inside)
    for _ in range(4):
        next(running)
    state = inside.state_dict()
    inside, batches = samplers()
    inside.load_state_dict(state)
    batches.set_epoch(3)
    assert batches.epoch == 3
    assert sorted(index for batch in batches for index in batch) == sorted(running)


def test_the_epoch_of_a_state_loaded_here_keeps_its_place() -> None:
    def batches() -> GroupedBatchSampler:
        return GroupedBatchSampler(DistributedSampler(range(20), 1, 0, shuffle="global", seed=1), [0, 1] * 10, 2)

    first = batches()
    first.set_epoch(3)
    running = iter(first)
    next(running), next(running)
    resumed = batches()
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(3)
    assert list(resumed) == list(running)


def test_a_state_of_the_batches_begins_the_sampler_at_the_start_of_its_epoch() -> None:
    def samplers() -> tuple[DistributedSampler, GroupedBatchSampler]:
        inside = DistributedSampler(range(20), 1, 0, shuffle="global", seed=1)
        return inside, GroupedBatchSampler(inside, [0, 1] * 10, 2)

    inside, first = samplers()
    first.set_epoch(3)
    whole = list(inside)
    list(itertools.islice(first, 2))
    resumed, batches = samplers()
    batches.load_state_dict(first.state_dict())
    assert resumed.epoch == 3
    assert list(resumed) == whole


def test_batches_by_class_are_as_was_assigned() -> None:
    inner = RandomSampler(range(12), shuffle="global", seed=2)

    def make(size: int, drop_last: bool = False) -> GroupedBatchSampler:
        classes = [int(i % 5 == 0) for i in range(12)]
        return GroupedBatchSampler(inner, classes, size, order="class", drop_last=drop_last, world_size=1)

    assigned = make(3)
    assigned.batch_size, assigned.drop_last = 2, True
    assert len(assigned) == 3 // 2 + 9 // 2
    assert list(assigned) == list(make(2, drop_last=True))


def test_batches_by_class_over_an_order_without_a_seed_have_none() -> None:
    inner = DistributedSampler(range(12), 1, 0, shuffle="global", seed=2)
    sampler = GroupedBatchSampler(inner, [i % 2 for i in range(12)], 3, order="class")
    assert bound(sampler).seed == 2
    inner.shuffle = True
    assert bound(sampler).seed is None
