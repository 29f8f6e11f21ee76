"""`close()` while others are at work: consumers that wait, loaders that fork, files that take over the numbers."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from faults_support import Big, Range, Slow, within
from full_run import full_only
from interpreter_support import FULL
from leak_support import wait_gone
from pairwise import each_value
from program_support import Program
from torch.utils.data import IterableDataset, get_worker_info

from penstock import DataLoader
from penstock.errors import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")

HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2},
    "threads inside": {"num_workers": 1, "threads_per_worker": 2},
    "auto": {"num_workers": "auto", "seed": 0},
}
PROCESSES = ["process", "threads inside"]
WORKERS = ["thread", *PROCESSES]


class Consumer(threading.Thread):
    """Goes through an iterator; what it had, and how it ended."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(daemon=True)
        self.iterator = iterator
        self.had: list[Any] = []
        self.asking = False
        self.end: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                self.asking = True
                batch = next(self.iterator)
                self.asking = False
                self.had.append(batch)
        except BaseException as error:
            self.end = error.with_traceback(None)


@contextmanager
def consuming(loader: Any) -> Iterator[Consumer]:
    """A thread that goes through the loader, which is closed in the block. It is told so, and never that the pass was
    over while it was not.
    """
    consumer = Consumer(iter(loader))
    consumer.start()
    yield consumer
    consumer.join(40)
    assert not consumer.is_alive(), "it waits for ever"
    if not isinstance(loader.dataset, IterableDataset) and len(consumer.had) == len(loader):
        assert isinstance(consumer.end, StopIteration | WorkerError), repr(consumer.end)
    else:
        assert isinstance(consumer.end, WorkerError), repr(consumer.end)
    if isinstance(consumer.end, WorkerError):
        assert "its DataLoader was closed" in str(consumer.end)


def close_in_a_thread(loader: Any) -> None:
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@full_only("workers for each", but=["process-False-close-6", "auto-True-close-1"])
@pytest.mark.parametrize(
    ("how", "persistent", "close", "count"),
    each_value(HOW, [False, True], [close_in_a_thread, DataLoader.close], [1, 3, 6]),
)
def test_a_loop_whose_loader_is_closed_raises_and_the_state_is_where_it_was(
    how: str, persistent: bool, close: Callable[[Any], None], count: int
) -> None:
    """Also behind the last batch, as long as the loop was not told that it is the last one."""
    keep = {"persistent_workers": persistent and how != "inline"}
    whole = [[k, k + 1] for k in range(0, 12, 2)]
    with within(60):
        loader = DataLoader(Range(12), 2, **HOW[how], **keep)
        iterator, had = iter(loader), []
        with pytest.raises(WorkerError, match="its DataLoader was closed"):
            for batch in iterator:
                had.append(batch.tolist())
                if len(had) == count:
                    close(loader)
        assert had == whole[:count]
        state = loader.state_dict()
        loader.close()
        with pytest.raises(WorkerError, match="its DataLoader was closed"):
            next(iterator)
        assert loader.stats()["failed_batches"] == 0
        resumed = DataLoader(Range(12), 2, seed=HOW[how].get("seed"))
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == whole[count:]
        assert [batch.tolist() for batch in loader] == whole, "it begins anew"
        loader.close()


@pytest.mark.parametrize("how", HOW)
def test_an_iterator_that_was_at_its_end_stays_there(how: str) -> None:
    loader = DataLoader(Range(4), 2, **HOW[how])
    with within(60):
        over = iter(loader)
        assert len(list(over)) == 2
        for _ in range(2):
            loader.close()
            assert next(over, None) is None


@pytest.mark.parametrize("how", HOW)
def test_leaving_the_block_of_a_loader_ends_an_iterator_that_is_held(how: str) -> None:
    with within(60):
        with DataLoader(Range(12), 2, **HOW[how]) as loader:
            held = iter(loader)
            next(held)
        with pytest.raises(WorkerError, match="its DataLoader was closed"):
            next(held)


class Closes(Range):
    """Sample 3 has its loader closed by another thread, and is made all the same."""

    loader: Any = None

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            close_in_a_thread(self.loader)
        return index


