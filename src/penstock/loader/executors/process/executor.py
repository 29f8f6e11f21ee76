"""`ProcessExecutor`: makes batches in worker processes, which return them in reused shared memory.

    submit   lend a slot for each request, and write the requests to a worker's pipe
    wait     poll the answers and deaths of all workers; lease the slot of each finished batch

    consumer  -- pipe of requests   -->  worker 0..n-1        one pipe each way and worker, one shared file for all:
              <-- pipe of answers --                          the number of descriptors is fixed
              == shared file: board, slots ==

Invariant: a slot is lent for a request, and returns when that is answered, whoever still wants it, or when its worker
has died; so a late worker never writes into another batch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import pickle
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as readable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from penstock.loader.config import LoaderConfig
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import Began, Event, Executor, Lost, Start
from penstock.loader.executors.process.ring import BOARD, Ring, fork
from penstock.loader.executors.process.transport import Channel, unpack
from penstock.loader.executors.process.worker import ENDED, REFUSED, SKIPPED, Setup, main
from penstock.loader.executors.threads import MOST_THREADS
from penstock.loader.make import Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult

__all__ = ["ProcessExecutor", "WorkerProcess"]

_HELD = 1.0
"""Seconds to wait for a thread inside a sampler, after the workers have ended."""

_AT_EXIT = 1.0
"""The same at interpreter exit, so that Ctrl-C acts quickly."""


class ProcessExecutor(Executor):
    """Makes batches in worker processes.

    Args:
        fetcher: copied to each worker.
        config: the loader's settings.
        context: the `multiprocessing` context; None for the system's default.
        base_seed: torch's base seed; worker i gets base_seed + i.
        rings: rings of earlier executors of the same loader, to reuse their pages. This executor takes one, and adds
            its own when it has been closed.

    Attributes:
        ring: the memory of the batches.
        members: the workers, by number.

    Raises:
        Exception: an error of starting, such as a dataset that cannot be pickled for spawn.
    """

    def __init__(self, fetcher: Fetcher, config: LoaderConfig, context: Any, base_seed: int, rings: list[Ring]) -> None:
        self.workers, self.lock, self.pid = 0, threading.RLock(), os.getpid()
        self.tells_begin = fetcher.has_states
        self._fetcher = fetcher
        self._config = config
        self._context = context or multiprocessing.get_context()
        self._base_seed = base_seed
        # Numbers (u64) of a worker on the board. The threads of a single process may become more.
        self._width = 3 + 2 * max(config.threads, MOST_THREADS * config.single_process)
        self._rings = rings
        # A forked process shares rings with its parent.
        usable = [ring for ring in rings if ring.pid == self.pid]
        rings.clear()
        self.ring = usable[0] if usable else Ring()
        self._words = memoryview(self.ring.file.map)[:BOARD].cast("Q")
        self.members: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []  # also those that were told to end, or could not start
        self._lent: dict[tuple[int, int], tuple[WorkerProcess, int]] = {}
        """The worker and the slot of each request that is not answered, by run and number."""
        self._events: list[Event] = []  # that no worker reports
        self._poller = select.poll()
        self._polls = threading.Lock()  # held in calls of `poll`, which two threads must not be in
        self._by_fd: dict[int, WorkerProcess] = {}
        self._close = weakref.finalize(self, _end, self._all, self._words, self.pid, self.lock)
        self.run = 0
        try:
            self.resize(config.workers)
        except BaseException:
            self.close(_AT_EXIT)
            raise

    @property
    def run(self) -> int:
        """The number of the run whose requests are wanted."""
        return self._words[0]

    @run.setter
    def run(self, run: int) -> None:
        # A forked process shares the board with its parent.
        if self.pid == os.getpid():
            self._words[0] = run

    @property
    def processes(self) -> list[Any]:  # type: ignore[override]
        """The worker processes."""
        return [member.process for member in self.members]

    # Requests.

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        """See `Executor`. A request whose indices cannot be pickled is answered by that error."""
        if self.closed:
            # By a signal handler, or by another thread that did not wait for a user's sampler.
            return
        member = self.members[worker]
        items: list[Any] = []
        for request in requests:
            if isinstance(request, Start):
                items.append(request)
                continue
            slot, extent = self.ring.lend()
            self._lent[request.run, request.number] = member, slot
            numbers = request.indices, request.keys, request.place
            items.append((request.run, request.number, slot, extent, *numbers))
        try:
            data = pickle.dumps(items, 5)
        except Exception as error:
            self._refuse(requests, worker, error)
            return
        channel = member.channel
        channel.send(data)
        if channel.waiting:
            self._by_fd[channel.writes] = member
            self._poller.register(channel.writes, select.POLLOUT)

    def _refuse(self, requests: Sequence[Start | BatchRequest], worker: int, error: Exception) -> None:
        """Answer the requests that cannot be pickled, and send the others one by one."""
        for request in requests:
            if isinstance(request, BatchRequest):
                self._give_back(request.run, request.number, None)
        if len(requests) > 1:
            for request in requests:
                self.submit([request], worker)
        elif isinstance(requests[0], Start):
            raise error
        else:
            run, number = requests[0].run, requests[0].number
            self._events.append(BatchResult(None, BatchMetrics(), number, worker, error=error, run=run))

    def _give_back(self, run: int, number: int, extent: int | None) -> None:
        """Free the slot of a request that nobody works on."""
        _, slot = self._lent.pop((run, number))
        self.ring.give_back(slot, extent)

    # Answers.

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        """See `Executor`."""
        ready: list[tuple[Any, int]] = []
        if not self._events:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if self.closed:
                return []
            self.waiting = True
            if self._polls.acquire(blocking=False):
                try:
                    ready = self._poller.poll(None if timeout is None else timeout * 1000)
                finally:
                    self._polls.release()
            else:
                # The consumer of an older iterator, in another thread, is in that call.
                ready = [(fd, 0) for fd in readable(list(self._by_fd), timeout)]
            self.waiting = False
        with self.lock:
            if run != self.run:
                return []
            events, self._events = self._events, []
            for fd, _ in ready:
                if not self.closed and (member := self._by_fd.get(fd)) is not None:
                    self._handle(member, fd, events)
            return events

    def _handle(self, member: WorkerProcess, fd: int, events: list[Event]) -> None:
        """Read the answers of a worker, write requests that it had no room for, or note its death."""
        channel = member.channel
        if fd == channel.writes:
            channel.send()
            if not channel.waiting:
                self._forget(fd, member)
                if member.ending:
                    member.dismiss()
            return
        died = fd != channel.reads
        # All answers of a worker precede its death.
        while True:
            for answers in channel.receive():
                for answer in answers:
                    self._take(answer, member.number, events)
            if channel.empty or not died:
                break
        if channel.ended:
            self._forget(fd, member)
        if died:
            self._bury(member, events)

    def _take(self, answer: Any, worker: int, events: list[Event]) -> None:
        """Turn an answer into an event, if it is of the present run."""
        if isinstance(answer, Began):
            if answer.run == self.run:
                events.append(answer)
            return
        run, number, slot, extent, used, data, costs, state, remote, how = answer
        if self._lent.pop((run, number), None) is None:
            return
        memory, wanted = None, run == self.run and how != SKIPPED
        if wanted and used:
            memory = self.ring.lease(slot, extent, used)
        else:
            self.ring.give_back(slot, extent)
        if not wanted:
            return
        begin = time.perf_counter()
        batch, metrics, error = None, BatchMetrics(*costs), None
        if remote is not None:
            error = rebuild(remote)
        elif how != ENDED:
            try:
                batch = unpack(data, memory)
            except Exception as failed:  # an object that cannot be unpickled
                error = failed
        metrics.hand_over += time.perf_counter() - begin
        way = "refused" if how == REFUSED else "ring" if used else "pipe"
        nbytes = used if isinstance(data, slice) else used + len(data)
        events.append(BatchResult(batch, metrics, number, worker, state, way, error, run, how == ENDED, nbytes))

    # Workers.

    def resize(self, workers: int) -> None:
        """See `Executor`."""
        config, width = self._config, self._width
        for number in range(workers):
            if number < len(self.members) and not self.members[number].dead and not self.members[number].ending:
                continue
            for place in range(1 + width * number, 1 + width * (number + 1)):
                self._words[place] = 0
            total, init = max(config.workers, number + 1), config.worker_init_fn
            setup = Setup(number, total, self._fetcher, init, self._base_seed, width, self.ring.file, self.pid)
            member = WorkerProcess(setup, self._context, self._all)
            self.members[number : number + 1] = [member]
            for fd in (member.channel.reads, member.sentinel):
                self._by_fd[fd] = member
                self._poller.register(fd, select.POLLIN)
        for member in self.members[workers:]:
            member.ending = True
            if not member.channel.waiting:
                member.dismiss()
        del self.members[workers:]
        self.workers = workers

    def _forget(self, fd: int, member: WorkerProcess) -> None:
        # The number of a pipe that was closed may be another worker's.
        if self._by_fd.get(fd) is member:
            del self._by_fd[fd]
            self._poller.unregister(fd)

    def _bury(self, member: WorkerProcess, events: list[Event]) -> None:
        """Note the death of a worker. Its slots are free, though nobody knows how much memory they have."""
        member.wait(time.monotonic() + 1)
        for fd in (member.channel.reads, member.channel.writes, member.sentinel):
            self._forget(fd, member)
        member.dead = True
        member.close()
        self._all.remove(member)
        owed = [key for key, (worker, _) in self._lent.items() if worker is member]
        if not member.ending or any(run == self.run for run, _ in owed):
            peak = self._words[1 + self._width * member.number]
            events.append(Lost(member.number, member.obituary(peak)))
        for key in owed:
            self._give_back(*key, None)

    def where(self, worker: int) -> list[tuple[int, int]]:
        """See `Executor`."""
        width = self._width
        shown = self._words[2 + width * worker : 1 + width * (worker + 1)].tolist()
        return [pair for pair in zip(shown[::2], shown[1::2], strict=True) if pair[1]]

    # The end.

    def close(self, patience: float) -> None:
        """End the workers: let them end, wait ``patience`` seconds for all, then kill them. Idempotent.

        Afterwards nothing writes to the ring, and all slots without a lease are free.
        """
        self.closed = True
        if self._close.detach() is None:
            return
        _end(self._all, self._words, self.pid, self.lock, patience)
        # Another thread may be inside a user's sampler. Then the ring is not reused.
        if self.pid == os.getpid() and self.lock.acquire(timeout=_HELD):
            try:
                for key in list(self._lent):
                    self._give_back(*key, None)
                self._rings.append(self.ring)
            finally:
                self.lock.release()


def _end(
    workers: list[WorkerProcess], words: memoryview, pid: int, lock: threading.RLock, patience: float = _AT_EXIT
) -> None:
    """Close the pipes of the workers, wait ``patience`` seconds for all to end, then kill them."""
    if os.getpid() != pid:
        return  # a fork of the process that owns these workers
    words[0] = 0
    # A user's sampler may hold it for long, and so may a thread that interpreter shutdown has stopped.
    locked = lock.acquire(timeout=patience)
    try:
        for worker in workers:
            worker.close()
    finally:
        if locked:
            lock.release()
    alive = [worker for worker in workers if not worker.dead]
    deadline = time.monotonic() + patience
    for how in (None, "terminate", "kill"):
        for worker in alive:
            if how is not None:
                getattr(worker.process, how)()
        alive = [worker for worker in alive if not worker.wait(deadline)]
        deadline = time.monotonic() + 1.0
    for worker in workers:
        worker.dead = True


_forks = threading.RLock()
"""Held while pipes are created or closed, and during forks.

