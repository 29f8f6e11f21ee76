"""What live jobs want decides what the cache keeps: hits as computed, several jobs, jobs that die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned_uses import uses

from penstock.errors import NotCachedError
from penstock.storage import Cache, RemoteSource, Storage
from penstock.storage import cache as cache_module
from penstock.storage.planned_use import NEVER, PlannedUses, UsePublisher, object_name

SIZE = 100_000
ROOM = SIZE + 1000  # with what the cache writes beside a copy


def stored(server: Any, cache: Cache, count: int) -> list[RemoteSource]:
    storage = Storage(cache=cache)
    urls = [server.put(f"{number}.bin", bytes([number % 256]) * SIZE) for number in range(count)]
    return [RemoteSource(url, storage) for url in urls]


def names(sources: list[RemoteSource]) -> list[str]:
    return [source.url for source in sources]


def held(cache: Cache) -> set[int]:
    """The numbers of the objects that are there."""
    return {int(entry.url.rpartition("/")[2].removesuffix(".bin")) for entry in cache.entries()}


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_hits_are_the_fraction_that_fits(server: Any, tmp_path: Path, fraction: float) -> None:
    """Each object once an epoch, in a random order: Belady's choice, with a bypass, hits what the cache holds."""
    count, epochs, rng = 40, 3, np.random.default_rng(0)
    cache = Cache(tmp_path, max_bytes=int(fraction * count) * ROOM)
    sources = stored(server, cache, count)
    future = UsePublisher(cache.folder)
    orders = [rng.permutation(count) for _ in range(epochs + 1)]
    place = np.empty(count, np.int64), np.empty(count, np.int64)
    hits = 0
    for epoch in range(epochs):
        for column, order in zip(place, orders[epoch : epoch + 2], strict=True):
            column[order] = np.arange(count)
        future.publish(uses(names(sources), place[0], place[0], count + place[1]))
        for position, number in enumerate(orders[epoch].tolist()):
            # From here on the object is wanted for its next use.
            future.advance(position + 1)
            hits += epoch > 0 and cache.has(sources[number])
            try:
                cache.open(sources[number], only_later=True)
            except NotCachedError:
                assert sources[number].read_at(5, 1) == bytes([number])
        assert sum(entry.size for entry in cache.entries()) <= int(fraction * count) * ROOM
    assert abs(hits / count / (epochs - 1) - fraction) <= 0.03
    future.close()
    assert list((tmp_path / "futures").iterdir()) == []


class TestEviction:
    def test_what_is_due_last_goes_first(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=3 * ROOM)
        sources = stored(server, cache, 5)
        future = UsePublisher(cache.folder)
        future.publish(uses(names(sources[:4]), [1, 30, 2, 20], [1, 30, 2, 20]))
        for source in sources[:3]:
            cache.open(source)
        cache.open(sources[3])
        assert held(cache) == {0, 2, 3}
        cache.open(sources[4])  # nobody said that it would be needed, so it is needed now
        assert held(cache) == {0, 2, 4}
        cache.open(sources[3])  # and no more after that
        assert held(cache) == {0, 2, 3}

    def test_what_is_needed_sooner_stays(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=2 * ROOM)
        sources = stored(server, cache, 3)
        future = UsePublisher(cache.folder)
        future.publish(uses(names(sources), [1, 2, 3], [1, 2, 3], [10, NEVER, 30]))
        cache.open(sources[0])
        cache.open(sources[1])
        with pytest.raises(NotCachedError, match="needed sooner"):
            cache.open(sources[2], only_later=True)
        assert held(cache) == {0, 1}
        assert list((tmp_path / "partial").iterdir()) == []
        future.advance(3)  # the second is not needed any more
        cache.open(sources[2], only_later=True)
        assert held(cache) == {0, 2}

    def test_what_another_process_uses_meanwhile_stays(self, server: Any, tmp_path: Path) -> None:
        """Nobody has said what comes, so what was used last stays, though this process has not seen that."""
        cache = Cache(tmp_path, max_bytes=100 * ROOM)
        sources = stored(server, cache, 102)
        for number, source in enumerate(sources[:100]):
            cache.open(source)
            os.utime(tmp_path / "objects" / cache.key(source) / ".entry.json", (number, number))
        cache.limit()
        seen = cache_module._scans[tmp_path]
        # As if looking had taken long.
        cache_module._scans[tmp_path] = cache_module._Scan(
            {e.folder.name: e for e in cache.entries()}, seen.until + 1000
        )
        os.utime(tmp_path / "objects" / cache.key(sources[0]) / ".entry.json")  # as another process does
        cache.open(sources[100])
        assert held(cache) == {0, *range(2, 101)}

    def test_two_jobs(self, server: Any, tmp_path: Path) -> None:
        """An object is as urgent as it is to the job that needs it first, in that job's pace."""
        cache = Cache(tmp_path, max_bytes=2 * ROOM)
        sources = stored(server, cache, 3)
        one, other = UsePublisher(cache.folder), UsePublisher(cache.folder)
        one.publish(uses(names(sources[:2]), [500, 100], [500, 100]))
        other.publish(uses(names(sources[:1]), [50], [50]))
        cache.open(sources[0])
        cache.open(sources[1])
        cache.open(sources[2])
        assert held(cache) == {0, 2}
        other.close()
        cache.open(sources[1])
        cache.open(sources[2])
        assert held(cache) == {1, 2}

    def test_ranges_are_read_where_no_job_wants_a_copy(self, tmp_path: Path) -> None:
        cache = Cache(tmp_path)
        one, other = UsePublisher(cache.folder), UsePublisher(cache.folder)
        one.publish(uses(["x", "y"], 0, 9, copied=[False, False]))
        other.publish(uses(["y", "z"], 0, 9, copied=[True, True]))
        wanted = [cache.planned_uses().prefer_ranges(object_name(url)) for url in "xyzw"]
        assert wanted == [True, False, False, False]


