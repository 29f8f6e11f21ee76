"""Pipelines and mixes are streams: opened at any cursor they give the same rest."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import opened
from full_run import full_only
from interpreter_support import FULL
from stream_conformance import (
    check_chosen_epochs,
    check_chosen_in_the_middle,
    check_every_cursor,
    check_loaded_state,
    check_purity,
    texts,
    through_json,
)
from wds_support import worker, write_shards

import penstock as ps
import penstock.wds as wds
from penstock.errors import StateError


def held_back(source: Iterator[Any]) -> Iterator[Any]:
    """A stage that holds two items back, of which nobody knows."""
    held: list[Any] = []
    for item in source:
        held.append(item)
        if len(held) > 2:
            yield held.pop(0)
    yield from held


@wds.memoryless
def marked(source: Iterator[Any]) -> Iterator[Any]:
    """A stage that says that it holds nothing."""
    for item in source:
        yield item, "marked"


def shuffled(urls: str) -> Any:
    return wds.WebDataset(urls, shardshuffle=True).shuffle(6, initial=3).to_tuple("cls")


def twice(urls: str) -> Any:
    one = shuffled(urls)
    return wds.RoundRobin([one, one], longest=True)


CASES: dict[str, Callable[[str], Any]] = {
    "shards": lambda urls: wds.WebDataset(urls),
    "shuffle": shuffled,
    "two shuffles": lambda urls: shuffled(urls).shuffle(9),
    "batched": lambda urls: shuffled(urls).batched(2),
    "batched and unbatched": lambda urls: wds.WebDataset(urls).decode().batched(4).unbatched().shuffle(3),
    "listed and unlisted": lambda urls: shuffled(urls).listed(3).unlisted().slice(1, 19),
    "with_epoch": lambda urls: shuffled(urls).with_epoch(31),
    "with_epoch per rank": lambda urls: shuffled(urls).with_epoch(13, per="rank"),
    "repeat": lambda urls: shuffled(urls).repeat(2),
    "repeat batches": lambda urls: shuffled(urls).repeat(nbatches=33),
    "resampled": lambda urls: wds.WebDataset(urls, resampled=True).with_epoch(17),
    "drawn": lambda urls: shuffled(urls).rsample(0.7),
    "a stage of one's own": lambda urls: shuffled(urls).compose(held_back).shuffle(4),
    "a stage without memory": lambda urls: shuffled(urls).compose(marked),
    "a function": lambda urls: wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_samples, wds.shuffle(5)),
    "an iterable": lambda urls: wds.DataPipeline(range(20), wds.shuffle(5)),
    "in turn": lambda urls: wds.RoundRobin([shuffled(urls), wds.WebDataset(urls)]),
    "in turn, longest": lambda urls: wds.RoundRobin([shuffled(urls), wds.WebDataset(urls).slice(3)], longest=True),
    "at random": lambda urls: wds.RandomMix([shuffled(urls), wds.WebDataset(urls)], [1, 2]),
    "at random, longest": lambda urls: wds.RandomMix([shuffled(urls), range(5)], [1, 2], longest=True),
    "the same one twice": twice,
    "a mix of mixes": lambda urls: wds.RandomMix([twice(urls), wds.RoundRobin([range(9)])], seed=3, longest=True),
    "a mix in a pipeline": lambda urls: wds.DataPipeline(twice(urls), wds.shuffle(5)),
    # 40 items: the last batch is made when the mix has ended.
    "the last batch of a mix": lambda urls: wds.DataPipeline(twice(urls), wds.listed(3)),
    "a pipeline in a pipeline": lambda urls: wds.DataPipeline(shuffled(urls).repeat(2), held_back).with_epoch(70),
    "shards of another data set": lambda urls: wds.DataPipeline(ps.StreamShards(urls, seed=2), wds.listed(3)).repeat(2),
}
GO_ON = {"with_epoch", "with_epoch per rank", "repeat batches", "resampled", "a pipeline in a pipeline"}


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(name: str, tmp_path: Path) -> Callable[[], Any]:
    urls = write_shards(tmp_path, 4, 5)
    return lambda: CASES[name](urls)


@pytest.mark.parametrize("epoch", [0, 3] if FULL else [3])
def test_opened_at_every_cursor_it_gives_the_same_rest(make: Callable[[], Any], epoch: int) -> None:
    check_every_cursor(make, epoch)


def test_a_cursor_is_pure(make: Callable[[], Any]) -> None:
    check_purity(make)


def test_a_loaded_state_is_used_once(make: Callable[[], Any]) -> None:
    check_loaded_state(make)


def test_an_epoch_chosen_in_the_middle_is_what_a_state_says(make: Callable[[], Any]) -> None:
    check_chosen_in_the_middle(make)


def test_each_iteration_is_another_epoch(make: Callable[[], Any], name: str) -> None:
    dataset = make()
    for epoch in (0, 1, 2):
        items = iter(dataset)
        assert dataset.epoch == epoch
        had = texts(items)
        assert dataset.epoch == epoch + 1
        if epoch == 0 or name not in GO_ON:
            assert had == texts(make().open(epoch=epoch))
    check_chosen_epochs(make)


def test_between_two_epochs_a_state_is_where_the_next_one_begins(make: Callable[[], Any]) -> None:
    dataset = make()
    list(dataset)
    other = make()
    other.load_state_dict(through_json(dataset.state_dict()))
    assert other.epoch == 1
    assert texts(other) == texts(dataset)
    assert texts(other) == texts(dataset)


def test_a_stream_that_goes_on_takes_over_the_stages(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 4, 5)
    dataset = wds.WebDataset(urls).to_tuple("cls").with_epoch(7)
    first = iter(dataset)
    had = [next(first) for _ in range(3)]
    second = iter(dataset)
    assert list(first) == []
    assert texts(dataset.open(through_json(first.cursor()))) == [f"(b'{number}',)" for number in range(3, 7)]
    assert [int(item[0]) for item in [*had, *second, *dataset]] == list(range(17))


def test_a_cursor_of_another_worker_is_refused(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make()
    stream = dataset.open(epoch=0)
    first = through_json(stream.cursor())
    next(stream)
    cursor = through_json(stream.cursor())
    with worker(monkeypatch, 1, 2):
        dataset.open(first)  # nothing has begun
        with pytest.raises(StateError, match="number of workers\\] is"):
            dataset.open(cursor)


@full_only("workers for each", but=["with_epoch"])
@pytest.mark.parametrize("name", ["with_epoch", "in turn"], indirect=True)
def test_workers_of_torch_s_loader_refuse_a_loaded_state(make: Callable[[], Any]) -> None:
    dataset = make()
    next(iter(dataset))
    dataset.load_state_dict(through_json(dataset.state_dict()))
    with pytest.raises(StateError, match="number of workers\\] is"):  # each worker would go on from there
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))


def test_a_cursor_of_another_mix_is_refused(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 2, 5)
    dataset = wds.RandomMix([shuffled(urls), range(9)], [1, 2], seed=1)
    stream = dataset.open()
    next(stream)
    for other in (
        wds.RandomMix([shuffled(urls), range(9)], [2, 2], seed=1),
        wds.RandomMix([shuffled(urls), range(9)], [1, 2], seed=2),
        wds.RandomMix([shuffled(urls), range(9), range(9)], seed=1),
        wds.RoundRobin([shuffled(urls), range(9)]),
    ):
        with pytest.raises(StateError):
            other.open(stream.cursor())


class Sometimes:
    """A function that fails at one number, until it is mended."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __call__(self, sample: Any) -> Any:
        if int(sample["cls"]) == self.bad:
            raise ArithmeticError("bad")
        return int(sample["cls"])


