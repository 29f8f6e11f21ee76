"""`Worker`: what runs in an actor: take a request, make the batch with a few threads, return it as bytes and arrays.

    control  begin, hello              one thread, so that a pass can be called off while batches are made
    make     two calls at a time       one is made while the other one's result is written to the object store

Errors of user code are answers, as text; an actor that raises SystemExit ends, as a worker process does.

A stale call (of a pass that is over) is answered without work.
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
from typing import Any, TypeVar, cast

import numpy as np
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.loader.exceptions import RemoteError, describe
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
    """In which of the actor's groups of threads a method runs."""
    return cast(Callable[[F], F], ray.method(concurrency_group=name))


class Actor:
    """A `Worker`, as Ray sees it: Ray wraps each method of an actor's class, however inward."""

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
    """What has to be the same on all machines."""
    return {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "penstock": penstock.__version__,
    }


class Worker:
    """One worker.

    Args:
        number: of the worker, as ``get_worker_info().id``.
        total: how many there are.
        threads: that make samples.
        turns: it matters what is made when: streams, and objects with a state of their own.
    """

    def __init__(self, number: int, total: int, threads: int, turns: bool) -> None:
        torch.set_num_threads(1)
        self._number = number
        self._total = total
        self._pool = ThreadPool(threads, None) if threads > 1 else None
        self._threads = threads
        self._fetcher: Fetcher | None = None
        self._broken: Exception | None = None  # what every batch is answered with
        self._told = False  # once by a stream, which then is at its end
        self._wanted = self._begun = 0  # number of the pass: that is asked for, and that can be served
        self._news = threading.Condition()
        self._turns = turns
        self._turn = threading.RLock()  # held while user code runs in the calling thread

    def hello(self) -> dict[str, Any]:
        """Who and where this is."""
        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "pid": os.getpid(), "versions": versions()}

    def begin(self, run: int, epoch: EpochStart, state: Any, setup: bytes | None, base_seed: int) -> Snapshot | None:
        """Begin a run, and return the first snapshot: what was asked for before is not wanted any more.

        Args:
            run: number of the pass.
            epoch: told to streams.
            state: of users' objects, to go on from.
            setup: a new fetcher and ``worker_init_fn``, pickled; None goes on with those at hand.
            base_seed: of new ones.
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
            except Exception as error:  # told where a batch is asked for
                self._broken = error
            with self._news:
                self._begun = run
                self._news.notify_all()
        return first

    def stop(self) -> None:
        """Nothing is wanted any more."""
        self._wanted = 0

    def _set_up(self, setup: bytes, base_seed: int) -> None:
        fetcher, init = pickle.loads(setup)
        seed_worker(base_seed, self._number)
        process_worker(self._number, self._total, base_seed + self._number, fetcher.dataset)
        if init is not None:
            init(self._number)
        self._fetcher = fetcher

    def make(self, run: int, requests: list[bytes], collate: bool, rows: bytes | None) -> list[Any]:
        """One batch, or several that are little work: what is written to the object store costs a millisecond.

        Args:
            run: number of their pass.
            requests: pickled.
            collate: False for the samples as they are.
            rows: of manifests whose file is not here, see `penstock.loader.executors.ray.remote_manifest`.

        Returns:
            The answers, pickled: of each its kind ("batch", "error", "end", "rows", "skipped"), payload, metrics,
            seconds and the number of its large buffers, which are behind.
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
        with self._turn if self._turns else nullcontext():  # a call of an older pass must not move a newer one's stream
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
            if not isinstance(self._fetcher, StreamFetch):
                raise
            return "end", None, []
        start = time.perf_counter()
        state = self._fetcher.state_dict() if collate else None
        try:
            data, _, buffers = pack(batch, None)
        except Exception:  # a class of the main program, say, that only Ray's pickle can send
            data, buffers = cloudpickle.dumps(batch), []
        beside = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        metrics.hand_over += time.perf_counter() - start
        return "batch", (data, state), beside

    def _make(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        if self._pool is None or not getattr(self._fetcher, "divisible", False) or len(request.indices) < 2:
            return self._alone(lambda: self._fetcher(request, metrics))  # type: ignore[misc]
        assert isinstance(self._fetcher, Fetch)
        return self._fetcher.collate(self._in_threads(self._fetcher, request, metrics), request, metrics)

    def _samples(self, request: BatchRequest, metrics: BatchMetrics) -> Any:
        assert isinstance(self._fetcher, Fetch)
        fetcher = self._fetcher
        return self._alone(lambda: fetcher.samples(request, metrics))

    def _alone(self, job: Callable[[], Any]) -> Any:
        """With one thread the user's code never runs twice at a time; with several it is said to bear that."""
        if self._pool is not None and not isinstance(self._fetcher, StreamFetch):
            return job()
        with self._turn:
            return job()

    def _in_threads(self, fetcher: Fetch, request: BatchRequest, metrics: BatchMetrics) -> list[Any]:
        """The samples of a request, each thread some of them."""
        assert self._pool is not None
        size, count = len(request.indices), min(self._threads, len(request.indices))
        done: queue.SimpleQueue[tuple[int, Any, BatchMetrics]] = queue.SimpleQueue()
        for chunk in range(count):
            part = request.part(chunk * size // count, (chunk + 1) * size // count)

            def job(_: Any, chunk: int = chunk, part: BatchRequest = part) -> None:
                mine = BatchMetrics()
                try:
                    made: Any = fetcher.samples(part, mine)
                except BaseException as error:  # raised again in the thread of the call
                    made = error
                done.put((chunk, made, mine))

            self._pool.submit(job)
        parts: dict[int, Any] = {}
        for _ in range(count):
            chunk, made, mine = done.get()
            parts[chunk] = made
            metrics.add(mine)
        for chunk in range(count):
            if isinstance(parts[chunk], BaseException):
                raise parts[chunk]
        return [sample for chunk in range(count) for sample in parts[chunk]]

    @property
    def _where(self) -> str:
        node = ray.get_runtime_context().get_node_id()[:6]
        return f"in DataLoader Ray worker {self._number} (pid {os.getpid()} on node {platform.node()} ({node}))"


def _told(remote: RemoteError, error: BaseException) -> RemoteError:
    """With the error's type also where only Ray's pickle can send it, as those of the main program."""
    if remote.kind:
        return remote
    try:
        return remote._replace(kind=cloudpickle.dumps(type(error)))
    except Exception:  # its name remains
        return remote
