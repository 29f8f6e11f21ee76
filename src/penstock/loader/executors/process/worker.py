"""The program of a worker process: take a request, make the batch, write it to its slot, and answer.

It ends when its request pipe is closed, and at the latest some seconds after its parent has ended. Errors of user code
are answers; SystemExit and KeyboardInterrupt end the worker, as in torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.arena import Slot, collating_into
from penstock.loader.exceptions import describe
from penstock.loader.executors.divided import DividedBatch
from penstock.loader.executors.process.channel import Inbox, write
from penstock.loader.executors.process.pack import Packed, pack
from penstock.loader.executors.process.region import Region, paged
from penstock.loader.executors.process.ring import Address
from penstock.loader.executors.thread_pool import ThreadPool, thread_number
from penstock.loader.fetch import Fetch, Fetcher
from penstock.loader.memory import SharedFile
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.snapshots import Snapshot
from penstock.loader.stateful import WorkerState
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import process_worker, seed_worker
from penstock.processes import end_with_parent
from penstock.random import show_samples

__all__ = ["Setup", "board_bytes", "board_width", "main"]


def board_width(threads: int) -> int:
    """Return how many numbers (u64) each worker has on the board.

    These are its peak memory in KiB, and for its main thread and each other thread the key of its sample and its batch
    + 1 (0: none). The board begins with the number of the current epoch iterator.
    """
    return 3 + 2 * threads


def board_bytes(workers: int, threads: int) -> int:
    """Return the size of the board at the head of the shared file, in whole pages."""
    page = 4096
    return -(-8 * (1 + board_width(threads) * workers) // page) * page


class Setup(NamedTuple):
    """The start arguments of a worker."""

    number: int
    total: int
    fetcher: Fetcher
    init: Callable[[int], object] | None
    base_seed: int
    threads: int
    file: SharedFile
    requests: Connection
    results: Connection
    parent: int
    held_back: bool
    """Whether SIGINT is blocked until the worker has a handler."""


_GROWTH = 8
"""Slots grow by at least this fraction of their size, so that a batch of many tensors extends them rarely."""

_MAPS = 1024
"""Maximum number of mapped slots."""

_QUICK, _ENOUGH = 1e-3, 64
"""Batches with less work than this (seconds) gain nothing from several threads. After this many in a row, one thread
makes all batches, until one takes longer.
"""

_TOGETHER = 2e-3
"""Seconds for which answers are held back to be sent together."""


def main(setup: Setup) -> None:
    """Run a worker."""
    # Ctrl-C reaches the whole process group, but the consumer decides when the workers end.
    signal.signal(signal.SIGINT, _ignore)
    if setup.held_back:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        # The same. Not 1: after a fork, OpenCV would wait for threads that exist only in the parent.
        sys.modules["cv2"].setNumThreads(0)
    seed_worker(setup.base_seed, setup.number)
    process_worker(setup.number, setup.total, setup.base_seed + setup.number, setup.fetcher.dataset)
    # Another fork may keep the request pipe open, or user code may never return.
    end_with_parent(setup.parent, grace=_ORPHAN_GRACE_S)
    worker = _Worker(setup)
    try:
        if setup.init is not None:
            setup.init(setup.number)
    except Exception as error:
        worker.unusable = error
    with contextlib.suppress(_Gone, KeyboardInterrupt):  # the consumer is gone
        worker.run()


def _peak_memory() -> int:
    """Return the peak memory of this process, in KiB."""
    import resource  # missing on Windows, where this module is imported but not used

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes.
    return peak // 1024 if sys.platform == "darwin" else peak


class _Gone(BaseException):
    """The consumer is gone. A separate class, to distinguish it from errors of user code."""


_ORPHAN_GRACE_S = 3.0  # seconds for a worker to end by itself after its parent has died

_TOLD = Exception()
"""Marks that a stream has reported the error of its start, and has ended."""


def _ignore(*_: object) -> None:
    pass


class _Worker:
    def __init__(self, setup: Setup) -> None:
        self.unusable: Exception | None = None  # an error of worker_init_fn
        self._broken: Exception | None = None  # an error at the start of this epoch iterator
        self._setup = setup
        self._fetcher = setup.fetcher
        self._results = setup.results.fileno()
        self._sending = threading.Lock()
        self._sent = 0
        self._kept: list[tuple[Any, ...]] | None = None  # answers to send together
        self._since = 0.0
        self._regions: dict[int, Region] = {}
        head = Region(setup.file.fd, 0, board_bytes(setup.total, setup.threads))
        self._board = memoryview(head.memory.data).cast("B").cast("Q")
        width = board_width(setup.threads)
        begin = 1 + width * setup.number
        self._mine = self._board[begin : begin + width]
        self._quick = 0  # consecutive batches with too little work for several threads
        self._pool = ThreadPool(setup.threads, None) if setup.threads > 1 else None
        show_samples(self._mine[1:])

    def run(self) -> None:
        os.set_blocking(self._setup.requests.fileno(), False)
        inbox = Inbox(self._setup.requests.fileno())
        poller = select.poll()
        poller.register(inbox.fd, select.POLLIN)
        while not inbox.ended:
            for message, _ in inbox.receive():
                kind, *rest = pickle.loads(message)
                getattr(self, f"_{kind}")(*rest)
            if not inbox.ended:
                poller.poll()

    # Messages of the consumer.

    def _begin(self, run: int, epoch: int | None, state: WorkerState | None) -> None:
        """Start an epoch iterator and send the first snapshot. An error is the answer to its first request."""
        self._broken, first = self.unusable, None
        if self._broken is None:
            try:
                if state is not None:
                    self._fetcher.load_state_dict(state)
                first = self._fetcher.begin(epoch)
            except Exception as error:
                self._broken = error
        if not self._fetcher.has_states:
            return
        try:
            self._send("begun", run, 0, first, BatchMetrics())
        except Exception as error:  # the state cannot be pickled
            self._broken = error
            self._send("begun", run, 0, None, BatchMetrics())

    def _group(self, messages: list[tuple[Any, ...]]) -> None:
        """Make several small batches, and send their answers together."""
        self._kept, self._since = [] if self._threads is None else None, time.perf_counter()
        try:
            for kind, *rest in messages:
                getattr(self, f"_{kind}")(*rest)
        finally:
            self._flush()
            self._kept = None

    @property
    def _threads(self) -> ThreadPool | None:
        """Return the threads that make batches; None if the main thread does."""
        return None if self._quick >= _ENOUGH else self._pool

    def _make(self, run: int, number: int, address: Any, packed: tuple[Any, ...]) -> None:
        request, fetcher, threads = BatchRequest(*packed), self._fetcher, self._threads
        slot = None if address is None else Slot(self._memory(address), partial(self._grow, address))
        if threads is None:
            self._answer(run, number, slot, partial(fetcher, request))
        elif isinstance(fetcher, Fetch) and fetcher.divisible and not fetcher.has_states and len(request.indices) > 1:
            batch = DividedBatch(fetcher, request, threads.count, slot)
            answer = partial(self._answer, run, number, slot, batch.collate)
            for part in range(batch.parts):
                self._submit(threads, partial(self._load, run, number, batch, part, answer))
        else:
            self._submit(threads, partial(self._answer, run, number, slot, partial(fetcher, request)))

    def _submit(self, threads: ThreadPool, job: Callable[[], None]) -> None:
        threads.submit(lambda _: self._in_thread(job))

    def _in_thread(self, job: Callable[[], None]) -> None:
        show_samples(self._mine[3 + 2 * thread_number() :])
        try:
            job()
        except _Gone:  # the main thread notices it, too
            pass
        except BaseException:  # SystemExit in user code ends the worker, not just a thread
            os._exit(1)

    # Work.

    def _answer(self, run: int, number: int, slot: Slot | None, make: Callable[[BatchMetrics], Any]) -> None:
        """Make a batch and send it, or its error."""
        metrics = BatchMetrics()
        if not self._wanted(run, number, metrics):
            return
        try:
            try:
                with collating_into(slot):
                    batch = make(metrics)
            except StopIteration:
                self._send("end", run, number, None, metrics, slot=slot)
                return
            packed = pack(batch, slot)
            payload = packed.data, packed.table, self._fetcher.state_dict()
            self._send("batch", run, number, payload, metrics, packed, slot)
        except Exception as error:
            self._send("error", run, number, self._told(error), metrics, slot=slot)

    def _load(self, run: int, number: int, batch: DividedBatch, part: int, answer: Callable[[], None]) -> None:
        """Load the samples of a part; the thread of the last part makes the batch and answers."""
        if self._board[0] == run and self._broken is None:
            self._mine[4 + 2 * thread_number()] = number + 1
            batch.load(part)
            self._mine[4 + 2 * thread_number()] = 0
        if batch.finished():
            answer()

    def _wanted(self, run: int, number: int, metrics: BatchMetrics) -> bool:
        """Return whether a request is still wanted; if not, send an answer that says so."""
        # A stream makes stale batches, too, so that its iterator does not depend on when the consumer left.
        if self._board[0] != run and not (self._board[0] and isinstance(self._fetcher, StreamFetch)):
            self._send("skipped", run, number, None, metrics)
            return False
        if self._broken is _TOLD:
            self._send("end", run, number, None, metrics)
            return False
        if self._broken is not None:
            self._send("error", run, number, (describe(self._broken, self._where), None), metrics)
            if isinstance(self._fetcher, StreamFetch):
                self._broken = _TOLD
            return False
        self._mine[4 + 2 * thread_number()] = number + 1
        return True

    def _memory(self, address: Address) -> npt.NDArray[np.uint8]:
        """Return the memory of a slot, possibly more than its current size."""
        begin, size, _ = address
        region = self._regions.get(begin)
        if region is None or region.size < size:
            if len(self._regions) >= _MAPS:
                self._regions.clear()  # most of these slots are no longer used
            region = self._regions[begin] = Region(self._setup.file.fd, begin, size)
        return region.memory[:size]

    def _grow(self, address: Address, size: int, needed: int) -> npt.NDArray[np.uint8] | None:
        """Extend a slot and return its memory; None if there is no more memory."""
        begin, _, room = address
        larger = paged(max(needed, size + size // _GROWTH))
        if larger > room:
            return None
        try:
            self._setup.file.reserve(begin + size, larger - size)
        except OSError:  # the buffer is sent beside the answer
            return None
        return self._memory((begin, larger, room))

    def _told(self, error: Exception) -> tuple[Any, Snapshot | None]:
        """Return an error in its transport form, and a snapshot after it; a failed snapshot is added to the error."""
        try:
            return describe(error, self._where), self._fetcher.state_after_error()
        except Exception as another:
            return describe(another, self._where), None

    @property
    def _where(self) -> str:
        return f"in DataLoader worker process {self._setup.number}"

    def _send(
        self,
        kind: str,
        run: int,
        number: int,
        payload: Any,
        metrics: BatchMetrics,
        packed: Packed | None = None,
        slot: Slot | None = None,
    ) -> None:
        self._mine[4 + 2 * thread_number()] = 0
        with self._sending:
            self._sent += 1
            if self._pool is not None and kind == "batch":
                self._quick = self._quick + 1 if metrics.fetch + metrics.collate < _QUICK else 0
            if self._sent % 16 == 1:
                self._mine[0] = _peak_memory()
        grown = slot.capacity if slot is not None and slot.grown else 0
        answer = kind, run, number, payload, metrics.packed(), grown
        beside = packed.beside if packed is not None else []
        if self._kept is not None and not beside and thread_number() < 0:
            self._kept.append(answer)
            if time.perf_counter() - self._since > _TOGETHER:
                self._flush()
        else:
            if thread_number() < 0:
                self._flush()
            self._write(pickle.dumps(answer, protocol=5), beside)

    def _flush(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._write(pickle.dumps(kept, protocol=5))
        self._since = time.perf_counter()

    def _write(self, data: bytes, beside: Sequence[memoryview] = ()) -> None:
        with self._sending:
            try:
                write(self._results, data, beside)
            except BrokenPipeError:
                raise _Gone from None
