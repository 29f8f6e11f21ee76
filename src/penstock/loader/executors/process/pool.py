"""The worker processes of a loader: start them, send messages without blocking, detect deaths, and end them.

    consumer  -- pipe of requests   -->  worker 0..n-1        one pipe each way and worker, one shared file for all:
              <-- pipe of results --                       the number of descriptors is fixed
              == shared file: board, slots ==

The consumer waits in one `poll` over the result pipes and the workers' sentinels, with its deadline.
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
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from penstock.loader.config import LoaderConfig
from penstock.loader.dataloader_iter import SHUTDOWN_TIMEOUT_S
from penstock.loader.executors.process.channel import Frame, Inbox, Outbox
from penstock.loader.executors.process.forks import our_own
from penstock.loader.executors.process.region import Region
from penstock.loader.executors.process.ring import SPARE, Ring
from penstock.loader.executors.process.worker import Setup, board_bytes, board_width, main
from penstock.loader.fetch import Fetcher
from penstock.plan.stream_plan import EpochStart

__all__ = ["Pool"]

_HELD = 1.0  # seconds to wait for a thread inside a sampler, after the workers have ended
_AT_EXIT = 1.0  # the same at interpreter exit, so that Ctrl-C acts quickly


class _Member:
    """A worker as seen by the consumer."""

    _pidfd = -1  # a class attribute, in case the constructor was interrupted

    def __init__(self, number: int, requests: Connection, results: Connection) -> None:
        self.number = number
        self.process: Any = None
        self.requests = requests
        self.results = results
        for connection in (requests, results):
            os.set_blocking(connection.fileno(), False)
        self.outbox = Outbox(requests.fileno())
        self.inbox = Inbox(results.fileno())
        self.dead = False

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self.process.sentinel if self._pidfd < 0 else self._pidfd

    def started(self) -> None:
        if hasattr(os, "pidfd_open"):
            # multiprocessing's sentinel is a pipe that processes started by the worker keep open.
            with contextlib.suppress(OSError):  # not permitted
                self._pidfd = os.pidfd_open(self.process.pid)

    def wait(self, deadline: float) -> bool:
        """Wait for the process to end; return whether it has."""
        if self.process.exitcode is None:
            poller = select.poll()
            poller.register(self.sentinel, select.POLLIN)
            if poller.poll(max(0.0, (deadline - time.monotonic()) * 1000)) and self.process.exitcode is None:
                self.process.join(1)  # a fork server reports it a little later
        if self.process.exitcode is None:
            return False
        self.process.join(0)  # makes multiprocessing release its resources
        return True

    def close(self) -> None:
        """Close our ends of the pipes."""
        with _forks:
            self.requests.close()
            self.results.close()

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit, module globals may be gone
        if self._pidfd >= 0:
            _close(self._pidfd)


_open: weakref.WeakSet[_Member] = weakref.WeakSet()
_forks = threading.RLock()
"""Held while pipes are created or closed, and during forks.

