"""`Worker`: the program of an actor: take requests, make the batches, return bytes and arrays.

    control  begin, stop               one thread, so that a run can be cancelled while batches are made
    make     two calls at a time       one is made while the result of the other is written to the object store

User code runs in the threads of a pool, also if there is only one. Its errors are answers, as text; SystemExit ends the
actor, as in a worker process. A call of an earlier run is answered without work.
"""

from __future__ import annotations

import os
import pickle
import platform
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray import cloudpickle

import penstock
from penstock.errors import ClusterError
from penstock.loader.exceptions import describe
from penstock.loader.executors.base import Start
from penstock.loader.executors.process.ring import ALIGNMENT
from penstock.loader.executors.process.transport import pack
from penstock.loader.executors.threads import ThreadPool
from penstock.loader.make import Maker
from penstock.loader.messages import BatchRequest, BatchResult
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
        parts: their memory, and where each is to be in the program's memory.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._used = 0

    def put(self, address: int, nbytes: int, read: Callable[[], npt.NDArray[np.uint8]]) -> int:
        """See `penstock.loader.executors.process.transport.Target`."""
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.parts.append((offset, read()))
        return offset


class Worker:
    """The actor.

    Args:
        number: its number, as ``get_worker_info().id``.
        total: the number of workers.
        threads: the threads that load samples.
        expected: the program's `versions`.

    Raises:
        ClusterError: this node has others.
    """

    def __init__(self, number: int, total: int, threads: int, expected: dict[str, str]) -> None:
        node = ray.get_runtime_context().get_node_id()[:6]
        self._node = f"{ray.util.get_node_ip_address()} ({node})"
        differing = [
            f"{name} {ours} (here {expected[name]})" for name, ours in versions().items() if ours != expected[name]
        ]
        if differing:
            raise ClusterError(
                f"the worker on node {self._node} runs {', '.join(differing)}: batches would not be the same. "
                "Install the same versions there, or name them by RayOptions(runtime_env=)"
            )
        torch.set_num_threads(1)
        self._number = number
        self._total = total
        self._wanted = 0  # number of the run
        boards = memoryview(array("Q", [0] * 2 * threads))
        # SystemExit in user code ends the worker, not just a thread.
        self._pool = ThreadPool(threads, boards=boards, crash=partial(os._exit, 1))
        self._where = f"in DataLoader Ray worker {number} (pid {os.getpid()} on node {self._node})"

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def begin(self, start: Start, setup: bytes | None, base_seed: int) -> tuple[str, Snapshot | None]:
        """Start a run, drop earlier requests, and return the node and the first snapshot.

        Args:
            start: the start.
            setup: a new pickled fetcher and ``worker_init_fn``; None keeps the present ones.
            base_seed: the base seed of new ones.
        """
        self._wanted = start.run
        first = Future[Snapshot | None]()

        def run(board: memoryview) -> None:
            try:
                if setup is not None:
                    self._use(setup, base_seed)
                first.set_result(self._maker.begin(start).snapshot)
            except Exception as error:
                first.set_exception(error)

        self._pool.submit(run)
        return self._node, first.result()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Drop all requests."""
        self._wanted = 0

    def _use(self, setup: bytes, base_seed: int) -> None:
        # If the new one cannot be had, nothing may go on with the old one.
        vars(self).pop("_maker", None)
        fetcher, init = pickle.loads(setup)
        seed_worker(base_seed, self._number)
        process_worker(self._number, self._total, base_seed + self._number, fetcher.dataset)
        self._maker = Maker(fetcher, self._number)
        self._maker.init(init, self._number)

    @ray.method(concurrency_group="make")  # type: ignore[untyped-decorator]
    def make(self, requests: list[BatchRequest]) -> list[tuple[BatchResult, list[tuple[int, Any]]]]:
        """Make one batch, or several small ones, since each write to the object store costs a millisecond.

        Returns:
            For each wanted batch its result, with a pickle as the batch and text as the error; and its large buffers,
            see `Buffers`.
        """
        results: list[Future[BatchResult | None]] = []
        for request in requests:
            result = Future[BatchResult | None]()
            results.append(result)
            self._pool.make(self._maker, request, result.set_result, wanted=lambda run: run == self._wanted)
        return [self._packed(made) for result in results if (made := result.result()) is not None]

    def _packed(self, result: BatchResult) -> tuple[BatchResult, list[tuple[int, Any]]]:
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
        return result, buffers.parts
