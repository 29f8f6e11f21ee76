"""Windows over executors, without a loader, as iterators that raise the errors of their batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.loader.executors.base import Executor
from penstock.loader.executors.inline import InlineExecutor
from penstock.loader.executors.thread import ThreadExecutor
from penstock.loader.executors.thread_pool import ThreadPool
from penstock.loader.messages import BatchRequest, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.loader.window import DispatchPolicy, Window


class Each:
    """The batches of a window. ``number`` and ``worker`` are those of the last batch, or of the last error."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.close, self.end = window.close, window.end
        self.number, self.worker = -1, 0

    def __iter__(self) -> Each:
        return self

    def __next__(self) -> BatchResult:
        made = self.window.next()
        self.number, self.worker = made.number, made.worker
        if made.error is not None:
            error, made = made.error, made._replace(error=None)
            try:
                raise error
            finally:
                del error
        return made


def each(
    requests: Iterator[BatchRequest],
    executor: Executor,
    *,
    turns: bool,
    stream: bool,
    in_order: bool = True,
    timeout: float = 0,
    first: int = 0,
) -> Each:
    policy = DispatchPolicy(turns=turns, stream=stream, in_order=in_order, timeout=timeout)
    return Each(Window(requests, executor, policy, first=first))


def inline(requests: Iterator[BatchRequest], fetcher: Any, epoch: Any = None) -> Each:
    stream = isinstance(fetcher, StreamFetch)
    return each(requests, InlineExecutor(fetcher, epoch), turns=stream, stream=stream)


def threads(
    requests: Iterator[BatchRequest],
    fetcher: Any,
    pool: ThreadPool,
    *,
    depth: int,
    epoch: Any = None,
    max_bytes: int | None = None,
    **policy: Any,
) -> Each:
    executor = ThreadExecutor(fetcher, pool, depth=depth, epoch=epoch, max_bytes=max_bytes)
    return each(requests, executor, turns=pool.lanes, stream=isinstance(fetcher, list), **policy)
