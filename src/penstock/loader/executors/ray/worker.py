"""`Worker`: the program of an actor: take requests, make the batches, return bytes and arrays.

    control  hello, begin, stop        one thread, so that a run can be cancelled while batches are made
    make     two calls at a time       one is made while the result of the other is written to the object store

User code runs in the threads of a pool, also if there is only one. Its errors are answers, as text; SystemExit ends the
actor, as in a worker process. A call of an earlier run is answered without work.
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
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.loader.exceptions import describe
from penstock.loader.executors.base import Start
from penstock.loader.executors.process.ring import ALIGNMENT
from penstock.loader.executors.process.transport import pack
from penstock.loader.executors.threads import ThreadPool
from penstock.loader.make import Maker
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.user_state import Snapshot
from penstock.loader.workerinfo import process_worker, seed_worker

__all__ = ["Worker", "versions"]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines: only the same code makes the same batches."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        # Without the build, such as +cpu.
        "torch": torch.__version__.partition("+")[0],
        "penstock": penstock.__version__,
    }


class Buffers:
    """The large tensors and arrays of one batch, which Ray writes to the object store from where they are.

    Attributes:
        arrays: their memory.
        offsets: where each is to be in the program's memory.
    """

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        self.offsets: list[int] = []
        self._used = 0

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int:
        """See `penstock.loader.executors.process.transport.Target`."""
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.arrays.append(read())
        self.offsets.append(offset)
        return offset


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
        boards = memoryview(array("Q", [0] * 2 * threads))
        # SystemExit in user code ends the worker, not just a thread.
        self._pool = ThreadPool(threads, boards=boards, crash=partial(os._exit, 1))
        node = ray.get_runtime_context().get_node_id()[:6]
        self._node = f"{ray.util.get_node_ip_address()} ({node})"
        self._where = f"in DataLoader Ray worker {number} (pid {os.getpid()} on node {self._node})"

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def hello(self) -> dict[str, Any]:
        """Return the versions and the node of this worker."""
        return {"node": self._node, "versions": versions()}

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def begin(self, start: Start, setup: bytes | None, base_seed: int) -> Snapshot | None:
        """Start a run, drop earlier requests, and return the first snapshot.

        Args:
            start: the start.
            setup: a new pickled fetcher and ``worker_init_fn``; None keeps the present ones.
            base_seed: the base seed of new ones.
        """
        self._wanted = start.run
        box: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._pool.submit(lambda board: box.put(self._begin(start, setup, base_seed)))
        first = box.get()
        with self._news:
            self._begun = start.run
            self._news.notify_all()
        return first

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Drop all requests."""
        self._wanted = 0

    def _begin(self, start: Start, setup: bytes | None, base_seed: int) -> Snapshot | None:
        if setup is not None:
            self._maker = self._broken = None
            try:
                fetcher, init = pickle.loads(setup)
            except Exception as error:
                self._broken = error
                return None
            seed_worker(base_seed, self._number)
            process_worker(self._number, self._total, base_seed + self._number, fetcher.dataset)
            self._maker = Maker(fetcher, self._number)
            self._maker.init(init, self._number)
        return None if self._maker is None else self._maker.begin(start).snapshot

    @ray.method(concurrency_group="make")  # type: ignore[untyped-decorator]
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
        boxes: list[queue.SimpleQueue[BatchResult | None]] = []
        for data in requests:
            request: BatchRequest = pickle.loads(data)
            boxes.append(box := queue.SimpleQueue[BatchResult | None]())
            if self._maker is None:
                box.put(BatchResult(None, BatchMetrics(), request.number, error=self._broken, run=run))
            else:
                self._pool.make(self._maker, request, box.put, wanted=lambda run: run == self._wanted)
        answers: list[tuple[BatchResult, list[int]]] = []
        arrays: list[Any] = []
        for box in boxes:
            if (result := box.get()) is not None:
                packed, buffers = self._packed(result)
                answers.append((packed, buffers.offsets))
                arrays += buffers.arrays
        return [cloudpickle.dumps(answers), *arrays]

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
                    error = failed
        if error is not None:
            remote: Any = describe(error, self._where, cloudpickle.dumps)
            result = result._replace(batch=None, error=remote)
        result.metrics.hand_over += time.perf_counter() - begin
        return result, buffers
