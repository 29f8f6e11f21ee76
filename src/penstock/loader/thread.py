"""The thread executor: all threads work on the *next* batch first, each on a chunk of its samples.

    tasks ->  [chunk|chunk|chunk] [chunk|chunk|chunk] ...   at most `depth` batches begun
                  |      |     |
               thread thread thread                         the last one to finish a batch collates it
                  `------+-----'
              batches, in order

Chunks, not samples, are handed out, so the cost of a hand-over is shared by many samples. Streams are not cut: there
each thread has a lane of its own, with its own iterator, and batch k is that of thread k mod n; one that has come to
its end is left out, as in torch.

All threads share one data set, and each of them is a worker: ``get_worker_info()`` says which.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.errors import WorkerError
from penstock.loader.arena import Shared, collating_into
from penstock.loader.delivery import CLOSED, timed_out
from penstock.loader.fetch import Maker
from penstock.loader.pool import Failure, ThreadPool, thread_number
from penstock.loader.snapshots import Snapshot
from penstock.loader.statistics import size_of
from penstock.loader.work import Made, Task, Work
from penstock.loader.workerinfo import worker_scope
from penstock.plan.opening import Told

__all__ = ["ThreadBatches", "ThreadPool"]


class _Lane:
    """What a thread makes batches with; a stream begins in its own thread."""

    def __init__(self, maker: Maker, epoch: Told, *, begun: bool) -> None:
        self.maker = maker
        self.active = True  # for the consumer: whether more can come
        self.waiting = 0  # batches begun
        self.broken = False  # never began: its error is told once
        self.first: Snapshot | None = None  # the snapshot right after the beginning
        self.begun = threading.Event()
        self._error: BaseException | None = None
        self._epoch = epoch
        if begun:
            self.begun.set()

    def begin(self, info: Any, failures: dict[int, Failure], failure: Failure | None) -> None:
        """Begin the stream; what goes wrong is raised in the place of its first batch."""
        failure = failure or failures.get(thread_number())
        try:
            if failure is not None:
                raise failure[0].with_traceback(failure[1])
            with worker_scope(info):
                self.first = self.maker.begin(self._epoch)
        except BaseException as error:
            self.broken, self._error = True, error
        finally:
            self.begun.set()

    def make(self, task: Task, work: Work, failure: Failure | None) -> Any:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        if failure is not None:
            raise failure[0].with_traceback(failure[1])
        return self.maker(task, work)


class _Batch:
    """A batch in the making."""

    def __init__(
        self,
        task: Task,
        number: int,
        worker: int,
        lane: _Lane,
        chunks: int,
        pool: ThreadPool,
        ready: queue.SimpleQueue[_Batch | None] | None,
    ) -> None:
        self.task = task
        self.number = number
        self.worker = worker
        self.lane = lane
        self.done = threading.Event()
        self._infos, self._failures = pool.infos, pool.failures
        self._ready = ready
        self._memory = Shared(len(task.indices))
        self._parts: list[list[Any]] = [[] for _ in range(chunks)]
        self._works = [Work() for _ in range(chunks)]
        self._errors: dict[int, BaseException] = {}
        self._left = chunks
        self._lock = threading.Lock()
        self._batch: Any = None
        self.state: Snapshot | None = None
        self._cancelled = False

    def submit_to(self, pool: ThreadPool) -> None:
        """Have the pool make it, in as many chunks as it was made for."""
        size, chunks = len(self.task.indices), len(self._parts)
        for chunk in range(chunks):
            begin, end = chunk * size // chunks, (chunk + 1) * size // chunks
            pool.submit(partial(self._make, chunk, begin, end), self.worker)

    def _make(self, chunk: int, begin: int, end: int, failure: Failure | None) -> None:
        """Make one chunk; whoever makes the last one collates."""
        number = thread_number()
        failure = failure or self._failures.get(number)
        with worker_scope(None if number < 0 else self._infos[number]):
            if not self._cancelled:
                try:
                    self._make_chunk(chunk, begin, end, failure)
                except BaseException as error:  # raised again in the consumer, in the place of this batch
                    self._errors[chunk] = error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._finish()

    def _make_chunk(self, chunk: int, begin: int, end: int, failure: Failure | None) -> None:
        if len(self._parts) == 1:
            self._batch = self.lane.make(self.task, self._works[0], failure)
            return
        if failure is not None:
            raise failure[0].with_traceback(failure[1])
        maker: Any = self.lane.maker
        with collating_into(self._memory.rows(begin, end)):
            self._parts[chunk] = maker.samples(self.task.part(begin, end), self._works[chunk])

    def _finish(self) -> None:
        if not self._errors and not self._cancelled:
            work = self._works[0]
            try:
                if len(self._parts) > 1:
                    for other in self._works[1:]:
                        work.add(other)
                    maker: Any = self.lane.maker
                    self._batch = maker.collate([sample for part in self._parts for sample in part], self.task, work)
                self.state = self.lane.maker.state_dict()
            except BaseException as error:  # as above
                self._errors[0] = error
        if self._errors and not self.ended:
            try:
                self.state = self.lane.maker.state_after_error()
            except BaseException as error:
                self._errors[0] = error
        self._parts.clear()
        del self._memory
        self.done.set()
        if self._ready is not None:
            self._ready.put(self)

    def cancel(self) -> None:
        """It is not wanted any more; whoever waits for it is woken."""
        self._cancelled = True
        self._errors.clear()
        self.done.set()

    @property
    def ended(self) -> bool:
        """Whether its stream had come to the end."""
        return isinstance(self._errors.get(0), StopIteration)

    def result(self, number: int) -> Made:
        """The batch, or the error of its first sample that failed."""
        if self._errors:
            errors, self._errors = self._errors, {}
            try:
                raise errors[min(errors)]
            finally:
                del errors  # the error's traceback holds this frame
        return Made(self._batch, self._works[0], number, self.worker, self.state)


class ThreadBatches:
    """Batches of the tasks, made by a pool, in order.

    Args:
        tasks: what is to be made; pulled from in the consumer's thread. If it raises, the batches planned before come
            first, then the error, and the iteration is over.
        maker: of a map-style data set; or, for streams, one for each thread of a pool with lanes.
        pool: does the work. A pool with lanes makes batch k whole, in thread k mod n.
        depth: batches begun at any time.
        timeout: seconds to wait for a batch, 0 for ever; then RuntimeError in torch's words, with a note that says at
            which samples the threads are; the next call waits for the same batch.
        in_order: False hands out whatever is ready first.
        epoch: given to the makers as they begin their pass.
        max_bytes: begin no more batches than fit in there, by the largest so far (one, until there is one).
        first: for streams, the worker whose turn it is.

    Attributes:
        number: of the batch that was last returned or raised, in the order of the tasks; of a stream's batch, how many
            were returned or raised before.
        worker: that it came from.
        first_states: snapshots right after the beginning, by worker; of streams complete once a batch is handed out.
        failed_state: snapshot right after the batch that was raised last.

    `close` and `end` may be called from any thread, also while another one waits for a batch, which then gets
    StopIteration or a `WorkerError`.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        maker: Maker | Sequence[Maker],
        pool: ThreadPool,
        *,
        depth: int,
        timeout: float,
        in_order: bool,
        epoch: Told = None,
        max_bytes: int | None = None,
        first: int = 0,
    ) -> None:
        self._begun: deque[_Batch] = deque()
        self._ready: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._tasks = tasks
        self._pool = pool
        self._depth = depth
        self._limit = depth if max_bytes is None else 1
        self._max_bytes = max_bytes
        self._largest = 1
        self._timeout = timeout or None
        self._in_order = in_order
        self._stream = isinstance(maker, Sequence)
        self.first_states: dict[int, Snapshot] = {}
        self._waits_for_begun = self._stream
        if isinstance(maker, Sequence):
            self._lanes = [_Lane(one, epoch, begun=False) for one in maker]
            for number, lane in enumerate(self._lanes):
                pool.submit(partial(lane.begin, pool.infos[number], pool.failures), number)
        else:
            snapshot = maker.begin(epoch)
            self.first_states = {} if snapshot is None else {0: snapshot}
            self._lanes = [_Lane(maker, epoch, begun=True) for _ in range(pool.count if pool.lanes else 1)]
        self._turn = first
        self._planned = 0
        self._broken: Exception | None = None
        self._ended = False
        self.number, self.worker = -1, 0
        self.failed_state: Snapshot | None = None
        self._fill()

    def __iter__(self) -> ThreadBatches:
        return self

    def __next__(self) -> Made:
        while True:
            self._fill()
            if not self._begun:
                broken, self._broken = self._broken, None
                if broken is None and self._ended:
                    raise WorkerError(CLOSED)
                raise StopIteration if broken is None else broken
            batch = self._take()
            lane = batch.lane
            if not (self._stream and (batch.ended or not lane.active)):
                break
            lane.active = False
        if self._stream and lane.broken:
            lane.active = False
        self.number = self.number + 1 if self._stream else batch.number
        self.worker = batch.worker
        self._fill()
        self.failed_state = batch.state
        made = batch.result(self.number)
        if self._max_bytes is not None:
            self._largest = max(self._largest, size_of(made.batch))
            self._limit = min(self._depth, max(1, self._max_bytes // self._largest))
        return made

    @property
    def depth(self) -> int:
        """Batches that may be begun at the moment."""
        return self._limit

    def ready(self) -> int:
        """Batches that are made and not handed out."""
        return sum(batch.done.is_set() for batch in list(self._begun))

    def close(self) -> None:
        """Have what was begun come to nothing; chunks that run end in their own time."""
        self._tasks, self._broken = iter(()), None
        begun = list(self._begun)
        self._begun.clear()
        for lane in self._lanes:
            lane.begun.set()
        for batch in begun:
            batch.cancel()
        self._ready.put(None)

    def end(self, patience: float) -> None:
        """The loader is closed: the threads end, each in its own time."""
        self._ended = True
        self.close()
        self._pool.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending():
            self.close()

    def _take(self) -> _Batch:
        """Wait for the batch that is next."""
        batch: _Batch | None = None
        if self._in_order:
            with suppress(IndexError):  # closed meanwhile
                batch = self._begun[0]
            if batch is not None and not batch.done.wait(self._timeout):
                raise self._late()
        else:
            try:
                batch = self._ready.get(timeout=self._timeout)
            except queue.Empty:
                raise self._late() from None
        try:
            self._begun.remove(batch)  # type: ignore[arg-type]
        except ValueError:  # closed meanwhile
            if not self._ended:
                raise StopIteration from None
        if not self._ended and self._waits_for_begun and batch is not None:
            self._note_first_states(batch.lane)
        if self._ended:  # the batch was cancelled, or given to threads that had ended
            raise WorkerError(CLOSED)
        assert batch is not None
        batch.lane.waiting -= 1
        return batch

    def _note_first_states(self, lane: _Lane) -> None:
        """Note the first snapshots of all lanes if one with a state is handed out: a state has to say where those are
        that nothing was had of.
        """
        self._waits_for_begun = False
        if lane.first is not None:
            for other in self._lanes:
                other.begun.wait(self._timeout)
            firsts = enumerate(other.first for other in self._lanes)
            self.first_states = {number: first for number, first in firsts if first is not None}

    def _late(self) -> RuntimeError:
        error = RuntimeError(timed_out(self._timeout))
        index_of: dict[int, Any] = {}
        for batch in list(self._begun):
            index_of.update(zip(batch.task.keys, batch.task.indices, strict=True))
        at = {number: index_of[board[0]] for number, board in enumerate(self._pool.boards) if board[0] in index_of}
        for number, index in at.items():
            error.add_note(f"thread {number} was last at sample {index!r}")
        if not at and self._begun:
            error.add_note(f"waiting for batch {self._begun[0].number} of worker {self._begun[0].worker}")
        return error

    def _fill(self) -> None:
        while len(self._begun) < self._limit and (worker := self._choose()) is not None:
            try:
                task = next(self._tasks, None)
            except Exception as error:  # of a sampler; raised behind the batches that it planned before
                self._tasks, self._broken, task = iter(()), error, None
            if task is None:
                return
            self._begin(task, worker)

    def _choose(self) -> int | None:
        """Which lane the next batch belongs to; None if all have come to their end."""
        lanes, count = self._lanes, len(self._lanes)
        turns = [n % count for n in range(self._turn, self._turn + count) if lanes[n % count].active]
        if not turns:
            return None
        if self._in_order:
            return turns[0]
        return min(turns, key=lambda n: lanes[n].waiting)  # a lane that is stuck holds its share and no more

    def _begin(self, task: Task, worker: int) -> None:
        pool, lane = self._pool, self._lanes[worker]
        size = len(task.indices)
        divide = not pool.lanes and getattr(lane.maker, "divisible", False)
        chunks = max(1, min(pool.count, size)) if divide else 1
        ready = None if self._in_order else self._ready
        batch = _Batch(task, self._planned, worker, lane, chunks, pool, ready)
        self._turn = worker + 1
        self._planned += 1
        lane.waiting += 1
        self._begun.append(batch)
        batch.submit_to(pool)
