"""Any iterable as a source of a pipeline or a mix: whose items it gives, and who says where it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from state_support import BothStream, HubStream, IteratorStream, PlainStream
from stream_conformance import texts, through_json
from wds_support import write_shards

import penstock as ps
import penstock.wds as wds
from penstock.errors import StateError


class Marked(wds.WebDataset):
    """A program's own idea of the items."""

    def __iter__(self) -> Any:
        return (("marked", int(sample["cls"])) for sample in super().__iter__())


class MarkedShards(ps.StreamShards):
    def __iter__(self) -> Any:
        return (("marked", int(sample["cls"])) for sample in super().__iter__())


OWN: dict[str, Callable[[str], Any]] = {
    "pipeline": lambda urls: Marked(urls, shardshuffle=True).shuffle(6),
    "shards": lambda urls: MarkedShards(urls, seed=2),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "pipeline": lambda source: wds.DataPipeline(source, wds.shuffle(4)),
    "pipeline of passes": lambda source: wds.DataPipeline(source).repeat(2),
    "wrapper": lambda source: wds.FluidWrapper(source).listed(3),
    "mix": lambda source: wds.RandomMix([source, range(5)], longest=True),
    "in turn": lambda source: wds.RoundRobin([range(5), source], longest=True),
}


def rests(make: Callable[[], Any], epoch: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the rest behind each item as it was, and as it comes from the state there in a copy."""
    whole = make()
    whole.set_epoch(epoch)
    items = texts(whole)
    assert len(items) > 6
    for had in range(0, len(items), 3):
        dataset, again = make(), make()
        dataset.set_epoch(epoch)
        stream = iter(dataset)
        for _ in range(had):
            next(stream)
        again.load_state_dict(through_json(dataset.state_dict()))
        yield items[had:], texts(again)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("own", OWN)
def test_a_source_gives_the_items_of_its_own_iter(tmp_path: Path, own: str, around: str) -> None:
    urls = write_shards(tmp_path, 4, 5)
    make = lambda: AROUND[around](OWN[own](urls))  # noqa: E731
    assert "marked" in str(list(make()))
    for epoch in (0, 2):
        for expected, found in rests(make, epoch):
            assert found == expected


@pytest.mark.parametrize("own", OWN)
def test_a_source_with_items_of_its_own_is_in_the_epoch_around_it(tmp_path: Path, own: str) -> None:
    urls = write_shards(tmp_path, 4, 5)
    outer = wds.DataPipeline(OWN[own](urls))
    epochs = [texts(outer) for _ in range(3)]
    assert len({tuple(items) for items in epochs}) == 3
    assert texts(outer.open(epoch=1)) == texts(outer.open(epoch=1)) == epochs[1]
    alone = OWN[own](urls)
    alone.set_epoch(1)
    assert texts(alone) == epochs[1]


class Noise(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Turns(PlainStream):
    """Without a state. It can be told its epoch, which is all that its order is of."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from ((item + self.epoch) % self.n for item in super().__iter__())


SOURCES: dict[str, Callable[[], Any]] = {
    "no state": lambda: PlainStream(9),
    "a function": lambda: lambda: iter(range(9)),
    "a state of the iterator": lambda: IteratorStream(9),
    "a state of both": lambda: BothStream(9),
    "a state of the data set": lambda: HubStream(9),
    "a loader with an order of its own": lambda: ps.DataLoader(Noise(), batch_size=None, shuffle=True, seed=1),
    "a loader of torch's": lambda: torch.utils.data.DataLoader(Turns(9), batch_size=None),
    "a loader of torch's over a pipeline": lambda: torch.utils.data.DataLoader(
        wds.DataPipeline(range(12), wds.shuffle(5)), batch_size=None
    ),
}
STAGES: dict[str, Callable[[Any], Any]] = {
    "pipeline": lambda source: wds.DataPipeline(source),
    "shuffle": lambda source: wds.DataPipeline(source, wds.shuffle(4)),
    "mix": lambda source: wds.RoundRobin([range(4), source], longest=True),
}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("source", SOURCES)
def test_in_any_epoch_a_state_goes_on_without_a_warning(source: str, stages: str) -> None:
    make = lambda: STAGES[stages](SOURCES[source]())  # noqa: E731
    whole = make()
    epochs = [texts(whole) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for had in range(1, len(epochs[1])):
            dataset, again = make(), make()
            list(dataset)
            stream = iter(dataset)
            assert texts(next(stream) for _ in range(had)) == epochs[1][:had]
            again.load_state_dict(through_json(dataset.state_dict()))
            assert texts(again) == epochs[1][had:], had


def test_a_chosen_epoch_reaches_a_loader_that_has_an_order_of_its_own() -> None:
    make = SOURCES["a loader with an order of its own"]
    loader, dataset = make(), wds.DataPipeline(make())
    epochs = [texts(loader) for _ in range(3)]
    for epoch in (2, 0, 1):
        dataset.set_epoch(epoch)
        assert texts(dataset) == epochs[epoch]


def test_a_loader_of_a_stream_without_epochs_is_told_none() -> None:
    dataset = wds.DataPipeline(ps.DataLoader(PlainStream(9), batch_size=None)).repeat(2)
    dataset.set_epoch(5)
    assert list(dataset) == 2 * list(range(9))


def test_a_source_that_has_become_another_one_is_noticed() -> None:
    dataset = wds.DataPipeline(range(9))
    stream = iter(dataset)
    for _ in range(5):
        next(stream)
    again = wds.DataPipeline(range(2))
    again.load_state_dict(dataset.state_dict())
    with pytest.raises(StateError, match="the source range had yielded 5 items"):
        list(again)
    stream = wds.DataPipeline(HubStream(9)).open()
    next(stream)
    with pytest.raises(StateError, match="state of the source PlainStream, which has none"):
        list(wds.DataPipeline(PlainStream(9)).open(stream.cursor()))
