"""What runs in a worker process: take a request, make the batch or a chunk of it, put it into its slot, say so.

It ends when its pipe of requests is closed, and at the latest some seconds after the process that started it is gone.
Errors of user code are answers; a worker that raises SystemExit or KeyboardInterrupt ends, as in torch.
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

from penstock.loader.arena import Column, Rows, Slot, collating_into
from penstock.loader.exceptions import describe
from penstock.loader.executors.process.channel import Inbox, write
from penstock.loader.executors.process.pack import Packed, pack
from penstock.loader.executors.process.region import Region, paged
from penstock.loader.executors.process.ring import Address
from penstock.loader.executors.process.rows import Layout, flatten
from penstock.loader.executors.thread_pool import ThreadPool, thread_number
from penstock.loader.fetch import Fetcher
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
    """Numbers (u64) that each worker shows: its peak memory in KiB, then for its main thread and each of the others the
    key of the sample that it is at, and its batch + 1 (0: none). Before them stands, for all, the number of the pass
    that is wanted.
    """
    return 3 + 2 * threads


def board_bytes(workers: int, threads: int) -> int:
    """Size of the board at the head of the shared file: whole pages."""
    page = 4096
    return -(-8 * (1 + board_width(threads) * workers) // page) * page


class Setup(NamedTuple):
    """What a worker is started with."""

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


_Chunk = tuple[int, int, int, int]
"""Which part of a batch is to be made: its number, and samples ``begin`` to ``end`` of ``size``."""

_GROWTH = 8
"""Slots grow by this part of their size at least: a batch of many tensors does not have them grow with each."""

_MAPS = 1024
"""Slots that are mapped at a time."""

_QUICK, _ENOUGH = 1e-3, 64
"""Seconds of work on a batch below which several threads wait for each other more than they help; and so many batches
after which one thread makes all of them, until one takes longer.
"""

_TOGETHER = 2e-3
"""Seconds after which answers are not kept back any more for those that are to come."""


def main(setup: Setup) -> None:
    """Be a worker."""
    # Ctrl-C reaches the whole group of processes; the consumer decides what becomes of the workers.
    signal.signal(signal.SIGINT, _ignore)
    if setup.held_back:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        # The same. Not 1: after a fork OpenCV would wait for the parent's threads to end, which are not there.
        sys.modules["cv2"].setNumThreads(0)
    seed_worker(setup.base_seed, setup.number)
    process_worker(setup.number, setup.total, setup.base_seed + setup.number, setup.fetcher.dataset)
    # A fork of somebody else's may keep the pipe of requests open, and user code may never return to it.
    end_with_parent(setup.parent, grace=_ORPHAN_GRACE_S)
    worker = _Worker(setup)
    try:
        if setup.init is not None:
            setup.init(setup.number)
    except Exception as error:
        worker.unusable = error
    with contextlib.suppress(_Gone, KeyboardInterrupt):  # nobody is left to make anything for
        worker.run()


def _peak_memory() -> int:
    """Of this process, in KiB."""
    import resource  # there is none on Windows, where this module is imported and not used

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes.
    return peak // 1024 if sys.platform == "darwin" else peak


class _Gone(BaseException):
    """The consumer does not read any more. An error of the user's of the same kind is something else."""


_ORPHAN_GRACE_S = 3.0  # seconds that a worker gets to end by itself when its parent has died

_TOLD = Exception()
"""A stream that could not begin has said so, and ends."""


def _ignore(*_: object) -> None:
    pass


