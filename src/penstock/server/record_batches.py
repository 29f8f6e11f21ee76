"""Record batches of a dataset's rows, of bounded size, gathered while earlier ones are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import ServerUnavailableError
from penstock.manifest.lines import TooMuch
from penstock.order.permutation import Indices
from penstock.server.catalog import Version

__all__ = ["Pages", "Sized", "cut"]

Sized = tuple[pa.RecordBatch, int]
"""A batch and its size in bytes."""

_AHEAD = 1  # batches gathered while one is sent
_WAIT = 0.1  # seconds to wait for a free thread: if all wait for a disk, the stream gathers rows itself


@dataclass(frozen=True)
class Pages:
    """The source of a stream's batches.

    Args:
        version: the version of the dataset.
        rows: ``rows(a, b)`` returns the row numbers at positions a to b.
        message_bytes: the limit of a batch. Fewer rows are taken if earlier rows were long, and batches that turn out
            too large are split; only a single row may exceed the limit.
        threads: the threads that gather batches. They are few and shared: one per stream would hold several times the
            memory of a batch.
    """

    version: Version
    rows: Callable[[int, int], Indices]
    message_bytes: int
    threads: ThreadPoolExecutor

    def between(self, begin: int, end: int, page_rows: int) -> Iterator[Sized]:
        """Yield the rows at positions ``begin`` to ``end``, in order, in batches of up to ``page_rows``.

        Memory: the batch being sent, the next one, and briefly the previous one.

        Raises:
            ServerUnavailableError: the server's program is ending.
        """
        row_bytes = self.version.row_bytes
        ahead: deque[_Part] = deque()
        try:
            while begin < end or ahead:
                while begin < end and len(ahead) <= _AHEAD:
                    stop = min(begin + page_rows, begin + max(1, int(self.message_bytes / row_bytes)), end)
                    ahead.append(self._begin(begin, stop))
                    begin = stop
                for batch, nbytes in self._finish(ahead.popleft()):
                    row_bytes = max(self.version.row_bytes, nbytes / batch.num_rows)
                    yield batch, nbytes
        finally:
            for part in ahead:
                part.future.cancel()

    def _begin(self, begin: int, end: int) -> _Part:
        """Start gathering rows in one of the threads."""
        try:
            return _Part(begin, end, self.threads.submit(self._gather, begin, end))
        except RuntimeError as error:  # at interpreter shutdown, or with too many threads
            raise ServerUnavailableError(f"the server is stopping, or out of threads: {error}") from None

    def _finish(self, part: _Part) -> Iterator[Sized]:
        """Yield the rows; gather them here if no thread was free, and in halves if they exceed a batch."""
        try:
            batch = part.future.result(_WAIT)
        except TimeoutError:
            batch = self._gather(part.begin, part.end) if part.future.cancel() else part.future.result()
        if batch is not None:
            yield from cut(batch, self.message_bytes)
            return
        middle = (part.begin + part.end) // 2
        for begin, end in ((part.begin, middle), (middle, part.end)):
            yield from self._finish(self._begin(begin, end))

    def _gather(self, begin: int, end: int) -> pa.RecordBatch | None:
        """Return the rows, or None if several rows exceed a message.

        These are not even gathered, since a request may repeat the longest row of a file many times.
        """
        most = None if end - begin == 1 else self.message_bytes
        try:
            return self.version.manifest.gather(self.rows(begin, end), most)
        except TooMuch:
            return None


@dataclass(frozen=True)
class _Part:
    """Rows being gathered."""

    begin: int
    end: int
    future: Future[pa.RecordBatch | None]


def cut(batch: pa.RecordBatch, message_bytes: int) -> Iterator[Sized]:
    """Yield a batch in parts of at most ``message_bytes`` bytes; a single row may exceed it."""
    nbytes = batch.nbytes
    if nbytes <= message_bytes or batch.num_rows == 1:
        yield batch, nbytes
    else:
        half = batch.num_rows // 2
        yield from cut(batch.slice(0, half), message_bytes)
        yield from cut(batch.slice(half), message_bytes)
