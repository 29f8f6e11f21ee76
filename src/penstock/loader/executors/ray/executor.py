"""`RayExecutor`: makes batches in actors on a Ray cluster, which stay until the loader is closed.

    begin(start) -> its node, and a snapshot -> make, make, ...
                                                  `-> lost or silent: `Lost`, and another one is started

A worker that has not started yet is not waited for: others make its batches, unless it matters who makes them. Ray
neither restarts nor retries these actors. The consumer waits in one ``ray.wait``.

Without ``persistent_workers``, an epoch iterator starts with the current dataset, as in torch: a changed dataset is
sent again, and streams get a new copy. See `RayExecutor.renew`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from penstock.errors import ClusterError, ConfigError
from penstock.loader.config import LoaderConfig
from penstock.loader.exceptions import RemoteError, rebuild
from penstock.loader.executors.base import Began, Event, Executor, Lost, Start
from penstock.loader.executors.process.transport import unpack
from penstock.loader.executors.ray.cluster import attach, ray, session
from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.executors.ray.worker import Worker, versions
from penstock.loader.make import Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult

__all__ = ["RayExecutor"]

_STORE_SHARE = 0.3
"""Share of the program's object store for the batches in flight, so that nothing is spilled to disk. Half of a store is
left to other users, and some to objects that Ray frees a little later.
"""

_COUNTS = ("workers", "batches", "samples", "bytes", "seconds", "lost")
"""What is counted on each node."""

_LARGE = 10 << 20
"""Pickles larger than this many bytes give a warning."""

_AT_WORK = 2
"""Calls that a worker may have started, see `Worker`."""

_FETCH_S = 30.0  # seconds to fetch an object that is reported as local
_STARTS = 3  # consecutive workers that fail to start until it is an error
_AT_EXIT_S = 5.0  # seconds to wait for the lock, which a user's sampler may hold


@dataclass(eq=False)
class RayWorker:
    """A worker.

    Attributes:
        number: its number.
        actor: Ray's handle.
        node: the name of its node; empty until it has started.
        run: the run that it has begun; 0 for none.
        setup: Ray's reference to the dataset that it has.
        last: when it answered last, or when its start was requested.
    """

    number: int
    actor: Any
    node: str = ""
    run: int = 0
    setup: Any = None
    last: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Call:
    """A call of a worker.

    Attributes:
        requests: the batches; or a `Start` alone.
        number: the number of the worker that they were submitted to.
        worker: the worker that makes them: another one, while that one has not started.
        sent: when it was sent.
    """

    requests: Sequence[Start | BatchRequest]
    number: int
    worker: RayWorker
    sent: float = field(default_factory=time.monotonic)


class RayExecutor(Executor):
    """Makes batches in the cluster.

    Args:
        fetcher: copied to each worker.
        config: the loader's settings.
        base_seed: torch's base seed; worker i gets base_seed + i.

    Attributes:
        max_bytes: bytes of the object store for batches in flight.

    Raises:
        ClusterError: no cluster.
        ConfigError: Ray is too old, or the dataset cannot be pickled.
    """

    def __init__(self, fetcher: Fetcher, config: LoaderConfig, base_seed: int) -> None:
        self.workers, self.lock, self.pid = 0, threading.RLock(), os.getpid()
        self._config = config
        self._options = config.ray_options or RayOptions()
        attach(self._options.address)
        self._session = session()
        here = ray.get_runtime_context().get_node_id()
        (store,) = (node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here)
        self.max_bytes = int(store * _STORE_SHARE)
        # Whether it matters which worker makes a batch.
        self._turns = self.tells_begin = fetcher.has_states
        self._run = 0
        self._setup: Any = None  # Ray's reference to the present dataset
        self._digest = b""
        self._actors: list[RayWorker] = []
        self._backlog: list[tuple[int, list[BatchRequest]]] = []
        """Requests, by worker, for which no worker is ready."""
        self._events: list[Event] = []  # that no worker reports
        self._pending: dict[Any, Call] = {}
        """The unanswered calls, oldest first, by Ray's references to their answers."""
        self._asked = 0.0  # when the consumer asked for a batch
        self._nodes: dict[str, dict[str, Any]] = {}
        """The counts of each node."""
        self._failed = 0  # workers in a row that could not be started
        self._serial = itertools.count()
        self._name = f"{self._options.name}-{uuid.uuid4().hex[:6]}"
        made_at_once = 1 if self._turns else _AT_WORK
        self._class = ray.remote(concurrency_groups={"control": 1, "make": made_at_once})(Worker)
        self._close = weakref.finalize(self, _end, self._actors, self._pending, self.pid, self._session, self.lock)
        self.renew(fetcher, base_seed)
        self.resize(config.workers)

    def renew(self, fetcher: Fetcher, base_seed: int) -> None:
        """Have the workers use a new copy of the dataset from the next run on, if it has changed or has a state.

        Raises:
            ConfigError: it cannot be pickled.
        """
        name = type(fetcher.dataset).__name__
        try:
            setup = ray.cloudpickle.dumps((fetcher, self._config.worker_init_fn))
        except Exception as error:
            raise ConfigError(
                f"{name}, the collate function or worker_init_fn cannot be pickled to be sent to other machines: "
                f"{error}"
            ) from error
        if len(setup) > _LARGE and not self._digest:
            warnings.warn(
                f"{name} pickles to {len(setup) / 1e6:.0f} MB, which each of {self._config.workers} workers holds a "
                "copy of: keep the data in files and open them by path (a Manifest travels as a handle of a few "
                "hundred bytes), or use fewer workers with more threads_per_worker",
                stacklevel=5,
            )
        self._base_seed = base_seed
        digest = hashlib.blake2b(setup).digest()
        if digest != self._digest or self._turns:
            self._setup, self._digest = ray.put(setup), digest

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the workers were ended, or have ended with the connection to the cluster."""
        return not self._close.alive or session() != self._session

    @property
    def run(self) -> int:
        """The number of the run whose requests are wanted."""
        return self._run

    @run.setter
    def run(self, run: int) -> None:
        self._run = run
        self._backlog.clear()
        self._events.clear()
        self._pending.clear()
        # A start says it, too.
        if not run and not self.closed:
            for worker in self._actors:
                worker.actor.stop.remote()

    # Requests.

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. A request whose indices cannot be pickled is answered by that error."""
        batches: list[BatchRequest] = []
        for request in requests:
            if isinstance(request, Start):
                self._begin(self._actors[worker], request)
            else:
                batches.append(request)
        if batches:
            self._backlog.append((worker, batches))
            self._send_backlog()

    def _begin(self, worker: RayWorker, start: Start) -> None:
        setup = None if worker.setup is self._setup else self._setup
        worker.setup = self._setup
        self._pending[worker.actor.begin.remote(start, setup, self._base_seed)] = Call([start], worker.number, worker)

    def _send_backlog(self) -> None:
        """Send the requests for which a worker is ready."""
        waiting, self._backlog = self._backlog, []
        for number, requests in waiting:
            worker = self._actors[number]
            if not worker.node and not self._turns:
                ready = (other for other in self._actors if other.run == self._run)
                worker = min(ready, key=self._load, default=worker)
            if worker.run != self._run:
                self._backlog.append((number, requests))
                continue
            try:
                ref = worker.actor.make.remote(requests)
            except Exception as error:
                if len(requests) > 1:
                    for request in requests:
                        self.submit([request], number)
                else:
                    failed = requests[0].number
                    self._events.append(BatchResult(None, BatchMetrics(), failed, number, error=error, run=self._run))
            else:
                self._pending[ref] = Call(requests, number, worker)

    def _load(self, worker: RayWorker) -> int:
        """Return how many batches a worker has to make."""
        return sum(len(call.requests) for call in self._pending.values() if call.worker is worker)

    # Answers.

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """See `Executor`.

        Raises:
            ClusterError: the program has left the cluster, or workers could not be started.
        """
        with self.lock:
            if not self._close.alive or run != self._run:
                return []
            if session() != self._session:
                # Ray would start another cluster without a request.
                raise ClusterError(
                    "the program is no longer connected to the Ray cluster of this DataLoader's workers "
                    "(ray.shutdown() was called): reconnect, and start a new iterator"
                )
            now, limit = time.monotonic(), self._options.deadline or math.inf
            if deadline is not None and deadline <= now:
                # While the consumer is busy, answers are not read, and no worker is silent.
                self._asked = now
            until = min(math.inf if deadline is None else deadline, self._check_starts(now))
            for call in self._pending.values():
                # Workers that start have a time-out of their own.
                silent = max(call.sent, call.worker.last, self._asked) + (limit if call.worker.node else math.inf)
                if now >= silent:
                    why = f"no answer for {limit} s, which is RayOptions(deadline=)"
                    self._events += self._lose(call.worker, why)
                    break
                until = min(until, silent)
            refs = [] if self._events else list(self._pending)
        self.waiting = True
        found = _wait(refs, None if until == math.inf else max(0.0, until - now))
        self.waiting = False
        with self.lock:
            if not self._close.alive or run != self._run:
                return []
            events, self._events = self._events, []
            for ref in found:
                # Not that of a worker that was just lost.
                if ref in self._pending:
                    events += self._take(ref, self._pending[ref])
            self._send_backlog()
            return events

    def _take(self, ref: Any, call: Call) -> list[Event]:
        """Return the events of an answer, see `Worker.begin` and `Worker.make`."""
        worker = call.worker
        try:
            answer = ray.get(ref, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            if worker.node:
                return self._lose(worker, error)
            self._failed += 1
            if self._failed == _STARTS:
                self.close(0.0)
                raise ClusterError(
                    f"{_STARTS} workers in a row could not be started in the Ray cluster; the last one said: {error}. "
                    "All nodes need penstock, torch and the dataset's modules and files in the versions of this program"
                ) from error
            del self._pending[ref]
            self._replace(worker)
            self.submit(call.requests, worker.number)
            return []
        del self._pending[ref]
        worker.last = time.monotonic()
        if isinstance(call.requests[0], Start):
            node, snapshot = answer
            if not worker.node:
                worker.node, self._failed = node, 0
                self._nodes.setdefault(node, dict.fromkeys(_COUNTS, 0))["workers"] += 1
            worker.run = self._run
            return [Began(self._run, call.number, snapshot)]
        counts, events = self._nodes[worker.node], list[Event]()
        result: BatchResult
        for result, large in answer:
            begin, metrics = time.perf_counter(), result.metrics
            batch, failure, nbytes = None, result.error, 0
            if failure is not None:
                failure = rebuild(cast(RemoteError, failure))
            elif not result.ended:
                nbytes = len(result.batch) + sum(array.nbytes for _, array in large)
                try:
                    # Ray's arrays are read-only views of objects that others may share: tensors would change them.
                    memory = np.empty(large[-1][0] + large[-1][1].nbytes if large else 0, np.uint8)
                    for offset, array in large:
                        memory[offset : offset + array.nbytes] = array
                    batch = unpack(result.batch, memory)
                except Exception as failed:  # too little memory, or an object that cannot be unpickled
                    failure = failed
                counts["batches"] += 1
                counts["samples"] += metrics.samples
                counts["bytes"] += nbytes
                counts["seconds"] += metrics.fetch + metrics.collate
            metrics.hand_over += time.perf_counter() - begin
            number = call.number if self._turns else 0
            events.append(result._replace(batch=batch, way="message", error=failure, nbytes=nbytes, worker=number))
        return events

    def _lose(self, worker: RayWorker, error: object) -> list[Event]:
        """Replace a worker. Return the events that say so, one for each worker whose requests it had."""
        self._replace(worker)
        calls = [call for call in self._pending.values() if call.worker is worker]
        numbers = {call.number for call in calls} or {worker.number}
        for ref in [ref for ref, call in self._pending.items() if call.number in numbers]:
            del self._pending[ref]
        self._nodes[worker.node]["workers"] -= 1
        self._nodes[worker.node]["lost"] += 1
        self._backlog = [(number, requests) for number, requests in self._backlog if number not in numbers]
        why = f"worker {worker.number} on node {worker.node} was lost ({' '.join(str(error).split())})"
        begun = [request for call in calls[:_AT_WORK] for request in call.requests if isinstance(request, BatchRequest)]
        if self._turns:
            why += (
                ", and with it the position of its copy of the dataset: an iterable dataset, or one with a state of "
                "its own, cannot go on without. Resume from the last state_dict()"
            )
        elif begun:
            for request in begun:
                request.unpack()
            why += " while it made " + " or ".join(f"batch {one.number}, samples {one.indices}" for one in begun)
        return [Lost(number, why) for number in sorted(numbers)]

    # Workers.

    def resize(self, workers: int) -> None:
        """See `Executor`. The number of workers is constant."""
        self.workers = workers
        for number in range(len(self._actors), workers):
            self._start(number)

    def _start(self, number: int) -> None:
        config, name = self._config, f"{self._name}-{next(self._serial)}"
        made = self._class.options(name=name, max_restarts=0, max_task_retries=0, **self._options.of_actors())
        actor = made.remote(number, config.workers, config.threads, versions())
        self._actors[number : number + 1] = [RayWorker(number, actor)]

    def _replace(self, worker: RayWorker) -> None:
        ray.kill(worker.actor, no_restart=True)
        self._start(worker.number)

    def _check_starts(self, now: float) -> float:
        """Return when it is an error that workers have not started; never if the others go on without them.

        Raises:
            ClusterError: it is now.
        """
        starting = [worker for worker in self._actors if not worker.node]
        if not starting or (not self._turns and len(starting) < self.workers):
            return math.inf
        since, timeout = min(worker.last for worker in starting), self._options.start_timeout
        if now < since + timeout:
            return since + timeout
        actors = self._options.of_actors()
        actors.pop("runtime_env", None)
        wanted = ", ".join(f"{name}={value!r}" for name, value in actors.items())
        free = ", ".join(f"{name} {value:g}" for name, value in ray.available_resources().items() if ":" not in name)
        self.close(0.0)
        raise ClusterError(
            f"{len(starting)} of {self.workers} workers could not be started in {now - since:.0f} s: each asks for "
            f"{wanted}, and free in the cluster are {free}. Add nodes, ask for less by RayOptions(num_cpus=, "
            "resources=, label_selector=), or raise its start_timeout. With num_cpus=0, workers share the CPUs of "
            "other loaders' workers"
        )

    def stats(self) -> dict[str, Any]:
        """Return counts by node, and the number of lost workers."""
        lost = sum(counts["lost"] for counts in self._nodes.values())
        return {"nodes": {name: dict(counts) for name, counts in self._nodes.items()}, "lost_workers": lost}

    def close(self, patience: float) -> None:
        """See `Executor`. The workers end at once, the cluster stays."""
        self._close()


def _wait(refs: list[Any], timeout: float | None) -> list[Any]:
    """Return the references that are ready; wait until there is one, at most ``timeout`` seconds (None: forever)."""
    if not refs:
        return []
    try:
        found, rest = ray.wait(refs, num_returns=1, timeout=timeout)
    except SystemError as error:
        # Ray raises this if a signal handler has raised.
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
    if found and rest:
        found += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
    return list(found)


def _end(workers: list[RayWorker], pending: dict[Any, Any], pid: int, before: str, lock: threading.RLock) -> None:
    if os.getpid() != pid or session() != before:
        return  # a fork of the process that owns these workers; or they ended with the connection
    locked = lock.acquire(timeout=_AT_EXIT_S)
    try:
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)
        pending.clear()
    finally:
        if locked:
            lock.release()
