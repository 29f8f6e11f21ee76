"""Iterable data sets that only they can order, inline and in threads: torch's batches, in torch's order."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from full_run import full_only
from loader_support import ended, outcomes
from torch.utils.data import IterableDataset, get_worker_info
from window_support import Each, inline
from window_support import threads as in_threads

from penstock.loader.executors.threads import ThreadExecutor
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.stream import StreamFetch
from penstock.loader.user_state import UserStates, WorkerState
from penstock.plan.stream import StreamStart

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Parts(IterableDataset[int]):
    """Worker w yields ``counts[w]`` items that say whose they are; without workers all of them."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.epoch = 0
        self.begun: list[tuple[Any, int]] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        self.begun.append((None if info is None else info.id, threading.get_ident()))
        mine = range(len(self.counts)) if info is None else [info.id]
        return iter([10_000 * self.epoch + 100 * w + k for w in mine for k in range(self.counts[w])])


class Breaks(Parts):
    """The stream of worker 0 breaks behind its first two items."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from [0, 1] if info is None or info.id == 0 else [100, 101, 102, 103]
        if info is None or info.id == 0:
            raise LookupError("the stream broke")


class Never(Parts):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("no such stream")


class Bare:
    """An iterator that has ``__next__`` alone, which is all that torch asks for."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __next__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left


class OverBare(Parts):
    def __iter__(self) -> Any:
        return Bare(5)


