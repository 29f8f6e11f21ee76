"""Rows of a data set as record batches of bounded size, gathered while they are sent."""

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
"""A batch, and its bytes."""

_AHEAD = 1  # batches that are gathered while one is sent
_WAIT = 0.1  # seconds for one of the threads: where others wait for a disk with all of them, a stream is its own


@dataclass(frozen=True)
class Pages:
    """Where a stream's batches come from.

    Args:
        version: of the data set.
        rows: ``rows(a, b)`` are the numbers of the rows at a to b.
        message_bytes: of a batch. Fewer rows are taken where rows have been long so far, and those that turn out to be
            larger are gathered in parts; only a single row may be larger.
        threads: where batches are gathered. A thread for each stream would keep the memory of what passes through it on
            the way, several times the batch; these few are shared.
    """

    version: Version
    rows: Callable[[int, int], Indices]
    message_bytes: int
    threads: ThreadPoolExecutor

    def between(self, begin: int, end: int, page_rows: int) -> Iterator[Sized]:
        """Batches of the rows at ``begin`` to ``end``, in order, of ``page_rows`` or fewer.

        Raises:
            ServerUnavailableError: the program that the server is in ends.

        Memory: the batch that is sent, the next one, and for a moment the last one.
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
        """Have rows gathered by one of the threads."""
        try:
            return _Part(begin, end, self.threads.submit(self._gather, begin, end))
        except RuntimeError as error:  # at the interpreter's end, or where there are too many threads
            raise ServerUnavailableError(f"the server is stopping, or out of threads: {error}") from None

    def _finish(self, part: _Part) -> Iterator[Sized]:
        """The rows; gathered here, if none of the threads was free, and in halves, if they are too much for a batch."""
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
        """None for several rows that are too much for a message: they are not even gathered, for a request may name the
        longest row of a file as often as it likes."""
        most = None if end - begin == 1 else self.message_bytes
        try:
            return self.version.manifest.gather(self.rows(begin, end), most)
        except TooMuch:
            return None


@dataclass(frozen=True)
class _Part:
    """Rows that are being gathered."""

    begin: int
    end: int
    future: Future[pa.RecordBatch | None]


def cut(batch: pa.RecordBatch, message_bytes: int) -> Iterator[Sized]:
    """A batch in as many pieces as it takes for them to have no more than so many bytes; single rows may have more."""
    nbytes = batch.nbytes
    if nbytes <= message_bytes or batch.num_rows == 1:
        yield batch, nbytes
    else:
        half = batch.num_rows // 2
        yield from cut(batch.slice(0, half), message_bytes)
        yield from cut(batch.slice(half), message_bytes)
