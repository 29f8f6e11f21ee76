"""Where the time of a data set goes: name its steps, and the loader's statistics say what each of them takes.

    from penstock.stages import stage

    class Scans(Dataset):
        def __getitem__(self, index):
            with stage("read"):
                data = read(self.paths[index])
            with stage("decode"):
                image = decode(data)
            return image

Times are exclusive: a stage inside another one counts for itself alone, so the stages of a thread never add up to more
than its time. Each thread has its own account, which whoever runs the data set takes with `collect`. A stage costs less
than a microsecond, so one per step of a sample is nothing, one per pixel is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["by_clock", "collect", "spent", "stage"]


class _Account(threading.local):
    """Of one thread: seconds by stage, seconds of the stages that ended within the one that is open, and the clock."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = perf_counter
        self.seconds: dict[str, float] = {}
        self.inner = 0.0


_account = _Account()


class stage:
    """``with stage("decode"):`` counts the time of the block, by the clock (see `by_clock`), under this name.

    Make a new one for each block: it belongs to one thread and one use. A block that raises counts as well. Do not
    yield inside one: the time of whoever takes the item would count.
    """

    __slots__ = ("_before", "_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        account = _account
        self._before = account.inner
        account.inner = 0.0
        self._start = account.clock()

    def __exit__(self, *exc: object) -> None:
        account = _account
        elapsed = account.clock() - self._start
        seconds, name = account.seconds, self._name
        seconds[name] = seconds.get(name, 0.0) + elapsed - account.inner
        account.inner = self._before + elapsed


def spent(name: str, seconds: float) -> None:
    """Count a part of the stage that is open for another one: of a call that does the work of both."""
    account = _account
    account.seconds[name] = account.seconds.get(name, 0.0) + seconds
    account.inner += seconds


def collect() -> dict[str, float]:
    """This thread's seconds by stage since the last call; counting begins anew.

    >>> _ = collect()
    >>> with stage("read"), stage("decode"):
    ...     pass
    >>> sorted(collect())
    ['decode', 'read']
    >>> collect()
    {}
    """
    seconds = _account.seconds
    if seconds:
        _account.seconds = {}
        return seconds
    return {}


@contextmanager
def by_clock(clock: Callable[[], float]) -> Iterator[None]:
    """The stages of this thread count by another clock: `time.thread_time` tells computing from waiting.

    >>> import time
    >>> with by_clock(time.thread_time), stage("waits"):
    ...     time.sleep(0.05)
    >>> collect()["waits"] < 0.025
    True
    """
    before, _account.clock = _account.clock, clock
    try:
        yield
    finally:
        _account.clock = before
