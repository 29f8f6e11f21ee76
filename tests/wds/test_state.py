"""Going on from a state: at every sample, behind every stage, in another process, with workers."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from entries_support import closed, opened
from pairwise import each_value
from wds_support import classes, worker, world, write_shards

import penstock
import penstock.wds as wds
from penstock.errors import StateError


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def plain(src: Any) -> Any:
    """A stage that holds two items back, of which nobody knows."""
    held = []
    for item in src:
        held.append(item)
        if len(held) > 2:
            yield held.pop(0)
    yield from held


PIPELINES: dict[str, Callable[[str], Any]] = {
    "plain": lambda urls: wds.WebDataset(urls),
    "tuple": lambda urls: wds.WebDataset(urls, shardshuffle=True).decode().to_tuple("txt", "cls"),
    "shuffle": lambda urls: wds.WebDataset(urls, shardshuffle=True).shuffle(8, initial=3).to_tuple("cls"),
    "large shuffle": lambda urls: wds.WebDataset(urls, shardshuffle=True).shuffle(100).to_tuple("cls"),
    "two shuffles": lambda urls: wds.WebDataset(urls).shuffle(9).map(dict).shuffle(4),
    "batched": lambda urls: wds.WebDataset(urls).shuffle(5).decode().batched(4),
    "unbatched": lambda urls: wds.WebDataset(urls).decode().batched(7).unbatched().shuffle(6, seed=3),
    "listed": lambda urls: wds.WebDataset(urls).decode().to_tuple("cls").listed(3).unlisted(),
    "slice": lambda urls: wds.WebDataset(urls).slice(3, 25, 2),
    "rsample": lambda urls: wds.WebDataset(urls).rsample(0.5),
    "select": lambda urls: wds.WebDataset(urls).select(lambda s: int(s["cls"]) % 3).shuffle(4),
    "own stage": lambda urls: wds.WebDataset(urls).shuffle(4).compose(plain).shuffle(3),
    "repeat": lambda urls: wds.WebDataset(urls, shardshuffle=True).shuffle(5).repeat(3),
    "epochs": lambda urls: wds.WebDataset(urls, shardshuffle=True).shuffle(5).with_epoch(25),
    "resampled": lambda urls: wds.WebDataset(urls, resampled=True).shuffle(7).with_epoch(45),
    "round robin": lambda urls: wds.RoundRobin([wds.WebDataset(urls), wds.WebDataset(urls).shuffle(5)]),
    "random mix": lambda urls: wds.RandomMix(
        [wds.WebDataset(urls), wds.WebDataset(urls).shuffle(5)], [2, 1], longest=True
    ),
    "mix in a pipeline": lambda urls: wds.DataPipeline(
        wds.RandomMix([wds.WebDataset(urls), wds.WebDataset(urls)], longest=True), wds.shuffle(5)
    ),
    "function": lambda urls: wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_samples, wds.shuffle(5)),
    "the same one twice": lambda urls: (lambda one: wds.RoundRobin([one, one], longest=True))(
        wds.WebDataset(urls, shardshuffle=True).shuffle(4)
    ),
    "detshuffle": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), wds.detshuffle(seed=4), wds.split_by_worker, wds.tarfile_to_samples()
    ),
}


def text(items: Any) -> list[str]:
    return [repr(item) for item in items]


@pytest.mark.parametrize("name", PIPELINES)
def test_resumed_at_any_sample(tmp_path: Path, name: str) -> None:
    urls = write_shards(tmp_path, 4, 6)
    make = PIPELINES[name]
    whole = make(urls)
    first, second = text(whole), text(whole)
    for at in [*range(0, len(first), 3), len(first)]:
        pipeline = make(urls)
        items = iter(pipeline)
        had = text(next(items) for _ in range(at))
        state = pipeline.state_dict()
        assert had == first[:at]
        again = make(urls)
        again.load_state_dict(through_json(state))
        assert through_json(again.state_dict()) == through_json(state)
        if at < len(first):
            assert again.epoch == 0 if hasattr(again, "epoch") else True
        assert text(again) == first[at:], at
        assert text(again) == second, at


@pytest.mark.parametrize("name", ["round robin", "random mix"])
def test_a_damaged_state_of_a_mix(tmp_path: Path, name: str) -> None:
    make, urls = PIPELINES[name], write_shards(tmp_path, 4, 6)
    mix = make(urls)
    next(iter(mix))
    entries = opened(mix.state_dict())
    for key in entries:
        with pytest.raises(StateError):
            make(urls).load_state_dict(closed({other: value for other, value in entries.items() if other != key}))
    turned = [{**entry, "turns": -1} for entry in entries["sources"]]
    for wrong in ({"last": 7}, {"last": [[]]}, {"sources": turned}, {"sources": []}, {"sources": 3}, {"yielded": "3"}):
        with pytest.raises(StateError):
            make(urls).load_state_dict(closed({**entries, **wrong}))
    make(urls).load_state_dict(closed(entries))


@pytest.mark.parametrize("name", ["shuffle", "unbatched", "own stage", "epochs"])
def test_resumed_twice(tmp_path: Path, name: str) -> None:
    urls = write_shards(tmp_path, 4)
    make = PIPELINES[name]
    first = text(make(urls))
    state = None
    had: list[str] = []
    for step in (3, 1, 8, 2, 5):
        pipeline = make(urls)
        if state is not None:
            pipeline.load_state_dict(state)
        items = iter(pipeline)
        if state is not None:
            assert opened(pipeline.state_dict())["steps"] == opened(state)["steps"] or step
        had += text(next(items) for _ in range(step))
        state = through_json(pipeline.state_dict())
    assert had == first[: len(had)]


@pytest.mark.parametrize("name", ["data set", "loader"])
def test_behind_an_error(tmp_path: Path, name: str) -> None:
    urls = write_shards(tmp_path, 3)

    def make(bad: int) -> Any:
        def checked(sample: dict[str, Any]) -> dict[str, Any]:
            if int(sample["cls"]) == bad:
                raise ArithmeticError("bad")
            return sample

        dataset = wds.WebDataset(urls).map(checked).to_tuple("cls")
        return dataset if name == "data set" else wds.WebLoader(dataset, batch_size=None, num_workers=0)

    first, again = make(15), make(-1)
    had: list[int] = []
    with pytest.raises(ArithmeticError):
        for item in first:
            had.append(int(item[0]))
    again.load_state_dict(through_json(first.state_dict()))
    rest = classes(again)
    assert (had, rest) == (list(range(15)), list(range(16, 30)))


@pytest.mark.parametrize("name", ["tuple", "shuffle", "epochs"])
def test_after_the_end_of_an_epoch(tmp_path: Path, name: str) -> None:
    urls = write_shards(tmp_path, 4)
    make = PIPELINES[name]
    whole = make(urls)
    epochs = [text(whole) for _ in range(4)]
    pipeline = make(urls)
    assert [text(pipeline) for _ in range(2)] == epochs[:2]
    again = make(urls)
    again.load_state_dict(through_json(pipeline.state_dict()))
    assert again.epoch == 2
    again.set_epoch(2)
    assert [text(again) for _ in range(2)] == epochs[2:]


def test_compressed_shards_and_selected_members(tmp_path: Path) -> None:
    write_shards(tmp_path, 3)
    for path in sorted(tmp_path.glob("*.tar")):
        path.with_suffix(".tgz").write_bytes(gzip.compress(path.read_bytes()))
    for make in (
        lambda: wds.WebDataset(str(tmp_path / "{000..002}.tgz")).shuffle(4),
        lambda: wds.WebDataset(str(tmp_path / "{000..002}.tar"), select_files=lambda n: n.endswith("cls")).shuffle(4),
    ):
        first = classes(make())
        for at in (0, 1, 13, 29, 30):
            pipeline, again = make(), make()
            items = iter(pipeline)
            for _ in range(at):
                next(items)
            again.load_state_dict(pipeline.state_dict())
            assert classes(again) == first[at:]


def test_a_resumed_shuffle_reads_only_what_it_held(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 20, 100)
    read: list[int] = []
    make = lambda: wds.WebDataset(urls).map(lambda s: read.append(1) or s).shuffle(20)  # noqa: E731
    pipeline = make()
    items = iter(pipeline)
    for _ in range(1500):
        next(items)
    state = pipeline.state_dict()
    assert len(json.dumps(state)) < 1000
    again = make()
    again.load_state_dict(state)
    read.clear()
    next(iter(again))
    assert len(read) < 400


@pytest.mark.parametrize(
    ("workers", "name", "place"), each_value([0, 1, 3], ["shuffle", "batched", "epochs"], ["first", "middle", "last"])
)
def test_loaders_go_on(tmp_path: Path, workers: int, name: str, place: str) -> None:
    urls = write_shards(tmp_path, 6)

    def make() -> Any:
        return wds.WebLoader(PIPELINES[name](urls), batch_size=None, num_workers=workers)

    whole = make()
    first, second = text(whole), text(whole)
    at = {"first": 1, "middle": len(first) // 2, "last": len(first)}[place]
    loader = make()
    items = iter(loader)
    assert text(next(items) for _ in range(at)) == first[:at]
    state = through_json(loader.state_dict())
    del items
    again = make()
    again.load_state_dict(state)
    assert text(again) == first[at:]
    assert text(again) == second


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_behind_the_loader_go_on(tmp_path: Path, workers: int) -> None:
    urls = write_shards(tmp_path, 6)

    def make() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=True).shuffle(5).decode().to_tuple("cls").batched(4)
        return (
            wds.WebLoader(dataset, batch_size=None, num_workers=workers).unbatched().shuffle(9).batched(3).with_epoch(9)
        )

    whole = make()
    epochs = [text(whole) for _ in range(4)]
    for epoch, at in ((0, 1), (0, 8), (1, 0), (2, 5), (3, 0)):
        loader = make()
        for _ in range(epoch):
            list(loader)
        items = iter(loader)
        for _ in range(at):
            next(items)
        state = through_json(loader.state_dict())
        again = make()
        again.load_state_dict(state)
        assert text(again) == epochs[epoch][at:]
        if epoch < 3:
            assert text(again) == epochs[epoch + 1]


def job(urls: str) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle=True).shuffle(7).decode().to_tuple("cls")
    return wds.WebLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork").with_epoch(50)


def killed_job(urls: str, path: str, kill: int) -> None:
    """Ends by SIGKILL, just after it has saved what it had and its state."""
    had: list[int] = []
    loader = job(urls)
    for item in loader:
        had.append(int(item[0]))
        if len(had) == kill:
            with open(path, "w") as file:
                json.dump([had, loader.state_dict()], file)
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_and_resumed(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 6)
    path = str(tmp_path / "state")
    process = multiprocessing.get_context("forkserver").Process(target=killed_job, args=(urls, path, 23))
    process.start()
    process.join(timeout=HANG)
    assert process.exitcode == -signal.SIGKILL
    with open(path) as file:
        had, state = json.load(file)
    again = job(urls)
    again.load_state_dict(state)
    assert had + [int(item[0]) for item in again] == [int(item[0]) for item in job(urls)]


def test_states_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_shards(tmp_path, 4)
    dataset = wds.WebDataset(urls).shuffle(5)
    next(iter(dataset))
    state = dataset.state_dict()
    with pytest.raises(StateError, match="stages"):
        wds.WebDataset(urls).load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        wds.WebDataset(urls, seed=1).shuffle(5).load_state_dict(state)
    with pytest.raises(StateError, match="shuffle with bufsize=5"):
        other = wds.WebDataset(urls).shuffle(6)
        other.load_state_dict(state)
        next(iter(other))
    with world(monkeypatch, 0, 2), pytest.raises(StateError, match="number of workers"):
        wds.WebDataset(urls).shuffle(5).load_state_dict(state)
    with worker(monkeypatch, 1, 2), pytest.raises(StateError, match="number of workers"):
        wds.WebDataset(urls).shuffle(5).load_state_dict(state)
    loaded = wds.WebDataset(urls).shuffle(5)
    loaded.load_state_dict(state)
    with worker(monkeypatch, 0, 2), pytest.raises(StateError, match="number of workers"):
        next(iter(loaded))
    entries = opened(state)
    for damage in ({"steps": 7}, {"turn": -1}, {"steps": [*entries["steps"][:-1], 3]}):
        with pytest.raises(StateError):
            again = wds.WebDataset(urls).shuffle(5)
            again.load_state_dict(closed({**entries, **damage}))
            next(iter(again))


def test_random_pipelines_at_random_places(tmp_path: Path) -> None:
    rng = random.Random(0)
    urls = write_shards(tmp_path, 4, 5)
    stages: list[Callable[[Any], Any]] = [
        lambda p, r: p.shuffle(r.randrange(1, 40), initial=r.randrange(1, 40)),  # type: ignore[list-item,misc]
        lambda p, r: p.listed(r.randrange(1, 6)).unlisted(),  # type: ignore[list-item,misc]
        lambda p, r: p.slice(r.randrange(3), None, r.randrange(1, 3)),  # type: ignore[list-item,misc]
        lambda p, r: p.rsample(0.8),  # type: ignore[list-item,misc]
        lambda p, r: p.map(dict),  # type: ignore[list-item,misc]
        lambda p, r: p.repeat(r.randrange(1, 3)),  # type: ignore[list-item,misc]
        lambda p, r: p.with_epoch(r.randrange(1, 60)),  # type: ignore[list-item,misc]
    ]
    for trial in range(50):
        seeds = [(rng.choice(stages), rng.random()) for _ in range(rng.randrange(1, 5))]

        def make(seeds: Any = seeds) -> Any:
            pipeline = wds.WebDataset(urls, shardshuffle=True)
            for stage, seed in seeds:
                pipeline = stage(pipeline, random.Random(seed))
            return pipeline

        whole = make()
        first = text(whole)
        stream = first + text(whole)
        at = rng.randrange(len(first) + 1)
        pipeline = make()
        items = iter(pipeline)
        for _ in range(at):
            next(items)
        again = make()
        again.load_state_dict(through_json(pipeline.state_dict()))
        assert text(again) + text(again) == stream[at:], (trial, at)


def test_penstock_loader_with_batches(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 4)

    def make() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=True).shuffle(6).decode().to_tuple("cls")
        return penstock.DataLoader(dataset, batch_size=3, num_workers=2)

    first = text(make())
    loader = make()
    items = iter(loader)
    for _ in range(5):
        next(items)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert text(again) == first[5:]


def test_nothing_is_left_open(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    urls = write_shards(tmp_path, 4)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        dataset = wds.WebDataset(urls).shuffle(3)
        items = iter(dataset)
        for _ in range(13):
            next(items)
        dataset.close()
        del items
    del dataset
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    shutil.rmtree(tmp_path)
