"""`ReadAhead`: which pages are in memory when, that nobody waits for what does not come, and that threads end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from full_run import full_only

from penstock.datasets.readahead import ReadAhead
from penstock.errors import ServerUnavailableError
from penstock.plan.share import MiniEpoch

ROWS = 10  # of a page
BYTES = 8 * ROWS


class Numbers:
    """Slices of numbers: row r of the slice of mini-epoch m is ``1000 m + r``. Batches come in uneven sizes."""

    def __init__(self, *sizes: int, step: int = 7) -> None:
        self.sizes, self.step = sizes, step
        self.asked: list[tuple[int, int, int]] = []
        self.open = 0
        self.fail_at: int | None = None
        self.error: type[Exception] = OSError
        self.gate = threading.Event()
        self.gate.set()

    def place(self, number: int) -> MiniEpoch:
        return MiniEpoch(0, number, max(self.sizes))

    def size(self, place: MiniEpoch) -> int:
        return self.sizes[place.mini_epoch]

    def after(self, place: MiniEpoch) -> MiniEpoch:
        return self.place(min(place.mini_epoch + 1, len(self.sizes) - 1))

    def read(self, place: MiniEpoch, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        self.asked.append((place.mini_epoch, begin, end))
        self.open += 1
        try:
            for first in range(begin, end, self.step):
                assert self.gate.wait(10)
                rows = np.arange(first, min(first + self.step, end))
                if self.fail_at in rows:
                    raise self.error(f"row {self.fail_at}")
                yield pa.record_batch([pa.array(1000 * place.mini_epoch + rows)], names=["row"])
        finally:
            self.open -= 1


@pytest.fixture
def ahead() -> Iterator[Callable[..., ReadAhead]]:
    made: list[ReadAhead] = []

    def make(slices: Numbers, number: int = 0, first: int = 0, pages: int = 4, **options: bool) -> ReadAhead:
        made.append(
            ReadAhead(
                slices,
                slices.place(number),
                first,
                page_rows=ROWS,
                cache_bytes=pages * BYTES,
                page_bytes=BYTES,
                **options,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.stop()
        one._thread.join(10)
        assert not one._thread.is_alive()


def had(ahead: ReadAhead, place: MiniEpoch, rows: list[int] | range) -> list[int] | None:
    batch = ahead.get(place, np.array(rows))
    return None if batch is None else batch.column("row").to_pylist()


def settled(ahead: ReadAhead) -> list[int]:
    """The pages in memory, once the thread waits."""
    before: list[int] = []
    for _ in range(1000):
        time.sleep(0.02)
        with ahead._changed:
            now = sorted(ahead._pages)
        if now == before:
            return now
        before = now
    raise AssertionError("the thread does not come to rest")


@pytest.mark.parametrize("step", [1, 3, 10, 25, 1000])
@pytest.mark.parametrize("first", [0, 4, 30])
def test_in_order_over_the_ends_of_slices(ahead: Callable[..., ReadAhead], step: int, first: int) -> None:
    slices = Numbers(95, 40, 1, 33, step=step)
    one = ahead(slices, first=first)
    for number, size in enumerate(slices.sizes):
        begin = 0 if number else first
        for start in range(begin, size, 6):
            rows = range(start, min(start + 6, size))
            assert had(one, slices.place(number), rows) == [1000 * number + row for row in rows]
    settled(one)
    assert slices.open == 0, "no stream is left open"
    ends = [(number, begin, end) for number, begin, end in slices.asked]
    assert sum(end - begin for _, begin, end in ends) == sum(slices.sizes) - first, "nothing twice"


@full_only("large files for each", but=["2", "50"])
@pytest.mark.parametrize("pages", [1, 2, 3, 7, 50])
def test_memory_is_bounded(ahead: Callable[..., ReadAhead], pages: int) -> None:
    slices = Numbers(1000)
    one = ahead(slices, pages=pages)
    most = 0
    for start in range(0, 1000, 5):
        assert had(one, slices.place(0), range(start, start + 5)) is not None
        if start % 50 == 0:
            held = settled(one)
            most = max(most, len(held))
            assert held == list(range(held[0], held[-1] + 1))
            assert held[-1] >= min(start // ROWS + 1, 99), "the page after the consumer's is there"
    assert most <= max(3, pages)
    assert most >= min(3, pages)


def test_half_of_the_memory_is_filled_at_a_time(ahead: Callable[..., ReadAhead]) -> None:
    slices = Numbers(10_000)
    one = ahead(slices, pages=16)
    for start in range(0, 10_000, 10):
        had(one, slices.place(0), range(start, start + 10))
        if start > 1000 and start % 500 == 0:
            settled(one)
    assert len(slices.asked) < 10_000 / ROWS / 4


def test_scattered_rows_of_what_is_there(ahead: Callable[..., ReadAhead]) -> None:
    slices = Numbers(57, 20)
    one = ahead(slices, pages=100, whole=True)
    settled(one)
    rng = random.Random(1)
    for _ in range(50):
        rows = [rng.randrange(57) for _ in range(rng.randrange(1, 12))]
        assert had(one, slices.place(0), rows) == rows
    assert had(one, slices.place(1), [19, 0, 5, 5]) == [1019, 1000, 1005, 1005]
    assert one.useful


def test_scattered_rows_are_not_let_go_of_for_the_next_slice(ahead: Callable[..., ReadAhead]) -> None:
    slices = Numbers(60, 60)
    one = ahead(slices, pages=8, whole=True)
    settled(one)
    for row in (55, 3, 59, 20):
        assert had(one, slices.place(0), [row]) == [row]
    assert settled(one)[:6] == list(range(6))
    assert len(settled(one)) <= 8
    assert had(one, slices.place(0), [3, 59]) == [3, 59]
    assert had(one, slices.place(1), [1]) == [1001]
    settled(one)
    assert had(one, slices.place(1), [59, 2]) == [1059, 1002]


def test_nobody_waits_for_what_is_far_off(ahead: Callable[..., ReadAhead]) -> None:
    slices = Numbers(1000, 1000)
    one = ahead(slices, first=100, pages=4)
    held = settled(one)
    assert held == [0, 1, 2, 3]
    place = slices.place(0)
    for rows in ([99], [100, 99], [140, 999], [165], [100, 140, 150], [199, 100]):
        assert had(one, place, rows) is None, rows
    assert had(one, slices.place(1), [0]) is None
    assert had(one, place, [139, 100]) == [139, 100]
    assert had(one, place, [135, 145]) == [135, 145], "the next page but not the one after it"
    settled(one)
    assert one.covers(place, 120)
    assert one.covers(place, 999)
    assert not one.covers(place, 100), "let go of for the next pages"
    assert not one.covers(place, 99)
    assert not one.covers(slices.place(1), 0)


@full_only("large files")
def test_a_consumer_that_leaves_most_of_it_is_noticed(ahead: Callable[..., ReadAhead]) -> None:
    for stride, useful in ((1, True), (2, True), (8, False)):
        slices = Numbers(2000)
        one = ahead(slices)
        for start in range(0, 200, 3 * stride):
            settled(one)
            assert had(one, slices.place(0), range(start, start + 3)) is not None
        assert one.useful is useful, stride


@pytest.mark.parametrize("error", [OSError, ServerUnavailableError])
@pytest.mark.parametrize("waits", [True, False])
def test_errors(ahead: Callable[..., ReadAhead], error: type[Exception], waits: bool) -> None:
    """What is wrong with the program is raised; what is wrong with the server, the consumer finds out by asking."""
    slices = Numbers(100)
    slices.fail_at, slices.error = 25, error
    if waits:
        slices.gate.clear()
        threading.Timer(0.2, slices.gate.set).start()
    one, place = ahead(slices), slices.place(0)
    assert had(one, place, range(10)) == list(range(10))
    assert had(one, place, range(10, 20)) == list(range(10, 20))
    if not waits:
        settled(one)
    if error is OSError:
        with pytest.raises(OSError, match="row 25"):
            had(one, place, range(20, 30))
    else:
        assert had(one, place, range(20, 30)) is None
    assert had(one, place, range(10, 20)) == list(range(10, 20)), "what is there is there"
    assert not one.covers(place, 50)


def test_who_waits_is_let_go_when_it_stops(ahead: Callable[..., ReadAhead]) -> None:
    slices = Numbers(100)
    slices.gate.clear()
    one = ahead(slices)
    threading.Timer(0.2, one.stop).start()
    assert had(one, slices.place(0), [3]) is None
    slices.gate.set()
    assert had(one, slices.place(0), [3]) is None
    assert not one.covers(slices.place(0), 3)
    one._thread.join(10)
    assert slices.open == 0


def test_several_threads_of_a_consumer(ahead: Callable[..., ReadAhead]) -> None:
    """As long as none of them is more than a page ahead of another, nothing is let go before it is asked for."""
    slices = Numbers(4000, 1)
    one = ahead(slices, pages=3)
    starts, under_way, turn = iter(range(0, 4000, 4)), set[int](), threading.Condition()
    wrong: list[object] = []
    most: list[int] = []

    def begin() -> int | None:
        with turn:
            start = next(starts, None)
            if start is not None:
                under_way.add(start)
                turn.wait_for(lambda: start - min(under_way) <= ROWS, 30)
                most.append(len(under_way))
            return start

    def consume() -> None:
        while (start := begin()) is not None:
            rows = list(range(start, start + 4))
            got = had(one, slices.place(0), rows)
            if got != rows:
                wrong.append((rows, got))
            with turn:
                under_way.remove(start)
                turn.notify_all()

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(most) == 1000
    assert max(most) > 1
