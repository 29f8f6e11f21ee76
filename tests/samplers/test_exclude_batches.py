"""``exclude=`` of batches by class: samples that no batch has any more, and nothing else that changes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from entries_support import opened
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import bound

from penstock import (
    DataLoader,
    DistributedSampler,
    GroupedBatchSampler,
    Ledger,
    SequentialSampler,
    TokenBudgetBatchSampler,
)
from penstock.errors import ConfigError, SamplerError, StateError

LENGTHS = np.random.default_rng(5).integers(1, 60, 120)
GROUPS = np.arange(90) % 3


def budget(exclude: Any = None, world: int = 1, rank: int = 0, **options: Any) -> TokenBudgetBatchSampler:
    given = {"lengths": LENGTHS, "max_tokens": 120, "seed": 3, "classes": 9, **options}
    return TokenBudgetBatchSampler(**given, world_size=world, rank=rank, exclude=exclude)


def groups(exclude: Any = None, world: int = 1, rank: int = 0) -> GroupedBatchSampler:
    sampler = DistributedSampler(range(90), world, rank, "global", 3)
    return GroupedBatchSampler(sampler, GROUPS, 4, order="class", exclude=exclude)


def batches(sampler: Any, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def round_robin(ranks: list[list[Any]]) -> list[Any]:
    return [batch for step in itertools.zip_longest(*ranks) for batch in step if batch is not None]


# What stands in their places.


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    bad=st.sets(st.integers(0, 59)),
    classes=st.integers(1, 8),
    max_batch=st.none() | st.integers(1, 5),
    longest=st.sampled_from(["alone", "drop"]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
@settings(deadline=None, max_examples=100)
def test_others_stay_and_the_budget_holds(
    lengths: list[int], bad: set[int], classes: int, longest: str, epoch: int, **options: Any
) -> None:
    limit = 30
    left = {row for row, length in enumerate(lengths) if length <= limit or longest == "alone"} - bad
    bad = {row for row in bad if row < len(lengths)}
    given = {"lengths": lengths, "max_tokens": limit, "classes": classes, "longest": longest, **options}
    if not left:
        if bad:
            with pytest.raises(ConfigError, match="exclude= leaves no"):
                budget(sorted(bad), **given)
        return
    before, after = batches(budget(**given), epoch), batches(made := budget(sorted(bad), **given), epoch)
    assert len(before) == len(after) == len(made)
    of = made._classes.of(np.array(lengths))
    for old, new in zip(before, after, strict=True):
        assert new
        assert not bad & set(new)
        assert len(new) == 1 or max(lengths[row] for row in new) * len(new) <= limit
        assert len(new) == len(old) or bad.issuperset(old)
        for one, other in zip(old, new, strict=False):
            assert other == (one if one not in bad else other)
            same = {row for row in left if of[row] == of[one]}
            shorter = {row for row in left if of[row] > of[one]}
            nearest = min((of[row] for row in shorter), default=max(of[row] for row in left))
            assert other in (same or {row for row in left if of[row] == nearest})
    counts = [Counter(batch) for batch in after]
    plan = bound(made)
    for row in range(len(lengths)):
        assert plan.numbers_of(row) == [number for number, had in enumerate(counts) for _ in range(had[row])]
        assert made.batch_of(row) == next((number for number, batch in enumerate(after) if row in batch), -1)


def test_a_class_of_which_all_are_excluded() -> None:
    lengths = [10] * 30 + [5] * 30 + [2] * 30
    plain = batches(budget(lengths=lengths, max_tokens=40, classes=3))
    for out, instead, most in ((range(30), 5, 4), (range(30, 60), 2, 8), (range(60, 90), 5, 8)):
        for old, new in zip(plain, batches(budget(out, lengths=lengths, max_tokens=40, classes=3)), strict=True):
            if set(old) <= set(out):
                assert {lengths[row] for row in new} == {instead}
                assert len(new) == min(len(old), most)
            else:
                assert [row for row in old if row not in out] == [row for row in new if row in old and row not in out]


@given(st.sets(st.integers(0, 89), max_size=89), st.integers(0, 2))
@settings(deadline=None, max_examples=30)
def test_batches_stay_those_of_one_group(bad: set[int], epoch: int) -> None:
    before, after = batches(groups(), epoch), batches(groups(sorted(bad)), epoch)
    left = {int(GROUPS[row]) for row in range(90) if row not in bad}
    for old, new in zip(before, after, strict=True):
        assert not bad & set(new)
        assert all(a == b for a, b in zip(old, new, strict=True) if a not in bad)
        group = GROUPS[old[0]]
        expected = min((found for found in left if found >= group), default=max(left))
        assert {GROUPS[row] for row in new} == {expected if set(old) <= bad else group}


# Ranks, states, the ledger.


@pytest.mark.parametrize("make", [budget, groups])
def test_a_run_goes_on_without_samples_on_other_ranks(make: Any) -> None:
    bad = [5, 17, 30, 80, *range(40, 60)]
    plain, whole = batches(make(), 1), batches(make(bad), 1)
    ranks = [make(world=3, rank=rank) for rank in range(3)]
    for sampler in ranks:
        sampler.set_epoch(1)
    had = round_robin([list(itertools.islice(sampler, 2)) for sampler in ranks])
    assert had == plain[:6]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert "excluded" not in state
    after = [make(bad, 2, rank) for rank in range(2)]
    for sampler in after:
        sampler.load_state_dict(state)
    rest = round_robin([list(sampler) for sampler in after])
    assert rest[: len(whole) - 6] == whole[6:]


@pytest.mark.parametrize("make", [budget, groups])
def test_states_know_what_was_left_out(make: Any) -> None:
    state = json.loads(json.dumps(make([3, 4]).state_dict()))
    assert opened(state)["excluded"][0] == 2
    for same_or_more in ([4, 3], [3, 4, 9]):
        sampler = make(same_or_more)
        sampler.load_state_dict(state)
        assert opened(sampler.state_dict())["excluded"][0] == len(same_or_more)
    for other in (None, [], [3], [3, 5]):
        with pytest.raises(StateError, match="other excluded rows: 2 with the hash"):
            make(other).load_state_dict(state)


class Rows:
    """Each sample is its row."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> int:
        return row


@pytest.mark.parametrize(("make", "n"), [(budget, 120), (groups, 90)])
@pytest.mark.parametrize("world", [1, 3])
def test_a_ledger_knows_what_came_instead(make: Any, n: int, world: int) -> None:
    bad = [*range(0, 60, 2), 77]
    loaders = [DataLoader(Rows(n), batch_sampler=make(bad, world, rank)) for rank in range(world)]
    ledger = Ledger(loaders[0])
    had: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(n)}
    for epoch, (rank, loader) in itertools.product(range(2), enumerate(loaders)):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            step = epoch * ledger.steps_per_epoch + number
            assert ledger.rows(step, rank=rank).rows.tolist() == batch.tolist()
            for row in batch.tolist():
                had[row].append((step, epoch, rank))
    for row, epoch in itertools.product(range(n), range(2)):
        assert ledger.steps(row, epoch=epoch) == sorted(found for found in had[row] if found[1] == epoch)
        assert not (row in bad and had[row])


def test_what_makes_no_sense() -> None:
    with pytest.raises(IndexError, match="out of range"):
        budget([120])
    with pytest.raises(ConfigError, match="leaves none of 120 rows"):
        budget(range(120))
    with pytest.raises(SamplerError, match="use order='class', not order='first'"):
        GroupedBatchSampler(SequentialSampler(range(90)), GROUPS, 4, order="first", exclude=[1], world_size=1)
