"""Look-ahead: what is needed next is there, no more than allowed, and nothing is left of it."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG

from penstock.errors import StorageNotFoundError
from penstock.storage import Cache, File, RemoteSource, Storage
from penstock.storage.fetcher import Fetcher
from penstock.storage.planned_use import PlannedUses, Use
from penstock.storage.transfer import Cancel

SIZE = 100_000
ROOM = SIZE + 1000


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(cache=Cache(tmp_path / "cache", max_bytes=20 * ROOM), attempts=1)


def stored(server: Any, count: int) -> list[str]:
    return [server.put(f"{number}.bin", bytes([number]) * SIZE) for number in range(count)]


def in_turn(urls: list[str], **more: Any) -> list[Use]:
    """Ten positions for each."""
    return [Use(url, 10 * number, 10 * number + 9, size=SIZE, **more) for number, url in enumerate(urls)]


def copy_of(url: str, storage: Storage) -> File:
    """As a consumer opens it: complete, in transfer, or fetched now."""
    return storage.the_cache().open(RemoteSource(url, storage))


def number(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".bin"))


class Seen:
    """What the server is asked for, as events."""

    def __init__(self, server: Any) -> None:
        self.asked: list[int] = []
        self._changed = threading.Condition()
        server.fault = self._note

    def _note(self, path: str, *_: Any) -> None:
        with self._changed:
            self.asked.append(number(path))
            self._changed.notify_all()

    def wait(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= count, HANG)
            return list(self.asked)


def test_what_is_needed_next_comes_next(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 12), Seen(server)
    ahead = Fetcher(storage, ahead_bytes=3 * SIZE)
    ahead.follow(in_turn(urls))
    assert sorted(seen.wait(4)) == [0, 1, 2, 3]  # what is needed now, and three more
    for turn in range(12):
        assert copy_of(urls[turn], storage).read_at(0, 1) == bytes([turn])
        ahead.advance(10 * turn + 9)
        assert max(seen.asked) <= turn + 3
        ahead.advance(10 * turn + 10)
        seen.wait(min(12, turn + 5))
    assert sorted(seen.asked) == list(range(12))
    ahead.close()


@pytest.mark.parametrize(("size", "expected"), [(SIZE, 16), (0, 16), (9 << 20, 5), (100 << 20, 4)])
def test_as_many_come_at_a_time_as_there_may_be_requests(server: Any, tmp_path: Path, size: int, expected: int) -> None:
    """A small object makes one request, as does one of unknown size; a large one several."""
    storage = Storage(cache=Cache(tmp_path, max_bytes=4 << 30), parallel=16)
    urls = stored(server, 30)
    uses = [Use(url, n, n, size=size, stat=RemoteSource(url, storage).stat) for n, url in enumerate(urls)]
    arrived = threading.Semaphore(0)

    def hang(*_: Any) -> str:
        arrived.release()
        return "hang"

    server.fault = hang
    ahead = Fetcher(storage, ahead_bytes=4 << 30)
    ahead.follow(uses)
    for _ in range(expected):
        assert arrived.acquire(timeout=HANG)
    assert not arrived.acquire(timeout=0.3)
    server.fault = lambda *_: None
    server.release.set()
    assert {copy_of(url, storage).size for url in urls} == {SIZE}
    ahead.close()


def test_room_is_made_by_what_is_needed_later(server: Any, tmp_path: Path) -> None:
    """The cache holds three: what was used and comes again last makes room; nothing is fetched twice in an epoch."""
    storage = Storage(cache=Cache(tmp_path / "cache", max_bytes=3 * ROOM))
    urls, seen = stored(server, 8), Seen(server)
    ahead = Fetcher(storage, ahead_bytes=10 * SIZE)
    ahead.follow([Use(url, 10 * n, 10 * n + 9, 1000 - 10 * n, size=SIZE) for n, url in enumerate(urls)])
    for turn in range(8):
        assert copy_of(urls[turn], storage).read_at(0, 1) == bytes([turn])
        ahead.advance(10 * turn + 10)
    assert sorted(seen.asked) == list(range(8))
    assert {number(entry.url) for entry in storage.the_cache().entries()} == {5, 6, 7}
    ahead.close()


def test_an_object_that_fails_is_left_to_its_reader(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 4), Seen(server)
    del server.objects["/1.bin"]
    ahead = Fetcher(storage, ahead_bytes=10 * SIZE)
    ahead.follow(in_turn(urls))
    seen.wait(3)
    assert copy_of(urls[0], storage).read_at(0, 1) == b"\0"
    with pytest.raises(StorageNotFoundError, match=r"1\.bin"):
        copy_of(urls[1], storage)
    assert copy_of(urls[2], storage).read_at(0, 1) == b"\2"
    server.put("1.bin", b"here again")
    assert copy_of(urls[1], storage).read_at(0, 10) == b"here again"
    ahead.close()


def test_what_a_consumer_waits_for_comes_first(server: Any, tmp_path: Path) -> None:
    """It needs no room that others would take, and its error is raised once."""
    storage = Storage(cache=Cache(tmp_path / "cache", max_bytes=2 * ROOM), parallel=1)
    brought: list[tuple[int, bool]] = []
    begun, free = threading.Event(), threading.Event()

    def bring(turn: int, only_later: bool, cancel: Cancel) -> None:
        brought.append((turn, only_later))
        begun.set()
        assert free.wait(HANG)
        if turn == 3:
            raise OSError("this one is bad")

    uses = [Use(f"http://127.0.0.1:9/{turn}", turn, turn, fetch=partial(bring, turn)) for turn in range(5)]
    ahead = Fetcher(storage)
    ahead.follow(uses)
    assert begun.wait(HANG)
    threading.Timer(1, free.set).start()  # once the consumer waits
    done = lambda use: (use.first, False) in brought  # noqa: E731
    ahead.wait([uses[4]], done)
    assert brought[1] == (4, False)
    with pytest.raises(OSError, match="this one is bad"):
        ahead.wait([uses[3]], lambda use: False)
    ahead.close()


def test_closing_while_the_server_hangs(server: Any, tmp_path: Path) -> None:
    storage = Storage(cache=Cache(tmp_path), idle=HANG, deadline=2 * HANG)
    urls, asked = stored(server, 4), threading.Event()

    def hang(*_: Any) -> str:
        asked.set()
        return "hang"

    server.fault = hang
    before = threading.enumerate()
    ahead = Fetcher(storage)
    ahead.follow(in_turn(urls))
    assert asked.wait(HANG)
    assert len(PlannedUses(tmp_path).jobs) == 1
    ahead.close()
    ahead.close()
    assert not [one for one in threading.enumerate() if one.name == "penstock-fetch" and one not in before]
    assert PlannedUses(tmp_path).jobs == []
    server.release.set()
    assert set(before) <= {*threading.enumerate()}


def test_nobody_holds_it_any_more(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 2), Seen(server)
    ahead = Fetcher(storage)
    ahead.follow(in_turn(urls))
    seen.wait(2)
    for thread in threading.enumerate():
        if thread.name == "penstock-fetch":
            thread.join(HANG)
            assert not thread.is_alive()
    del ahead, thread
    gc.collect()
    assert PlannedUses(storage.the_cache().folder).jobs == []


def test_a_forked_child_fetches_nothing(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 6), Seen(server)
    ahead = Fetcher(storage, ahead_bytes=SIZE)

    def use() -> None:
        ahead.follow(in_turn(urls))
        ahead.advance(50)
        ahead.close()

    ahead.follow(in_turn(urls))
    seen.wait(2)
    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join(HANG)
    assert process.exitcode == 0
    assert sorted(seen.asked) == [0, 1]
    assert len(PlannedUses(storage.the_cache().folder).jobs) == 1
    ahead.close()


def test_another_sequence_takes_its_place(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 8), Seen(server)
    ahead = Fetcher(storage, ahead_bytes=SIZE)
    ahead.follow(in_turn(urls[:4]))
    seen.wait(2)
    ahead.follow(in_turn(urls[4:]))
    assert copy_of(urls[4], storage).read_at(0, 1) == b"\4"
    ahead.advance(25)
    seen.wait(5)
    assert set(seen.asked) <= {0, 1, 2, 4, 5, 6, 7}
    ahead.follow([Use(url, 0, 9, copied=False) for url in urls[2:4]])
    assert not storage.the_cache().has(storage.open(urls[3]))
    ahead.close()