@pytest.mark.parametrize("mixed", [False, True])
def test_behind_an_error_the_cursor_is_behind_the_failed_sample(tmp_path: Path, mixed: bool) -> None:
    urls = write_shards(tmp_path, 4, 5)
    function = Sometimes(8)
    dataset = wds.WebDataset(urls).map(function)
    source: Any = wds.RoundRobin([dataset]) if mixed else dataset
    stream = source.open()
    had: list[int] = []
    with pytest.raises(ArithmeticError):
        had.extend(stream)
    assert list(stream) == []
    assert (had, list(source.open(through_json(stream.cursor())))) == (list(range(8)), list(range(9, 20)))


def first_again(items: Iterator[int]) -> Iterator[int]:
    """Begins with the first item, as stages do that look at it. It assumes that there is one."""
    first = next(items)
    return itertools.chain([first], items)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_stage_that_leaks_stop_iteration_does_not_end_the_stream(mixed: bool) -> None:
    pipeline = wds.DataPipeline((), first_again)
    source: Any = ps.Mixture([(pipeline, 1), (wds.DataPipeline(range(5)), 1)]) if mixed else pipeline
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(source)


def test_an_error_at_the_beginning_of_a_pass_leaves_a_state_there() -> None:
    begun: list[int] = []

    def source() -> Iterator[int]:
        begun.append(0)
        if len(begun) == 2:
            raise OSError("not yet")
        return iter(range(5))

    dataset = wds.DataPipeline(source).repeat(3)
    had: list[int] = []
    with pytest.raises(OSError, match="not yet"):
        had.extend(dataset)
    again = wds.DataPipeline(source).repeat(3)
    again.load_state_dict(through_json(dataset.state_dict()))
    assert had + list(again) == 3 * list(range(5))


