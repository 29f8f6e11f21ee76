"""`RayExecutor`: makes batches in actors on a Ray cluster, which stay until the loader is closed.

    start -> hello (node, versions) -> begin(start) -> make, make, ...
                                                        `-> lost or silent: `Lost`, and `resize` starts another one

A worker that has not started yet is not waited for: others make its batches, unless it matters who makes them. Ray
neither restarts nor retries these actors. The consumer waits in one ``ray.wait``.

Without ``persistent_workers``, an epoch iterator starts with the current dataset, as in torch: a changed dataset is
sent again, and streams get a new copy. See `RayExecutor.renew`.
"""

from __future__ import annotations

import hashlib
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
import ray
from ray import cloudpickle
from ray.exceptions import RayError

from penstock.errors import ClusterError, ConfigError
from penstock.loader.config import LoaderConfig
from penstock.loader.exceptions import RemoteError, rebuild
from penstock.loader.executors.base import Began, Event, Executor, Lost, Start
from penstock.loader.executors.process.transport import unpack
from penstock.loader.executors.ray.cluster import attach, session
from penstock.loader.executors.ray.manifests import pickle_with_handles
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

_PENDING_S = 30.0  # seconds after which workers that do not start are reported
_FETCH_S = 30.0  # seconds to fetch an object that is reported as local
_STARTS = 3  # consecutive workers that may fail to start
_AT_EXIT_S = 5.0  # seconds to wait for the lock, which a user's sampler may hold


@dataclass(eq=False)
class RayWorker:
    """A worker.

    Attributes:
        number: its number.
        actor: Ray's handle.
        node: the name of its node; empty until it has started.
        dead: whether it was lost.
        setup: Ray's reference to the dataset that it has.
        calls: its unanswered calls, oldest first.
        last: when it answered last, or when its start was requested.
    """

    number: int
    actor: Any
    node: str = ""
    dead: bool = False
    setup: Any = None
    calls: list[Call] = field(default_factory=list)
    last: float = field(default_factory=time.monotonic)

    @property
    def ready(self) -> bool:
        """Whether it can make batches."""
        return bool(self.node) and not self.dead


