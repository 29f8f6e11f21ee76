"""Rows of a data set as record batches of bounded size, gathered while they are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from penstock.order.permutation import Indices
from penstock.server.catalog import Version

__all__ = ["Sized", "cut", "pages"]

Sized = tuple[pa.RecordBatch, int]
"""A batch, and its bytes."""


_AHEAD = 1  # batches that are gathered while one is sent


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
        message_bytes: of a batch. Fewer rows are taken where rows have been long so far, and a batch that turns out to
            be larger is cut; only a single row may be larger.
        threads: where larger batches are gathered. A thread for each stream would keep the memory of what passes
            through it on the way, several times the batch; these few are shared.

    Memory: the batch that is sent, the next one, and for a moment the last one.
    """
    row_bytes = version.row_bytes
    ahead: deque[Future[pa.RecordBatch]] = deque()
    try:
        while begin < end or ahead:
            while begin < end and len(ahead) <= _AHEAD:
                stop = min(begin + page_rows, begin + max(1, int(message_bytes / row_bytes)), end)
                ahead.append(threads.submit(_gather, version, rows, begin, stop))
                begin = stop
            whole = ahead.popleft().result()
            for batch, nbytes in cut(whole, message_bytes):
                row_bytes = max(version.row_bytes, nbytes / batch.num_rows)
                yield batch, nbytes
    finally:
        for future in ahead:
            future.cancel()


def _gather(version: Version, rows: Callable[[int, int], Indices], begin: int, end: int) -> pa.RecordBatch:
    return version.manifest.gather(rows(begin, end))


def cut(batch: pa.RecordBatch, message_bytes: int) -> Iterator[Sized]:
    """A batch in as many pieces as it takes for them to have no more than so many bytes; single rows may have more."""
    nbytes = batch.nbytes
    if nbytes <= message_bytes or batch.num_rows == 1:
        yield batch, nbytes
    else:
        half = batch.num_rows // 2
        yield from cut(batch.slice(0, half), message_bytes)
        yield from cut(batch.slice(half), message_bytes)
