"""A `Mixture` of iterable-style data sets: proportions in each worker, ends, and states."""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections import Counter
from typing import Any

import pytest
from entries_support import closed, opened
from mixture_support import Numbers, StatefulStream, Stream
from torch.utils.data import IterableDataset

from penstock import DataLoader, Mixture
from penstock.datasets.mixture_stream import MixtureStream
from penstock.errors import ConfigError, StateError


def make(kind: Any = Stream, sizes: tuple[int, ...] = (10, 30), **options: Any) -> Any:
    return Mixture([(kind(1000 * i, n), 1 + i) for i, n in enumerate(sizes)], **options)


def test_proportions_and_ends() -> None:
    mixture = make(stop="first")
    assert isinstance(mixture, MixtureStream)
    found = list(mixture)
    for length in range(len(found) + 1):
        counted = Counter(f"source {item // 1000}" for item in found[:length])
        assert mixture.counts(length) == {name: counted[name] for name in mixture.names}
    assert [item for item in found if item < 1000] == list(range(10))
    # The next sample would be one that a source does not have.
    ends = mixture.counts(len(found) + 1)
    assert len(set(found)) == len(found)
    assert ends["source 0"] > 10 or ends["source 1"] > 30
    everything = list(make())
    assert set(everything) >= {*range(10), *range(1000, 1030)}
    assert Counter(everything)[0] == 2
    assert len(list(make(stop=17))) == 17
    chosen = Counter(item // 1000 for item in make(sizes=(10, 30), mode="choose"))
    assert chosen == {0: 1, 1: 2}
    had = Counter(item // 1000 for item in everything[:9])
    assert make().counts(9) == {"source 0": had[0], "source 1": had[1]}
    assert [number for _, number in itertools.islice(make(tag=True), 9)] == [item // 1000 for item in everything[:9]]
    ended = make(stop=9)
    assert Counter(item // 1000 for item in ended) == {0: 3, 1: 6}
    assert ended.counts(9) == {"source 0": 3, "source 1": 6}


def test_sources_that_begin_anew_are_told_the_epoch() -> None:
    mixture = make(sizes=(4, 30))
    mixture.set_epoch(5)
    list(mixture)
    told = mixture.sources[0].epochs
    assert len(told) in (4, 5), "by where the order of this epoch has the last sample of the other source"
    assert told == list(range(5, 5 + len(told)))
    assert mixture.sources[1].epochs == [5]


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize("stop", ["first", "all", 50])
def test_resume_anywhere(kind: Any, stop: Any) -> None:
    mixture = make(kind, stop=stop)
    seen, states = [], [json.loads(json.dumps(mixture.state_dict()))]
    for item in mixture:
        seen.append(item)
        states.append(json.loads(json.dumps(mixture.state_dict())))
    for k, state in enumerate(states):
        again = make(kind, stop=stop)
        again.load_state_dict(state)
        assert again.state_dict() == state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert list(again) == seen[k:], k
    with pytest.raises(StateError):
        make(kind, stop="first", sizes=(1, 2, 3)).load_state_dict(states[1])
    with pytest.raises(StateError, match="order"):
        make(kind, stop=stop).load_state_dict(closed({**opened(states[1]), "order": "of another version"}))


@pytest.mark.parametrize("workers", [0, 2])
def test_under_a_loader(workers: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(make(StatefulStream if not workers else Stream, stop=40), batch_size=4, num_workers=workers)

    warnings.simplefilter("ignore")
    with loader() as plain:
        batches, states = [], []
        for batch in plain:
            batches.append(batch.tolist())
            states.append(json.loads(json.dumps(plain.state_dict())))
    assert sum(map(len, batches)) == 40
    assert plain.stats()["stages"].keys() >= {"source 0", "source 1"}
    for k in (0, 3, 8):
        with loader() as again:
            again.load_state_dict(states[k])
            assert [batch.tolist() for batch in again] == batches[k + 1 :]


def test_errors() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Mixture([(Stream(0, 3), 1), (Numbers(0, 3), 1)])
    with pytest.raises(ConfigError, match=r"needs the length of every source"):
        make(mode="repeat")
    with pytest.raises(ConfigError, match=r"source 0 yielded no samples"):
        list(make(sizes=(0, 3)))
    assert len(list(pickle.loads(pickle.dumps(make(stop=5))))) == 5


class Breaks(IterableDataset[int]):
    """Its third item is an error, and then there are more."""

    def __iter__(self) -> Any:
        return map(self.item, range(6))

    def item(self, number: int) -> int:
        if number == 2:
            raise ValueError("the third")
        return number


def test_an_error_of_a_source_ends_the_iteration() -> None:
    stream = iter(Mixture([(Breaks(), 1)]))
    assert [next(stream), next(stream)] == [0, 1]
    before = stream.cursor()
    with pytest.raises(ValueError, match="the third"):
        next(stream)
    assert stream.cursor() == before
    assert list(stream) == []


def test_each_epoch_and_each_rank_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = make(tag=True, stop=40)
    epochs = [[number for _, number in mixture] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert Counter(epochs[0]) == Counter(epochs[1])
    shares = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        shares.append([number for _, number in make(tag=True, stop=80)])
    assert shares[0] != shares[1]
    assert Counter(shares[0]) == Counter(shares[1])
    # A worker that is not forked has no process group, and perhaps no environment either.
    payload = pickle.dumps(make(tag=True, stop=80))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert [number for _, number in pickle.loads(payload)] == shares[1]
