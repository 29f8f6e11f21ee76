"""The thread executor, and the inline one beside it: order, chunks, errors, waiting, ending."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from busy_support import HANG
from full_run import full_only
from interpreter_support import run
from loader_support import Draws, Faulty, GlobalDraws, Squares, bad_collate, outcomes, plain
from torch.utils.data import get_worker_info
from window_support import Each, each, inline
from window_support import threads as in_threads

from penstock import DataLoader
from penstock.errors import WorkerError
from penstock.loader.executors.base import Event, Executor
from penstock.loader.executors.threads import ThreadExecutor, ThreadPool
from penstock.loader.make import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult


def requests(n: int, size: int) -> Iterator[BatchRequest]:
    for k in range(0, n, size):
        indices = list(range(k, min(k + size, n)))
        yield BatchRequest(indices, [1000 + index for index in indices])


def fetch(data: Any, collate_fn: Any = list) -> Fetch:
    return Fetch(data, collate_fn, batched=True, seed_globals=False)


def threads(data: Any, n: int = 12, size: int = 4, *, count: int = 2, **options: Any) -> Each:
    planned = options.pop("requests", None) or requests(n, size)
    fetcher = options.pop("fetcher", None) or fetch(data)
    return in_threads(planned, fetcher, count, **options)


def soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def alive() -> int:
    return sum(thread.name.startswith("penstock-") for thread in threading.enumerate())


def error_of(batches: Each) -> str:
    """What is raised in place of the next batch."""
    with pytest.raises(Exception) as caught:
        next(batches)
    return caught.type.__name__


class Kept:
    """A batch that one can tell from others, and see go."""


class Who(Squares):
    """Which worker made the item, in which thread."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, info.seed, info.dataset is self, threading.get_ident()


class Bulk(Squares):
    """Wants its batches whole."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(len(indices), index) for index in indices]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("n", "size"), [(0, 3), (1, 3), (12, 4), (13, 4), (9, 1)])
def test_threads_make_what_is_made_inline(n: int, size: int, count: int) -> None:
    expected = list(inline(requests(n, size), fetch(Draws(n))))
    made = list(threads(Draws(n), n, size, count=count))
    assert [one.batch for one in made] == [one.batch for one in expected]
    assert [one.number for one in made] == [one.number for one in expected] == list(range(-(-n // size)))
    for one, other in zip(made, expected, strict=True):
        assert one.metrics.samples == other.metrics.samples == len(other.batch)
        assert one.metrics.fetch > 0
        assert one.metrics.collate > 0
        assert (one.way, one.state) == ("local", None)


def test_inline_seeds_the_global_generators_and_puts_them_back() -> None:
    before = torch.get_rng_state()
    fetcher = Fetch(GlobalDraws(4), list, batched=True, seed_globals=True, keeps_globals=True)
    first, second = [plain([one.batch for one in inline(requests(4, 2), fetcher)]) for _ in range(2)]
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)


def test_all_threads_work_on_the_next_batch() -> None:
    (made,) = threads(Who(40), 40, 40, count=4)
    assert {who[0] for who in made.batch} == {0, 1, 2, 3}
    assert [who[0] for who in made.batch] == sorted(
        (who[0] for who in made.batch), key=[who[0] for who in made.batch].index
    )


def test_data_sets_that_want_whole_batches_get_them() -> None:
    made = list(threads(Bulk(8), 8, 4))
    assert [one.batch for one in made] == [[(4, k) for k in range(4)], [(4, k) for k in range(4, 8)]]


def test_each_thread_is_a_worker() -> None:
    seen: list[Any] = []
    data = Who(30)

    def init(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.id == number
        seen.append((info.id, info.num_workers, info.seed, info.dataset is data))

    batches = threads(data, 30, 30, count=3, init=init)
    made = next(batches).batch
    assert sorted(seen) == [(0, 3, 70, True), (1, 3, 71, True), (2, 3, 72, True)]
    assert {who[:4] for who in made} == set(seen)
    assert len({who[4] for who in made}) == 3
    assert get_worker_info() is None


def test_collate_functions_see_the_worker_too() -> None:
    def collate(samples: list[Any]) -> Any:
        info = get_worker_info()
        return None if info is None else info.num_workers

    assert [one.batch for one in threads(Squares(8), 8, fetcher=fetch(Squares(8), collate))] == [2, 2]


def test_errors_come_in_the_place_of_their_batch() -> None:
    data = Faulty(12, {0, 5, 11})
    expected = ["KeyError", [4, 9], "KeyError", [36, 49], [64, 81], "KeyError"]
    assert outcomes(inline(requests(12, 2), fetch(data))) == expected
    batches = threads(data, 12, 2)
    assert outcomes(batches) == expected
    assert batches.number == 5
    fetcher = fetch(Squares(8), bad_collate)
    assert outcomes(threads(Squares(8), 8, 2, fetcher=fetcher)) == [1, "ArithmeticError", 41, 85]


def test_the_error_of_a_batch_is_that_of_its_first_bad_sample() -> None:
    class Two(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 0:
                time.sleep(0.05)
                raise LookupError("the first")
            raise KeyError("a later one")

    with pytest.raises(LookupError, match="the first") as caught:
        next(threads(Two(8), 8, 8, count=4))
    assert "while loading sample 0" in caught.value.__notes__[0]


def test_errors_do_not_keep_their_batch_alive() -> None:
    class Sample:
        pass

    made: list[Any] = []

    class Holding(Squares):
        def __getitem__(self, index: int) -> Any:
            sample = Sample()
            made.append(weakref.ref(sample))
            if index == 1:
                raise KeyError(index)
            return sample

    batches = threads(Holding(2), 2, 2, count=1)
    gc.collect()
    gc.disable()
    try:
        assert outcomes(batches) == ["KeyError"]
        del batches
        assert soon(lambda: all(sample() is None for sample in made))
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_any_error_reaches_the_consumer(kind: type[BaseException]) -> None:
    data = Faulty(6, {2}, kind)  # type: ignore[arg-type]
    batches = threads(data, 6, 2)
    assert next(batches).batch == [0, 1]
    with pytest.raises(kind):
        next(batches)
    assert next(batches).batch == [16, 25]


def _broken_requests() -> Iterator[BatchRequest]:
    yield from requests(4, 2)
    raise LookupError("the sampler broke")


class _GoesOn:
    """An iterator that could go on behind its error."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> _GoesOn:
        return self

    def __next__(self) -> BatchRequest:
        self.count += 1
        if self.count == 3:
            raise LookupError("the sampler broke")
        return BatchRequest([self.count], [self.count])


