"""Look-ahead: what is needed next is there, no more than allowed, and nothing is left of it."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG

from penstock.errors import StorageError, StorageNotFoundError
from penstock.storage import Cache, RemoteSource, Storage
from penstock.storage.futures import Futures
from penstock.storage.prefetch import CopiesAhead, Use

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
    ahead = CopiesAhead(storage, ahead_bytes=3 * SIZE)
    ahead.follow(in_turn(urls))
    assert sorted(seen.wait(4)) == [0, 1, 2, 3]  # what is needed now, and three more
    for turn in range(12):
        assert ahead.get(urls[turn]).read_at(0, 1) == bytes([turn])
        ahead.advance(10 * turn + 9)
        assert max(seen.asked) <= turn + 3
        ahead.advance(10 * turn + 10)
        seen.wait(min(12, turn + 5))
    assert sorted(seen.asked) == list(range(12))
    ahead.close()


@pytest.mark.parametrize(("size", "expected"), [(SIZE, 16), (0, 4), (9 << 20, 5), (100 << 20, 4)])
def test_as_many_come_at_a_time_as_there_may_be_requests(server: Any, tmp_path: Path, size: int, expected: int) -> None:
    """A small object makes one request, a large one several; what is of unknown size may be large."""
    storage = Storage(cache=Cache(tmp_path, max_bytes=4 << 30), parallel=16)
    urls = stored(server, 30)
    uses = [Use(url, n, n, size=size, stat=RemoteSource(url, storage).stat) for n, url in enumerate(urls)]
    arrived = threading.Semaphore(0)

    def hang(*_: Any) -> str:
        arrived.release()
        return "hang"

    server.fault = hang
    ahead = CopiesAhead(storage, ahead_bytes=4 << 30)
    ahead.follow(uses)
    for _ in range(expected):
        assert arrived.acquire(timeout=HANG)
    assert not arrived.acquire(timeout=0.3)
    server.fault = lambda *_: None
    server.release.set()
    assert {ahead.get(url).size for url in urls} == {SIZE}
    ahead.close()


def test_room_is_made_by_what_is_needed_later(server: Any, tmp_path: Path) -> None:
    """The cache holds three: what was used and comes again last makes room; nothing is fetched twice in an epoch."""
    storage = Storage(cache=Cache(tmp_path / "cache", max_bytes=3 * ROOM))
    urls, seen = stored(server, 8), Seen(server)
    ahead = CopiesAhead(storage, ahead_bytes=10 * SIZE)
    ahead.follow([Use(url, 10 * n, 10 * n + 9, 1000 - 10 * n, size=SIZE) for n, url in enumerate(urls)])
    for turn in range(8):
        assert ahead.get(urls[turn]).read_at(0, 1) == bytes([turn])
        ahead.advance(10 * turn + 10)
    assert sorted(seen.asked) == list(range(8))
    assert {number(entry.url) for entry in storage.the_cache().entries()} == {5, 6, 7}
    ahead.close()


def test_an_error_is_raised_in_its_turn(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 4), Seen(server)
    del server.objects["/1.bin"]
    ahead = CopiesAhead(storage, ahead_bytes=10 * SIZE)
    ahead.follow(in_turn(urls))
    seen.wait(3)
    assert ahead.get(urls[0]).read_at(0, 1) == b"\0"
    with pytest.raises(StorageNotFoundError, match=r"1\.bin"):
        ahead.get(urls[1])
    assert ahead.get(urls[2]).read_at(0, 1) == b"\2"
    server.put("1.bin", b"here again")
    assert ahead.get(urls[1]).read_at(0, 10) == b"here again"
    ahead.close()


def test_closing_while_the_server_hangs(server: Any, tmp_path: Path) -> None:
    storage = Storage(cache=Cache(tmp_path), idle=HANG, deadline=2 * HANG)
    urls, asked = stored(server, 4), threading.Event()

    def hang(*_: Any) -> str:
        asked.set()
        return "hang"

    server.fault = hang
    before = threading.active_count()
    ahead = CopiesAhead(storage)
    ahead.follow(in_turn(urls))
    assert asked.wait(HANG)
    assert len(Futures(tmp_path).jobs) == 1
    ahead.close()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-copies"]
    assert Futures(tmp_path).jobs == []
    server.release.set()
    assert threading.active_count() >= before


def test_nobody_holds_it_any_more(server: Any, storage: Storage) -> None:
    urls = stored(server, 2)
    ahead = CopiesAhead(storage)
    ahead.follow(in_turn(urls))
    threads = [thread for thread in threading.enumerate() if thread.name == "penstock-copies"]
    assert threads
    del ahead
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    assert Futures(storage.the_cache().folder).jobs == []


def _read(ahead: CopiesAhead, urls: list[str]) -> None:
    for n, url in enumerate(urls):
        assert ahead.get(url).read_at(0, 1) == bytes([n])
        ahead.advance(10 * n + 10)
    ahead.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_opens_copies_itself(server: Any, storage: Storage, method: str) -> None:
    urls, seen = stored(server, 6), Seen(server)
    ahead = CopiesAhead(storage, ahead_bytes=2 * SIZE)
    ahead.follow(in_turn(urls))
    process = multiprocessing.get_context(method).Process(target=_read, args=(ahead, urls))
    process.start()
    process.join(HANG)
    assert process.exitcode == 0
    assert sorted(seen.asked) == list(range(6))
    assert len(Futures(storage.the_cache().folder).jobs) == 1
    copy = pickle.loads(pickle.dumps(ahead))
    assert copy.get(urls[3]).read_at(0, 1) == b"\3"
    ahead.close()


def test_another_sequence_takes_its_place(server: Any, storage: Storage) -> None:
    urls, seen = stored(server, 8), Seen(server)
    ahead = CopiesAhead(storage, ahead_bytes=SIZE)
    ahead.follow(in_turn(urls[:4]))
    seen.wait(2)
    ahead.follow(in_turn(urls[4:]))
    assert ahead.get(urls[4]).read_at(0, 1) == b"\4"
    ahead.advance(25)
    seen.wait(5)
    assert set(seen.asked) <= {0, 1, 2, 4, 5, 6, 7}
    ahead.follow([Use(url, 0, 9, whole=False) for url in urls[2:4]])
    assert not storage.the_cache().has(storage.open(urls[3]))
    ahead.close()
    with pytest.raises(StorageError):
        ahead.get("http://127.0.0.1:9/none")
