"""`Actors`: the workers of one loader in the cluster: start, request, detect losses, replace.

    start -> hello (node, versions) -> begin(start) -> make, make, ...       pending workers are not waited for
                                                         `-> lost: replaced by another worker

Ray neither restarts nor retries these actors: other workers make a lost worker's batches at once, and a new worker
joins when it is ready. Everything runs in the consumer's thread, which waits in one ``ray.wait``. Another thread may
close the workers meanwhile, when it holds the lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import warnings
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from penstock.errors import ClusterError
from penstock.loader.executors.ray.cluster import check_attached, session
from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.executors.ray.worker import Worker, versions
from penstock.loader.snapshots import Snapshot
from penstock.plan.stream_plan import EpochStart

__all__ = ["Actors", "Answer", "Call", "RayWorker", "Start"]

_PENDING_S = 30.0  # seconds after which workers that do not start are reported
_FETCH_S = 30.0  # seconds to fetch an object that is reported as local
_STARTS = 3  # consecutive workers that may fail to start
_AT_EXIT_S = 5.0  # seconds to wait for the lock, which a user's sampler may hold


class Start(NamedTuple):
    """The message that starts an epoch iterator in the workers. ``fresh``: with a new copy of the dataset."""

    run: int
    epoch: EpochStart
    states: dict[int, Any]
    base_seed: int
    fresh: bool


@dataclass(eq=False)
class RayWorker:
    """A worker as seen by the consumer.

    Attributes:
        node: the name of its node; None until it has started.
        calls: its unanswered calls, oldest first.
        last: time of its last answer.
        has_dataset: whether it has the current dataset.
    """

    number: int
    actor: Any
    node: str | None = None
    calls: list[Call] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    last: float = 0.0
    has_dataset: bool = False

    @property
    def owed(self) -> int:
        """The number of requested batches."""
        return sum(len(call.batches) for call in self.calls)


@dataclass(eq=False)
class Call:
    """A request for batches, whose answers have the same order."""

    ref: Any
    batches: list[Any]
    worker: RayWorker
    sent: float = field(default_factory=time.monotonic)


class Answer(NamedTuple):
    """The value of a call; or why a worker does not answer some calls, and whether it was lost and replaced."""

    worker: RayWorker
    calls: list[Call]
    value: Any
    error: Exception | None = None
    lost: bool = False


@dataclass
class _Counts:
    """The counts of one node."""

    workers: int = 0
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lost: int = 0


class Actors:
    """The workers.

    Args:
        setup: the pickled fetcher and ``worker_init_fn``.
        options: where they run.
        count: number of workers.
        threads: threads in each worker.
        turns: whether it matters which worker makes a batch: all must start, and calls are served in order.

    Attributes:
        begun: first snapshots of the workers' objects, by worker.
        lost: number of lost workers.
        waiting: whether it only waits, so that Ctrl-C does no harm.

    Raises:
        ClusterError: no cluster.
    """

    def __init__(self, setup: bytes, options: RayOptions, *, count: int, threads: int, turns: bool) -> None:
        self.session = session()
        self.pid = os.getpid()
        self.options = options
        self.count = count
        self.workers: dict[int, RayWorker] = {}
        self.lost = 0
        self.waiting = False
        self.begun: dict[int, Snapshot | None] = {}
        self._threads, self._turns = threads, turns
        self._name = f"{options.name}-{uuid.uuid4().hex[:6]}"
        self._class = ray.remote(concurrency_groups={"control": 1, "make": 1 if turns else 2})(Worker)
        self._counts: dict[str, _Counts] = {}
        self._starting: dict[Any, RayWorker] = {}
        self._begins: dict[Any, int] = {}  # pending starts of workers with states
        self._calls: dict[Any, Call] = {}
        self._start_message: Start | None = None
        self._failed = self._serial = 0
        self._warned = False
        self._lock = threading.RLock()
        self._close = weakref.finalize(self, _end, self.workers, self.pid, self.session, self._lock)
        self.renew(setup)
        for number in range(count):
            self._start(number)

    def renew(self, setup: bytes) -> None:
        """Set a new or changed dataset, for the next epoch iterator."""
        self._setup = ray.put(setup)
        for worker in self.workers.values():
            worker.has_dataset = False

    @property
    def closed(self) -> bool:
        """Whether they were ended, or this process is a fork of the one that started them."""
        return not self._close.alive or self.pid != os.getpid()

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock held while workers are used or ended; not while waiting."""
        # In a forked child, a thread of the parent may hold it forever.
        return self._lock if self.pid == os.getpid() else contextlib.nullcontext()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._close()
        with self.turn():
            self._calls.clear()
            self._starting.clear()
            self._begins.clear()

    def ready(self) -> list[RayWorker]:
        """Return the workers that have started."""
        return [worker for worker in self.workers.values() if worker.node is not None]

    # Starting and replacing.

    def _start(self, number: int) -> None:
        self._serial += 1
        name = f"{self._name}-{number}" + (f".{self._serial}" if self._serial > self.count else "")
        made = self._class.options(name=name, max_restarts=0, max_task_retries=0, **self.options.of_actors())
        worker = RayWorker(number, made.remote(number, self.count, self._threads, self._turns))
        self.workers[number] = worker
        self._starting[worker.actor.hello.remote()] = worker

    def replace(self, worker: RayWorker) -> list[Call]:
        """Replace a lost or silent worker; return its unanswered calls."""
        self.lost += 1
        for call in worker.calls:
            del self._calls[call.ref]
        if worker.node is not None:
            self._counts[worker.node].workers -= 1
            self._counts[worker.node].lost += 1
        ray.kill(worker.actor, no_restart=True)
        self._start(worker.number)
        return worker.calls

    def _greet(self, ref: Any) -> None:
        """Process the start of a worker, or its failure."""
        worker = self._starting.pop(ref)
        try:
            said = ray.get(ref)
        except RayError as error:
            self._failed += 1
            if self._failed >= _STARTS:
                self.close()
                raise ClusterError(
                    f"{_STARTS} workers in a row could not be started in the Ray cluster; the last one said: {error}. "
                    "All nodes need penstock, torch and the modules of the dataset, in the versions of this program"
                ) from error
            self.replace(worker)
            return
        if differing := _differing(said["versions"]):
            self.close()
            raise ClusterError(
                f"the worker on node {said['node']} runs {', '.join(differing)}: batches would not be the same. "
                "Install the same versions there, or name them by RayOptions(runtime_env=)"
            )
        worker.node = said["node"]
        self._failed = 0
        self._counts.setdefault(said["node"], _Counts()).workers += 1
        if self._start_message is not None:
            self._begin(worker, self._start_message)

    # Epoch iterators.

    @property
    def run(self) -> int:
        """The number of the current epoch iterator."""
        return 0 if self._start_message is None else self._start_message.run

    def begin(self, start: Start) -> None:
        """Start an epoch iterator, and drop earlier requests."""
        check_attached(self.session)
        self._start_message = start
        self._calls.clear()
        self._begins.clear()
        self.begun = {}
        for worker in self.ready():
            worker.calls.clear()
            self._begin(worker, start)

    def _begin(self, worker: RayWorker, start: Start) -> None:
        setup = self._setup if start.fresh or not worker.has_dataset else None
        worker.has_dataset = True
        state = start.states.get(worker.number)
        ref = worker.actor.begin.remote(start.run, start.epoch, state, setup, start.base_seed)
        if self._turns:
            self._begins[ref] = worker.number

    def stop(self) -> None:
        """Drop all requests."""
        if not self.closed and session() == self.session:
            self._calls.clear()
            for worker in self.ready():
                worker.calls.clear()
                worker.actor.stop.remote()

    # Requests and answers.

    def ask(self, worker: RayWorker, batches: list[Any], requests: list[bytes]) -> None:
        """Request batches from a worker."""
        call = Call(worker.actor.make.remote(self.run, requests), batches, worker)
        self._calls[call.ref] = call
        worker.calls.append(call)

    def wait(self, timeout: float | None) -> list[Any]:
        """Wait for news and return it for `receive`, at most ``timeout`` seconds (None: forever); empty on time-out.

        Raises:
            ClusterError: the program has left the cluster.
        """
        check_attached(self.session)
        refs = [*self._starting, *self._begins, *self._calls]
        if not refs:
            return []
        if (left := self._time_to_start()) is not None:
            timeout = left if timeout is None else min(timeout, left)
        self.waiting = True
        try:
            found, rest = ray.wait(refs, num_returns=1, timeout=timeout)
        except SystemError as error:
            # Ray raises this if a signal handler has raised.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        if found and rest:
            found += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        self.waiting = False
        return list(found)

    def receive(self, found: list[Any]) -> list[Answer]:
        """Return the answers that `wait` found; empty if a worker joined.

        Raises:
            ClusterError: workers could not be started.
        """
        answers = []
        for ref in found:
            if ref in self._starting:
                self._greet(ref)
            elif ref in self._begins:
                self._note_begun(ref)
            elif ref in self._calls:  # not of a worker that was just lost
                answers.append(self._take(self._calls[ref]))
        if self._starting:
            self._check_pending()
        return answers

    def _note_begun(self, ref: Any) -> None:
        """Store the first snapshot of a worker; its loss is noticed when a batch is requested."""
        number = self._begins.pop(ref)
        try:
            self.begun[number] = ray.get(ref, timeout=_FETCH_S)
        except RayError:
            self.begun[number] = None

    def _take(self, call: Call) -> Answer:
        worker, value, error = call.worker, None, None
        try:
            value = ray.get(call.ref, timeout=_FETCH_S)
        except (ObjectLostError, GetTimeoutError, RayTaskError) as caught:  # the worker is not lost
            error = caught
        except RayError as caught:
            return Answer(worker, self.replace(worker), None, caught, lost=True)
        del self._calls[call.ref]
        worker.calls.remove(call)
        worker.last = time.monotonic()
        return Answer(worker, [call], value, error)

    def count_batch(self, worker: RayWorker, seconds: float, samples: int, nbytes: int) -> None:
        """Count a worker's batch."""
        assert worker.node is not None
        counts = self._counts[worker.node]
        counts.batches += 1
        counts.samples += samples
        counts.bytes += nbytes
        counts.seconds += seconds

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counts by node."""
        return {name: asdict(counts) for name, counts in self._counts.items()}

    # Workers that do not start.

    def _time_to_start(self) -> float | None:
        """Return the seconds until it is an error that workers have not started; None if the others go on."""
        if not self._starting or (self.ready() and not self._turns):
            return None
        return max(0.05, self.options.start_timeout - self._pending_seconds())

    def _pending_seconds(self) -> float:
        """Return for how long the first pending worker has been waited for."""
        return time.monotonic() - min(worker.started for worker in self._starting.values())

    def _check_pending(self) -> None:
        waited, pending, left = self._pending_seconds(), len(self._starting), self._time_to_start()
        if left is not None and waited >= self.options.start_timeout:
            resources = self._resources()
            self.close()
            raise ClusterError(
                f"{pending} of {self.count} workers could not be started in {waited:.0f} s: {resources}. Add nodes, "
                "ask for less by RayOptions(num_cpus=, resources=, label_selector=), or raise its start_timeout. "
                "With num_cpus=0, workers share the CPUs of other loaders' workers"
            )
        if left is None and waited >= _PENDING_S and not self._warned:
            self._warned = True
            warnings.warn(
                f"{pending} of {self.count} workers of this DataLoader are still waiting for room in the Ray "
                f"cluster after {waited:.0f} s; the others go on without them: {self._resources()}",
                stacklevel=2,
            )

    def _resources(self) -> str:
        """Return which resources the workers wait for, in words."""
        actors = self.options.of_actors()
        actors.pop("runtime_env", None)
        wanted = ", ".join(f"{name}={value!r}" for name, value in actors.items())
        free = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items() if ":" not in k)
        return f"each asks for {wanted}, and free in the cluster are {free}"


def _differing(theirs: dict[str, str]) -> list[str]:
    """Return the versions that differ: only the same code makes the same batches."""
    return [
        f"{name} {theirs.get(name, 'none')} (here {ours})"
        for name, ours in versions().items()
        if _public(name, theirs.get(name, "")) != _public(name, ours)
    ]


def _public(name: str, version: str) -> str:
    """Return the relevant part of a version: without torch's build and Python's patch number."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version.partition("+")[0]


def _end(workers: dict[int, RayWorker], pid: int, before: str, lock: threading.RLock) -> None:
    if os.getpid() != pid or session() != before:
        return  # a fork of the process that owns these workers; or they ended with the connection
    locked = lock.acquire(timeout=_AT_EXIT_S)
    try:
        for worker in list(workers.values()):
            ray.kill(worker.actor, no_restart=True)
        workers.clear()
    finally:
        if locked:
            lock.release()