A fork must not see a half-closed pipe, whose number may be reused, nor miss a new one.
"""


def _close_in_child() -> None:
    """Close our pipe ends in a forked child: with copies open elsewhere, workers would never see end of file."""
    for member in list(_open):
        member.close()
        # multiprocessing in the child would end them: it takes the parent's children for its own.
        multiprocessing.process._children.discard(member.process)  # type: ignore[attr-defined]
    _forks.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_close_in_child)


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


@contextlib.contextmanager
def _holding_back_interrupts(method: str) -> Iterator[bool]:
    """Delay Ctrl-C while a worker is started with this method. Yield whether the worker has to unblock the signal.

    Ctrl-C reaches all processes of the group. A worker would print a traceback before it can set a handler, so it
    starts with the signal blocked, like this thread. Another thread may receive the signal meanwhile, and Python would
    raise KeyboardInterrupt in this thread with a half-started worker. So the handler is replaced, too. Afterwards a
    delayed signal is raised.
    """
    if method == "forkserver":
        # The fork server would pass a blocked signal on to everything else that it starts.
        yield False
        return
    if method == "spawn":
        from multiprocessing import resource_tracker

        # It unblocks the signal when it starts.
        resource_tracker.ensure_running()
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    came: list[int] = []
    try:
        if callable(handler):
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


class _Life:
    """The shared state of a pool's end, for threads that wait for its workers.

    Attributes:
        over: whether the pipes are closed, and their numbers may be reused.
        lock: held while pipes and slots are used, and to close them; not while waiting.
    """

    def __init__(self) -> None:
        self.over = False
        self.lock = threading.RLock()


class Pool:
    """Worker processes and the ring of their batches.

    Args:
        fetcher: copied to each worker.
        config: the loader's settings.
        context: the `multiprocessing` context; None for the system's default.
        base_seed: torch's base seed; worker i gets base_seed + i.
        ring: the ring of an earlier pool of the same loader, to reuse its pages.

    Raises:
        Exception: an error of starting, such as a dataset that cannot be pickled for spawn.
    """

    def __init__(
        self, fetcher: Fetcher, config: LoaderConfig, context: Any, base_seed: int, ring: Ring | None = None
    ) -> None:
        self.config = config
        self._context = context
        self._base_seed = base_seed
        self.pid = os.getpid()
        head = board_bytes(config.workers, config.threads)
        self.ring = ring or Ring(
            config.depth, config.small_batch_depth, head=head, max_bytes=config.max_bytes_in_flight
        )
        self.batches: dict[tuple[int, int], Any] = {}
        """Batches in progress, of all epoch iterators: their slots are not free."""
        self.load = [0] * config.workers
        """Number of unanswered batches of each worker."""
        self.broken = False
        """Whether a worker died and was not replaced."""
        self._head = Region(self.ring.file.fd, 0, head)
        self._board = self._head.memory.view(np.uint64)
        self._poller = select.poll()
        self._by_fd: dict[int, _Member] = {}
        self.members: list[_Member] = []
        self.run = 0
        self.restarts = 0
        self._warned = False
        self._fetcher = fetcher
        self.life = _Life()
        self.polling = False
        """Whether the consumer only waits, where an interrupt does no harm."""
        self._close = weakref.finalize(self, _end, self.members, self._board, self.pid, self.life)
        try:
            for number in range(config.workers):
                self._start(number)
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> None:
        context = self._context or multiprocessing.get_context()
        with _forks:
            theirs_in, ours_out = context.Pipe(duplex=False)
            ours_in, theirs_out = context.Pipe(duplex=False)
            member = _Member(number, ours_out, ours_in)
            _open.add(member)  # before the fork, which must close its copies
        try:
            with _holding_back_interrupts(context.get_start_method()) as held_back:
                self._start_process(member, context, theirs_in, theirs_out, held_back)
                self.members[number : number + 1] = [member]
        except BaseException:
            member.close()
            raise
        finally:
            theirs_in.close()
            theirs_out.close()
        for fd in (ours_in.fileno(), member.sentinel):
            self._by_fd[fd] = member
            self._poller.register(fd, select.POLLIN)

    def _start_process(
        self, member: _Member, context: Any, requests: Connection, results: Connection, held_back: bool
    ) -> None:
        config = self.config
        setup = Setup(
            *(member.number, config.workers, self._fetcher, config.worker_init_fn, self._base_seed, config.threads),
            *(self.ring.file, requests, results, self.pid, held_back),
        )
        member.process = context.Process(
            target=main, args=(setup,), name=f"penstock-worker-{member.number}", daemon=True
        )
        try:
            with our_own():
                member.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            _explain(error, setup)
            raise
        member.started()

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock held while pipes and slots are used or closed; not while waiting."""
        # In a forked child, a thread of the parent may hold it forever.
        return self.life.lock if self.pid == os.getpid() else contextlib.nullcontext()

    @property
    def closed(self) -> bool:
        """Whether the workers were told to end, or this process is a fork of the one that started them."""
        return not self._close.alive or self.pid != os.getpid()

    def begin(self, epoch: EpochStart, states: dict[int, Any]) -> int:
        """Start an epoch iterator, and drop earlier requests. Returns its number."""
        self.run += 1
        self._board[0] = self.run
        for member in list(self.members):
            if member.dead:  # it died after the last epoch iterator ended
                self.restart(member.number)
            self.send(member.number, ("begin", self.run, epoch, states.get(member.number)))
        return self.run

    def stop(self) -> None:
        """Drop all requests."""
        if self.pid == os.getpid():
            self._board[0] = 0

    def dismiss(self) -> None:
        """Let the workers end, without waiting."""
        self.stop()
        with _forks:
            for member in self.members:
                member.requests.close()

    def warn_copies(self) -> None:
        """Warn once that batches are copied."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"more than {SPARE} batches of this DataLoader are being kept: from now on they are copied "
                "out of the workers' memory, which costs time. Keep clones of what you need, or drop batches earlier",
                stacklevel=11,
            )

    def send(self, number: int, message: tuple[Any, ...]) -> None:
        """Send a message to a worker; what the pipe does not accept is sent while waiting."""
        self.post(number, pickle.dumps(message, protocol=5))

    def post(self, number: int, data: bytes) -> None:
        """Send a pickled message. Nothing is sent to a dead worker: its requests go to another one."""
        member = self.members[number]
        if member.dead or self.life.over:
            return
        member.outbox.send(data)
        if member.outbox.waiting:
            self._watch_outbox(member)

    def _watch_outbox(self, member: _Member) -> None:
        self._by_fd[member.outbox.fd] = member
        self._poller.register(member.outbox.fd, select.POLLOUT)

    def wait(self, deadline: float | None) -> list[tuple[int, int]]:
        """Wait for news and return it for `receive`; empty if the deadline has passed.

        Args:
            deadline: on the monotonic clock; None waits forever.
        """
        timeout = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        self.polling = True
        events = self._poller.poll(timeout)
        self.polling = False
        return events

    def receive(self, events: list[tuple[int, int]]) -> tuple[list[tuple[int, Frame]], list[int]]:
        """Return messages with the number of their worker, and the numbers of dead workers.

        All messages of a worker precede its death.
        """
        frames: list[tuple[int, Frame]] = []
        dead: list[int] = []
        for fd, _ in events:
            member = self._by_fd.get(fd)
            if member is None or member.dead:
                continue
            if fd == member.inbox.fd:
                frames += [(member.number, frame) for frame in member.inbox.receive()]
                if member.inbox.ended:
                    self._poller.unregister(fd)
                    del self._by_fd[fd]
            elif fd == member.outbox.fd:
                member.outbox.flush()
                if not member.outbox.waiting:
                    self._poller.unregister(fd)
                    del self._by_fd[fd]
            else:
                frames += [(member.number, frame) for frame in member.inbox.receive()]
                self._reap(member)
                dead.append(member.number)
        return frames, dead

    def _reap(self, member: _Member) -> None:
        member.dead = True
        member.wait(time.monotonic() + 1)
        for fd in (member.inbox.fd, member.outbox.fd, member.sentinel):
            if self._by_fd.pop(fd, None) is not None:
                self._poller.unregister(fd)
        member.close()

    def dead(self) -> list[int]:
        """Return the numbers of dead workers that were not replaced. A worker whose pipe has ended is waited for."""
        for member in self.members:
            if member.inbox.ended and not member.dead:
                self._reap(member)
        return [member.number for member in self.members if member.dead]

    def restart(self, number: int) -> None:
        """Start a replacement for a dead worker."""
        self.restarts += 1
        self._shown(number)[:] = 0
        self._start(number)

    def obituary(self, number: int) -> str:
        """Return how a worker died, in torch's words and with details."""
        process = self.members[number].process
        code, peak = process.exitcode, int(self._shown(number)[0]) / 1024
        memory = f" Its memory was {peak:.0f} MiB at its last batch." if peak else ""
        if code is not None and code < 0:
            text = f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}.{memory}"
            if -code == signal.SIGKILL:
                text += " The kernel does that when memory runs out: see dmesg; use fewer workers, or smaller batches."
            elif -code == signal.SIGBUS:
                text += " A mapped file was truncated while it was read (replace files by rename), or memory ran out."
            return text
        return f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}.{memory}"

    def at(self, number: int) -> list[tuple[int, int]]:
        """Return the sample key and batch number of each busy thread of a worker."""
        shown = self._shown(number)[1:].reshape(-1, 2).tolist()
        return [(key, batch - 1) for key, batch in shown if batch]

    def _shown(self, number: int) -> Any:
        """Return the board entries of a worker."""
        width = board_width(self.config.threads)
        return self._board[1 + width * number : 1 + width * (number + 1)]

    def close(self, patience: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the workers: ask them, wait ``patience`` seconds for all, then kill them. Idempotent.

        Afterwards nothing writes to the ring, and all slots without a lease are free.
        """
        if self._close.detach() is not None:
            _end(self.members, self._board, self.pid, self.life, patience)
        if self.pid == os.getpid() and not self.life.lock.acquire(timeout=_HELD):
            self.broken = True  # its ring is not reused
            return
        try:
            for batch in self.batches.values():
                if batch.slot is not None:
                    self.ring.take_back(batch.slot)
            self.batches.clear()
        finally:
            if self.pid == os.getpid():
                self.life.lock.release()


def _end(members: list[_Member], board: Any, pid: int, life: _Life, patience: float = _AT_EXIT) -> None:
    if os.getpid() != pid:
        return  # a fork of the process that owns these workers
    board[0] = 0
    # A user's sampler may hold it for long, and so may a thread that interpreter shutdown has stopped.
    locked = life.lock.acquire(timeout=patience)
    try:
        life.over = True
        alive = [member for member in members if not member.dead]
        for member in alive:
            member.close()
    finally:
        if locked:
            life.lock.release()
    deadline = time.monotonic() + patience
    for how in (None, "terminate", "kill"):
        for member in alive:
            if how is not None:
                getattr(member.process, how)()
        alive = [member for member in alive if not member.wait(deadline)]
        deadline = time.monotonic() + 1.0
    for member in members:
        member.dead = True