class _Worker:
    def __init__(self, setup: Setup) -> None:
        self.unusable: Exception | None = None  # an error of worker_init_fn
        self._broken: Exception | None = None  # an error at the beginning of this pass
        self._setup = setup
        self._fetcher = setup.fetcher
        self._results = setup.results.fileno()
        self._sending = threading.Lock()
        self._sent = 0
        self._kept: list[tuple[Any, ...]] | None = None  # answers to be sent together
        self._since = 0.0
        self._layout: Layout | None = None
        self._columns: dict[int, list[Column]] = {}  # of that, by size of the batch
        self._regions: dict[int, Region] = {}
        head = Region(setup.file.fd, 0, board_bytes(setup.total, setup.threads))
        self._board = memoryview(head.memory.data).cast("B").cast("Q")
        width = board_width(setup.threads)
        begin = 1 + width * setup.number
        self._mine = self._board[begin : begin + width]
        self._quick = 0  # batches in a row that were too little work for more than one thread
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

    # What the consumer says.

    def _layout_is(self, layout: Layout) -> None:
        self._layout = layout
        self._columns = {}

    def _begin(self, run: int, epoch: int | None, state: WorkerState | None) -> None:
        """Begin a run, and send the first snapshot. What goes wrong is the answer to its first request."""
        self._broken, first = self.unusable, None
        if self._broken is None:
            try:
                if state is not None:
                    self._fetcher.load_state_dict(state)
                first = self._fetcher.begin(epoch)
            except Exception as error:
                self._broken = error
        if not self._fetcher.tells_states:
            return
        try:
            self._send("begun", run, 0, 0, first, BatchMetrics())
        except Exception as error:  # a state that cannot be pickled
            self._broken = error
            self._send("begun", run, 0, 0, None, BatchMetrics())

    def _group(self, messages: list[tuple[Any, ...]]) -> None:
        """Several batches that are little work: the answers go together, too."""
        self._kept, self._since = [] if self._threads is None else None, time.perf_counter()
        try:
            for kind, *rest in messages:
                getattr(self, f"_{kind}")(*rest)
        finally:
            self._flush()
            self._kept = None

    @property
    def _threads(self) -> ThreadPool | None:
        """The threads that make batches; None where the main thread does."""
        return None if self._quick >= _ENOUGH else self._pool

    def _make(self, run: int, number: int, address: Any, packed: tuple[Any, ...]) -> None:
        request = BatchRequest(*packed)
        threads = self._threads
        if threads is None:
            self._whole(run, number, address, request)
        else:
            threads.submit(lambda _: self._in_thread(partial(self._whole, run, number, address, request)))

    def _chunk(self, run: int, number: int, address: Any, chunk: _Chunk, packed: tuple[Any, ...]) -> None:
        request = BatchRequest(*packed)
        threads = self._threads
        if threads is None:
            self._part(run, number, address, chunk, request)
        else:
            threads.submit(lambda _: self._in_thread(partial(self._part, run, number, address, chunk, request)))

    def _in_thread(self, job: Callable[[], None]) -> None:
        show_samples(self._mine[3 + 2 * thread_number() :])
        try:
            job()
        except _Gone:  # the main thread sees that too
            pass
        except BaseException:  # SystemExit in user code ends the worker, not just a thread
            os._exit(1)

    # What it does.

    def _whole(self, run: int, number: int, address: Any, request: BatchRequest) -> None:
        metrics = BatchMetrics()
        if not self._wanted(run, number, 0, metrics):
            return
        slot = None if address is None else Slot(self._memory(address), partial(self._grow, address))
        try:
            try:
                with collating_into(slot):
                    batch = self._fetcher(request, metrics)
            except StopIteration:
                if not isinstance(self._fetcher, StreamFetch):
                    raise
                self._send("end", run, number, 0, None, metrics, slot=slot)
                return
            packed = pack(batch, slot)
            payload = packed.data, packed.table, self._fetcher.state_dict()
            self._send("batch", run, number, 0, payload, metrics, packed, slot)
        except Exception as error:
            self._send("error", run, number, 0, self._told(error), metrics, slot=slot)

    def _part(self, run: int, number: int, address: Any, chunk: _Chunk, request: BatchRequest) -> None:
        metrics, (part, begin, end, _) = BatchMetrics(), chunk
        if not self._wanted(run, number, part, metrics):
            return
        rows = self._rows(address, chunk)
        try:
            with collating_into(rows):  # some write there at once
                samples = self._fetcher.samples(request, metrics)  # type: ignore[attr-defined]
        except Exception as error:
            self._send("error", run, number, part, (describe(error, self._where), None), metrics)
            return
        packed, texts = None, None
        with contextlib.suppress(Exception):  # what does not collate may do so as a whole, or fails there as it should
            if len(samples) != end - begin:
                pass  # on_error has left some out
            elif rows is None:
                packed = pack(self._fetcher.collate(samples, request, metrics), None)  # type: ignore[attr-defined]
            else:
                texts = self._put_rows(samples, request, rows, metrics)
        if packed is not None:
            self._send("batch", run, number, part, (packed.data, packed.table, None), metrics, packed)
        else:
            self._send("again" if texts is None else "rows", run, number, part, texts, metrics)

    def _rows(self, address: Any, chunk: _Chunk) -> Rows | None:
        """Where a chunk goes; None as long as nobody knows."""
        layout, (_, begin, end, size) = self._layout, chunk
        if address is None or layout is None:
            return None
        columns = self._columns.get(size)
        if columns is None:
            columns = layout.columns(size)
            if len(self._columns) < 64:
                self._columns[size] = columns
        return Rows(self._memory(address), columns, begin, end)

    def _put_rows(
        self, samples: list[Any], request: BatchRequest, rows: Rows, metrics: BatchMetrics
    ) -> list[Any] | None:
        """Write the rows of a chunk; its strings, or None if it looks unlike the batches before."""
        layout = self._layout
        assert layout is not None
        with collating_into(rows):
            batch = self._fetcher.collate(samples, request, metrics)  # type: ignore[attr-defined]
        tensors: list[torch.Tensor] = []
        texts: list[Any] = []
        if flatten(batch, tensors, texts) != layout.spec or any(len(text) != len(samples) for text in texts):
            return None
        if len(rows.addresses) != len(layout.rows) or [t.data_ptr() for t in tensors] != rows.addresses:
            return None
        return texts

    def _wanted(self, run: int, number: int, part: int, metrics: BatchMetrics) -> bool:
        """Whether to go on with a request; if not, that is said."""
        # A stream's stale batches are made all the same: its iterator should not depend on when the consumer left.
        if self._board[0] != run and not (self._board[0] and isinstance(self._fetcher, StreamFetch)):
            self._send("skipped", run, number, part, None, metrics)
            return False
        if self._broken is _TOLD:
            self._send("end", run, number, part, None, metrics)
            return False
        if self._broken is not None:
            self._send("error", run, number, part, (describe(self._broken, self._where), None), metrics)
            if isinstance(self._fetcher, StreamFetch):
                self._broken = _TOLD
            return False
        self._mine[4 + 2 * thread_number()] = number + 1
        return True

    def _memory(self, address: Address) -> npt.NDArray[np.uint8]:
        """What a slot has at the moment, or had more of."""
        begin, size, _ = address
        region = self._regions.get(begin)
        if region is None or region.size < size:
            if len(self._regions) >= _MAPS:
                self._regions.clear()  # most of these slots are not used any more
            region = self._regions[begin] = Region(self._setup.file.fd, begin, size)
        return region.memory[:size]

    def _grow(self, address: Address, size: int, needed: int) -> npt.NDArray[np.uint8] | None:
        """The memory of a slot with more behind it; None if there is no more."""
        begin, _, room = address
        larger = paged(max(needed, size + size // _GROWTH))
        if larger > room:
            return None
        try:
            self._setup.file.reserve(begin + size, larger - size)
        except OSError:  # it travels beside the answer
            return None
        return self._memory((begin, larger, room))

    def _told(self, error: Exception) -> tuple[Any, Snapshot | None]:
        """Return an error as it is sent, and a snapshot right after it. If that fails, too, its error tells of both."""
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
        part: int,
        payload: Any,
        metrics: BatchMetrics,
        packed: Packed | None = None,
        slot: Slot | None = None,
    ) -> None:
        self._mine[4 + 2 * thread_number()] = 0
        with self._sending:
            self._sent += 1
            if self._pool is not None and kind in ("batch", "rows"):
                self._quick = self._quick + 1 if metrics.fetch + metrics.collate < _QUICK else 0
            if self._sent % 16 == 1:
                self._mine[0] = _peak_memory()
        grown = slot.capacity if slot is not None and slot.grown else 0
        answer = kind, run, number, part, payload, metrics.packed(), grown
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
