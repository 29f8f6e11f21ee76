"""The partition: everything exactly once, plus what is declared; over any interruption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.order import Partition

n_, world_, minis_ = st.integers(0, 300), st.integers(1, 12), st.integers(1, 9)


def shares(n: int, world: int, minis: int, **options: Any) -> list[list[Partition]]:
    return [
        [Partition(n, world, rank, mini_epochs=minis, mini_epoch=m, **options) for rank in range(world)]
        for m in range(minis)
    ]


@settings(deadline=None, max_examples=examples(75, 300))
@given(n=n_, world=world_, minis=minis_, consumed=st.integers(0, 320))
def test_pad_is_everything_once_and_the_declared_padding(n: int, world: int, minis: int, consumed: int) -> None:
    parts = shares(n, world, minis, consumed=consumed)
    positions = np.concatenate([p.positions() for row in parts for p in row])
    first = parts[0][0]
    assert len({len(p) for row in parts for p in row}) == 1
    assert sorted(positions.tolist()) == list(range(min(consumed, n), n + first.padded))
    assert first.repeated.tolist() == [(n + i) % n for i in range(first.padded)] if n else not first.padded
    assert first.padded < world * minis
    assert first.dropped == 0


@settings(deadline=None, max_examples=examples(50, 200))
@given(n=n_, world=world_, minis=minis_, consumed=st.integers(0, 320))
def test_drop_is_equal_and_loses_less_than_a_row(n: int, world: int, minis: int, consumed: int) -> None:
    parts = shares(n, world, minis, remainder="drop", consumed=consumed)
    positions = np.concatenate([p.positions() for row in parts for p in row])
    first = parts[0][0]
    assert len({len(p) for row in parts for p in row}) == 1
    assert sorted(positions.tolist()) == list(range(min(consumed, n), n - first.dropped))
    assert 0 <= first.dropped < world * minis
    assert first.padded == 0


@settings(deadline=None, max_examples=examples(50, 200))
@given(n=n_, world=world_, minis=minis_, consumed=st.integers(0, 320))
def test_uneven_is_everything_exactly_once(n: int, world: int, minis: int, consumed: int) -> None:
    parts = shares(n, world, minis, remainder="uneven", consumed=consumed)
    positions = np.concatenate([p.positions() for row in parts for p in row])
    assert sorted(positions.tolist()) == list(range(min(consumed, n), n))
    assert parts[0][0].padded == parts[0][0].dropped == 0
    for row in parts:
        lengths = [len(p) for p in row]
        assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=examples(25, 100))
@given(n=n_, world=world_, minis=minis_, data=st.data())
def test_index_positions_and_slices_agree(n: int, world: int, minis: int, data: Any) -> None:
    rank, mini = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, minis - 1))
    p = Partition(n, world, rank, mini_epochs=minis, mini_epoch=mini, remainder="uneven")
    whole = p.positions()
    assert len(whole) == len(p)
    assert p[np.arange(len(p))].tolist() == whole.tolist()
    assert [p[i] for i in range(-len(p), 0)] == whole.tolist()
    a, b = sorted((data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))))
    assert p.positions(a, b).tolist() == whole[a:b].tolist()
    for bad in (len(p), -len(p) - 1):
        with pytest.raises(IndexError):
            p[bad]


@settings(deadline=None, max_examples=examples(50, 200))
@given(
    n=st.integers(0, 200),
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 25)), min_size=1, max_size=7),
    last=st.integers(1, 9),
    remainder=st.sampled_from(["pad", "uneven"]),
)
def test_interrupted_anywhere_with_any_world_sizes(
    n: int, legs: list[tuple[int, int]], last: int, remainder: str
) -> None:
    consumed, had = 0, []
    for world, steps in [*legs, (last, 10**6)]:
        ranks = [Partition(n, world, rank, remainder=remainder, consumed=consumed) for rank in range(world)]
        steps = min(steps, max(len(rank) for rank in ranks))
        for i in range(steps):
            had += [rank[i] for rank in ranks if i < len(rank)]
        consumed = ranks[0].consumed_after(steps)
    assert consumed == n
    # Padding ends an epoch, so only what ended it can repeat anything.
    assert had[:n] == list(range(n))
    assert len(had) - n < max(last, *(world for world, _ in legs))
    if remainder == "uneven":
        assert len(had) == n


@settings(deadline=None, max_examples=examples(25, 100))
@given(n=st.integers(0, 200), world=world_, minis=minis_, data=st.data())
def test_interrupted_within_mini_epochs(n: int, world: int, minis: int, data: Any) -> None:
    mini = data.draw(st.integers(0, minis - 1))
    ranks = [Partition(n, world, r, mini_epochs=minis, mini_epoch=mini) for r in range(world)]
    steps = data.draw(st.integers(0, len(ranks[0])))
    consumed = ranks[0].consumed_after(steps)
    before = [p.positions() for m in range(mini) for p in shares(n, world, minis)[m]]
    had = np.concatenate([*before, *(rank.positions(0, steps) for rank in ranks)])
    assert sorted(x for x in had.tolist() if x < n) == list(range(consumed))


def test_worlds_larger_than_the_data() -> None:
    assert [Partition(3, 8, r).positions().tolist() for r in range(8)] == [[r] for r in range(8)]
    assert Partition(3, 8, 0).repeated.tolist() == [0, 1, 2, 0, 1]
    assert [len(Partition(3, 8, r, remainder="uneven")) for r in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [len(Partition(3, 8, r, remainder="drop")) for r in range(8)] == [0] * 8
    assert [Partition(2, 1, 0, mini_epochs=5, mini_epoch=m).positions().tolist() for m in range(5)] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    for remainder in ("pad", "drop", "uneven"):
        assert len(Partition(0, 4, 3, mini_epochs=2, mini_epoch=1, remainder=remainder)) == 0


def test_huge() -> None:
    p = Partition(2**62, 7, 6, mini_epochs=3, mini_epoch=2)
    assert p[len(p) - 1] == p.positions(len(p) - 1)[0] == 2**62 + p.padded - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "0 <= n"),
        ({"n": 2**62 + 1}, "0 <= n"),
        ({"n": 1, "world_size": 0}, "must be positive"),
        ({"n": 1, "world_size": 2, "rank": 2}, "rank 2 is outside the world of 2: ranks go from 0 to 1"),
        ({"n": 1, "world_size": 2, "rank": -1}, "rank -1 is outside"),
        ({"n": 1, "mini_epochs": 0}, "must be positive"),
        ({"n": 1, "mini_epochs": 2, "mini_epoch": 2}, "mini_epoch 2 is outside the epoch's 2"),
        ({"n": 1, "remainder": "wrap"}, "unknown remainder 'wrap'"),
        ({"n": 1, "consumed": -1}, "consumed must be 0 or more"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Partition(**arguments)
