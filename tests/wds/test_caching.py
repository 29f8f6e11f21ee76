"""Samples that are read once and kept."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import get_worker_info

import penstock.wds as wds

pytest.importorskip("lmdb")

Make = Callable[[], Any]


def samples(count: int = 7, asked: list[int] | None = None) -> Iterator[dict[str, Any]]:
    for number in range(count):
        if asked is not None:
            asked.append(number)
        yield {"__key__": f"{number:03d}", "txt": f"text {number}"}


def never() -> Iterator[Any]:
    raise AssertionError("the samples are there already")
    yield


@pytest.fixture(params=["memory", 1, 3, 500])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A cache; the same one each time."""
    cached = wds.Cached()
    if request.param == "memory":
        return lambda: cached
    return lambda: wds.LMDBCached(str(tmp_path / "kept.lmdb"), map_size=1e8, chunksize=request.param)


def test_the_second_pass_asks_nobody(make: Make) -> None:
    asked: list[int] = []
    first = make().run(samples(asked=asked))
    assert next(first)["txt"] == "text 0"
    assert asked == [0], "samples pass through one by one"
    assert len(list(first)) == 6
    for _ in range(2):
        assert list(make().run(never())) == list(samples())


def test_a_pass_that_was_left_does_not_count(make: Make) -> None:
    first = make().run(samples())
    for _ in range(4):
        next(first)
    first.close()
    assert list(make().run(samples())) == list(samples())
    assert list(make().run(never())) == list(samples())


def test_a_pass_that_was_left_leaves_no_samples(make: Make) -> None:
    first = make().run(samples())
    for _ in range(4):
        next(first)
    first.close()
    assert list(make().run(samples(2))) == list(samples(2))
    assert list(make().run(never())) == list(samples(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_worker_keeps_its_own_samples(tmp_path: Path, workers: int) -> None:
    def split() -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        yield from itertools.islice(samples(40), worker.id if worker else 0, None, worker.num_workers if worker else 1)

    dataset = wds.DataPipeline(split, wds.LMDBCached(str(tmp_path / "kept.lmdb"), map_size=1e8))
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    expected = [sample["txt"] for sample in samples(40)]
    for _ in range(2):
        assert sorted(sample["txt"] for sample in loader) == sorted(expected)


def test_in_a_worker_it_begins_anew_in_memory_and_goes_on_in_a_file(make: Make) -> None:
    cache = make()
    list(cache.run(samples()))
    there = pickle.loads(pickle.dumps(cache))
    assert list(there.run(samples() if isinstance(cache, wds.Cached) else never())) == list(samples())


def test_in_a_pipeline(make: Make) -> None:
    pipeline = wds.DataPipeline(lambda: samples(), make().run, wds.map(lambda sample: sample["txt"]))
    assert list(pipeline) == list(pipeline) == [f"text {number}" for number in range(7)]
