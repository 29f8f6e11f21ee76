"""Batches within a budget of tokens: each sample once, little padding, the same global batches for any job."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import bound

import penstock as ps
import penstock.samplers.distributed
from penstock.errors import DataFileChangedError, DataFileError, PartitionError, SamplerError, StateError
from penstock.samplers import (
    DistributedSampler,
    GroupedBatchSampler,
    RandomSampler,
    SequentialSampler,
    TokenBudgetBatchSampler,
)
from penstock.storage import class_index

LENGTHS = np.random.default_rng(5).integers(1, 60, 400)


def budget(world: int = 1, rank: int = 0, lengths: Any = LENGTHS, most: int = 120, **options: Any) -> Any:
    return TokenBudgetBatchSampler(lengths, most, **{"seed": 3, "world_size": world, "rank": rank, **options})


def round_robin(ranks: list[list[Any]]) -> list[Any]:
    """Return the batches of a job in their order."""
    return [batch for step in itertools.zip_longest(*ranks) for batch in step if batch is not None]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# What a batch is.


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(0, 1 << 33), max_size=80),
    most=st.integers(1, 200) | st.integers(1, 1 << 34),
    classes=st.integers(1, 12),
    max_batch=st.none() | st.integers(1, 5),
    longest=st.sampled_from(["alone", "drop"]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_is_in_one_batch_within_the_budget(
    lengths: list[int],
    most: int,
    classes: int,
    max_batch: int | None,
    longest: str,
    drop_last: bool,
    epoch: int,
) -> None:
    sampler = budget(
        lengths=lengths, most=most, classes=classes, max_batch=max_batch, longest=longest, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == sampler.total
    long = {row for row, length in enumerate(lengths) if length > most}
    assert sampler.too_long == len(long)
    for batch in batches:
        assert batch
        assert max_batch is None or len(batch) <= max_batch
        if long & set(batch):
            assert len(batch) == 1
        else:
            assert max(lengths[row] for row in batch) * len(batch) <= most
    seen = Counter(row for batch in batches for row in batch)
    expected = set(range(len(lengths))) - (long if longest == "drop" else set())
    assert set(seen.values()) <= {1}
    assert seen.keys() <= expected
    assert drop_last or seen.keys() == expected
    numbers = [-1] * len(lengths)
    for number, batch in enumerate(batches):
        for row in batch:
            numbers[row] = number
    assert [sampler.batch_of(row) for row in range(len(lengths))] == numbers
    assert not batches or sampler.batch(-1) == batches[-1]


@settings(deadline=None, max_examples=12)
@given(
    n=st.integers(0, 200),
    worlds=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    steps=st.integers(0, 40),
    epoch=st.integers(0, 2),
)
def test_any_job_has_the_same_batches(n: int, worlds: tuple[int, int], remainder: str, steps: int, epoch: int) -> None:
    alone = budget(lengths=LENGTHS[:n])
    alone.set_epoch(epoch)
    whole, consumed, state = list(alone), 0, None
    for world, count in zip(worlds, (steps, None), strict=True):  # the second one to the end
        ranks = [budget(world, rank, LENGTHS[:n], remainder=remainder) for rank in range(world)]
        for sampler in ranks:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
        left = len(whole) - consumed
        lengths = [len(sampler) for sampler in ranks]
        if remainder == "uneven":
            assert sum(lengths) == left
        else:
            assert set(lengths) == {left // world if remainder == "drop" else -(-left // world)}
        had = [list(itertools.islice(sampler, count)) for sampler in ranks]
        numbers = range(consumed, consumed + sum(map(len, had)))
        assert round_robin(had) == [whole[number % len(whole)] for number in numbers]
        states = [through_json(sampler.state_dict()) for sampler in ranks]
        if remainder != "uneven" or (count is not None and count <= min(lengths)):
            assert all(found == states[0] for found in states)
        state, consumed = states[0], opened(states[0])["consumed"]
    assert consumed == len(whole) or remainder == "drop"


def test_a_resume_at_every_position_on_other_ranks() -> None:
    ranks = [budget(3, rank) for rank in range(3)]
    whole = list(budget())
    iterators = [iter(sampler) for sampler in ranks]
    for step in range(len(ranks[0]) + 1):
        state = through_json(ranks[0].state_dict())
        assert len(json.dumps(state)) < 1_000
        after = [budget(5, rank) for rank in range(5)]
        for sampler in after:
            sampler.load_state_dict(state)
        rest = round_robin([list(sampler) for sampler in after])
        consumed = min(3 * step, len(whole))
        assert rest[: len(whole) - consumed] == whole[consumed:]
        for iterator in iterators:
            next(iterator, None)


def test_positions_are_those_of_the_job() -> None:
    def places(world: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(world):
            for indices, positions in bound(budget(world, rank)):
                assert positions.dtype == np.int64
                found |= dict(zip(positions.tolist(), indices, strict=True))
        return found

    world = next(world for world in range(5, 9) if budget().total % world)
    alone, many = places(1), places(world)
    assert sorted(alone) == list(range(len(LENGTHS)))
    assert alone.items() <= many.items()
    repeats = many.keys() - alone.keys()
    assert repeats, "batches of the last round are other samples to their generators"
    assert all(many[position] == alone[position % len(LENGTHS)] for position in repeats)
    assert sorted(alone.values()) == list(range(len(LENGTHS)))
    sampler = budget()
    batches = list(sampler)
    assert all(row in batches[sampler.batch_of(row)] for row in range(len(LENGTHS)))


def test_epochs_and_seeds_are_different_batches() -> None:
    def sets(seed: int, epoch: int) -> list[frozenset[int]]:
        sampler = budget(seed=seed, classes=4)
        sampler.set_epoch(epoch)
        return [frozenset(batch) for batch in sampler]

    first = sets(0, 0)
    for seed, epoch in ((0, 1), (1, 0)):
        other = sets(seed, epoch)
        assert other != first
        assert len(set(other) & set(first)) < len(first) / 2
    assert sets(0, 0) == first
    lengths = [max(LENGTHS[list(batch)]) for batch in first]
    assert abs(np.corrcoef(np.arange(len(lengths)), lengths)[0, 1]) < 0.3, "long and short batches are mixed"


def lengths_like(kind: str, count: int) -> Any:
    """Return lengths up to 8,192 as of web pages, chats, code, or two kinds of documents."""
    rng = np.random.default_rng(1)
    drawn = {
        "web": lambda: rng.lognormal(6.2, 1.1, count),
        "chat": lambda: rng.lognormal(5.0, 0.9, count),
        "code": lambda: rng.lognormal(7.0, 1.3, count),
        "bimodal": lambda: np.where(
            rng.random(count) < 0.7, rng.lognormal(4.5, 0.5, count), rng.lognormal(8.2, 0.4, count)
        ),
    }[kind]()
    return np.clip(drawn, 1, 8_192).astype(np.uint16)


@pytest.mark.parametrize("kind", ["web", "chat", "code", "bimodal"])
def test_padding_is_under_the_bar(kind: str) -> None:
    lengths = lengths_like(kind, 200_000)
    run = bound(budget(lengths=lengths, most=65_536))
    real = padded = 0
    for rows, _ in run:
        inside = lengths[rows]
        cost = int(inside.max()) * len(rows)
        assert cost <= 65_536
        real, padded = real + int(inside.sum(dtype=np.int64)), padded + cost
    assert real == int(lengths.sum(dtype=np.int64))
    assert 1 - real / padded < 0.012
    assert real / len(run) / 65_536 > 0.96, "share of the budget"


def test_the_order_is_frozen() -> None:
    sampler = TokenBudgetBatchSampler(np.arange(1, 21), 40, seed=7, classes=4, world_size=1, rank=0)
    expected = [[7, 6, 5, 9], [8, 0, 4, 3], [15, 16], [14, 11], [2, 1], [17, 12], [18, 19], [13, 10]]
    assert list(sampler) == expected
    assert sampler.batch(1, epoch=1) == [6, 3, 0, 4]


# Where lengths come from.


def test_files_and_arrays_are_the_same_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, LENGTHS.astype(np.uint16))
    whole = list(budget())
    for source in (path, str(path), LENGTHS.tolist(), LENGTHS.astype(np.uint8)):
        other = budget(lengths=source)
        assert list(other) == whole
        assert opened(other.state_dict()) == {**opened(budget().state_dict()), "consumed": len(whole)}
        assert list(pickle.loads(pickle.dumps(other))) == whole
    mapped = budget(lengths=path)
    assert len(pickle.dumps(mapped)) < len(pickle.dumps(budget())), "a file travels as its path"
    np.save(path, LENGTHS[::-1].astype(np.uint32))
    with pytest.raises(DataFileChangedError):
        mapped.batch(0)


def test_the_index_is_one_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(budget())
    sampler = budget(cache_dir=tmp_path)
    assert len(sampler) == len(whole)
    assert list(tmp_path.iterdir()) == [], "who asks for a length alone needs no index"
    assert list(sampler) == whole
    (made,) = tmp_path.iterdir()
    stamp = made.stat().st_mtime_ns
    assert list(pickle.loads(pickle.dumps(sampler))) == list(budget(cache_dir=tmp_path)) == whole
    assert made.stat().st_mtime_ns == stamp
    other = budget(most=121, cache_dir=tmp_path)
    next(iter(other))
    assert len(list(tmp_path.iterdir())) == 2, "another budget has other classes"
    pickled = pickle.dumps(sampler)
    made.unlink()
    assert list(pickle.loads(pickled)) == whole, "made again where it is missing"


def test_as_many_classes_that_end_elsewhere_have_an_index_of_their_own(tmp_path: Path) -> None:
    known: dict[int, Any] = {}
    for classes in range(2, 90):
        sampler = budget(classes=classes, cache_dir=tmp_path)
        other = known.setdefault(len(sampler._classes), sampler)
        if other._classes.longest.tolist() != sampler._classes.longest.tolist():
            break
    assert other is not sampler
    for one in (other, sampler):
        assert list(one) == list(budget(classes=one.classes))


def test_areas_of_images() -> None:
    class Sizes:
        widths, heights = np.full(9, 1 << 16, np.int32), np.arange(9, dtype=np.int32) << 13
        fingerprint = "a"

    class Images(list[int]):
        fingerprint = "b"

    sampler = budget(lengths=Sizes(), most=1 << 33)
    assert sorted(row for batch in sampler for row in batch) == list(range(9))
    assert all(max(row << 29 for row in batch) * len(batch) <= 1 << 33 for batch in sampler)
    with pytest.raises(StateError, match="belong to another manifest"):
        budget(lengths=Sizes(), most=1 << 33, data_source=Images(range(9)))


# What is refused.


def test_a_sample_above_the_budget_is_named() -> None:
    with pytest.raises(
        SamplerError, match=r"sample 2 has length 90, but max_tokens is 50 \(2 samples of 4 longer .* longest='alone'"
    ):
        budget(lengths=[5, 50, 90, 51], most=50)
    alone = list(budget(lengths=[5, 50, 90, 51], most=50, longest="alone"))
    assert sorted(map(sorted, alone)) == [[0], [1], [2], [3]]
    assert sorted(budget(lengths=[5, 5, 90, 51], most=50, longest="drop")) in ([[0, 1]], [[1, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, "max_tokens should be a positive integer value, but got max_tokens=0"),
        ({"most": 1.5}, "max_tokens should be a positive integer"),
        ({"classes": 0}, "classes should be a positive integer"),
        ({"max_batch": -1}, "max_batch should be a positive integer"),
        ({"longest": "cut"}, "unknown longest 'cut': use one of 'error', 'alone', 'drop'"),
        ({"lengths": [[1, 2]]}, r"lengths must be a one-dimensional array of integers.* of shape \(1, 2\)"),
        ({"lengths": [1.5]}, "one-dimensional array of integers, one per sample, got float64"),
        ({"lengths": [3, -1]}, "sample 1 has length -1: lengths must be 0 or more"),
        ({"data_source": range(3)}, "there are 400 lengths for a dataset of 3 samples"),
        ({"remainder": "some"}, "unknown remainder 'some'"),
        ({"remainder": "pad", "drop_last": True}, "drop_last=True contradicts remainder='pad'"),
        ({"rank": 2, "world": 2}, "rank 2 is outside the world of 2"),
        ({"seed": "a"}, "seed must be an integer"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(**options)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.npy").write_bytes(b"no array")
    with pytest.raises(DataFileError, match=r"lengths\.npy is not an \.npy file"):
        budget(lengths=tmp_path / "lengths.npy")
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(SamplerError, match=r"floats\.npy must be a one-dimensional array of integers"):
        budget(lengths=tmp_path / "floats.npy")


def test_one_ranks_share_is_refused(write_manifest: Any) -> None:
    share = ps.RankDataset(ps.Manifest.open(write_manifest(10)), rank=0, world_size=2)
    with pytest.raises(PartitionError, match="has only one rank's share: make the sampler over its manifest"):
        budget(lengths=[1] * len(share), data_source=share)


def test_states_of_other_batches_are_refused() -> None:
    state = budget().state_dict()
    for options, name in (
        ({"most": 121}, "max_tokens"),
        ({"classes": 3}, "classes"),
        ({"max_batch": 2}, "max_batch"),
        ({"longest": "drop"}, "longest"),
        ({"drop_last": True}, "drop_last"),
        ({"lengths": LENGTHS[::-1]}, "lengths"),
        ({"seed": 4}, "seed"),
    ):
        with pytest.raises(StateError, match=name):
            budget(**options).load_state_dict(state)
    with pytest.raises(StateError, match="it has consumed 9999 of"):
        budget().load_state_dict(closed({**opened(state), "consumed": 9_999}))
    with pytest.raises(IndexError):
        budget().batch(budget().total)
    with pytest.raises(IndexError, match="there is no sample 400"):
        budget().batch_of(400)
    ledger = ps.Ledger(ps.DataLoader(LENGTHS, batch_sampler=budget()))
    assert ledger.steps(-1, epoch=0) == ledger.steps(400, epoch=0) == []


def test_large_tables_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_index, "_SHARED_FROM", len(LENGTHS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sampler = budget()
    assert next(iter(sampler)) == sampler.batch(0)
    assert len(list((tmp_path / "penstock" / "classes").iterdir())) == 1


# Groups by class: the same plan.

GROUPS = np.arange(90) * 7 % 3


def classes(world: int = 1, rank: int = 0, **options: Any) -> GroupedBatchSampler:
    return GroupedBatchSampler(
        DistributedSampler(range(90), world, rank, "global", 3), GROUPS, 4, order="class", **options
    )


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 90),
    world=st.integers(1, 9),
    size=st.integers(1, 9),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    drop=st.booleans(),
)
def test_groups_by_class(n: int, world: int, size: int, remainder: str, drop: bool) -> None:
    ranks = [
        GroupedBatchSampler(
            DistributedSampler(range(n), world, rank, "global", 3, remainder=remainder),
            GROUPS[:n],
            size,
            drop_last=drop,
            order="class",
        )
        for rank in range(world)
    ]
    batches = round_robin([list(sampler) for sampler in ranks])
    assert all(len({GROUPS[row] for row in batch}) == 1 for batch in batches)
    sizes = np.bincount(GROUPS[:n], minlength=3)
    total = int((sizes // size).sum() if drop else (-(-sizes // size)).sum())
    seen = Counter(row for batch in batches[:total] for row in batch)
    assert set(seen.values()) <= {1}
    lengths = {len(sampler) for sampler in ranks}
    if drop or remainder == "drop":
        assert lengths == {total // world}
    elif remainder == "pad":
        assert lengths == {-(-total // world)}
        assert len(seen) == n
        assert batches[total:] == [batches[number] for number in ranks[0].repeated]
    else:
        assert len(batches) == total
        assert len(seen) == n


def test_groups_by_class_resume_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(classes())
    ranks = [classes(3, rank) for rank in range(3)]
    had = round_robin([list(itertools.islice(sampler, 4)) for sampler in ranks])
    state = through_json(ranks[1].state_dict())
    asked: list[Any] = []
    monkeypatch.setattr(penstock.samplers.distributed, "epoch_order", lambda *order: asked.append(order))
    after = [classes(2, rank) for rank in range(2)]
    for sampler in after:
        sampler.load_state_dict(state)
    rest = round_robin([list(sampler) for sampler in after])
    assert (had + rest)[: len(whole)] == whole
    assert asked == [], "nothing is replayed"


def test_groups_by_class_take_a_random_order_of_all() -> None:
    for sampler in (
        SequentialSampler(range(90)),
        DistributedSampler(range(90), 1, 0),
        DistributedSampler(range(90), 1, 0, "none"),
        RandomSampler(range(90)),
        RandomSampler(range(90), num_samples=30, shuffle="global"),
        RandomSampler(range(90), True, shuffle="global"),
    ):
        with pytest.raises(SamplerError, match=r"order='class' .* of all samples with shuffle='global', not this"):
            GroupedBatchSampler(sampler, GROUPS, 4, order="class", world_size=None)
    inner = DistributedSampler(range(90), 1, 0, "global")
    next(iter(inner))
    other = DistributedSampler(range(90), 1, 0, "global")
    grouped = GroupedBatchSampler(other, GROUPS, 4, order="class")
    iterator = iter(inner)
    next(iterator)
    other.load_state_dict(inner.state_dict())
    with pytest.raises(StateError, match="load the state of this GroupedBatchSampler"):
        next(iter(grouped))
