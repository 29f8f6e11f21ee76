"""Time the named steps of a dataset, so that the loader's statistics show the time of each.

    from penstock.stages import stage

    class Scans(Dataset):
        def __getitem__(self, index):
            with stage("read"):
                data = read(self.paths[index])
            with stage("decode"):
                image = decode(data)
            return image

Times are exclusive: the time of a nested stage is not part of the outer one, so the stages of a thread never add up to
more than its time. Each thread counts separately; the code that runs the dataset reads the counts with `collect`. A
stage costs less than a microsecond: fine for each step of a sample, too much for each pixel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["account", "by_clock", "collect", "spent", "stage"]


class _Account(threading.local):
    """The times of one thread: the clock, seconds by stage, and seconds of the stages nested in the open one."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        self.seconds: dict[str, float] = {}
        self.inner = 0.0


account = _Account()


class stage:
    """Add the time of a ``with`` block to this stage, by the current clock (see `by_clock`).

    Create a new object for each block: it works in one thread, once. A block that raises counts, too. Do not yield
    inside a block: the time of the consumer would count.
    """

    __slots__ = ("_before", "_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = account.inner
        account.inner = 0.0
        self._start = account.clock()

    def __exit__(self, *exc: object) -> None:
        elapsed = account.clock() - self._start
        seconds, name = account.seconds, self._name
        seconds[name] = seconds.get(name, 0.0) + elapsed - account.inner
        account.inner = self._before + elapsed


def spent(name: str, seconds: float) -> None:
    """Add seconds to a stage, and take them from the open stage if there is one.

    It is for a call that does the work of two stages; and for steps of a few microseconds, because it costs a third of
    a `stage`: ``start = account.clock(); ...; spent("read", account.clock() - start)``. The step must not enter stages.
    """
    account.seconds[name] = account.seconds.get(name, 0.0) + seconds
    account.inner += seconds


def collect() -> dict[str, float]:
    """Return the seconds by stage of this thread since the last call, and reset them.

    >>> _ = collect()
    >>> with stage("read"), stage("decode"):
    ...     pass
    >>> sorted(collect())
    ['decode', 'read']
    >>> collect()
    {}
    """
    seconds, account.seconds = account.seconds, {}
    return seconds


@contextmanager
def by_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Measure the stages of this thread with another clock: `time.thread_time` separates computing from waiting.

    >>> import time
    >>> with by_clock(time.thread_time), stage("waits"):
    ...     time.sleep(0.05)
    >>> collect()["waits"] < 0.025
    True
    """
    before, account.clock = account.clock, clock
    try:
        yield
    finally:
        account.clock = before
