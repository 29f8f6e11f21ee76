"""Data sets that go wrong, and what is left of workers, for the tests of faults."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_support import Range
from torch.utils.data import Dataset

import penstock as ps
from penstock.loader.executors.process import worker

HERE = Path(__file__).parent

ORPHAN_GRACE_S = "PENSTOCK_TEST_ORPHAN_GRACE_S"
"""Variable of the environment: seconds that workers get to end by themselves when their parent has died."""

if ORPHAN_GRACE_S in os.environ:
    assert hasattr(worker, "_ORPHAN_GRACE_S"), "it has another name now"
    worker._ORPHAN_GRACE_S = float(os.environ[ORPHAN_GRACE_S])


class Slow(Range):
    """Each sample takes so many seconds; those at `stuck` take five minutes."""

    def __init__(self, n: int, seconds: float = 0.02, stuck: frozenset[int] = frozenset()) -> None:
        super().__init__(n)
        self.seconds = seconds
        self.stuck = stuck

    def __getitem__(self, index: int) -> Any:
        time.sleep(300 if index in self.stuck else self.seconds)
        return index


class Big(Range):
    """Vectors of floats, all equal to the index; with a hole in the pipe if the ring is not there yet."""

    def __init__(self, n: int, size: int = 50_000, seconds: float = 0.0) -> None:
        super().__init__(n)
        self.size = size
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((self.size,), float(index))


class Draws(Range):
    """Random vectors: the index, what `penstock.generator` draws, and what torch's global generator draws."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.from_numpy(ps.generator().random(2000)), torch.rand(3, dtype=torch.float64)


class PureDraws(Range):
    """The same without the global generator; declared pure."""

    pure = True

    def __getitem__(self, index: int) -> Any:
        return index, torch.from_numpy(ps.generator().random(2000))


def by_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def by_segv() -> None:
    ctypes.string_at(0)


def by_bus() -> None:
    """Reads a mapped file that has been truncated."""
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        memory = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        memory[5000]


def by_abort() -> None:
    os.abort()


def by_exit() -> None:
    os._exit(3)


def by_sys_exit() -> None:
    sys.exit(4)


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "SIGKILL": (by_kill, "killed by signal: Killed"),
    "SIGSEGV": (by_segv, "killed by signal: Segmentation fault"),
    "SIGBUS": (by_bus, "killed by signal: Bus error"),
    "SIGABRT": (by_abort, "killed by signal: Aborted"),
    "os._exit": (by_exit, "exit code 3"),
    "sys.exit": (by_sys_exit, "exit code"),
}
"""Ways for a worker to end, with the words that tell of it."""


class Dies(Range):
    """Ends its worker at some indices, the first time, or (no folder) always."""

    def __init__(self, data: Dataset[Any], at: set[int], way: str, folder: Path | None = None) -> None:
        super().__init__(len(data))  # type: ignore[arg-type]
        self.pure = getattr(data, "pure", False)
        self.data = data
        self.at = at
        self.way = way
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        item = self.data[index]
        if index in self.at and self._first(index):
            faulthandler.disable()  # pytest's would tell of it on standard error
            WAYS[self.way][0]()
            time.sleep(60)  # a signal may take a moment
        return item

    def _first(self, index: int) -> bool:
        if self.folder is None:
            return True
        try:
            (self.folder / str(index)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class WithGrandchild(Range):
    """At index 3 the worker leaves a child of its own, whose process id is the name of a file, and is killed."""

    def __init__(self, n: int, folder: Path) -> None:
        super().__init__(n)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            child = os.fork()
            if child == 0:
                time.sleep(300)
                os._exit(0)
            (self.folder / str(child)).touch()
            by_kill()
        return index


class Raises(Range):
    """Raises an error at index 3."""

    def __init__(self, n: int, error: Any) -> None:
        super().__init__(n)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise self.error()
        return index


class Started(Range):
    """Says how the worker was started."""

    def __getitem__(self, index: int) -> str:
        return type(multiprocessing.current_process()).__name__


def interrupt() -> None:
    """Ctrl-C, which goes to the whole group of processes."""
    os.killpg(os.getpgrp(), signal.SIGINT)


def once(folder: str) -> bool:
    """Whether nobody has asked before."""
    try:
        Path(folder, "begun").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Starting(Range):
    """Interrupts while it is unpickled, the first time. Says which signals are blocked, if any are."""

    start = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.start and once(self.start):
            interrupt()
            time.sleep(0.1)  # a signal that is not held back would come now

    def __getitem__(self, index: int) -> Any:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert not blocked, f"blocked: {blocked}"
        return index


class NoFork(Started):
    fork_safe = False


class OddError(Exception):
    """Can be made only with two arguments, and pickles into something that cannot be made."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def odd() -> Exception:
    return OddError(5, reason="oddly")


class LocalNameError(Exception):
    """Claims to come from a module that is not there."""


LocalNameError.__module__ = "no.such.module"


class NoText(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def holding_a_lock() -> Exception:
    import threading

    error = RuntimeError("locked")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.add_note("a note that should arrive")
    return error


class OneWay:
    """Pickles, but cannot be made from that at index 3."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        return (refuse if self.index == 3 else OneWay), (self.index,)


def refuse(index: int) -> None:
    raise ValueError(f"object {index} cannot be made")


class OneWays(Range):
    def __getitem__(self, index: int) -> Any:
        return OneWay(index)


class OneWayText(str):
    """Pickles, but cannot be made from that."""

    def __reduce__(self) -> Any:
        return refuse_text, (str(self),)


def refuse_text(text: str) -> None:
    raise ValueError(f"text {text} cannot be made")


class OneWayTexts(Range):
    """A row that is large enough for the ring and a text, of which some are of the kind that cannot be made."""

    def __init__(self, n: int, at: set[int]) -> None:
        super().__init__(n)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        text = OneWayText(index) if index in self.at else str(index)
        return {"row": torch.full((3000,), float(index)), "text": text}


class Unpicklable(Range):
    """At index 3 a generator, which no pickle takes."""

    def __getitem__(self, index: int) -> Any:
        return (n for n in ()) if index == 3 else index


def first(samples: list[Any]) -> Any:
    return samples[0]


def last_exits(samples: list[int]) -> int:
    if 3 in samples:
        raise BrokenPipeError("collating")
    return samples[0]


def init_exits(worker: int) -> None:
    os._exit(9)


def init_raises(worker: int) -> None:
    raise BrokenPipeError(f"worker {worker} finds no server")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """An end to whatever waits for ever: the test fails instead of hanging. Later on a busy machine."""

    again = False

    def ring(*_: object) -> None:
        nonlocal again
        from busy_support import slowness  # not at the top: programs of tests import this module, too

        more, again = (0.0, True) if again else (seconds * (slowness() - 1), True)
        if not more:
            pytest.fail(f"still waiting after {seconds} s")  # no Exception: tests catch those
        signal.setitimer(signal.ITIMER_REAL, more)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def over(loader: Any) -> Iterator[Any]:
    """An iterator whose workers are gone afterwards, whatever holds it."""
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            try:
                workers = iterator._workers
            except AttributeError:
                return
            for worker in workers:
                worker.kill()
            iterator._shutdown_workers()