@dataclass(eq=False)
class Call:
    """A request for batches, whose answers have the same order.

    Attributes:
        requests: the batches; none if it starts a run.
        number: the number of the worker that they were submitted to.
        worker: the worker that makes them: another one, while that one has not started.
        ref: Ray's reference to the answers.
        sent: when it was sent.
    """

    requests: list[BatchRequest]
    number: int
    worker: RayWorker
    ref: Any
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
        super().__init__(0)
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
        self._starts: dict[int, Start] = {}
        """How each worker starts the present run."""
        self._backlog: list[tuple[int, list[BatchRequest]]] = []
        """Requests, by worker, for which no worker is ready."""
        self._events: list[Event] = []  # that no worker reports
        self._pending: dict[Any, RayWorker | Call] = {}
        """What Ray's references are about: a worker that starts, or a call."""
        self._asked = 0.0  # when the consumer asked for a batch
        self._nodes: dict[str, dict[str, Any]] = {}
        """The counts of each node."""
        self._lost = self._failed = self._serial = 0
        self._warned = False
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
            setup = pickle_with_handles((fetcher, self._config.worker_init_fn))
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
                stacklevel=6,
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
        self._starts.clear()
        self._backlog.clear()
        self._events.clear()
        for ref, about in list(self._pending.items()):
            if not isinstance(about, RayWorker):
                del self._pending[ref]
        # A start says it, too.
        stop = not run and not self.closed
        for worker in self._actors:
            worker.calls.clear()
            if stop and worker.ready:
                worker.actor.stop.remote()

    # Requests.

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. A request whose indices cannot be pickled is answered by that error."""
        for request in requests:
            if isinstance(request, Start):
                self._starts[worker] = request
                if self._actors[worker].ready:
                    self._begin(self._actors[worker])
        self._backlog.append((worker, [request for request in requests if isinstance(request, BatchRequest)]))
        self._send_backlog()

    def _begin(self, worker: RayWorker) -> None:
        setup = None if worker.setup is self._setup else self._setup
        worker.setup = self._setup
        ref = worker.actor.begin.remote(self._starts[worker.number], setup, self._base_seed)
        if self._turns:
            self._pending[ref] = Call([], worker.number, worker, ref)

    def _send_backlog(self) -> None:
        """Send the requests for which a worker is ready."""
        waiting, self._backlog = self._backlog, []
        for number, requests in waiting:
            worker = self._actors[number]
            if not worker.ready and not self._turns:
                ready = (other for other in self._actors if other.ready)
                worker = min(ready, key=lambda one: sum(len(call.requests) for call in one.calls), default=worker)
            if not worker.ready:
                self._backlog.append((number, requests))
                continue
            sent: list[BatchRequest] = []
            packed: list[bytes] = []
            for request in requests:
                try:
                    packed.append(cloudpickle.dumps(request))
                    sent.append(request)
                except Exception as error:
                    result = BatchResult(None, BatchMetrics(), request.number, number, error=error, run=request.run)
                    self._events.append(result)
            if sent:
                call = Call(sent, number, worker, worker.actor.make.remote(self._run, packed))
                self._pending[call.ref] = call
                worker.calls.append(call)

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
            for worker in self._actors:
                if not worker.calls:
                    continue
                silent = max(worker.calls[0].sent, worker.last, self._asked) + limit
                if now >= silent:
                    self._events += self._lose(worker, f"no answer for {limit} s, which is RayOptions(deadline=)")
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
                # None if it is of a worker that was just lost.
                about = self._pending.pop(ref, None)
                if isinstance(about, RayWorker):
                    self._greet(ref, about)
                elif about is not None:
                    events += self._take(about)
            self._send_backlog()
            return events

    def _take(self, call: Call) -> list[Event]:
        """Return the events of an answer, see `Worker.begin` and `Worker.make`."""
        worker = call.worker
        try:
            answer = ray.get(call.ref, timeout=_FETCH_S)
        except RayError as error:
            return self._lose(worker, error)
        if not call.requests:
            return [Began(self._run, call.number, answer)]
        worker.calls.remove(call)
        worker.last = time.monotonic()
        counts, events = self._nodes[worker.node], list[Event]()
        packed, *arrays = answer
        arrays.reverse()
        result: BatchResult
        for result, offsets in cloudpickle.loads(packed):
            begin, metrics = time.perf_counter(), result.metrics
            large = [arrays.pop() for _ in offsets]
            batch, failure, nbytes = None, result.error, 0
            if failure is not None:
                failure = rebuild(cast(RemoteError, failure))
            elif not result.ended:
                nbytes = len(result.batch) + sum(array.nbytes for array in large)
                try:
                    # Ray's arrays are read-only views of objects that others may share: tensors would change them.
                    memory = np.empty(offsets[-1] + large[-1].nbytes if large else 0, np.uint8)
                    for offset, array in zip(offsets, large, strict=True):
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
        """Give a worker up. Return the events that say so, one for each worker whose requests it had."""
        worker.dead = True
        self._lost += 1
        self._nodes[worker.node]["workers"] -= 1
        self._nodes[worker.node]["lost"] += 1
        ray.kill(worker.actor, no_restart=True)
        why = f"worker {worker.number} on node {worker.node} was lost ({' '.join(str(error).split())})"
        begun = [request for call in worker.calls[:_AT_WORK] for request in call.requests]
        if self._turns:
            why += (
                ", and with it the position of its copy of the dataset: an iterable dataset, or one with a state of "
                "its own, cannot go on without. Resume from the last state_dict()"
            )
        elif begun:
            for request in begun:
                request.unpack()
            why += " while it made " + " or ".join(f"batch {one.number}, samples {one.indices}" for one in begun)
        numbers = {call.number for call in worker.calls} or {worker.number}
        for other in self._actors:
            for call in [call for call in other.calls if call.number in numbers]:
                other.calls.remove(call)
                self._pending.pop(call.ref, None)
        self._backlog = [(number, requests) for number, requests in self._backlog if number not in numbers]
        return [Lost(number, why) for number in sorted(numbers)]

    # Workers.

    def resize(self, workers: int) -> None:
        """See `Executor`. The number of workers is constant."""
        self.workers = workers
        for number in range(workers if self._close.alive else 0):
            if number == len(self._actors) or self._actors[number].dead:
                self._start(number)

    def _start(self, number: int) -> None:
        self._serial += 1
        config = self._config
        name = f"{self._name}-{number}" + (f".{self._serial}" if self._serial > config.workers else "")
        made = self._class.options(name=name, max_restarts=0, max_task_retries=0, **self._options.of_actors())
        worker = RayWorker(number, made.remote(number, config.workers, config.threads))
        self._actors[number : number + 1] = [worker]
        self._pending[worker.actor.hello.remote()] = worker

    def _greet(self, ref: Any, worker: RayWorker) -> None:
        """Process the start of a worker, or its failure."""
        try:
            said = ray.get(ref)
        except RayError as error:
            self._failed += 1
            if self._failed >= _STARTS:
                self.close(0.0)
                raise ClusterError(
                    f"{_STARTS} workers in a row could not be started in the Ray cluster; the last one said: {error}. "
                    "All nodes need penstock, torch and the modules of the dataset, in the versions of this program"
                ) from error
            ray.kill(worker.actor, no_restart=True)
            self._lost += 1
            self._start(worker.number)
            return
        ours, theirs = versions(), said["versions"]
        if theirs != ours:
            differing = [name for name in ours if theirs.get(name) != ours[name]]
            others = ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in differing)
            self.close(0.0)
            raise ClusterError(
                f"the worker on node {said['node']} runs {others}: batches would not be the same. "
                "Install the same versions there, or name them by RayOptions(runtime_env=)"
            )
        worker.node = said["node"]
        self._failed = 0
        self._nodes.setdefault(worker.node, dict.fromkeys(_COUNTS, 0))["workers"] += 1
        if worker.number in self._starts:
            self._begin(worker)

    def _check_starts(self, now: float) -> float:
        """Return when it is an error that workers have not started; never if the others go on without them.

        Raises:
            ClusterError: it is now.
        """
        starting = [worker for worker in self._actors if not worker.node]
        if not starting:
            return math.inf
        since = min(worker.last for worker in starting)
        count, waited = f"{len(starting)} of {self.workers} workers", now - since
        if not self._turns and any(worker.ready for worker in self._actors):
            if waited >= _PENDING_S and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{count} of this DataLoader are still waiting for room in the Ray cluster after {waited:.0f} s; "
                    f"the others go on without them: {_resources_of(self._options)}",
                    stacklevel=2,
                )
            return math.inf
        if waited < self._options.start_timeout:
            return since + self._options.start_timeout
        resources = _resources_of(self._options)
        self.close(0.0)
        raise ClusterError(
            f"{count} could not be started in {waited:.0f} s: {resources}. Add nodes, ask for less by "
            "RayOptions(num_cpus=, resources=, label_selector=), or raise its start_timeout. "
            "With num_cpus=0, workers share the CPUs of other loaders' workers"
        )

    def stats(self) -> dict[str, Any]:
        """Return counts by node, and the number of lost workers."""
        return {"nodes": {name: dict(counts) for name, counts in self._nodes.items()}, "lost_workers": self._lost}

    def close(self, patience: float) -> None:
        """See `Executor`. The workers end at once, the cluster stays."""
        self._close()


def _resources_of(options: RayOptions) -> str:
    """Return which resources workers wait for, in words."""
    actors = options.of_actors()
    actors.pop("runtime_env", None)
    wanted = ", ".join(f"{name}={value!r}" for name, value in actors.items())
    free = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items() if ":" not in k)
    return f"each asks for {wanted}, and free in the cluster are {free}"


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