class ClosingSampler(list[int]):
    """Has its loader closed by another thread before it gives the fourth index."""

    loader: Any = None

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        close_in_a_thread(self.loader)
        yield from range(3, 12)


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_closed_while_a_batch_is_made(executor: str) -> None:
    how: dict[str, Any] = {"executor": executor, "num_workers": int(executor == "thread")}
    dataset, sampler = Closes(12), ClosingSampler(range(12))
    of_dataset, of_sampler = DataLoader(dataset, **how), DataLoader(Range(12), sampler=sampler, **how)
    dataset.loader, sampler.loader = of_dataset, of_sampler
    with within(60):
        for loader in (of_dataset, of_sampler):
            had = []
            with pytest.raises(WorkerError, match="its DataLoader was closed"):
                for batch in loader:
                    had.append(int(batch))
            assert had == list(range(len(had)))
            assert len(had) <= 4
            resumed = DataLoader(Range(12))
            if loader is of_dataset:
                fingerprint = opened(resumed.state_dict())["fingerprint"]
                resumed.load_state_dict(closed({**opened(loader.state_dict()), "fingerprint": fingerprint}))
                assert [int(batch) for batch in resumed] == list(range(len(had), 12))


class ClosesIt:
    """A sampler that closes the loader where its second epoch begins."""

    loader: Any = None
    epoch = 0

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch == 1:
            self.loader.close()
        return iter(range(12))


@pytest.mark.parametrize("how", ["thread", "process"])
def test_closed_while_an_epoch_begins_that_was_chosen_after_iter(how: str) -> None:
    sampler = ClosesIt()
    loader = sampler.loader = DataLoader(Range(12), 2, sampler=sampler, **HOW[how])
    with within(60):
        iterator = iter(loader)
        sampler.set_epoch(1)
        with pytest.raises(WorkerError, match="its DataLoader was closed"):
            next(iterator)


@pytest.mark.parametrize("how", WORKERS)
def test_the_workers_of_an_iterator_are_shut_down(how: str) -> None:
    """By torch's private names: that is not the end of the epoch either."""
    if how == "thread":
        pytest.skip("threads have no such names")
    for persistent in (False, True):
        loader = DataLoader(Range(12), 2, persistent_workers=persistent, **HOW[how])
        with within(60):
            iterator = iter(loader)
            next(iterator)
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            with pytest.raises(WorkerError, match="its DataLoader was closed"):
                next(iterator)


def test_a_daemon_thread_that_finds_no_workers_when_the_program_ends_is_quiet(tmp_path: Path) -> None:
    body = """
    import atexit
    begun, go = threading.Event(), threading.Event()
    iterator = iter(DataLoader(Range(100_000), collate_fn=first, num_workers=1))
    def run():
        for batch in iterator:
            begun.set()
            go.wait()
    thread = threading.Thread(target=run, daemon=True)
    def ended():
        for worker in iterator._workers:
            worker.kill()
            worker.join()
        go.set()
        thread.join(1)  # it would end with a traceback
    atexit.register(ended)
    thread.start()
    begun.wait()
    """
    with Program(tmp_path, body, {}) as program:
        assert program.end(30) == 0
        assert program.err == ""


@full_only("waits for seconds for each", but=["process", "thread"])
@pytest.mark.parametrize("how", HOW)
def test_close_ends_the_wait_of_another_thread(how: str) -> None:
    loader = DataLoader(Slow(6, 0.4), persistent_workers=how != "inline", **HOW[how])
    with within(60):
        with consuming(loader) as consumer:
            pids = [worker.pid for worker in consumer.iterator._workers] if how in PROCESSES else []  # type: ignore[attr-defined]
            while len(consumer.had) < 2 or not consumer.asking:
                time.sleep(0.01)
            time.sleep(0.1)
            assert consumer.asking
            loader.close()
        assert [int(batch) for batch in consumer.had] == list(range(len(consumer.had)))
        assert not wait_gone(pids, 1)
        assert [int(batch) for batch in loader] == list(range(6)), "it begins anew"
        loader.close()


@full_only("waits for real time-outs; test_hangs.py has one")
def test_close_ends_the_wait_for_a_worker_that_hangs() -> None:
    loader = DataLoader(Slow(9, stuck=frozenset({1})), num_workers=2, persistent_workers=True)
    with within(60):
        with consuming(loader) as consumer:
            pids = [worker.pid for worker in consumer.iterator._workers]  # type: ignore[attr-defined]
            time.sleep(0.5)
            loader.close()
        assert [int(batch) for batch in consumer.had] == [0]
        assert not wait_gone(pids, 1)
        resumed = DataLoader(Slow(9, 0.0))
        resumed.load_state_dict(loader.state_dict())
        assert [int(batch) for batch in resumed] == list(range(1, 9))


LET_GO = threading.Event()