A fork must not see a half-closed pipe, whose number may be reused, nor miss a new one.
"""


class WorkerProcess:
    """A worker as seen by the consumer.

    Args:
        setup: its start arguments, without the pipes.
        context: the `multiprocessing` context.
        started: gets this object before the process starts, so that it is ended whatever happens.

    Attributes:
        number: its number.
        process: the process.
        channel: requests and answers.
        sentinel: a descriptor that becomes readable when the process has ended.
        dead: whether it has ended, or could not start.
        ending: whether it was told to end.

    Raises:
        Exception: an error of starting, such as a dataset that cannot be pickled for spawn; or of a signal handler,
            perhaps after the start: end the worker.
    """

    def __init__(self, setup: Setup, context: Any, started: list[WorkerProcess]) -> None:
        self.number = setup.number
        self.process: Any = None
        self.dead, self.ending = True, False
        with _forks:
            theirs, self._requests = context.Pipe(duplex=False)
            self._answers, results = context.Pipe(duplex=False)
            self.channel = Channel(self._answers.fileno(), self._requests.fileno())
            _open.add(self)  # before the fork, which must close its copies
        started.append(self)
        try:
            for connection in (self._requests, self._answers):
                os.set_blocking(connection.fileno(), False)
            with _holding_back_signals(context.get_start_method()) as held_back:
                setup = setup._replace(pipes=(theirs, results), held_back=held_back)
                process = context.Process(
                    target=main, args=(setup,), name=f"penstock-worker-{self.number}", daemon=True
                )
                try:
                    fork.ours = True
                    process.start()
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    _explain(error, setup)
                    raise
                finally:
                    fork.ours = False
                self.process, self.dead, self.sentinel = process, False, process.sentinel
                if hasattr(os, "pidfd_open"):
                    # multiprocessing's sentinel is a pipe that processes started by the worker keep open.
                    with contextlib.suppress(OSError):  # not permitted
                        self._pidfd = Connection(os.pidfd_open(process.pid), writable=False)
                        self.sentinel = self._pidfd.fileno()
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            results.close()

    def wait(self, deadline: float) -> bool:
        """Wait for the process to end; return whether it has."""
        if self.process.exitcode is None and readable([self.sentinel], max(0.0, deadline - time.monotonic())):
            self.process.join(1)  # a fork server reports it a little later
        if self.process.exitcode is None:
            return False
        self.process.join(0)  # makes multiprocessing release its resources
        return True

    def dismiss(self) -> None:
        """Let the worker end when it has answered all requests."""
        self.channel.closed = True
        with _forks:
            self._requests.close()

    def close(self) -> None:
        """Close our ends of the pipes."""
        self.dismiss()
        with _forks:
            self._answers.close()

    def obituary(self, peak: int) -> str:
        """Return how it died, in torch's words and with details.

        Args:
            peak: its peak memory in KiB; 0 if unknown.
        """
        process, code = self.process, self.process.exitcode
        memory = f" Its memory was {peak / 1024:.0f} MiB at its last batch." if peak else ""
        if code is None or code >= 0:
            return f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}.{memory}"
        text = f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}.{memory}"
        if -code == signal.SIGKILL:
            text += " The kernel does that when memory runs out: see dmesg; use fewer workers, or smaller batches."
        elif -code == signal.SIGBUS:
            text += " A mapped file was truncated while it was read (replace files by rename), or memory ran out."
        return text


_open: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close our pipe ends in a forked child: with copies open elsewhere, workers would never see end of file."""
    for worker in list(_open):
        worker.close()
        # multiprocessing in the child would end them: it takes the parent's children for its own.
        multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
    _forks.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_close_in_child)


