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
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.loader.exceptions import describe
from penstock.loader.executors.process.pack import pack
from penstock.loader.fetch import Fetch, Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.loader.snapshots import Snapshot
from penstock.loader.stream import StreamFetch
from penstock.loader.workerinfo import process_worker, seed_worker
from penstock.plan.stream_plan import EpochStart

__all__ = ["Worker", "versions"]

F = TypeVar("F", bound=Callable[..., Any])


def _in_group(name: str) -> Callable[[F], F]:
    """Return a decorator that assigns a method to a concurrency group of the actor."""
    return cast(Callable[[F], F], ray.method(concurrency_group=name))


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines."""
    return {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "penstock": penstock.__version__,
    }


class Worker:
    """The actor.

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
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._fetcher: Fetcher | None = None
        self._broken: Exception | None = None  # the answer to every batch
        self._ended = False  # whether a stream has reported it
        self._wanted = self._begun = 0  # numbers of the requested and the started epoch iterator
        self._news = threading.Condition()
        self._turns = turns
        self._turn = threading.RLock()  # held while user code runs in the calling thread
        node = ray.get_runtime_context().get_node_id()[:6]
        self._node = f"{ray.util.get_node_ip_address()} ({node})"

    @_in_group("control")
    def hello(self) -> dict[str, Any]:
        """Return the versions and the node of this worker."""
        return {"node": self._node, "versions": versions()}

    @_in_group("control")
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
                    self._broken, self._ended = None, False
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

    @_in_group("control")
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

    @_in_group("make")
    def make(self, run: int, requests: list[bytes]) -> list[Any]:
        """Make one batch, or several small ones, since each write to the object store costs a millisecond.

        Args:
            run: number of their epoch iterator.
            requests: pickled requests.

        Returns:
            The pickled answers, each with its kind ("batch", "error", "end", "skipped"), payload, metrics, seconds and
            number of large buffers; then the large buffers.
        """
        with self._news:
            self._news.wait_for(lambda: self._begun >= run)
        answers: list[Any] = []
        buffers: list[Any] = []
        for request in requests:
            metrics, start = BatchMetrics(), time.perf_counter()
            kind, payload, large = self._answer(run, BatchRequest(*pickle.loads(request)), metrics)
            answers.append((kind, payload, metrics.packed(), time.perf_counter() - start, len(large)))
            buffers += large
        return [cloudpickle.dumps(answers), *buffers]

    def _answer(self, run: int, request: BatchRequest, metrics: BatchMetrics) -> tuple[str, Any, list[Any]]:
        """Return kind, payload and large buffers of the answer to a request."""
        with self._turn if self._turns else nullcontext():  # an older call must not advance a newer stream
            if run != self._wanted:
                return "skipped", None, []
            if self._ended:
                return "end", None, []
            try:
                if self._broken is not None:
                    self._ended = isinstance(self._fetcher, StreamFetch)
                    raise self._broken
                assert self._fetcher is not None
                batch = self._batch(self._fetcher, request, metrics)
                start = time.perf_counter()
                state = self._fetcher.state_dict()
                try:
                    data, _, buffers = pack(batch, None)
                except Exception:  # for example a class of the main program, which only Ray's pickle can send
                    data, buffers = cloudpickle.dumps(batch), []
                metrics.hand_over += time.perf_counter() - start
                return "batch", (data, state), [np.frombuffer(buffer, np.uint8) for buffer in buffers]
            except StopIteration:
                return "end", None, []
            except Exception as error:
                where = f"in DataLoader Ray worker {self._number} (pid {os.getpid()} on node {self._node})"
                return "error", describe(error, where, cloudpickle.dumps), []

    def _batch(self, fetcher: Fetcher, request: BatchRequest, metrics: BatchMetrics) -> Any:
        if self._pool is None or not isinstance(fetcher, Fetch):
            with self._turn:
                return fetcher(request, metrics)
        size, count = len(request.indices), min(self._threads, len(request.indices))
        if not fetcher.divisible or count < 2:
            return fetcher(request, metrics)
        parts = [request.part(part * size // count, (part + 1) * size // count) for part in range(count)]
        costs = [BatchMetrics() for _ in parts]
        samples = list(self._pool.map(fetcher.samples, parts, costs))
        for cost in costs:
            metrics.add(cost)
        return fetcher.collate([sample for part in samples for sample in part], request, metrics)