class Stuck(IterableDataset[int]):
    """Each worker gives its number and waits to be let go. It has epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield 0 if info is None else info.id
        LET_GO.wait(300)


@full_only("many starts of workers", but=["thread"])
@pytest.mark.parametrize("how", ["thread", "process"])
def test_a_stream_that_is_closed_is_not_in_its_next_epoch(how: str) -> None:
    loader = DataLoader(Stuck(), None, **HOW[how])
    loader.set_epoch(3)
    with within(60), consuming(loader) as consumer:
        while len(consumer.had) < 2:
            time.sleep(0.01)
        loader.close()
    LET_GO.set()  # threads end in their own time
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-worker"):
            thread.join(40)
    LET_GO.clear()
    assert consumer.had == [0, 1]
    assert loader.epoch == 3


@full_only("random moments for each", but=["process"])
@pytest.mark.parametrize("how", PROCESSES)
def test_close_at_any_moment_of_next(how: str, tmp_path: Path) -> None:
    """It ends with an error that says so; and nobody writes to descriptors that were closed:
    their numbers are other files' by then.
    """
    rng = random.Random(4)
    with within(60):
        for _ in range(25 if FULL else 6):
            loader = DataLoader(Range(100_000), 2, persistent_workers=True, **HOW[how])
            files = []
            with consuming(loader) as consumer:
                time.sleep(rng.random() * 0.03)
                closing = threading.Thread(target=loader.close, daemon=True)
                closing.start()
                while closing.is_alive() and len(files) < 200:
                    files.append((tmp_path / str(len(files))).open("w+b", buffering=0))
                closing.join()
            assert [batch.tolist() for batch in consumer.had] == [[2 * k, 2 * k + 1] for k in range(len(consumer.had))]
            assert [os.fstat(file.fileno()).st_size for file in files] == [0] * len(files), "somebody has written there"
            for file in files:
                file.close()


@full_only("random moments")
def test_close_of_threads_at_any_moment() -> None:
    """Nobody waits for a job that was handed to threads that had just ended."""
    rng = random.Random(4)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with within(60):
            for _ in range(600 if FULL else 120):
                loader = DataLoader(Range(100_000), 2, persistent_workers=True, **HOW["thread"])
                with consuming(loader) as consumer:
                    time.sleep(rng.random() * 0.004)
                    loader.close()
                assert [batch.tolist() for batch in consumer.had[-2:]] == [
                    [2 * k, 2 * k + 1] for k in range(len(consumer.had))[-2:]
                ]
    finally:
        sys.setswitchinterval(before)


@full_only("workers for each", but=["process"])
@pytest.mark.parametrize("how", PROCESSES)
def test_what_was_had_before_close_stays_what_it_is(how: str) -> None:
    """Though the next pass may use the same memory."""
    rng = random.Random(5)
    with within(60):
        loader = DataLoader(Big(60, 20_000), 2, persistent_workers=True, **HOW[how])
        for _ in range(12 if FULL else 4):
            with consuming(loader) as consumer:
                time.sleep(0.03 + rng.random() * 0.03)
                loader.close()
            del consumer.iterator
            for batches in (loader, consumer.had):
                for k, batch in enumerate(batches):
                    assert bool((batch == batch[:, :1]).all())
                    assert batch[:, 0].tolist() == [2.0 * k, 2.0 * k + 1]
        loader.close()


@full_only("a race that runs for seconds")
@pytest.mark.clock  # a worker that is slower to end than others are patient is killed
def test_loaders_are_closed_while_others_start_workers(tmp_path: Path) -> None:
    """A fork has a copy of all pipes, and closes those that are others'. One that is being closed at that moment, or
    was just made, must not be missed (a worker that is told to end does not see it, and `close()` waits), nor be taken
    for another one that has its number by now (an error in the fork, or a worker without its pipe).
    """
    body = """
    import random
    from collections import Counter
    ends, workers, until = Counter(), [], time.monotonic() + {seconds}
    def run(seed):
        rng = random.Random(seed)
        while time.monotonic() < until:
            try:
                loader = DataLoader(Range(12), 2, num_workers=2, persistent_workers=True, timeout=30)
                iterator = iter(loader)
                had = [next(iterator).tolist() for _ in range(rng.randrange(2))]
                assert had == [[0, 1]][: len(had)]
                workers.extend(iterator._workers)
                loader.close()
            except Exception as error:
                ends[repr(error)] += 1
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.update(worker.exitcode for worker in workers)  # now: each thread waits for children of all of them
    assert list(ends) == [0] and ends[0] > 8, ends  # none had to be killed
    assert not children()
    """.replace("{seconds}", "5" if FULL else "2")
    with Program(tmp_path, body, {}) as program:
        assert program.end(50) == 0, program.out + program.err
        assert program.err == ""
