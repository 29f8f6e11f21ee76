"""A loader counts the epochs of its stream: what others read of the same data set moves nothing of it."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only
from torch.utils.data import IterableDataset

import penstock as ps
import penstock.wds as wds
from penstock.errors import ConfigError
from penstock.shards import ShardWriter

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, EACH = 8, 4
TOTAL = SHARDS * EACH


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    with ShardWriter(str(tmp_path / "part-%04d.tar"), maxcount=EACH) as writer:
        for row in range(TOTAL):
            writer.write({"__key__": f"{row:04d}", "cls": row})
    return sorted(map(str, tmp_path.glob("*.tar")))


def shards(urls: list[str]) -> Any:
    return ps.StreamShards(urls, seed=3)


def mixture(urls: list[str]) -> Any:
    halves = [ps.StreamShards(half, seed=3) for half in (urls[:4], urls[4:])]
    return ps.Mixture([(half, 0.5) for half in halves], stop=TOTAL)


def pipeline(urls: list[str]) -> Any:
    return wds.WebDataset(urls, shardshuffle=8, seed=3).shuffle(5)


def going_on(urls: list[str]) -> Any:
    return wds.WebDataset(urls, shardshuffle=8, seed=3).with_epoch(20)


KINDS: dict[str, Callable[[list[str]], Any]] = {
    "shards": shards,
    "mixture": mixture,
    "pipeline": pipeline,
    "an epoch that goes on": going_on,
}
INLINE: dict[str, Any] = {}
WORKERS: dict[str, dict[str, Any]] = {
    "thread": {"executor": "thread", "num_workers": 1},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def loader_over(dataset: Any, **how: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(dataset, 3, collate_fn=keys, **how)


def travelled(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.fixture(params=list(KINDS))
def make(request: pytest.FixtureRequest, urls: list[str]) -> Callable[[], Any]:
    return lambda: KINDS[request.param](urls)


@pytest.fixture
def passes(make: Callable[[], Any]) -> list[Any]:
    """The first epochs of a loader that has its data set for itself."""
    loader = loader_over(make())
    return [list(loader) for _ in range(4)]


def alternating(*iterators: Iterator[Any]) -> list[list[Any]]:
    """Return the items of iterators that are read in turn."""
    columns = zip(*itertools.zip_longest(*iterators), strict=True)
    return [[item for item in column if item is not None] for column in columns]


def test_loaders_that_take_turns_each_have_all_epochs(make: Callable[[], Any], passes: list[Any]) -> None:
    dataset = make()
    first, second = loader_over(dataset), loader_over(dataset)
    for expected in passes[:3]:
        assert list(first) == expected
        assert list(second) == expected


def test_interleaved_loaders_each_have_all_epochs(make: Callable[[], Any], passes: list[Any]) -> None:
    dataset = make()
    first, second = loader_over(dataset), loader_over(dataset)
    for expected in passes[:3]:
        assert alternating(iter(first), iter(second)) == [expected, expected]


@full_only("workers for each", but=["thread", "persistent"])
@pytest.mark.parametrize("how", WORKERS)
def test_workers_of_two_loaders_each_have_all_epochs(urls: list[str], how: str) -> None:
    alone = loader_over(shards(urls), **WORKERS[how])
    expected = [list(alone) for _ in range(3)]
    dataset = shards(urls)
    with loader_over(dataset, **WORKERS[how]) as first, loader_over(dataset, **WORKERS[how]) as second:
        for epoch in range(3):
            assert alternating(iter(first), iter(second)) == [expected[epoch]] * 2
            assert len(set(itertools.chain.from_iterable(expected[epoch]))) == TOTAL
    alone.close()


def test_reading_it_by_hand_moves_no_loader(make: Callable[[], Any], passes: list[Any]) -> None:
    dataset = make()
    list(dataset)
    loader = loader_over(dataset)
    iterator = iter(loader)
    had = [next(iterator)]
    list(dataset)
    assert had + list(iterator) == passes[0]
    list(dataset)
    assert list(loader) == passes[1]
    assert dataset.epoch == 1


@full_only("workers for each", but=["{}", "{'num_workers': 2, 'persistent_workers': True}"])
@pytest.mark.parametrize("how", [INLINE, WORKERS["processes"], WORKERS["persistent"]], ids=str)
def test_every_loader_takes_an_epoch_that_is_chosen_once(urls: list[str], how: dict[str, Any]) -> None:
    alone = loader_over(shards(urls), **how)
    passes = [list(alone) for _ in range(5)]
    alone.close()
    dataset = shards(urls)
    dataset.set_epoch(1)
    with loader_over(dataset, **how) as first, loader_over(dataset, **how) as second:
        assert (list(first), list(second)) == (passes[1], passes[1])
        dataset.set_epoch(3)
        assert (list(first), list(first), list(second)) == (passes[3], passes[4], passes[3])
        iterator = iter(first)
        dataset.set_epoch(2)  # nothing was had
        had = [next(iterator)]
        dataset.set_epoch(0)  # for the next pass
        assert had + list(iterator) == passes[2]
        assert (list(first), list(second), list(first)) == (passes[0], passes[0], passes[1])
        second.set_epoch(4)
        assert (list(second), list(first)) == (passes[4], passes[2])
        assert dataset.epoch == 2
        with pytest.raises(ConfigError, match="0 or more"):
            first.set_epoch(-1)


class Growing(ps.StreamShards):
    """Reads one shard more each epoch that it is told."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.urls = self.urls[: epoch + 1]