@pytest.mark.parametrize("in_order", [True, False])
def test_a_sampler_that_raises(in_order: bool) -> None:
    """Behind the batches that it had planned; then the iteration is over."""
    for planned in (_broken_requests, _GoesOn):
        expected = 3
        batches = threads(Squares(4), requests=planned(), in_order=in_order)
        assert [type(one) for one in outcomes(batches)] == [list, list, str]
        assert outcomes(batches) == []
        here = inline(planned(), fetch(Squares(4)))
        assert len(outcomes(here)) == expected
        assert outcomes(here) == []


def test_an_init_that_fails_tells_whoever_waits_and_grows_no_traceback() -> None:
    def init(number: int) -> None:
        raise ValueError(f"worker {number} cannot start")

    executor = ThreadExecutor(fetch(Squares(4)), 1, init, seed=0)
    lengths = []
    for _ in range(20):
        with pytest.raises(ValueError, match="worker 0 cannot start") as caught:
            next(threads(Squares(4), 4, 4, count=1, executor=executor, persistent=True))
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1
    del executor, caught
    gc.collect()
    assert soon(lambda: alive() == 0), "the error that it remembers must not keep it"


def test_a_time_out_says_at_which_sample() -> None:
    go = threading.Event()

    class Waits(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 6:
                go.wait(20)
            return index

    batches = threads(Waits(8), 8, 4, timeout=0.6)
    assert next(batches).batch == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.6 seconds: worker \d was .*at sample 6"):
            next(batches)
    assert batches.number == 0
    go.set()
    time.sleep(0.05)
    assert outcomes(batches) == [[4, 5, 6, 7]]


class _Scripted(Executor):
    """Answers what a function says; by default nothing, until the deadline."""

    tells_begin = False

    def __init__(self, workers: int = 1, answer: Callable[[BatchRequest, int], list[Event]] = lambda *_: []) -> None:
        self.workers, self.lock, self.pid = workers, threading.RLock(), os.getpid()
        self.answer, self.events, self.asked, self.waits = answer, list[Event](), list[int](), 0

    def submit(self, requests: Any, worker: int) -> None:
        for request in requests:
            if isinstance(request, BatchRequest):
                self.asked.append(worker)
                self.events += self.answer(request, worker)

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        if not self.events and deadline:
            self.waits += 1
            time.sleep(max(0.0, deadline - time.monotonic()))
        events, self.events = self.events, []
        return events

    def resize(self, workers: int) -> None:
        pass

    def close(self, patience: float) -> None:
        self.closed = True


def test_streams_that_have_ended_are_not_asked_again() -> None:
    """Three, two of which are empty."""

    def answer(request: BatchRequest, worker: int) -> list[Event]:
        metrics = BatchMetrics()
        return [BatchResult(request.number, metrics, request.number, worker, run=request.run, ended=worker < 2)]

    executor = _Scripted(3, answer)
    assert [one.batch for one in each(requests(6, 1), executor, depth=1, stream=True)] == [2, 3, 4, 5]
    assert executor.asked == [0, 1, 2, 2, 2, 2]


class _Interrupted(_Scripted):
    """Interrupted while it waits, which does no harm; and then at work, which may."""

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        if not deadline:
            return []
        self.waiting, self.waits = not self.waits, self.waits + 1
        raise KeyboardInterrupt


def test_after_an_interruption_at_work_nothing_is_handed_out() -> None:
    batches = each(requests(4, 2), _Interrupted(), timeout=20)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    with pytest.raises(WorkerError, match="was interrupted"):
        next(batches)


def test_a_time_out_comes_at_the_deadline() -> None:
    executor = _Scripted()
    batches = each(requests(4, 2), executor, timeout=0.05)
    with pytest.raises(RuntimeError, match="timed out after"):
        next(batches)
    assert executor.waits == 1


def test_the_fast_overtake_if_they_may() -> None:
    go = threading.Event()

    class Overtaken(Squares):
        def __getitem__(self, index: int) -> int:
            assert index or go.wait(40), "by nobody"
            return super().__getitem__(index)

    data = Overtaken(12)
    made = []
    for one in threads(data, 12, 1, in_order=False, depth=4):
        made.append(one)
        if len(made) == 11:
            go.set()
    assert sorted(one.batch[0] for one in made) == [n * n for n in range(12)]
    assert made[-1].number == 0
    assert sorted(one.number for one in made) == list(range(12))
    assert [one.number for one in threads(data, 12, 1, depth=4)] == list(range(12))


def test_prefetching_is_bounded_by_number_and_by_bytes() -> None:
    made: list[int] = []

    class Noting(Squares):
        def __getitem__(self, index: int) -> Any:
            made.append(index)
            return torch.zeros(1000, dtype=torch.uint8)

    fetcher = fetch(Noting(99), torch.stack)
    for options, ahead in (({}, 4), ({"max_bytes": 5000}, 2), ({"max_bytes": 1}, 1), ({"max_bytes": 10**9}, 4)):
        made.clear()
        batches = threads(Noting(99), 40, 2, fetcher=fetcher, **options)
        seen = 0
        for one in batches:
            seen += 1
            if seen == 5:
                assert soon(lambda: len(made) == 2 * (5 + ahead)), "as far ahead as it may"  # noqa: B023
            time.sleep(0.002)
            assert one.batch.shape == (2, 1000)
            assert len(made) <= 2 * (seen + ahead)
        assert (len(made), seen) == (40, 20)
    made.clear()
    batches = threads(Noting(99), 40, 2, fetcher=fetcher)
    assert soon(lambda: len(made) == 2 * 4)
    next(batches)


def test_the_largest_of_the_last_batches_bounds_the_bytes_in_flight() -> None:
    class Sizes(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1000 if index == 0 else 10, dtype=torch.uint8)

    batches = threads(Sizes(20), 20, 1, fetcher=fetch(Sizes(20), torch.cat), max_bytes=2000)
    most = threads(Sizes(20), 20, 1, fetcher=fetch(Sizes(20), torch.cat)).window.depth
    assert most > 2
    assert [batches.window.depth for _ in batches] == [2] * 8 + [most] * 12


def test_a_batch_that_is_done_after_the_end_is_not_kept() -> None:
    begun, go, kept = threading.Event(), threading.Event(), weakref.WeakSet[Kept]()

    def collate(samples: Any) -> Any:
        batch = Kept()
        kept.add(batch)
        begun.set()
        assert go.wait(HANG)
        return batch

    # In two chunks: whoever makes the last one collates.
    batches = threads(Squares(4), 4, count=2, fetcher=fetch(Squares(4), collate))
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(error_of(batches)), daemon=True)
    thread.start()
    assert begun.wait(HANG)
    batches.close()
    thread.join(HANG)
    assert seen == ["WorkerError"]
    assert len(kept) == 1
    go.set()
    assert soon(lambda: not kept)


