"""``DataLoader(skip=...)``: steps that are passed over, by every executor, from every state, on any number of ranks."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from job_support import Leg, flat, recorded
from pair_support import Pairs
from state_support import CountingCollate

from penstock import DataLoader, DistributedSampler, InfiniteSampler, Ledger, Mixture, MPDataset, RankDataset
from penstock.errors import ConfigError, StateError
from penstock.loader.config import ranges_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N, SIZE = 47, 5  # ten steps an epoch
HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2},
    "chunk": {"num_workers": 2, "dispatch": "chunk"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "auto": {"num_workers": "auto"},
}


def make(skip: Any = (), **options: Any) -> DataLoader[Any]:
    return DataLoader(Pairs(N), SIZE, shuffle="global", seed=1, skip=skip, **options)


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


EPOCHS = 3


@pytest.fixture(scope="module")
def steps() -> list[list[int]]:
    """The rows of every step."""
    loader = make()
    return [batch for _ in range(EPOCHS) for batch in rows(loader)]


def left(steps: list[list[int]], skip: Any, begin: int, end: int) -> list[list[int]]:
    passed = {step for a, b in ranges_of(skip) for step in range(a, b)}
    return [steps[step] for step in range(begin, end) if step not in passed]


SKIP = [(3, 5), (9, 12), (28, 40)]


@pytest.mark.parametrize("how", HOW)
def test_every_executor_passes_over_them(how: str, steps: list[list[int]]) -> None:
    with make(SKIP, **HOW[how]) as loader:
        lengths = []
        for epoch in range(EPOCHS):
            lengths.append(len(loader))
            assert rows(loader) == left(steps, SKIP, epoch * 10, epoch * 10 + 10)
        assert lengths == [7, 8, 8]


def test_draws_of_the_others_are_theirs() -> None:
    whole, passing = list(make()), list(make((3, 5)))
    assert all(torch.equal(a[1], b[1]) for a, b in zip([*whole[:3], *whole[5:]], passing, strict=True))


def test_nothing_of_them_is_read() -> None:
    class Noting(Pairs):
        def __getitem__(self, row: int) -> Any:
            read.append(row)
            return super().__getitem__(row)

    read: list[int] = []
    loader = DataLoader(Noting(N), SIZE, shuffle="global", seed=1, skip=(2, 8))
    assert flat(rows(loader)) == read
    assert len(read) == N - 30


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_that_overtake(in_order: bool, steps: list[list[int]]) -> None:
    for had in range(8):
        with make(SKIP, num_workers=2, in_order=in_order) as loader:
            iterator = iter(loader)
            found = rows(next(iterator) for _ in range(min(had, 7)))
            state = json.loads(json.dumps(loader.state_dict()))
        for skip in (SKIP, (), (0, 4)):
            again = make(skip)
            again.load_state_dict(state)
            if skip == SKIP:
                assert again.state_dict() == state
            rest = rows(again)
            assert not set(map(tuple, found)) & set(map(tuple, rest))
            passed = {step for a, b in [*SKIP[: 1 + (had > 6)], *ranges_of(skip)] for step in range(a, b)}
            assert {tuple(steps[step]) for step in range(10) if step not in passed} <= set(map(tuple, found + rest))
            if skip == SKIP:
                assert sorted(found + rest) == sorted(left(steps, SKIP, 0, 10))


def test_a_state_of_batches_that_overtook(steps: list[list[int]]) -> None:
    def resumed(skip: Any, ahead: list[int]) -> DataLoader[Any]:
        loader = make(skip)
        loader.load_state_dict({**make().state_dict(), "ahead": ahead, "world": [0, 1]})
        return loader

    loader = resumed((3, 5), [2, 6])
    assert loader.state_dict()["ahead"] == [2, 6]
    assert rows(loader) == [steps[step] for step in (0, 1, 5, 7, 8, 9)]
    # What is passed over closes the gap.
    loader = resumed((0, 2), [2, 4])
    state = loader.state_dict()
    assert (state["sampler"]["consumed"], state["ahead"]) == (3 * SIZE, [1])
    assert rows(loader) == [steps[step] for step in (3, 5, 6, 7, 8, 9)]
    loader = resumed((0, 1), list(range(1, 10)))
    assert rows(loader) == []
    assert loader.epoch == 1


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda a: (a[0], sum(a))), max_size=4)


@given(first=ranges, second=ranges, had=st.integers(0, 29), between=st.booleans())
@settings(max_examples=60)
def test_states_in_and_around_ranges(first: Any, second: Any, had: int, between: bool) -> None:
    loader = make()
    steps = [batch for _ in range(4) for batch in rows(loader)]
    loader, found = make(first), []
    iterator = iter(loader)
    for _ in range(had):
        while (batch := next(iterator, None)) is None and loader.epoch < 4:
            iterator = iter(loader)
        if batch is None or loader.epoch >= 4:
            break
        found.append(batch[0].tolist())
    state = json.loads(json.dumps(loader.state_dict()))
    at = Ledger(loader).step
    assert found == left(steps, first, 0, at)
    again = make(second)
    again.load_state_dict(state)
    if between:  # asking changes nothing
        again.load_state_dict(again.state_dict())
    rest = [batch for _ in range(again.epoch, 4) for batch in rows(again)]
    assert rest == left(steps, second, at, 40)
    ledger = Ledger(again)
    passed = {step for a, b in ranges_of(first) for step in range(a, min(b, at))}
    passed |= {step for a, b in ranges_of(second) for step in range(max(a, at), b)}
    assert [ledger.skipped(step) for step in range(40)] == [step in passed for step in range(40)]
    assert ledger.rows(17).skipped == (17 in passed)
    assert ledger.seen(3, until=40) == sum(3 in batch for batch in found + rest)


@pytest.mark.parametrize("kind", ["sampler", "mixture"])
def test_other_ranks_go_on(kind: str) -> None:
    skip = [(4, 7), (11, 13), (20, 22)]

    def loader(rank: int, ranks: int, batch_size: int) -> DataLoader[Any]:
        if kind == "mixture":
            data = Mixture([(Pairs(60), 1)], rank=rank, world_size=ranks, seed=5, mini_epochs=2)
            return DataLoader(data, batch_size, skip=skip)
        data = Pairs(60)
        sampler = DistributedSampler(data, ranks, rank, shuffle="global", seed=5)
        return DataLoader(data, batch_size, sampler=sampler, skip=skip)

    job = recorded(loader, [Leg(2, 3, 9), Leg(3, 4, 2), Leg(1, 6, 12)])
    ledger = Ledger(loader(0, 1, 1), state=job.state)
    done = ledger.step
    had = [step for step in range(done) if not ledger.skipped(step)]
    assert [step for step in range(done) if ledger.skipped(step)] == [s for a, b in skip for s in range(a, b)]
    assert [ledger.rows(step).rows.tolist() for step in had] == [flat(ranks) for ranks in job.steps]
    assert job.state["skipped"] == [list(pair) for pair in skip]


def test_what_the_method_passes_over_is_counted() -> None:
    loader = make((5, 7))
    iterator = iter(loader)
    assert len(rows(next(iterator) for _ in range(3))) == 3
    loader.skip(4)  # steps 3 to 6
    assert Ledger(loader).step == 7
    assert rows(loader) == rows(make())[7:]
    ledger = Ledger(loader)
    assert [step for step in range(30) if ledger.skipped(step)] == [3, 4, 5, 6]
    again = make()
    again.load_state_dict(loader.state_dict())
    assert again.state_dict()["skipped"] == [[3, 7]]
    # Who is behind batches that are passed over anyway counts from there.
    loader = make((0, 2))
    loader.skip(3)
    assert Ledger(loader).step == 5


@pytest.mark.parametrize("count", range(7))
def test_the_method_passes_over_batches_that_were_not_delivered(count: int, steps: list[list[int]]) -> None:
    """Batches 0, 2, 4 and 5 were delivered, the last three ahead of others."""
    loader = make()
    next(iter(loader))
    loader.load_state_dict({**loader.state_dict(), "ahead": [1, 3, 4], "world": [0, 1]})
    with pytest.raises(ConfigError, match="has 6 batches left"):
        loader.skip(7)
    loader.skip(count)
    again = make()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    left = [1, 3, 6, 7, 8, 9]
    assert [step for step in range(10) if Ledger(loader).skipped(step)] == left[:count]
    assert rows(again) == rows(loader) == [steps[step] for step in left[count:]]


@pytest.mark.parametrize("how", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_method_does_not_change_later_batches(how: dict[str, Any], shuffle: bool) -> None:
    """Neither their draws, also without a seed, nor the states of users' objects."""

    def plain(batches: Any) -> list[Any]:
        return [(calls, [(row, float(draw)) for row, draw in batch]) for calls, batch in batches]

    expected: list[Any] = []
    for _ in range(2):
        torch.manual_seed(2)
        with DataLoader(Pairs(N), SIZE, shuffle=shuffle, collate_fn=CountingCollate(), **how) as loader:
            iterator = iter(loader)
            if not expected:
                expected = plain(iterator)
                continue
            assert plain(next(iterator) for _ in range(3)) == expected[:3]
            loader.skip(2)
            assert plain(loader) == [(calls - 2, batch) for calls, batch in expected[5:]]


