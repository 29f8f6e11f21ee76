"""`Worker`: the program of an actor: take a request, make the batch in a few threads, return bytes and arrays.

    control  begin, hello              one thread, so that an epoch iterator can be cancelled while batches are made
    make     two calls at a time       one is made while the result of the other is written to the object store

Errors of user code are answers, as text; SystemExit ends the actor, as in a worker process. A call of an earlier epoch
iterator is answered without work.
"""

from __future__ import annotations

import os
import pickle
import platform
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.loader.exceptions import RemoteError, describe
from penstock.loader.executors.divided import DividedBatch
from penstock.loader.executors.process.pack import pack
from penstock.loader.executors.ray.remote_manifest import RowsWanted, keep_rows
from penstock.loader.executors.thread_pool import ThreadPool
from penstock.loader.fetch import Fetch, Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.snapshots import Snapshot
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import process_worker, seed_worker
from penstock.plan.stream_plan import EpochStart

__all__ = ["Actor", "Worker", "versions"]

F = TypeVar("F", bound=Callable[..., Any])


def _in_group(name: str) -> Callable[[F], F]:
    """Return a decorator that assigns a method to a concurrency group of the actor."""
    return cast(Callable[[F], F], ray.method(concurrency_group=name))


class Actor:
    """The Ray actor of a `Worker`; separate, since Ray wraps every method of an actor's class."""

    def __init__(self, number: int, total: int, threads: int, turns: bool) -> None:
        self._worker = Worker(number, total, threads, turns)

    @_in_group("control")
    def hello(self) -> dict[str, Any]:
        """See `Worker`."""
        return self._worker.hello()

    @_in_group("control")
    def begin(self, run: int, epoch: EpochStart, state: Any, setup: bytes | None, base_seed: int) -> Snapshot | None:
        """See `Worker`."""
        return self._worker.begin(run, epoch, state, setup, base_seed)

    @_in_group("control")
    def stop(self) -> None:
        """See `Worker`."""
        self._worker.stop()

    @_in_group("make")
    def make(self, run: int, requests: list[bytes], collate: bool, rows: bytes | None) -> list[Any]:
        """See `Worker`."""
        return self._worker.make(run, requests, collate, rows)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines."""
    return {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "penstock": penstock.__version__,
    }


class Worker:
    """A worker.

    Args:
        number: its number, as ``get_worker_info().id``.
        total: the number of workers.
        threads: the threads that load samples.
        turns: whether the order of calls matters: for streams, and objects with their own state.
    """

    def __init__(self, number: int, total: int, threads: int, turns: bool) -> None:
        torch.set_num_threads(1)
        self._number = number
        self._total = total
        self._pool = ThreadPool(threads, None) if threads > 1 else None
        self._threads = threads
        self._fetcher: Fetcher | None = None
        self._broken: Exception | None = None  # the answer to every batch
        self._told = False  # whether a stream has reported it, and ended
        self._wanted = self._begun = 0  # numbers of the requested and the started epoch iterator
        self._news = threading.Condition()
        self._turns = turns
        self._turn = threading.RLock()  # held while user code runs in the calling thread

    def hello(self) -> dict[str, Any]:
        """Return versions and node of this worker."""
        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "pid": os.getpid(), "versions": versions()}

    def begin(self, run: int, epoch: EpochStart, state: Any, setup: bytes | None, base_seed: int) -> Snapshot | None:
        """Start an epoch iterator, drop earlier requests, and return the first snapshot.

        Args:
            run: number of the epoch iterator.
            epoch: passed to streams.
            state: the state of users' objects to resume from.
            setup: a new pickled fetcher and ``worker_init_fn``; None keeps the present ones.
            base_seed: the base seed of new ones.
        """
        self._wanted, first = run, None
        with self._turn:
            try:
                if setup is not None:
                    self._broken, self._told = None, False
                    self._set_up(setup, base_seed)
                if self._fetcher is not None and self._broken is None:
                    if state is not None:
                        self._fetcher.load_state_dict(state)
                    first = self._fetcher.begin(epoch)
            except Exception as error:  # reported when a batch is requested
                self._broken = error
            with self._news:
                self._begun = run
                self._news.notify_all()
        return first

    def stop(self) -> None:
        """Drop all requests."""
        self._wanted = 0

    def _set_up(self, setup: bytes, base_seed: int) -> None:
        fetcher, init = pickle.loads(setup)
        seed_worker(base_seed, self._number)
        process_worker(self._number, self._total, base_seed + self._number, fetcher.dataset)
        if init is not None:
            init(self._number)
        self._fetcher = fetcher

    def make(self, run: int, requests: list[bytes], collate: bool, rows: bytes | None) -> list[Any]:
        """Make one batch, or several small ones, since each write to the object store costs a millisecond.

        Args:
            run: number of their epoch iterator.
            requests: pickled requests.
            collate: False returns samples uncollated.
            rows: rows of manifests whose file is elsewhere, see `penstock.loader.executors.ray.remote_manifest`.

        Returns:
            The pickled answers, each with its kind ("batch", "error", "end", "rows", "skipped"), payload, metrics,
            seconds and number of large buffers; then the large buffers.
        """
        with self._news:
            self._news.wait_for(lambda: self._begun >= run)
        if rows is not None:
            keep_rows(rows)
        answers: list[Any] = []
        buffers: list[Any] = []
        for packed in requests:
            answer, beside = self._make_one(run, packed, collate)
            answers.append(answer)
            buffers += beside
        return [cloudpickle.dumps(answers), *buffers]

    def _make_one(self, run: int, packed: bytes, collate: bool) -> tuple[Any, list[Any]]:
        metrics, start = BatchMetrics(), time.perf_counter()
        kind: str = "skipped"
        payload: Any = None
        beside: list[Any] = []
        with self._turn if self._turns else nullcontext():  # an older call must not advance a newer stream
            if run == self._wanted:
                try:
                    kind, payload, beside = self._answer(BatchRequest(*pickle.loads(packed)), metrics, collate)
                except RowsWanted as wanted:
                    kind, payload = "rows", (wanted.key, wanted.rows)
                except Exception as error:
                    kind, payload = "error", _told(describe(error, self._where), error)
        return (kind, payload, metrics.packed(), time.perf_counter() - start, len(beside)), beside

    def _answer(self, request: BatchRequest, metrics: BatchMetrics, collate: bool) -> tuple[str, Any, list[Any]]:
        if self._broken is not None:
            if isinstance(self._fetcher, StreamFetch) and self._told:
                return "end", None, []
            self._told = True
            raise self._broken
        assert self._fetcher is not None
        try:
            batch = self._make(request, metrics) if collate else self._samples(request, metrics)
        except StopIteration:
            return "end", None, []
        start = time.perf_counter()
        state = self._fetcher.state_dict() if collate else None
        try:
            data, _, buffers = pack(batch, None)
        except Exception:  # for example a class of the main program, which only Ray's pickle can send
            data, buffers = cloudpickle.dumps(batch), []
        beside = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        metrics.hand_over += time.perf_counter() - start
        return "batch", (data, state), beside

    def _make(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        if self._pool is None or not getattr(self._fetcher, "divisible", False) or len(request.indices) < 2:
            return self._alone(lambda: self._fetcher(request, metrics))  # type: ignore[misc]
        assert isinstance(self._fetcher, Fetch)
        batch = DividedBatch(self._fetcher, request, self._threads)
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def load(part: int, _: Any) -> None:
            try:
                batch.load(part)
                done.put(None)
            except BaseException as error:  # raised again in the calling thread
                done.put(error)

        for part in range(batch.parts):
            self._pool.submit(partial(load, part))
        errors = [done.get() for _ in range(batch.parts)]
        for error in errors:
            if error is not None:
                raise error
        return batch.collate(metrics)

    def _samples(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        assert isinstance(self._fetcher, Fetch)
        fetcher = self._fetcher
        return self._alone(lambda: fetcher.samples(request, metrics))

    def _alone(self, job: Callable[[], Any]) -> Any:
        """Run a job, exclusively if there is one thread; with several, user code must be thread-safe."""
        if self._pool is not None and not isinstance(self._fetcher, StreamFetch):
            return job()
        with self._turn:
            return job()

    @property
    def _where(self) -> str:
        node = ray.get_runtime_context().get_node_id()[:6]
        return f"in DataLoader Ray worker {self._number} (pid {os.getpid()} on node {platform.node()} ({node}))"


def _told(remote: RemoteError, error: BaseException) -> RemoteError:
    """Return the error with its type, also for types that only Ray's pickle can send."""
    if remote.kind:
        return remote
    try:
        return remote._replace(kind=cloudpickle.dumps(type(error)))
    except Exception:  # only its name is sent
        return remote