def test_closing_wakes_whoever_waits() -> None:
    for in_order in (True, False):
        go = threading.Event()

        class Waits(Squares):
            def __getitem__(self, index: int) -> int:
                go.wait(20)  # noqa: B023
                return index

        batches = threads(Waits(8), 8, 4, in_order=in_order, timeout=0)
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(error_of(batches)), daemon=True)  # noqa: B023
        thread.start()
        time.sleep(0.05)
        batches.close()
        thread.join(5)
        assert seen == ["WorkerError"]
        go.set()
        batches.close()


def test_closed_threads_and_a_fork_of_them_raise_instead_of_waiting() -> None:
    fetcher = fetch(Squares(40))
    executor = ThreadExecutor(fetcher, 2, None, seed=0)
    batches = threads(Squares(40), 40, 4, executor=executor)
    next(batches)
    executor.close(0)
    executor.close(0)
    with pytest.raises(WorkerError, match="it was closed, or this is a fork"):
        next(batches)
    pool = ThreadPool(2, boards=memoryview(array("Q", [0] * 4)))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            pool.submit(int)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "the threads of this DataLoader are gone" in pipe.read()
    os.waitpid(pid, 0)


def test_a_fork_does_not_wait_for_threads_that_it_has_not() -> None:
    begun, go = threading.Event(), threading.Event()

    class Waits(Squares):
        def __getitem__(self, index: int) -> int:
            begun.set()
            go.wait(20)
            return index

    batches = threads(Waits(4), 4, 4, timeout=0)
    assert begun.wait(20)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    go.set()
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read().startswith("WorkerError: the workers of this DataLoader have ended")
    os.waitpid(pid, 0)
    assert next(batches).batch == [0, 1, 2, 3]


