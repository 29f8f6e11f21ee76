"""Windows over executors, without a loader, as iterators that raise the errors of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.loader.config import LoaderConfig
from penstock.loader.executors.base import Executor
from penstock.loader.executors.inline import InlineExecutor
from penstock.loader.executors.threads import ThreadExecutor
from penstock.loader.flow import Flow
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
    depth: int = 2,
    max_bytes: int | None = None,
    stream: bool = False,
    in_order: bool = True,
    timeout: float = 0,
    persistent: bool = False,
    **options: Any,
) -> Each:
    """The batches of an executor, of which so many are in flight."""
    workers = executor.workers if depth else 0
    config = LoaderConfig(num_workers=workers, max_bytes_in_flight=max_bytes, in_order=in_order, timeout=timeout)
    vars(config)["depth"] = depth
    flow = Flow(config, ahead=False)
    policy = DispatchPolicy(stream, stream, persistent=persistent)
    return Each(Window(requests, executor, flow, policy, **options))


def inline(requests: Iterator[BatchRequest], fetcher: Any, epoch: Any = None) -> Each:
    stream = isinstance(fetcher, StreamFetch)
    return each(requests, InlineExecutor(fetcher), depth=0, stream=stream, epoch=epoch)


def threads(
    requests: Iterator[BatchRequest],
    fetcher: Any,
    count: int,
    *,
    init: Callable[[int], object] | None = None,
    executor: ThreadExecutor | None = None,
    **options: Any,
) -> Each:
    """The batches of so many threads, or of those that there are."""
    executor = executor or ThreadExecutor(fetcher, count, init, seed=70)
    options = {"depth": 2 * count, "timeout": 20, "stream": isinstance(fetcher, StreamFetch), **options}
    return each(requests, executor, **options)