class Keeps:
    """Says how many items it has given, which it forgets where the next pass gives its first."""

    begins = had = 0

    def __iter__(self) -> Iterator[int]:
        begins, self.begins = self.begins, 0
        for item in range(begins, 5):
            self.had = item + 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"had": self.had}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["had"]


def test_a_source_that_has_not_run_yet_is_not_where_its_last_pass_ended() -> None:
    def make() -> Any:
        return wds.RandomMix([Keeps(), Keeps()], longest=True)

    dataset = make()
    assert sorted(dataset) == sorted(2 * list(range(5)))
    stream = iter(dataset)
    had: list[int] = []
    states = [through_json(dataset.state_dict())]
    for item in stream:
        had.append(item)
        states.append(through_json(dataset.state_dict()))
    assert len(had) == 10
    for count, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        assert list(again) == had[count:], count


def test_the_data_sets_inside_keep_their_own_epochs(tmp_path: Path) -> None:
    inside = shuffled(write_shards(tmp_path, 4, 5))
    alone = texts(inside.compose())
    outer = wds.RoundRobin([inside])
    stream = iter(outer)
    next(stream)
    assert texts(inside) == alone, "it was not iterated, and nobody set its epoch"
    assert texts(outer.open(opened(outer.state_dict()))) == texts(stream)


def test_each_pass_and_each_epoch_of_a_data_set_inside_has_an_order_of_its_own(tmp_path: Path) -> None:
    outer = wds.DataPipeline(shuffled(write_shards(tmp_path, 4, 5))).repeat(2)
    epochs = [texts(outer) for _ in range(2)]
    passes = [epoch[begin : begin + 20] for epoch in epochs for begin in (0, 20)]
    assert len({tuple(items) for items in passes}) == 4
    assert len({tuple(sorted(items)) for items in passes}) == 1


def test_a_remembered_stream_closes_its_files_with_the_data_set(make: Callable[[], Any], tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")

    def opened() -> list[str]:
        paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [path for path in paths if os.path.exists(path) and str(tmp_path) in os.path.realpath(path)]

    gc.collect()
    gc.disable()
    try:
        dataset = make()
        next(iter(dataset))
        del dataset
        assert opened() == []
    finally:
        gc.enable()


def test_it_travels_while_it_is_read(make: Callable[[], Any], name: str) -> None:
    if "own" in name or "without" in name or "function" in name:
        pytest.skip("functions of this file do not pickle everywhere")
    dataset = make()
    stream = iter(dataset)
    next(stream)
    there = pickle.loads(pickle.dumps(dataset))
    assert texts(there.open(through_json(stream.cursor()))) == texts(stream)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_set_in_the_data_set_of_a_loader_is_the_next_one(tmp_path: Path, workers: int) -> None:
    dataset = shuffled(write_shards(tmp_path, 4, 5))
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    epochs = [texts(loader) for _ in range(3)]
    dataset.set_epoch(1)
    assert [texts(loader), texts(loader)] == epochs[1:]
    loader.set_epoch(0)
    assert texts(loader) == epochs[0]
