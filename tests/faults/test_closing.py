"""`close()` while others are at work: consumers that wait, loaders that fork, files that take over the numbers."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults_support import Big, Range, Slow, within
from leak_support import wait_gone
from program_support import Program

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")

HOW: dict[str, dict[str, Any]] = {
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2},
    "chunk": {"num_workers": 2, "dispatch": "chunk"},
    "threads inside": {"num_workers": 1, "threads_per_worker": 2},
}
PROCESSES = [name for name in HOW if name != "thread"]


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
    """A thread that goes through the loader; it has ended afterwards, as whoever is closed in mid pass should."""
    consumer = Consumer(iter(loader))
    consumer.start()
    yield consumer
    consumer.join(40)
    assert not consumer.is_alive(), "it waits for ever"
    assert isinstance(consumer.end, StopIteration | RuntimeError), repr(consumer.end)
    if isinstance(consumer.end, RuntimeError):
        assert "closed" in str(consumer.end)


@pytest.mark.clock
@pytest.mark.parametrize("how", HOW)
def test_close_ends_the_wait_of_another_thread(how: str) -> None:
    loader = DataLoader(Slow(6, 0.4), persistent_workers=True, **HOW[how])
    with within(20):
        with consuming(loader) as consumer:
            pids = [worker.pid for worker in consumer.iterator._workers] if how != "thread" else []  # type: ignore[attr-defined]
            while len(consumer.had) < 2 or not consumer.asking:
                time.sleep(0.01)
            time.sleep(0.1)
            assert consumer.asking
            begin = time.monotonic()
            loader.close()
        assert time.monotonic() - begin < 3
        assert [int(batch) for batch in consumer.had] == list(range(len(consumer.had)))
        assert not wait_gone(pids, 1)
        assert [int(batch) for batch in loader] == list(range(6)), "it begins anew"
        loader.close()


@pytest.mark.clock
def test_close_ends_the_wait_for_a_worker_that_hangs() -> None:
    loader = DataLoader(Slow(9, stuck=frozenset({1})), num_workers=2, persistent_workers=True)
    with within(20):
        with consuming(loader) as consumer:
            pids = [worker.pid for worker in consumer.iterator._workers]  # type: ignore[attr-defined]
            time.sleep(0.5)
            begin = time.monotonic()
            loader.close()
        assert time.monotonic() - begin < 9
        assert [int(batch) for batch in consumer.had] == [0]
        assert not wait_gone(pids, 1)


@pytest.mark.parametrize("how", PROCESSES)
def test_close_at_any_moment_of_next(how: str, tmp_path: Path) -> None:
    """It ends with the iteration, or with an error that says so; and nobody writes to descriptors that were closed:
    their numbers are other files' by then.
    """
    rng = random.Random(4)
    with within(60):
        for _ in range(25):
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


def test_close_of_threads_at_any_moment() -> None:
    """Nobody waits for a job that was handed to threads that had just ended."""
    rng = random.Random(4)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with within(60):
            for _ in range(600):
                loader = DataLoader(Range(100_000), 2, persistent_workers=True, **HOW["thread"])
                with consuming(loader) as consumer:
                    time.sleep(rng.random() * 0.004)
                    loader.close()
                assert [batch.tolist() for batch in consumer.had[-2:]] == [
                    [2 * k, 2 * k + 1] for k in range(len(consumer.had))[-2:]
                ]
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("how", PROCESSES)
def test_what_was_had_before_close_stays_what_it_is(how: str) -> None:
    """Though the next pass may use the same memory."""
    rng = random.Random(5)
    with within(60):
        loader = DataLoader(Big(60, 20_000), 2, persistent_workers=True, **HOW[how])
        for _ in range(12):
            with consuming(loader) as consumer:
                time.sleep(0.03 + rng.random() * 0.03)
                loader.close()
            del consumer.iterator
            for batches in (loader, consumer.had):
                for k, batch in enumerate(batches):
                    assert bool((batch == batch[:, :1]).all())
                    assert batch[:, 0].tolist() == [2.0 * k, 2.0 * k + 1]
        loader.close()


def test_loaders_are_closed_while_others_start_workers(tmp_path: Path) -> None:
    """A fork has a copy of all pipes, and closes those that are others'. One that is being closed at that moment, or
    was just made, must not be missed (a worker that is told to end does not see it, and `close()` waits), nor be taken
    for another one that has its number by now (an error in the fork, or a worker without its pipe).
    """
    body = """
    import random
    from collections import Counter
    ends, workers, until = Counter(), [], time.monotonic() + 5
    def run(seed):
        rng = random.Random(seed)
        while time.monotonic() < until:
            try:
                loader = DataLoader(Range(12), 2, num_workers=4, persistent_workers=True, timeout=30)
                iterator = iter(loader)
                had = [next(iterator).tolist() for _ in range(rng.randrange(2))]
                assert had == [[0, 1]][: len(had)]
                workers.extend(iterator._workers)
                loader.close()
            except Exception as error:
                ends[f"{type(error).__name__}: {error}"] += 1
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.update(worker.exitcode for worker in workers)  # now: each thread waits for children of all of them
    assert set(ends) == {0} and ends[0] > 8, ends  # none had to be killed
    assert not children()
    """
    with Program(tmp_path, body, {}) as program:
        assert program.end(50) == 0, program.out + program.err
        assert program.err == ""