def test_threads_end_with_their_executor() -> None:
    gc.collect()  # what errors of other tests held
    assert soon(lambda: alive() == 0), [thread.name for thread in threading.enumerate()]
    executor = ThreadExecutor(fetch(Squares(8)), 2, None, seed=0)
    batches = threads(Squares(8), 8, 4, executor=executor, persistent=True)
    assert len(outcomes(batches)) == 2
    assert alive() == 2
    del executor, batches
    assert soon(lambda: gc.collect() >= 0 and alive() == 0)


def test_a_newer_iterator_takes_over_the_threads() -> None:
    executor = ThreadExecutor(fetch(Draws(30)), 2, None, seed=0)
    old = threads(Draws(30), 30, 3, executor=executor, persistent=True)
    next(old)
    new = threads(Draws(30), 30, 3, executor=executor, persistent=True)
    with pytest.raises(RuntimeError, match="a newer iterator of this DataLoader has taken over"):
        next(old)
    assert [one.batch for one in new] == [one.batch for one in inline(requests(30, 3), fetch(Draws(30)))]


def test_a_loader_inside_a_worker_thread() -> None:
    class Nested(Squares):
        def __getitem__(self, index: int) -> Any:
            inner = [one.batch for one in threads(Who(6), 6, 3, count=3)]
            info = get_worker_info()
            assert info is not None
            return sorted({who[1] for batch in inner for who in batch}), info.num_workers

    assert outcomes(threads(Nested(4), 4, 2)) == [[[[3], 2]] * 2] * 2


PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
from loader_support import Slow
from test_threads import fetch, requests, threads
data = Slow(400, dict.fromkeys(range(1, 400), 0.02))
iterator = threads(data, 400, 2, timeout=0)
next(iterator)
print("ready", flush=True)
{end}
"""


@full_only("a program for each", but=["raise KeyError(3)-1"])
@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise KeyError(3)", 1), ("sys.exit(3)", 3)])
def test_programs_end_with_an_iterator_alive(end: str, code: int) -> None:
    tests = Path(__file__).parent
    path = [str(tests), str(tests.parent / "support"), *[entry for entry in sys.path if entry.endswith("src")]]
    program = PROGRAM.format(path=path, end=end + "\nlast = time.monotonic()")
    done = run(["-c", program], timeout=HANG)
    assert done.returncode == code, done.stderr
    assert done.stdout == "ready\n"
    assert ("KeyError" in done.stderr) == (code == 1)
    assert "Exception ignored" not in done.stderr


class Sleepy(Squares):
    releases_gil = True

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.2)
        return index


def test_threads_whose_consumer_is_gone_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """As after Ctrl-C: nobody reads the pipe any more to which a thread of a worker process writes its batch."""
    with DataLoader(Sleepy(8), 2, num_workers=1, threads_per_worker=2) as loader:
        iterator = iter(loader)
        (member,) = iterator._batches.executor.members  # type: ignore[attr-defined]
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, member.channel.reads)
        os.close(nothing)
        time.sleep(1)
        loader.close()
    assert capfd.readouterr().err == ""