@pytest.mark.parametrize("how", [INLINE, WORKERS["processes"]], ids=str)
def test_a_subclass_with_its_own_set_epoch_is_told(urls: list[str], how: dict[str, Any]) -> None:
    loader = loader_over(Growing(urls), **how)
    loader.set_epoch(2)
    assert len(list(itertools.chain.from_iterable(loader))) == 3 * EACH


@full_only(
    "workers for each",
    but=[
        "4-{}",
        "0-{}",
        "None-{}",
        "{'executor': 'thread', 'num_workers': 1}",
        "4-{'num_workers': 2, 'persistent_workers': True}",
    ],
)
@pytest.mark.parametrize("how", [INLINE, *WORKERS.values()], ids=str)
@pytest.mark.parametrize("batches", [0, 4, None])
def test_a_state_is_resumed_wherever_the_data_set_is(urls: list[str], batches: int | None, how: dict[str, Any]) -> None:
    def run(loader: ps.DataLoader[Any]) -> tuple[Any, list[Any]]:
        list(loader)
        if batches is None:
            state = travelled(loader.state_dict())
            return state, list(loader)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        state = travelled(loader.state_dict())
        return state, list(iterator)

    first, dataset = loader_over(shards(urls), **how), shards(urls)
    state, rest = run(first)
    following = list(first)
    first.close()
    dataset.set_epoch(7)
    with loader_over(dataset, **how) as other, loader_over(dataset, **how) as again:
        list(other)
        list(dataset)
        again.load_state_dict(state)
        assert again.epoch == 1
        assert list(again) == rest
        assert list(again) == following
        again.load_state_dict(state)
        dataset.set_epoch(0)  # gives the state up
        assert sorted(itertools.chain.from_iterable(list(again))) == sorted(f"{row:04d}" for row in range(TOTAL))
        assert again.epoch == 1
        assert len(list(other)) == len(following)


