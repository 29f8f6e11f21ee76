"""How a stream asks: little at first, all that it may as soon as somebody reads on, and anew after a seek."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from busy_support import HANG

from penstock.storage.stream import BlockStream
from penstock.storage.transfer import Cancel

BLOCK, SMALL = 1600, 100
DATA = bytes(range(256)) * 100


class Source:
    """Ranges of `DATA`, each of which is held back until it is let go."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.held = threading.Condition()
        self.free: set[int] = set()
        self.open = False

    def fetch(self, begin: int, end: int, cancel: Cancel) -> bytes:
        self.asked.put((begin, end))
        with self.held:
            assert self.held.wait_for(lambda: self.open or begin in self.free or cancel.is_set(), 10)
        return DATA[begin:end]

    def let_go(self, *begins: int) -> None:
        with self.held:
            self.free.update(begins)
            self.open = not begins
            self.held.notify_all()

    def next(self, count: int) -> list[tuple[int, int]]:
        """The next requests in the order of their bytes; there are no more for the moment."""
        found = [self.asked.get(timeout=HANG) for _ in range(count)]
        assert self.asked.empty()
        return sorted(found)


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.let_go()


def test_reading_on_opens_the_window_before_the_first_block_is_complete(source: Source) -> None:
    source.let_go(0, 10_000)
    with BlockStream(source.fetch, 0, len(DATA), block=BLOCK, parallel=4) as stream:
        assert stream.read(SMALL) == DATA[:SMALL]
        assert source.next(2) == [(0, SMALL), (SMALL, BLOCK)]  # a look at a header: one block
        reader = threading.Thread(target=stream.read, args=(1,))
        reader.start()
        assert source.next(3) == [(BLOCK * k, BLOCK * (k + 1)) for k in (1, 2, 3)]  # and the rest of the first: 4
        source.let_go(SMALL)
        reader.join(10)
        assert stream.tell() == SMALL + 1
        assert stream.seek(10_000) == 10_000
        assert stream.read(5) == DATA[10_000:10_005]
        assert source.next(2) == [(10_000, 10_000 + SMALL), (10_000 + SMALL, 10_000 + BLOCK)]


def test_what_is_read_as_a_whole_is_asked_for_at_once(source: Source) -> None:
    result: list[bytes] = []
    reader = threading.Thread(
        target=lambda: result.append(BlockStream(source.fetch, 7, 7 + 3 * BLOCK, block=BLOCK, parallel=4).read())
    )
    reader.start()
    assert source.next(3) == [(7 + BLOCK * k, 7 + BLOCK * (k + 1)) for k in range(3)]
    source.let_go()
    reader.join(10)
    assert result == [DATA[7 : 7 + 3 * BLOCK]]


@pytest.mark.parametrize(("block", "parallel"), [(1, 1), (1, 4), (15, 2), (16, 2), (100_000, 3), (999, 1)])
def test_all_bytes_whatever_the_numbers(block: int, parallel: int) -> None:
    end = min(len(DATA), 40 * block)
    stream = BlockStream(lambda b, e, _: DATA[b:e], 3, end, block=block, parallel=parallel)
    assert stream.read() == DATA[3:end]
    assert stream.seek(max(0, end - 2)) == max(0, end - 2)
    assert stream.read() == DATA[max(0, end - 2) : end]
