"""Rows of a data set as record batches of bounded size, gathered while they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from penstock.order.permutation import Indices
from penstock.server.catalog import Version

__all__ = ["pages"]

_FEW = 1024  # rows for which it would take longer to wake a thread


def pages(
    version: Version,
    rows: Callable[[int, int], Indices],
    begin: int,
    end: int,
    page_rows: int,
    message_bytes: int,
    threads: ThreadPoolExecutor,
) -> Iterator[pa.RecordBatch]:
    """Batches of the rows at ``begin`` to ``end``, in order.

    Args:
        version: of the data set.
        rows: ``rows(a, b)`` are the numbers of the rows at a to b.
        page_rows: rows of a batch.
        message_bytes: of a batch. Fewer rows are taken where rows have been long so far, and a batch that turns out to
            be larger is cut; only a single row may be larger.

        threads: where larger batches are gathered. A thread for each stream would keep the memory of what passes
            through it on the way, several times the batch; these few are shared.

    Memory: the batch.
    """
    row_bytes = version.row_bytes
    while begin < end:
        stop = min(begin + page_rows, begin + max(1, int(message_bytes / row_bytes)), end)
        if stop - begin <= _FEW:
            batch = _gather(version, rows, begin, stop)
        else:
            batch = threads.submit(_gather, version, rows, begin, stop).result()
        size = batch.nbytes
        row_bytes = max(version.row_bytes, size / (stop - begin))
        begin = stop
        if size <= message_bytes:
            yield batch
        else:
            yield from _cut(batch, message_bytes)


def _gather(version: Version, rows: Callable[[int, int], Indices], begin: int, end: int) -> pa.RecordBatch:
    return version.manifest.gather(rows(begin, end))


def _cut(batch: pa.RecordBatch, message_bytes: int) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= message_bytes or batch.num_rows == 1:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from _cut(batch.slice(0, half), message_bytes)
        yield from _cut(batch.slice(half), message_bytes)