@full_only("workers for each", but=["pipeline-4", "shards-0", "mixture-4"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_state_that_was_given_up_says_so(make: Callable[[], Any], passes: list[Any], at: int) -> None:
    loader = loader_over(make())
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    state = travelled(loader.state_dict())
    again = loader_over(make())
    again.load_state_dict(state)
    again.set_epoch(0)
    assert list(again) == passes[0][at:]
    again.load_state_dict(state)
    again.set_epoch(1)
    given_up = travelled(again.state_dict())
    expected = list(make().open(epoch=1))
    for one in (again, loader_over(make())):
        one.load_state_dict(given_up)
        assert list(itertools.chain.from_iterable(one)) == keys(expected)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert list(itertools.chain.from_iterable(again)) == keys(expected)


def test_a_copy_begins_the_epoch_of_its_original(make: Callable[[], Any], passes: list[Any]) -> None:
    loader = loader_over(make())
    list(loader)
    next(iter(loader))
    first, second = copy.copy(loader), pickle.loads(pickle.dumps(loader))
    expected = list(make().open(epoch=1))
    for one in (first, second):
        assert list(itertools.chain.from_iterable(one)) == keys(expected)
    assert loader.epoch == 1
    assert len(list(loader)) == len(passes[2])


class SaysEpoch(IterableDataset[int]):
    """A user's data set, which is told its epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 2)


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))], ids=["copied", "pickled"]
)
def test_a_copy_tells_the_epoch_that_was_chosen_for_its_original(copied: Callable[[Any], Any]) -> None:
    loader = ps.DataLoader(SaysEpoch(), 2)
    loader.set_epoch(3)
    other = copied(loader)
    for one in (other, loader):
        assert [[batch.tolist() for batch in one] for _ in range(2)] == [[[3, 3]], [[4, 4]]]


@pytest.mark.parametrize("how", [INLINE, *WORKERS.values()], ids=["inline", *WORKERS])
def test_an_epoch_set_before_the_first_batch_of_a_user_s_stream_is_its_epoch(how: dict[str, Any]) -> None:
    loader = ps.DataLoader(SaysEpoch(), batch_size=None, **how)
    loader.set_epoch(3)
    iterator = iter(loader)
    loader.set_epoch(7)
    assert set(iterator) == {7}
    assert set(loader) == {8}


@pytest.mark.parametrize("had", [0, 1])
@pytest.mark.parametrize("how", [INLINE, WORKERS["processes"]], ids=["inline", "processes"])
def test_epoch_0_is_read_of_a_user_s_stream_that_begins_at_another(how: dict[str, Any], had: int) -> None:
    data = SaysEpoch()
    data.epoch = 3
    loader = ps.DataLoader(data, batch_size=None, **how)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(had)]
    loader.set_epoch(0)
    assert set(got + list(iterator)) == ({3} if had else {0})
    assert set(loader) == ({0} if had else {1})


def test_a_loaded_state_of_a_user_s_stream_belongs_to_its_epoch() -> None:
    loader = ps.DataLoader(SaysEpoch(), batch_size=None)
    loader.set_epoch(3)
    iterator = iter(loader)
    got = [next(iterator)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(iterator)
    for epoch, expected in ((3, rest), (5, [5] * len(got + rest))):
        other = ps.DataLoader(SaysEpoch(), batch_size=None)
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert list(other) == expected


@full_only("workers for each", but=["{}", "{'num_workers': 2, 'persistent_workers': True}"])
@pytest.mark.parametrize("how", [INLINE, WORKERS["processes"], WORKERS["persistent"]], ids=str)
def test_a_pass_that_was_left_is_followed_by_the_next_epoch(urls: list[str], how: dict[str, Any]) -> None:
    alone = loader_over(shards(urls), **how)
    passes = [list(alone) for _ in range(3)]
    alone.close()
    dataset = shards(urls)
    with loader_over(dataset, **how) as loader, loader_over(dataset, **how) as other:
        for _ in loader:
            list(other)
            break
        again = loader_over(shards(urls), **how)
        again.load_state_dict(travelled(loader.state_dict()))
        assert list(again) == passes[0][1:]
        again.close()
        assert list(loader) == passes[1]
        assert list(other) == passes[1]
        dataset.set_epoch(2)
        again.load_state_dict(travelled(loader.state_dict()))
        assert (list(again), list(loader)) == (passes[2], passes[2])
        again.close()


def test_a_state_that_the_data_set_has_loaded_is_used_once(make: Callable[[], Any]) -> None:
    whole = make()
    items = iter(whole)
    for _ in range(6):
        next(items)
    state = travelled(whole.state_dict())
    rest = keys(list(items))
    dataset = make()
    dataset.load_state_dict(state)
    loader = loader_over(dataset)
    saved = travelled(loader.state_dict())
    assert list(itertools.chain.from_iterable(loader)) == rest
    assert len(list(itertools.chain.from_iterable(loader))) > len(rest)
    loader.load_state_dict(saved)
    assert list(itertools.chain.from_iterable(loader)) == rest
