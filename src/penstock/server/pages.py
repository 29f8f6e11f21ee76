"""Rows of a data set as record batches of bounded size, gathered while they are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from penstock.errors import ServerUnavailableError
from penstock.manifest.lines import TooMuch
from penstock.order.permutation import Indices
from penstock.server.catalog import Version

__all__ = ["Sized", "cut", "pages"]

Sized = tuple[pa.RecordBatch, int]
"""A batch, and its bytes."""


_AHEAD = 1  # batches that are gathered while one is sent
_WAIT = 0.1  # seconds for one of the threads: where others wait for a disk with all of them, a stream is its own


def pages(
    version: Version,
    rows: Callable[[int, int], Indices],
    begin: int,
    end: int,
    page_rows: int,
    message_bytes: int,
    threads: ThreadPoolExecutor,
) -> Iterator[Sized]:
    """Batches of the rows at ``begin`` to ``end``, in order.

    Args:
        version: of the data set.
        rows: ``rows(a, b)`` are the numbers of the rows at a to b.
        page_rows: rows of a batch.
        message_bytes: of a batch. Fewer rows are taken where rows have been long so far, and those that turn out to
            be larger are gathered in parts; only a single row may be larger.
        threads: where larger batches are gathered. A thread for each stream would keep the memory of what passes
            through it on the way, several times the batch; these few are shared.

    Memory: the batch that is sent, the next one, and for a moment the last one.
    """
    row_bytes = version.row_bytes
    ahead: deque[Future[pa.RecordBatch | None]] = deque()
    asked: deque[tuple[int, int]] = deque()
    try:
        while begin < end or ahead:
            while begin < end and len(ahead) <= _AHEAD:
                stop = min(begin + page_rows, begin + max(1, int(message_bytes / row_bytes)), end)
                ahead.append(_submit(threads, version, rows, begin, stop, message_bytes))
                asked.append((begin, stop))
                begin = stop
            first, last = asked.popleft()
            whole = _result(ahead.popleft(), version, rows, first, last, message_bytes)
            if whole is not None:
                found = cut(whole, message_bytes)
            else:
                found = _in_parts(version, rows, first, last, message_bytes, threads)
            del whole
            for batch, nbytes in found:
                row_bytes = max(version.row_bytes, nbytes / batch.num_rows)
                yield batch, nbytes
    finally:
        for future in ahead:
            future.cancel()


def _submit(
    threads: ThreadPoolExecutor,
    version: Version,
    rows: Callable[[int, int], Indices],
    begin: int,
    end: int,
    message_bytes: int,
) -> Future[pa.RecordBatch | None]:
    """`_gather` in one of the threads. ServerUnavailableError where a program with a server in it ends before that."""
    try:
        return threads.submit(_gather, version, rows, begin, end, message_bytes)
    except RuntimeError as error:  # none are begun after the interpreter's end has begun, or where there are too many
        raise ServerUnavailableError(f"the server is stopping, or out of threads: {error}") from None


def _result(
    future: Future[pa.RecordBatch | None],
    version: Version,
    rows: Callable[[int, int], Indices],
    begin: int,
    end: int,
    message_bytes: int,
) -> pa.RecordBatch | None:
    """What `_gather` gives in one of the threads, or here, if none of them is free for it."""
    try:
        return future.result(_WAIT)
    except TimeoutError:
        return _gather(version, rows, begin, end, message_bytes) if future.cancel() else future.result()


def _gather(
    version: Version, rows: Callable[[int, int], Indices], begin: int, end: int, message_bytes: int
) -> pa.RecordBatch | None:
    """None for several rows that are too much for a message: they are not even gathered, for a request may name the
    longest row of a file as often as it likes."""
    try:
        return version.manifest.gather(rows(begin, end), None if end - begin == 1 else message_bytes)
    except TooMuch:
        return None


def _in_parts(
    version: Version,
    rows: Callable[[int, int], Indices],
    begin: int,
    end: int,
    message_bytes: int,
    threads: ThreadPoolExecutor,
) -> Iterator[Sized]:
    """Rows that are too much for a message, in halves until they are not."""
    middle = (begin + end) // 2
    for first, last in ((begin, middle), (middle, end)):
        future = _submit(threads, version, rows, first, last, message_bytes)
        part = _result(future, version, rows, first, last, message_bytes)
        if part is None:
            yield from _in_parts(version, rows, first, last, message_bytes, threads)
        else:
            yield from cut(part, message_bytes)


def cut(batch: pa.RecordBatch, message_bytes: int) -> Iterator[Sized]:
    """A batch in as many pieces as it takes for them to have no more than so many bytes; single rows may have more."""
    nbytes = batch.nbytes
    if nbytes <= message_bytes or batch.num_rows == 1:
        yield batch, nbytes
    else:
        half = batch.num_rows // 2
        yield from cut(batch.slice(0, half), message_bytes)
        yield from cut(batch.slice(half), message_bytes)