class Resumable(Parts):
    """Its iterator has a state."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        number = 0 if info is None else info.id
        return Place(100 * number, self.counts[number])


class Place:
    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.had, self.loaded = first, count, 0, False

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> int:
        if self.had == self.count:
            raise StopIteration
        self.had += 1
        return self.first + self.had - 1

    def state_dict(self) -> dict[str, int]:
        return {"had": self.had}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.had, self.loaded = state["had"], True


def endless() -> Iterator[BatchRequest]:
    return (BatchRequest([], []) for _ in itertools.count())


def fetch(data: Any, batch_size: int | None = 2, drop_last: bool = False, collate_fn: Any = list) -> StreamFetch:
    return StreamFetch(data, collate_fn, batch_size=batch_size, drop_last=drop_last)


def threads(data: Any, count: int, *, fetcher: StreamFetch | None = None, **options: Any) -> Each:
    return in_threads(endless(), fetcher or fetch(data), count, **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("n", [0, 1, 6, 7])
def test_inline_as_torch(n: int, batch_size: int, drop_last: bool) -> None:
    theirs = [batch.tolist() for batch in torch.utils.data.DataLoader(Parts([n]), batch_size, drop_last=drop_last)]
    assert outcomes(inline(endless(), fetch(Parts([n]), batch_size, drop_last))) == theirs


def test_without_batching_as_torch() -> None:
    assert list(torch.utils.data.DataLoader(Parts([3]), None, collate_fn=str)) == ["0", "1", "2"]
    fetcher = fetch(Parts([3]), None, collate_fn=str)
    assert outcomes(inline(endless(), fetcher)) == ["0", "1", "2"]


COUNTS = [[4, 4], [0, 3], [5, 0], [0, 0], [1, 6, 3], [2, 0, 9, 1], [7]]


@full_only("threads for each", but=["[4, 4]-True", "[0, 3]-False", "[1, 6, 3]-False"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_threads_take_turns_as_torchs_workers_do(counts: list[int], drop_last: bool) -> None:
    """One that ends is left out, one may have nothing at all; partial batches are per worker."""
    loader = torch.utils.data.DataLoader(
        Parts(counts), 2, num_workers=len(counts), drop_last=drop_last, multiprocessing_context="fork"
    )
    with ended(iter(loader)) as theirs:
        expected = [batch.tolist() for batch in theirs]
    data = Parts(counts)
    made = list(threads(data, len(counts), fetcher=fetch(data, drop_last=drop_last)))
    assert [one.batch for one in made] == expected
    assert [one.worker for one in made] == [batch[0] // 100 for batch in expected]
    assert [one.number for one in made] == list(range(len(expected)))
    assert [one.metrics.samples for one in made] == [len(batch) for batch in expected]


def test_a_batch_says_what_it_took() -> None:
    class Slow(Parts):
        def __iter__(self) -> Iterator[int]:
            threading.Event().wait(0.02)
            yield 1
            threading.Event().wait(0.02)
            yield 2

    metrics = BatchMetrics()
    fetcher = fetch(Slow([2]), 2, collate_fn=lambda items: threading.Event().wait(0.02))
    fetcher(BatchRequest([], []), metrics)
    assert metrics.samples == 2
    assert metrics.fetch > 0.035
    assert metrics.collate > 0.015


def test_each_thread_begins_its_own_iterator_in_itself() -> None:
    data = Parts([4, 4, 4])
    executor = ThreadExecutor(fetch(data), 3, None, seed=50)
    for _ in range(2):  # workers that persist begin anew
        batches = threads(data, 3, executor=executor, persistent=True)
        assert [batch.batch[0] // 100 for batch in batches] == [0, 1, 2, 0, 1, 2]
    assert sorted(number for number, _ in data.begun) == [0, 0, 1, 1, 2, 2]
    assert len({thread for _, thread in data.begun}) == 3
    assert threading.get_ident() not in {thread for _, thread in data.begun}


def test_the_epoch_is_told_to_data_sets_that_want_it() -> None:
    data = Parts([2])
    assert outcomes(inline(endless(), fetch(data), epoch=StreamStart(epoch=3))) == [[30_000, 30_001]]
    assert outcomes(threads(data, 1, epoch=StreamStart(epoch=4))) == [[40_000, 40_001]]
    assert outcomes(threads(data, 1)) == [[40_000, 40_001]], "None leaves it to the data set"


def test_iterators_with_nothing_but_next() -> None:
    assert outcomes(inline(endless(), fetch(OverBare([5])))) == [[4, 3], [2, 1], [0]]


def test_the_end_is_the_end() -> None:
    """Whoever has said so once is not asked again, as in torch."""

    class Again:
        def __init__(self) -> None:
            self.script = [1, 2, 3, StopIteration, 5, 6]

        def __next__(self) -> int:
            item = self.script.pop(0)
            if item is StopIteration:
                raise StopIteration
            return item  # type: ignore[return-value]

    class OverAgain(Parts):
        def __iter__(self) -> Any:
            return Again()

    batches = inline(endless(), fetch(OverAgain([0])))
    assert outcomes(batches) == [[1, 2], [3]]
    assert outcomes(batches) == []


def test_errors_of_a_stream_come_in_their_place_and_the_others_go_on() -> None:
    assert outcomes(inline(endless(), fetch(Breaks([0]), 1))) == [[0], [1], "LookupError"]
    data = Breaks([0, 0])
    assert outcomes(threads(data, 2, fetcher=fetch(data, 1))) == [[0], [100], [1], [101], "LookupError", [102], [103]]
    iterator = threads(data, 2, fetcher=fetch(data, 1))
    for _ in range(4):
        next(iterator)
    with pytest.raises(LookupError, match="the stream broke"):
        next(iterator)
    assert (iterator.number, iterator.worker) == (4, 0)


def test_errors_of_iter_come_once_for_each_worker() -> None:
    with pytest.raises(LookupError, match="no such stream"):
        inline(endless(), fetch(Never([0])))
    assert outcomes(threads(Never([0, 0]), 2)) == ["LookupError"] * 2


def test_errors_of_worker_init_come_once_for_each_worker() -> None:
    def init(number: int) -> None:
        if number == 1:
            raise ValueError("cannot start")

    data = Parts([4, 4])
    assert outcomes(threads(data, 2, init=init)) == [[0, 1], "ValueError", [2, 3]]


def test_errors_of_collate_functions() -> None:
    def collate(items: list[int]) -> int:
        if 3 in items:
            raise ArithmeticError("three does not collate")
        return sum(items)

    assert outcomes(inline(endless(), fetch(Parts([6]), 2, collate_fn=collate))) == [1, "ArithmeticError", 9]


def test_whatever_is_ready() -> None:
    """A worker that hangs holds no more than its share; the others do the rest."""
    hang = threading.Event()

    class Hangs(Parts):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            for k in range(8):
                if info.id == 0:
                    hang.wait(20)
                yield 100 * info.id + k

    data = Hangs([0, 0])
    batches = threads(data, 2, in_order=False)
    seen = [next(batches) for _ in range(4)]
    assert [one.batch for one in seen] == [[100, 101], [102, 103], [104, 105], [106, 107]]
    hang.set()
    assert sorted(outcomes(batches)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_time_out_is_not_the_end() -> None:
    go = threading.Event()

    class Waits(Parts):
        def __iter__(self) -> Iterator[int]:
            go.wait(20)
            yield from range(3)

    batches = threads(Waits([0]), 1, timeout=0.05)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"timed out after 0\.05 seconds: worker 0 was at batch 0 of this iterator"
        ):
            next(batches)
    go.set()
    flow = batches.window._flow
    flow.config = replace(flow.config, timeout=20)
    assert outcomes(batches) == [[0, 1], [2]]


def test_what_is_in_flight_is_bounded() -> None:
    made: list[int] = []

    class Noting(Parts):
        def __iter__(self) -> Iterator[Any]:
            for k in range(50):
                made.append(k)
                yield torch.zeros(1000, dtype=torch.uint8)

    data = Noting([0, 0])
    batches = threads(data, 2, fetcher=fetch(data, 1, collate_fn=torch.stack), depth=10, max_bytes=3500)
    for number in range(12):
        next(batches)
        threading.Event().wait(0.005)
        assert len(made) <= number + 1 + 3


@pytest.mark.parametrize("kind", [Parts, Resumable])
@pytest.mark.parametrize("counts", [[7], [5, 8], [2, 0, 9]], ids=str)
def test_going_on_from_any_batch(kind: type[Parts], counts: list[int]) -> None:
    """With states of the iterators, or by making again what was had: the same batches come, in the same order."""
    workers = len(counts)

    def begin(states: UserStates) -> Each:
        data, begun = kind(counts), states.begin(fresh=True)
        return threads(data, workers, resume=begun.resumed.get, first=begun.next)

    def fresh() -> UserStates:
        return UserStates(workers, stream=True)

    whole = [one.batch for one in begin(fresh())]
    assert len(whole) == sum(-(-n // 2) for n in counts)
    for stop in range(len(whole) + 1):
        states = fresh()
        batches = begin(states)
        for _ in range(stop):
            made = next(batches)
            states.delivered(made.worker, made.state)
        again = fresh().load(states.state())
        assert [one.batch for one in begin(again)] == whole[stop:], f"stopped after batch {stop}"


def test_going_on_in_a_later_epoch() -> None:
    """What was had is made again in the epoch that runs, also where the snapshot is of the one before."""
    data = Parts([5])
    fetcher = fetch(data)
    fetcher.load_state_dict(WorkerState({}, 1))
    assert outcomes(inline(endless(), fetcher, epoch=StreamStart(epoch=3))) == [[30_002, 30_003], [30_004]]
    seen: list[int] = []

    class Telling(Parts):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)
            super().set_epoch(epoch)

    fetcher = fetch(Telling([5]))
    fetcher.load_state_dict(WorkerState({}, 5, ended=1))
    assert outcomes(inline(endless(), fetcher, epoch=StreamStart(epoch=3))) == [[30_002, 30_003], [30_004]]
    assert seen == [2, 3]


def test_states_of_iterators_travel_with_their_batches() -> None:
    made = list(inline(endless(), fetch(Resumable([6]))))
    assert all(one.state is not None for one in made)
    assert len({one.state["iterator"] for one in made}) == 3
    assert [one.state for one in inline(endless(), fetch(Parts([6])))] == [None] * 3


def test_dropping_the_batches_drops_the_iterators() -> None:
    over: list[str] = []

    class Closing(Parts):
        def __iter__(self) -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                over.append("over")

    data = Closing([0, 0])
    batches = threads(data, 2)
    next(batches)
    next(batches)
    batches.close()
    assert outcomes(batches) == []
    del batches
    for _ in range(100):
        gc.collect()
        if len(over) == 2:
            break
        threading.Event().wait(0.02)
    assert over == ["over"] * 2


def test_random_counts_as_torchs_rule() -> None:
    """Against the rule itself, which the test above compares with torch for a few cases."""
    draw = random.Random(5)
    for _ in range(40):
        counts = [draw.randrange(0, 12) for _ in range(draw.randrange(1, 5))]
        size = draw.randrange(1, 5)
        lanes = [
            [list(range(100 * w + k, 100 * w + min(k + size, n))) for k in range(0, n, size)]
            for w, n in enumerate(counts)
        ]
        expected = [batch for turn in itertools.zip_longest(*lanes) for batch in turn if batch is not None]
        data = Parts(counts)
        batches = threads(data, len(counts), fetcher=fetch(data, size), depth=draw.randrange(1, 9))
        assert outcomes(batches) == expected