def _publish_and_wait(folder: str, ready: Any) -> None:
    future = UsePublisher(Path(folder))
    future.publish(uses(["x"], 5, 5))
    ready.set()
    signal.pause()
    future.close()


class TestLife:
    def test_a_killed_job_wants_nothing(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=_publish_and_wait, args=(str(tmp_path), ready))
        process.start()
        assert ready.wait(60)
        asked = np.array([object_name("x")], np.uint64)
        assert np.isfinite(PlannedUses(tmp_path).due(asked)).all()
        process.kill()
        process.join()
        assert np.isinf(PlannedUses(tmp_path).due(asked)).all()
        assert list((tmp_path / "futures").iterdir()) == []

    def test_a_fork_does_not_keep_its_parent_alive(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        ready, child = context.Event(), context.Value("i", 0)
        process = context.Process(target=_publish_fork_and_wait, args=(str(tmp_path), ready, child))
        process.start()
        assert ready.wait(60)
        assert len(PlannedUses(tmp_path).jobs) == 1
        process.kill()
        process.join()
        try:
            assert PlannedUses(tmp_path).jobs == []
        finally:
            assert child.value > 1
            os.kill(child.value, signal.SIGKILL)

    def test_a_child_does_not_end_what_its_parent_wants(self, tmp_path: Path) -> None:
        future = UsePublisher(tmp_path)
        future.publish(uses(["x"], 5, 5))
        process = multiprocessing.get_context("fork").Process(target=future.close)
        process.start()
        process.join()
        assert len(PlannedUses(tmp_path).jobs) == 1
        future.close()
        assert PlannedUses(tmp_path).jobs == []

    def test_a_use_that_is_over(self, tmp_path: Path) -> None:
        future = UsePublisher(tmp_path)
        future.publish(uses(["a", "b"], [10, 10], [20, 20], [100, NEVER]), position=5)
        asked = np.array([object_name("a"), object_name("b"), object_name("c")], np.uint64)
        assert PlannedUses(tmp_path).due(asked).tolist() == [
            0.005,
            0.005,
            np.inf,
        ]  # a millisecond each, as long as unknown
        future.advance(15)
        assert PlannedUses(tmp_path).due(asked).tolist() == [0.0, 0.0, np.inf]
        future.advance(21)
        due = PlannedUses(tmp_path).due(asked)
        assert 0 < due[0] < np.inf
        assert due[1:].tolist() == [np.inf, np.inf]


def _publish_fork_and_wait(folder: str, ready: Any, child: Any) -> None:
    future = UsePublisher(Path(folder))
    future.publish(uses(["x"], 5, 5))
    if forked := os.fork():
        child.value = forked  # which both share
        ready.set()
    signal.pause()
    future.close()
