"""Errors of signal handlers while a loader is at work: the state is right, and no process is left."""

from __future__ import annotations

import itertools
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from faults_support import Range, over, within
from full_run import full_only
from tuned_support import scripted

from penstock import DataLoader
from penstock.errors import WorkerError
from penstock.random import in_sample

HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"executor": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "out of order": {"num_workers": 2, "in_order": False},
}


class Alarm(KeyboardInterrupt):
    pass


class Struck:
    """A handler that raises where our code is at work, but not where the consumer has the batch already."""

    def __init__(self) -> None:
        self.armed = True

    def __call__(self, number: int, frame: Any) -> None:
        if self.armed and _is_ours(frame):
            self.armed = False
            raise Alarm


def _is_ours(frame: Any) -> bool:
    """Return whether `next` is under way, and has not come to hand a batch over. Python swallows what is raised in
    `__del__`, in callbacks of weak references, and by the garbage collector, which calls Hypothesis.
    """
    if frame.f_code.co_filename.endswith("loader/dataloader_iter.py"):
        return False
    while frame is not None:
        name = frame.f_code.co_filename
        if "hypothesis" in name or "_weakrefset" in name or frame.f_code.co_name == "__del__":
            return False
        if name.endswith("loader/dataloader_iter.py"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def struck_at(rng: random.Random) -> Iterator[Struck]:
    """Signals every so many microseconds, one of which is heeded."""
    handler, over = Struck(), threading.Event()
    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        time.sleep(rng.random() * 0.02)
        while handler.armed and not over.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(rng.random() * 0.001)

    thread = threading.Thread(target=strike)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield handler
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def struck_in_call(place: int, strike: Callable[[], None]) -> Iterator[list[str]]:
    """Do something in the function that the loader calls as its so many-th, where handlers of signals may run; say in
    which. Nothing where it calls fewer.
    """
    calls, struck, here = itertools.count(), list[str](), os.getpid()

    def trace(frame: Any, event: str, arg: Any) -> None:
        if os.getpid() == here and _is_ours(frame) and next(calls) == place:
            struck.append(frame.f_code.co_qualname)
            strike()

    sys.settrace(trace)
    try:
        yield struck
    finally:
        sys.settrace(None)


def raise_alarm() -> None:
    signal.raise_signal(signal.SIGUSR1)


@contextmanager
def handling(handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@full_only("workers for each call", but=["inline", "thread", "process"])
@pytest.mark.parametrize(("how", "step"), [("inline", 2), ("thread", 5), ("process", 29), ("out of order", 31)])
def test_a_handler_that_strikes_in_any_call(how: str, step: int) -> None:
    def handler(number: int, frame: Any) -> None:
        raise Alarm

    for place in itertools.count(0, step):
        loader = DataLoader(Range(6), 2, **HOW[how])
        with within(60), over(loader) as iterator, handling(handler):
            got = [next(iterator).tolist()]
            with suppress(Alarm), struck_in_call(place, raise_alarm) as struck:
                for batch in iterator:
                    got.append(batch.tolist())
            assert not in_sample(), struck
            state = loader.state_dict()
            rest = goes_on_or_says_why(iterator)
        if not struck:
            return
        left = [[n, n + 1] for n in range(0, 6, 2) if [n, n + 1] not in got]
        # Inline, as with torch, an iterator goes on after the batch that was interrupted.
        assert rest in (None, left, left[1:] if how == "inline" else left), struck
        again = DataLoader(Range(6), 2, **HOW[how])
        again.load_state_dict(state)
        if left:
            assert sorted(batch.tolist() for batch in again) == left, struck


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("how", [Exception, KeyboardInterrupt])
def test_a_handler_that_strikes_while_workers_start(
    method: str, how: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the first process exists: a long call ends there, and handlers run. No process is left."""

    def handler(number: int, frame: Any) -> None:
        raise how("struck")

    def then_strike(start: Callable[..., int]) -> Callable[..., int]:
        def started(*args: Any) -> int:
            if (pid := start(*args)) != 0:
                signal.raise_signal(signal.SIGUSR1)
            return pid

        return started

    loader = DataLoader(Range(6), 2, num_workers=2, multiprocessing_context=method)
    resource_tracker.ensure_running()  # it stays
    before = children()
    with monkeypatch.context() as patch, handling(handler):
        patch.setattr(os, "fork", then_strike(os.fork))
        patch.setattr(multiprocessing.util, "spawnv_passfds", then_strike(multiprocessing.util.spawnv_passfds))
        with pytest.raises(how, match="struck"):
            iter(loader)
        assert signal.getsignal(signal.SIGUSR1) is handler
    assert children() <= before
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_worker_has_the_handlers_of_the_program() -> None:
    def handler(number: int, frame: Any) -> None:
        raise ValueError("as in the program")

    class Raises(Range):
        def __getitem__(self, index: int) -> Any:
            signal.raise_signal(signal.SIGUSR1)

    with handling(handler), pytest.raises(ValueError, match="as in the program"):
        next(iter(DataLoader(Raises(6), 2, num_workers=1, multiprocessing_context="fork")))


def children() -> set[int]:
    """Return this process's children, with those that have ended and were not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@full_only("every segment; strikes in any call are tested without")
def test_a_handler_that_strikes_while_numbers_of_workers_are_tried() -> None:
    """A batch may be out of its window, threads half started: then the pass ends, and does not go on without it."""

    def handler(number: int, frame: Any) -> None:
        raise Alarm

    def make() -> DataLoader[Any]:
        # No processes: what strikes in a function that is called at a fork is swallowed by Python.
        return scripted(DataLoader(Range(24), 2, seed=1, num_workers="auto", executor="thread"), [2, 3, 1], [3, 3])

    for place in itertools.count(0, 13):
        loader, got = make(), []
        with within(60), over(loader) as iterator, handling(handler):
            with suppress(Alarm), struck_in_call(place, raise_alarm) as struck:
                for batch in iterator:
                    got.append(batch.tolist())
            state = loader.state_dict()
            rest = goes_on_or_says_why(iterator)
        if not struck:
            return
        left = [[n, n + 1] for n in range(0, 24, 2) if [n, n + 1] not in got]
        assert got == [[n, n + 1] for n in range(0, 2 * len(got), 2)], struck
        assert rest in (None, left), struck
        again = DataLoader(Range(24), 2, seed=1)
        again.load_state_dict(state)
        if left:
            assert [batch.tolist() for batch in again] == left, struck


@full_only("workers for each call", but=["inline", "thread"])
@pytest.mark.parametrize(("how", "step"), [("inline", 2), ("thread", 5), ("process", 29)])
def test_a_handler_that_closes_the_loader_in_any_call(how: str, step: int) -> None:
    for place in itertools.count(0, step):
        loader = DataLoader(Range(6), 2, **HOW[how])
        with within(60), over(loader) as iterator:
            got = [next(iterator).tolist()]
            with suppress(WorkerError), struck_in_call(place, loader.close) as struck:
                for batch in iterator:
                    got.append(batch.tolist())
        if not struck:
            return
        again = DataLoader(Range(6), 2, **HOW[how])
        if len(got) < 3:
            again.load_state_dict(loader.state_dict())
            assert got + [batch.tolist() for batch in again] == [[n, n + 1] for n in range(0, 6, 2)], struck


@full_only("workers for each call", but=["inline", "thread", "1-process", "3-process", "5-out of order"])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("number", range(6))
def test_nothing_is_lost_or_repeated(how: dict[str, Any], number: int) -> None:
    rng = random.Random(number)
    data = Range(400)
    expected = [batch.tolist() for batch in DataLoader(data, 4, shuffle=True, seed=3)]
    loader = DataLoader(data, 4, shuffle=True, seed=3, **how)
    got: list[list[int]] = []
    with within(60), over(loader) as iterator:
        with struck_at(rng) as handler, pytest.raises((Alarm, StopIteration)):
            while True:
                got.append(next(iterator).tolist())
        if handler.armed or len(got) == len(expected):
            return  # it was too quick, or struck while the pass ended
        again = DataLoader(data, 4, shuffle=True, seed=3, **how)
        again.load_state_dict(loader.state_dict())
        assert sorted(got + [batch.tolist() for batch in again]) == sorted(expected)
        left = [batch for batch in expected if batch not in got]
        rest = goes_on_or_says_why(iterator)
        # Inline, as with torch, an iterator goes on after the batch that was interrupted.
        assert rest in (None, sorted(left), sorted(left[1:]) if not how else None)


def goes_on_or_says_why(iterator: Any) -> list[Any] | None:
    """Return the batches that are left, of an iterator that was only waiting; None of one that has ended."""
    try:
        first = next(iterator, None)
    except WorkerError:
        with pytest.raises(WorkerError, match="was interrupted: start a new one"):
            next(iterator)
        return None
    return [] if first is None else sorted(batch.tolist() for batch in (first, *iterator))


class Sampler:
    """A signal comes while it draws the third index."""

    def __iter__(self) -> Iterator[int]:
        for index in itertools.count():
            if index == 9:
                signal.raise_signal(signal.SIGUSR1)
            yield index

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("how", [{}, {"executor": "thread", "num_workers": 1, "prefetch_factor": 1}], ids=str)
def test_a_handler_that_strikes_in_a_sampler(how: dict[str, Any]) -> None:
    def handler(number: int, frame: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        loader = DataLoader(Range(20), 4, sampler=Sampler(), **how)
        with pytest.raises(Alarm), over(loader) as iterator:
            for _ in range(5):
                next(iterator)
        with pytest.raises(WorkerError, match="was interrupted"):
            next(iterator)
    finally:
        signal.signal(signal.SIGUSR1, before)
