"""The program of a worker process: take requests, make batches in their slots, and answer.

    board     | run | worker 0: peak memory, then key and batch + 1 of its main thread, and of each other thread | ...
    request   (run, number, slot, extent of the slot, indices, keys, place); a `Start` before those of a run
    answer    (run, number, slot, extent, bytes used, pickle or its place, metrics, state, error, how), or `Began`

It ends when its request pipe is closed, and at the latest some seconds after its parent has ended. Errors of user code
are answers; SystemExit and KeyboardInterrupt end the worker, as in torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.loader.exceptions import describe
from penstock.loader.executors.base import Start
from penstock.loader.executors.process.ring import SharedFile, Slot
from penstock.loader.executors.process.transport import Channel, pack
from penstock.loader.executors.threads import ThreadPool
from penstock.loader.make import Fetcher, Maker
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import process_worker, seed_worker
from penstock.processes import end_with_parent
from penstock.random import show_samples

__all__ = ["ENDED", "REFUSED", "SKIPPED", "Setup", "main"]

ENDED, SKIPPED, REFUSED = 1, 2, 3
"""How an answer is special: the stream has ended; the run is not wanted; the slot got no more memory."""

_QUICK, _ENOUGH = 1e-3, 64
"""Batches with less work than this (seconds) gain nothing from several threads. After this many in a row, one thread
makes all batches, until one takes longer.
"""

_TOGETHER = 2e-3
"""Seconds for which answers are held back to be sent together."""

_LARGE = 1 << 14
"""Pickles of more bytes, of many texts for example, are put into the slot: a pipe takes them in pieces."""

_MEASURE_S = 0.1
"""Seconds between measurements of the peak memory, which are system calls."""

_costs_of = attrgetter(*(field.name for field in fields(BatchMetrics)))

_ORPHAN_GRACE_S = 3.0
"""Seconds for a worker to end by itself after its parent has died."""


class Setup(NamedTuple):
    """The start arguments of a worker."""

    number: int
    total: int
    fetcher: Fetcher
    init: Callable[[int], object] | None
    base_seed: int
    width: int
    """How many numbers it has on the board."""
    file: SharedFile
    parent: int
    pipes: tuple[Connection, Connection] | None = None
    """Its ends: of requests, and of answers."""
    held_back: bool = False
    """Whether SIGINT is blocked until the worker has a handler."""


def main(setup: Setup) -> None:
    """Run a worker."""
    # Ctrl-C reaches the whole process group, but the consumer decides when the workers end.
    signal.signal(signal.SIGINT, lambda *_: None)
    if setup.held_back:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # What the consumer has made is neither searched nor copied by this process's garbage collector.
    gc.freeze()
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        # The same. Not 1: after a fork, OpenCV would wait for threads that exist only in the parent.
        sys.modules["cv2"].setNumThreads(0)
    seed_worker(setup.base_seed, setup.number)
    process_worker(setup.number, setup.total, setup.base_seed + setup.number, setup.fetcher.dataset)
    # Another fork may keep the request pipe open, or user code may never return.
    end_with_parent(setup.parent, grace=_ORPHAN_GRACE_S)
    worker = _Worker(setup)
    worker.maker.init(setup.init, setup.number)
    with contextlib.suppress(KeyboardInterrupt):
        worker.run()


class _Worker:
    """The loop of a worker.

    Attributes:
        maker: makes the batches.
    """

    def __init__(self, setup: Setup) -> None:
        self.maker = Maker(setup.fetcher, setup.number)
        self._stream = isinstance(setup.fetcher, StreamFetch)
        self._where = f"in DataLoader worker process {setup.number}"
        assert setup.pipes is not None
        self._channel = Channel(*(pipe.fileno() for pipe in setup.pipes))
        self._sending = threading.Lock()
        self._answers: list[tuple[Any, ...]] = []  # to send together
        self._measured = 0.0  # when the peak memory was measured last
        self._file = setup.file
        self._words = memoryview(setup.file.map).cast("Q")
        self._board = self._words[1 + setup.width * setup.number : 1 + setup.width * (setup.number + 1)]
        self._quick = 0  # consecutive batches with too little work for several threads
        self._pool: ThreadPool | None = None
        show_samples(self._board[1:])

    def run(self) -> None:
        """Answer requests until a pipe ends."""
        while not self._channel.ended:
            for message in self._channel.receive():
                until, last = time.perf_counter() + _TOGETHER, message[-1]
                for item in message:
                    if self._channel.closed:
                        return
                    if isinstance(item, Start):
                        self._begin(item)
                    else:
                        self._make(*item)
                    if self._answers and (item is last or time.perf_counter() > until):
                        self._send(self._answers)
                        self._answers, until = [], time.perf_counter() + _TOGETHER

    def _begin(self, start: Start) -> None:
        if self._pool is not None:
            self._pool.resize(start.threads)
        elif start.threads > 1:
            # SystemExit in user code ends the worker, not just a thread.
            crash = partial(os._exit, 1)
            self._pool = ThreadPool(start.threads, boards=self._board[3:], crash=crash)
        began = self.maker.begin(start)
        if self.maker.fetcher.has_states:
            self._answers.append(began)

    def _wanted(self, run: int) -> bool:
        """Return whether a run is wanted.

        A stream makes the batches of older runs, too, so that its iterator does not depend on when the consumer left.
        """
        current = self._words[0]
        return current == run or bool(current and self._stream)

    def _make(self, run: int, number: int, slot: int, extent: int, indices: Any, keys: Any, place: Any) -> None:
        request = BatchRequest(indices, keys, place, run, number)
        memory = Slot(self._file, slot, extent)
        if self._pool is not None and self._quick < _ENOUGH:
            self._pool.make(
                self.maker, request, partial(self._send_now, request, memory), wanted=self._wanted, arena=memory.empty
            )
            return
        result = None
        if self._wanted(run):
            self._board[2] = number + 1
            result = self.maker.make(request, memory.empty)
            self._board[2] = 0
        self._answers.append(self._answer(request, memory, result))

    def _send_now(self, request: BatchRequest, slot: Slot, result: BatchResult | None) -> None:
        """Answer a request in the thread that has made the batch."""
        self._send([self._answer(request, slot, result)])

    def _answer(self, request: BatchRequest, slot: Slot, result: BatchResult | None) -> tuple[Any, ...]:
        """Return the answer to a request; None is for one that is not wanted any more."""
        data: bytes | slice = b""
        how, metrics, state, error = SKIPPED, BatchMetrics(), None, None
        if result is not None:
            how, state, error = ENDED * result.ended, result.state, result.error
            metrics = result.metrics
            if error is None and not result.ended:
                begin = time.perf_counter()
                try:
                    data = pack(result.batch, slot)
                    if len(data) > _LARGE and (copy := slot.empty((len(data),), torch.uint8)) is not None:
                        copy.numpy()[:] = np.frombuffer(data, np.uint8)
                        data = slice(slot.used - len(data), slot.used)
                except Exception as failed:
                    error = failed
                metrics.hand_over += time.perf_counter() - begin
            how = REFUSED if slot.refused and not how else how
        if self._pool is not None and result is not None:
            with self._sending:
                self._quick = self._quick + 1 if metrics.fetch + metrics.collate < _QUICK else 0
        return (
            *(request.run, request.number, slot.number, slot.extent, 0 if error is not None else slot.used, data),
            _costs_of(metrics),
            *(state, None if error is None else describe(error, self._where), how),
        )

    def _send(self, answers: list[tuple[Any, ...]]) -> None:
        with self._sending:
            now = time.perf_counter()
            if now > self._measured + _MEASURE_S:
                import resource  # missing on Windows, where this module is imported but not used

                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                # In KiB. macOS counts bytes.
                self._measured, self._board[0] = now, peak // 1024 if sys.platform == "darwin" else peak
            self._channel.send(pickle.dumps(answers, 5))