@contextlib.contextmanager
def _holding_back_signals(method: str) -> Iterator[bool]:
    """Delay Ctrl-C and the program's signal handlers while a worker is started with this method.

    A handler that raised there would leave a half-started worker: nobody would know its process. Delayed signals are
    raised again afterwards.

    Ctrl-C reaches all processes of the group. A worker would print a traceback before it can set a handler, so it
    starts with the signal blocked, like this thread. Yield whether the worker has to unblock it.
    """
    here, starting = os.getpid(), True
    came: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {n: handler for n in signal.valid_signals() if callable(handler := signal.getsignal(n))}

    def hold_back(number: int, frame: Any) -> None:
        if starting and os.getpid() == here:
            came.append(number)
        else:
            handlers[number](number, frame)

    # The fork server would pass a blocked signal on to everything else that it starts.
    blocks = method != "forkserver"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for number in handlers:
            signal.signal(number, hold_back)
        if method == "spawn":
            from multiprocessing import resource_tracker

            # It unblocks the signal when it starts.
            resource_tracker.ensure_running()
        if blocks:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield blocks and signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        starting = False
        # Whatever raises, the others are called, too: the last one first.
        with contextlib.ExitStack() as after:
            for number in came:
                after.callback(signal.raise_signal, number)
            for number, handler in handlers.items():
                after.callback(signal.signal, number, handler)


def _explain(error: Exception, setup: Setup) -> None:
    """Add a note that names the loader's argument that cannot be pickled, and the remedies."""
    fetcher = setup.fetcher
    for name, value in {
        "dataset": fetcher.dataset,
        "collate_fn": fetcher.collate_fn,
        "worker_init_fn": setup.init,
        "on_error": getattr(fetcher, "on_error", None),
    }.items():
        try:
            ForkingPickler.dumps(value)
        except Exception as again:
            if str(again) == str(error):
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                error.add_note(
                    f"the {name} ({kind}) cannot be pickled, but workers that are not forked need that: use only "
                    "picklable parts (functions and classes of a module, not local ones), or pass "
                    "multiprocessing_context='fork'"
                )
                return
