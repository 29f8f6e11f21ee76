"""`RoundRobin` and `RandomMix` from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wds_support import write_shards

import penstock.wds as wds


def shuffled(urls: str) -> Any:
    return wds.WebDataset(urls, shardshuffle=True, seed=1).shuffle(20, seed=2)


MIXES: dict[str, Callable[[str], Any]] = {
    "round robin": lambda urls: wds.RoundRobin([shuffled(urls), shuffled(urls)], longest=True),
    "random": lambda urls: wds.RandomMix([shuffled(urls), shuffled(urls)], [1, 2], longest=True),
}


@pytest.fixture(params=list(MIXES))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    urls = write_shards(tmp_path, 3)
    return lambda: MIXES[request.param](urls)


def keys(mix: Any) -> list[str]:
    return [sample["__key__"] for sample in mix]


def test_an_epoch_that_is_set_is_that_epoch_of_all_sources(make: Callable[[], Any]) -> None:
    one = make()
    epochs = [keys(one) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(2 * [f"{number:06d}" for number in range(30)]) for epoch in epochs)
    other = make()
    for epoch in (2, 0, 1, 1):
        other.set_epoch(epoch)
        assert keys(other) == epochs[epoch]


def test_the_epoch_of_a_state_is_not_begun_anew_by_naming_it(make: Callable[[], Any]) -> None:
    """Programs call ``set_epoch`` at the beginning of each epoch, of the one they resume in, too."""
    one = make()
    keys(one)
    steps = iter(one)
    head = [next(steps)["__key__"] for _ in range(7)]
    state = one.state_dict()
    rest = [sample["__key__"] for sample in steps]
    other = make()
    other.load_state_dict(state)
    other.set_epoch(1)
    assert keys(other) == rest
    other.load_state_dict(state)
    other.set_epoch(0)  # another one: the state is given up
    assert keys(other) == keys(make())
    fresh = make()
    fresh.load_state_dict(one.state_dict())  # between two epochs
    assert keys(fresh) == keys(one)
    assert len(head) + len(rest) == 60