def test_the_method_passes_over_batches_of_an_endless_sampler() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(range(9), 2, sampler=InfiniteSampler(range(9), seed=1))

    expected = [batch.tolist() for batch in itertools.islice(loader(), 9)]
    skipping = loader()
    next(iter(skipping))
    skipping.skip(5)
    assert [batch.tolist() for batch in itertools.islice(skipping, 3)] == expected[6:]


def test_a_whole_epoch_is_passed_over(steps: list[list[int]]) -> None:
    loader = make((10, 20))
    assert [rows(loader) for _ in range(3)] == [steps[:10], [], steps[20:]]
    state = make((0, 10)).state_dict()
    again = make((0, 10))
    again.load_state_dict(state)
    assert [len(rows(again)) for _ in range(2)] == [0, 10]


def test_iterable_data_sets_of_ours(tmp_path: Any) -> None:
    (tmp_path / "train.txt").write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(40)))

    def loader(**options: Any) -> DataLoader[Any]:
        data = MPDataset(tmp_path / "train.txt", batch_size=4, rank=0, world_size=1)
        return DataLoader(data, 4, **options)

    whole, passing = [[b[2].tolist() for b in loader(**skip)] for skip in ({}, {"skip": (2, 5)})]
    assert passing == whole[:2] + whole[5:]
    assert (len(loader()), len(loader(skip=(2, 5)))) == (10, 7)


