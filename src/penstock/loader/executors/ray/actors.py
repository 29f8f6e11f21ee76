"""`Actors`: the workers of one loader in the cluster: start, request, detect losses, replace.

    start -> hello (node, versions) -> begin(pass) -> make, make, ...       pending workers are not waited for
                                                        `-> lost: replaced by another worker

Ray neither restarts nor retries these actors: other workers make a lost worker's batches at once, and a new worker
joins when it is ready. Everything runs in the consumer's thread, which waits in one ``ray.wait``. Another thread may
close the workers meanwhile, when it holds the lock.

Loaders of one program share CPUs: if other loaders' workers leave no room for the first worker, it runs beside them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import warnings
import weakref
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from penstock.errors import ClusterError
from penstock.loader.executors.ray.cluster import check_attached, nodes, resources, session
from penstock.loader.executors.ray.member import Answer, Call, Counts, Member, Pass
from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.executors.ray.worker import Actor, versions
from penstock.loader.snapshots import Snapshot

__all__ = ["Actors"]

_PENDING = 30.0  # seconds after which workers that do not start are reported
_CROWDED = 5.0  # seconds between checks whether other loaders occupy the CPUs
_FETCH = 30.0  # seconds to fetch an object that is reported as local
_STARTS = 3  # consecutive workers that may fail to start
_AT_EXIT = 5.0  # seconds to wait for the lock, which a user's sampler may hold


class Actors:
    """The workers.

    Args:
        setup: the pickled fetcher and ``worker_init_fn``.
        options: where they run.
        count: initial number of workers.
        threads: threads in each worker.
        turns: serve calls one by one, in order.

    Attributes:
        waiting: whether it only waits, so that Ctrl-C does no harm.

    Raises:
        ClusterError: no cluster.
    """

    def __init__(self, setup: bytes, options: RayOptions, *, count: int, threads: int, turns: bool) -> None:
        self.session = session()
        self.pid = os.getpid()
        self.options = options
        self.count = count
        self.members: dict[int, Member] = {}
        self.counts: dict[str, Counts] = {}
        self.lost = 0
        self._threads, self._turns = threads, turns
        self._name = f"{options.name}-{uuid.uuid4().hex[:6]}"
        self._class = ray.remote(concurrency_groups={"control": 1, "make": 1 if turns else 2})(Actor)
        self._starting: dict[Any, Member] = {}
        self._calls: dict[Any, Call] = {}
        self._begins: dict[Any, int] = {}  # pending starts of workers with states
        self.begun: dict[int, Snapshot | None] = {}  # first snapshots, by worker
        self._pass: Pass | None = None
        self._failed = self._serial = 0
        self._warned = False
        self.waiting = False
        self._lock = threading.RLock()
        self._close = weakref.finalize(self, _end, self.members, self.pid, self.session, self._lock)
        with _opening:
            _open.add(self)
        self.renew(setup)
        for number in range(count):
            self._start(number)

    def renew(self, setup: bytes) -> None:
        """Set a new or changed dataset, for the next epoch iterator."""
        self._setup = ray.put(setup)
        for member in self.members.values():
            member.primed = False
            member.far.clear()

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

    def ready(self) -> list[Member]:
        """Return the workers that are ready."""
        return [member for member in self.members.values() if member.node is not None]

    # Starting.

    def _start(self, number: int) -> None:
        self._serial += 1
        name = f"{self._name}-{number}" + (f".{self._serial}" if self._serial > self.count else "")
        wanted = self.options.of_actors()
        if self._crowded(sum(member.cpus for member in self.members.values())):
            wanted["num_cpus"] = 0
            if bare := [node.id for node in nodes().values() if node.bare]:
                away = {"ray.io/node-id": f"!in({','.join(bare)})"}  # CPUs must not be shared there
                wanted["label_selector"] = {**wanted.get("label_selector", {}), **away}
        made = self._class.options(name=name, max_restarts=0, max_task_retries=0, **wanted)
        member = Member(number, made.remote(number, self.count, self._threads, self._turns))
        member.cpus = wanted["num_cpus"]
        self.members[number] = member
        self._starting[member.actor.hello.remote()] = member

    def _crowded(self, mine: float) -> bool:
        """Return whether other loaders of this program leave no room for the first worker.

        Args:
            mine: CPUs that this loader's workers have or wait for.
        """
        with _opening:  # a set must not grow while it is iterated
            others = [other for other in _open if other is not self]
        others = [other for other in others if other.session == self.session and not other.closed]
        theirs = sum(member.cpus for other in others for member in list(other.members.values()))
        if not theirs or not self.options.num_cpus or (mine and not self._turns):
            return False
        return resources().get("CPU", 0.0) - theirs - mine < self.options.num_cpus

    def add(self) -> None:
        """Add a worker."""
        self._start(max(self.members, default=-1) + 1)

    def remove(self, member: Member) -> None:
        """Remove a worker."""
        self._forget(member)
        ray.kill(member.actor, no_restart=True)

    def _forget(self, member: Member) -> list[Call]:
        """Forget a lost worker; return its unanswered calls."""
        del self.members[member.number]
        for call in member.calls:
            del self._calls[call.ref]
        self._starting = {ref: other for ref, other in self._starting.items() if other is not member}
        if member.node is not None:
            self.counts[member.node.name].workers -= 1
        return member.calls

    def replace(self, member: Member) -> list[Call]:
        """Replace a lost or late worker; return its unanswered calls."""
        calls = self._forget(member)
        self.lost += 1
        if member.node is not None:
            self.counts[member.node.name].lost += 1
        ray.kill(member.actor, no_restart=True)
        self._start(member.number)
        return calls

    def _greet(self, ref: Any) -> None:
        """Process the start of a worker, or its failure."""
        member = self._starting[ref]
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
            self.replace(member)
            return
        node = nodes()[said["node"]]
        if differing := _differing(said["versions"]):
            self.close()
            raise ClusterError(
                f"the worker on node {node.name} runs {', '.join(differing)}: batches would not be the same. Install "
                "the same versions there, or name them by RayOptions(runtime_env=)"
            )
        member.node = node
        del self._starting[ref]
        self._failed = 0
        self.counts.setdefault(member.node.name, Counts()).workers += 1
        if self._pass is not None:
            self._tell(member, self._pass)

    # Epoch iterators.

    @property
    def run(self) -> int:
        """The number of the current epoch iterator."""
        return 0 if self._pass is None else self._pass.run

    def begin(self, told: Pass) -> None:
        """Start an epoch iterator, and drop earlier requests."""
        check_attached(self.session)
        self._pass = told
        self._calls.clear()
        self._begins.clear()
        self.begun = {}
        for member in self.ready():
            member.calls.clear()
            self._tell(member, told)

    def _tell(self, member: Member, told: Pass) -> None:
        setup = self._setup if told.fresh or not member.primed else None
        member.primed = True
        state = told.states.get(member.number)
        ref = member.actor.begin.remote(told.run, told.epoch, state, setup, told.base_seed)
        if self._turns:
            self._begins[ref] = member.number

    def stop(self) -> None:
        """Drop all requests."""
        if not self.closed and session() == self.session:
            self._calls.clear()
            for member in self.ready():
                member.calls.clear()
                member.actor.stop.remote()

    # Requests.

    def ask(
        self,
        member: Member,
        items: list[Any],
        requests: list[bytes],
        *,
        collate: bool = True,
        rows: bytes | None = None,
    ) -> Call:
        """Request batches from a worker; without ``collate``, their samples uncollated."""
        call = Call(member.actor.make.remote(self.run, requests, collate, rows), items, member)
        self._calls[call.ref] = call
        member.calls.append(call)
        return call

    def wait(self, timeout: float | None) -> list[Any]:
        """Wait for news and return it for `receive`, at most ``timeout`` seconds (None: forever); empty on time-out.

        Raises:
            ClusterError: the program has left the cluster.
        """
        check_attached(self.session)
        refs = [*self._starting, *self._begins, *self._calls]
        if not refs:
            return []
        patience = self._patience(timeout)
        self.waiting = True
        try:
            found, rest = ray.wait(refs, num_returns=1, timeout=patience)
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
            ClusterError: no worker could be started.
        """
        answers = []
        for ref in found:
            if ref in self._starting:
                self._greet(ref)
            elif ref in self._begins:
                self._note_begun(ref)
            elif ref in self._calls:  # not of a worker that was just lost
                answers.append(self._take(self._calls[ref]))
        if not found:
            self._complain()
        return answers

    def _note_begun(self, ref: Any) -> None:
        """Store the first snapshot of a worker; its loss is noticed when a batch is requested."""
        number = self._begins.pop(ref)
        try:
            self.begun[number] = ray.get(ref, timeout=_FETCH)
        except RayError:
            self.begun[number] = None

    def _take(self, call: Call) -> Answer:
        member = call.member
        try:
            value = ray.get(call.ref, timeout=_FETCH)
            error, lost = None, None
        except (ObjectLostError, GetTimeoutError, RayTaskError) as caught:  # lost with its node, or never stored
            value, error, lost = None, caught, None
        except RayError as caught:
            calls = list(member.calls)
            self.replace(member)
            return Answer(calls, None, caught, member)
        del self._calls[call.ref]
        member.calls.remove(call)
        member.last = time.monotonic()
        return Answer([call], value, error, lost)

    def learn(self, member: Member, seconds: float, samples: int, nbytes: int) -> None:
        """Record the time and size of a worker's batch."""
        member.took(seconds)
        assert member.node is not None
        counts = self.counts[member.node.name]
        counts.batches += 1
        counts.samples += samples
        counts.bytes += nbytes
        counts.seconds += seconds

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counts by node."""
        return {name: asdict(counts) for name, counts in self.counts.items()}

    # Workers that do not start.

    def _patience(self, timeout: float | None) -> float | None:
        """Return the seconds to wait, shortened so that the next report of pending workers is on time."""
        if not self._starting:
            return timeout
        limit, pending = _PENDING if self.ready() else self.options.start_timeout, self._pending()
        if not self.ready() and pending < _CROWDED:
            limit = min(limit, _CROWDED)
        left = None if self.ready() and self._warned else max(0.05, limit - pending)
        return min(value for value in (timeout, left, 3600.0) if value is not None)

    def _pending(self) -> float:
        """Return for how long the first pending worker has been waited for."""
        begun = [member.started for member in self._starting.values()]
        return time.monotonic() - min(begun) if begun else 0.0

    def _complain(self) -> None:
        waited, pending = self._pending(), len(self._starting)
        waiting = [member for member in self._starting.values() if member.cpus]
        if waiting and not self.ready() and waited >= _CROWDED and self._crowded(0.0):
            for member in waiting:
                self.remove(member)
            for member in waiting:
                self._start(member.number)
            return
        if pending and not self.ready() and waited >= self.options.start_timeout:
            self.close()
            raise ClusterError(
                f"none of {pending} workers could be started in {waited:.0f} s: {self._wanted()}. Add nodes, ask for "
                "less by RayOptions(num_cpus=, resources=, label_selector=), or raise its start_timeout"
            )
        if self.ready() and pending and waited >= _PENDING and not self._warned:
            self._warned = True
            warnings.warn(
                f"{pending} of {len(self.members)} workers of this DataLoader are still waiting for room in the Ray "
                f"cluster after {waited:.0f} s; the others go on without them: {self._wanted()}",
                stacklevel=2,
            )

    def _wanted(self) -> str:
        actors = self.options.of_actors()
        actors.pop("runtime_env", None)
        wanted = ", ".join(f"{name}={value!r}" for name, value in actors.items())
        free = ", ".join(f"{k} {v:g}" for k, v in resources(free=True).items() if ":" not in k)
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


def _end(members: dict[int, Member], pid: int, before: str, lock: threading.RLock) -> None:
    if os.getpid() != pid or session() != before:
        return  # a fork of the process that owns these workers; or they ended with the connection
    locked = lock.acquire(timeout=_AT_EXIT)
    try:
        for member in list(members.values()):
            ray.kill(member.actor, no_restart=True)
        members.clear()
    finally:
        if locked:
            lock.release()


_opening = threading.Lock()
_open: weakref.WeakSet[Actors] = weakref.WeakSet()
"""The open workers of this program."""
