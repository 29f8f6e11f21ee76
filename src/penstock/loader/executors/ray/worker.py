"""`Worker`: the program of an actor: take requests, make the batches, return bytes and arrays.

    control  hello, begin, stop        one thread, so that a run can be cancelled while batches are made
    make     two calls at a time       one is made while the result of the other is written to the object store

Errors of user code are answers, as text; SystemExit ends the actor, as in a worker process. A call of an earlier run is
answered without work.
"""

from __future__ import annotations

import os
import pickle
import platform
import queue
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.loader.exceptions import describe
from penstock.loader.executors.base import Start
from penstock.loader.executors.process.transport import pack
from penstock.loader.executors.ray.receive_buffer import Buffers
from penstock.loader.executors.threads import ThreadPool
from penstock.loader.make import Maker
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot
from penstock.loader.workerinfo import process_worker, seed_worker

__all__ = ["Worker", "versions"]

F = TypeVar("F", bound=Callable[..., Any])


def _in_group(name: str) -> Callable[[F], F]:
    """Return a decorator that assigns a method to a concurrency group of the actor."""
    return cast(Callable[[F], F], ray.method(concurrency_group=name))


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines: only the same code makes the same batches."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        # Without the build, such as +cpu.
        "torch": torch.__version__.partition("+")[0],
        "penstock": penstock.__version__,
    }


class Worker:
    """The actor.

    Args:
        number: its number, as ``get_worker_info().id``.
        total: the number of workers.
        threads: the threads that load samples.
    """

    def __init__(self, number: int, total: int, threads: int) -> None:
        torch.set_num_threads(1)
        self._number = number
        self._total = total
        self._maker: Maker | None = None
        self._broken: Exception | None = None
        """Why there is no maker: the dataset could not be unpickled here."""
        self._wanted = self._begun = 0  # numbers of the requested and the started run
        self._news = threading.Condition()
        self._turn = threading.Lock()  # held while user code runs in the calling thread
        self._pool: ThreadPool | None = None
        if threads > 1:
            boards = memoryview(array("Q", [0] * 2 * threads))
            # SystemExit in user code ends the worker, not just a thread.
            self._pool = ThreadPool(threads, boards=boards, crash=partial(os._exit, 1))
        node = ray.get_runtime_context().get_node_id()[:6]
        self._node = f"{ray.util.get_node_ip_address()} ({node})"
        self._where = f"in DataLoader Ray worker {number} (pid {os.getpid()} on node {self._node})"

    @_in_group("control")
    def hello(self) -> dict[str, Any]:
        """Return the versions and the node of this worker."""
        return {"node": self._node, "versions": versions()}

    @_in_group("control")
    def begin(self, start: Start, setup: bytes | None, base_seed: int) -> Snapshot | None:
        """Start a run, drop earlier requests, and return the first snapshot.

        Args:
            start: the start.
            setup: a new pickled fetcher and ``worker_init_fn``; None keeps the present ones.
            base_seed: the base seed of new ones.
        """
        self._wanted, first = start.run, None
        with self._turn:
            if setup is not None:
                self._set_up(setup, base_seed)
            if self._maker is not None:
                first = self._maker.begin(start).snapshot
        with self._news:
            self._begun = start.run
            self._news.notify_all()
        return first

    @_in_group("control")
    def stop(self) -> None:
        """Drop all requests."""
        self._wanted = 0

    def _set_up(self, setup: bytes, base_seed: int) -> None:
        self._maker = self._broken = None
        try:
            fetcher, init = pickle.loads(setup)
        except Exception as error:
            self._broken = error
            return
        seed_worker(base_seed, self._number)
        process_worker(self._number, self._total, base_seed + self._number, fetcher.dataset)
        self._maker = Maker(fetcher, self._number)
        try:
            if init is not None:
                init(self._number)
        except Exception as error:
            self._maker.fail(error)

    @_in_group("make")
    def make(self, run: int, requests: list[bytes]) -> list[Any]:
        """Make one batch, or several small ones, since each write to the object store costs a millisecond.

        Args:
            run: number of their run.
            requests: pickled requests.

        Returns:
            A pickled list: for each wanted batch its result, with a pickle as the batch and text as the error, and the
            offsets of its large buffers, see `Buffers`; then all these buffers.
        """
        with self._news:
            self._news.wait_for(lambda: self._begun >= run)
        answers: list[tuple[BatchResult, list[int]]] = []
        arrays: list[Any] = []
        for take in [self._made(run, *pickle.loads(request)) for request in requests]:
            if (result := take()) is not None:
                packed, buffers = self._packed(result)
                answers.append((packed, buffers.offsets))
                arrays += buffers.arrays
        return [cloudpickle.dumps(answers), *arrays]

    def _made(self, run: int, number: int, *values: Any) -> Callable[[], BatchResult | None]:
        """Return a function that returns a batch, made by the threads meanwhile; None if it is not wanted any more."""
        request = BatchRequest(*values)
        request.run, request.number = run, number
        if self._pool is None or self._maker is None:
            return partial(self._make_here, request)
        box: queue.SimpleQueue[BatchResult | None] = queue.SimpleQueue()
        self._pool.make(self._maker, request, box.put, wanted=self._is_wanted)
        return box.get

    def _make_here(self, request: BatchRequest) -> BatchResult | None:
        with self._turn:
            if not self._is_wanted(request.run):
                return None
            if self._maker is None:
                return BatchResult(None, BatchMetrics(), request.number, error=self._broken)
            return self._maker.make(request)

    def _is_wanted(self, run: int) -> bool:
        return run == self._wanted

    def _packed(self, result: BatchResult) -> tuple[BatchResult, Buffers]:
        """Return a result that can be sent, and its large buffers."""
        error, buffers, begin = result.error, Buffers(), time.perf_counter()
        if error is None and not result.ended:
            try:
                result = result._replace(batch=pack(result.batch, buffers))
            except Exception:
                buffers = Buffers()
                try:
                    # For example a class of the main program, which only Ray's pickle can send.
                    result = result._replace(batch=cloudpickle.dumps(result.batch))
                except Exception as failed:
                    error, result = failed, result._replace(state=None)
        if error is not None:
            remote: Any = describe(error, self._where, cloudpickle.dumps)
            result = result._replace(batch=None, error=remote)
        result.metrics.hand_over += time.perf_counter() - begin
        return result, buffers