def test_a_resumed_epoch_that_was_dealt_anew_has_its_length() -> None:
    sampler = DistributedSampler(range(60), 2, 0, shuffle="global", seed=5)
    loader = DataLoader(range(60), 5, sampler=sampler)
    next(iter(loader))
    alone = DistributedSampler(range(60), 1, 0, shuffle="global", seed=5)
    again = DataLoader(range(60), 5, sampler=alone, skip=(10, 20))
    again.load_state_dict(loader.state_dict())
    assert (len(again), len(list(again)), len(again)) == (11, 9, 3)


@pytest.mark.parametrize("skip", [3, (5, 3), [(1, 2, 3)], "ab", (-1, 4), [(1, 2), 3], (1.5, 2)])
def test_what_is_no_range(skip: Any) -> None:
    with pytest.raises(ConfigError, match="not a range of steps"):
        make(skip)


def test_orders_without_steps() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    for arguments, message in (
        ({"dataset": Stream()}, "known only by reading"),
        ({"dataset": range(9), "shuffle": True}, "without a seed"),
        ({"dataset": range(9), "sampler": [1, 2]}, "does not know the order of a"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataLoader(skip=(1, 2), **arguments)


def test_a_damaged_state() -> None:
    for entry in ({"skipped": [[5, 3]]}, {"skipped": 7}, {"step": -1}):
        with pytest.raises(StateError):
            make().load_state_dict({**make().state_dict(), **entry})


def test_a_copy_passes_over_them(tmp_path: Any) -> None:
    import copy
    import pickle

    for other in (copy.copy(make((1, 9))), pickle.loads(pickle.dumps(make((1, 9))))):
        assert len(rows(other)) == 2


def test_a_data_set_with_an_order_of_its_own(tmp_path: Any) -> None:
    (tmp_path / "train.txt").write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(40)))
    loaders = [
        DataLoader(RankDataset(tmp_path / "train.txt", rank=0, world_size=1, mini_epochs=2, seed=1), 4, skip=skip)
        for skip in ((), (4, 6))
    ]
    whole, passing = [[batch[2].tolist() for _ in range(2) for batch in loader] for loader in loaders]
    assert passing == whole[:4] + whole[6:]
